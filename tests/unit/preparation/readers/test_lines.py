import gzip

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretrain.errors import DataError
from tests.helpers.reading import documents, texts


def test_a_line_is_a_document_without_its_end(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\n\n two \nthree\r\r\nfour")
    assert texts(tmp_path, format="lines") == ["one", "", " two ", "three\r", "four"]


def test_consumed_bytes_add_up_to_the_size_on_disk(tmp_path):
    content = b"a line\n" * 1000
    (tmp_path / "a.txt").write_bytes(content)
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(content))
    for path in tmp_path.iterdir():
        assert sum(document.consumed_bytes for document in documents(path, format="lines")) == path.stat().st_size


@given(st.lists(st.text(alphabet="ab\u00e9\r", max_size=6), max_size=12), st.integers(1, 30))
def test_lines_cut_into_parts_come_once_each_in_order(tmp_path_factory, rows, part_bytes):
    path = tmp_path_factory.mktemp("lines") / "a.txt"
    path.write_bytes("".join(row + "\n" for row in rows).encode())
    assert texts(path, part_bytes=part_bytes, format="lines") == [row.removesuffix("\r") for row in rows]


def test_invalid_utf8_is_named_with_its_byte(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\ntwo\xff\n")
    with pytest.raises(DataError, match=r"a\.txt, byte 7: invalid UTF-8: byte 0xff"):
        texts(tmp_path, format="lines")
