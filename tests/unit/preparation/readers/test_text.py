import gzip

import pytest

from pretrain.errors import DataError
from pretrain.preparation.filters import Document
from tests.helpers.reading import documents, texts


def test_file_is_one_document_byte_for_byte(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\r\ntwo\rthree \xef\xbb\xbf\n\x00")
    (document,) = documents(path, part_bytes=1)
    assert document.utf8 == path.read_bytes() == document.text.encode()


def test_compressed_file_is_the_document_that_was_compressed(tmp_path):
    content = b"abc\r\n" * 1000
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(content))
    size = (tmp_path / "a.txt.gz").stat().st_size
    assert documents(tmp_path) == [Document(content.decode(), content, size)]


def test_invalid_utf8_is_named_with_its_byte(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"abc\xff")
    with pytest.raises(
        DataError, match=r"a\.txt, byte 3: invalid UTF-8: byte 0xff \(invalid start byte\); convert the file"
    ):
        texts(tmp_path / "a.txt")


def test_a_file_of_the_limit_is_read_and_a_longer_one_refused(tmp_path):
    (tmp_path / "a.txt").write_text("abcd")
    assert texts(tmp_path, max_document_bytes=4) == ["abcd"]
    message = r"a\.txt: a document of 4 bytes is longer than max_document_bytes=3; raise it .--max-document-bytes, or"
    with pytest.raises(DataError, match=message):
        texts(tmp_path, max_document_bytes=3)
