import gzip

import pytest

from pretrain.errors import DataError
from tests.helpers.reading import documents


def write(folder, source, target, compress_target=False):
    (folder / "a.en").write_bytes(source)
    name = "a.de.gz" if compress_target else "a.de"
    (folder / name).write_bytes(gzip.compress(target) if compress_target else target)
    return {"paired_path": str(folder / name), "kind": "pairs"}


@pytest.mark.parametrize("compress", [False, True])
def test_the_nth_line_goes_with_the_nth_line(tmp_path, compress):
    options = write(tmp_path, b"one\r\ntwo\n\nfour", b"eins\nzwei\ndrei\n\n", compress)
    found = documents(tmp_path / "a.en", **options)
    pairs = [(document.source, document.text) for document in found]
    assert pairs == [("one", "eins"), ("two", "zwei"), ("", "drei"), ("four", "")]
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert sum(document.consumed_bytes for document in found) == size


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        (
            b"1\n2\n3\n4",
            b"1\n2\n",
            r"a\.en:3: .*a\.en has 4 lines, .*a\.de(\.gz)? 2: this line has no pair; give files",
        ),
        (b"1\n", b"1\n\n\n", r"a\.de(\.gz)?:2: .*a\.en has 1 lines, .*a\.de(\.gz)? 3: this line has no pair"),
        (b"", b"1", r"a\.de(\.gz)?:1: .*a\.en has 0 lines, .*a\.de(\.gz)? 1: this line has no pair"),
    ],
)
def test_unequal_numbers_of_lines_are_named_with_the_place(tmp_path, source, target, message, compress):
    options = write(tmp_path, source, target, compress)
    with pytest.raises(DataError, match=message):
        documents(tmp_path / "a.en", **options)


def test_invalid_utf8_of_either_file_is_named(tmp_path):
    options = write(tmp_path, b"1\n2\n", b"1\n\xff\n")
    with pytest.raises(DataError, match=r"a\.de, byte 2: invalid UTF-8: byte 0xff"):
        documents(tmp_path / "a.en", **options)


def test_a_long_line_of_either_file_is_refused(tmp_path):
    options = write(tmp_path, b"1\n2\n", b"1\n22222\n")
    with pytest.raises(DataError, match=r"a\.de:2: a line is longer than max_document_bytes=4"):
        documents(tmp_path / "a.en", max_document_bytes=4, **options)
