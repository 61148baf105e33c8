"""What is too long is refused where it stands, and costs no more memory than the limit."""

import gzip
import io
import itertools
import tarfile
import tracemalloc

import pytest

from pretrain.errors import DataError
from pretrain.preparation.inputs.opening import zstd
from pretrain.preparation.readers.webdataset import TarReader
from tests.helpers.reading import documents, texts

MIB = 2**20
LIMIT = MIB


def peak_bytes(call):
    """Runs `call`; returns the most memory that Python held meanwhile."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def sparse(path, start, num_bytes, fill=None):
    """Writes a file that begins with `start` and goes on with zeros, of which the disk has none."""
    with path.open("wb") as file:
        file.write(start)
        file.truncate(num_bytes)
    return path


@pytest.mark.parametrize(
    ("name", "options", "where"),
    [("a.jsonl", {}, ":2: a line is"), ("a.txt", {"format": "lines"}, ":2: a line is"), ("a.txt", {}, "document of")],
)
def test_a_line_of_two_gigabytes_is_refused_in_bounded_memory(tmp_path, name, options, where):
    path = sparse(tmp_path / name, b'{"text": "a"}\n{"text": "', 2**31)

    def refuse():
        fix = r"raise it \(--max-document-bytes, or max_document_bytes of the input\), which costs memory, or cut"
        with pytest.raises(DataError, match=f"{where}.* longer than max_document_bytes={LIMIT}; {fix}"):
            documents(path, part_bytes=2**32, max_document_bytes=LIMIT, **options)

    assert peak_bytes(refuse) < 8 * LIMIT


def test_a_part_that_begins_inside_a_long_line_passes_over_it_in_bounded_memory(tmp_path):
    path = sparse(tmp_path / "a.jsonl", b'{"text": "', 128 * MIB)
    with path.open("ab") as file:
        file.write(b'"}\n{"text": "b"}\n')

    def read():
        with pytest.raises(DataError, match=r"a\.jsonl:1: a line is longer"):
            documents(path, part_bytes=64 * MIB, max_document_bytes=LIMIT)

    assert peak_bytes(read) < 8 * LIMIT


@pytest.mark.parametrize(("suffix", "compress"), [(".gz", gzip.compress), (".zst", zstd.compress)])
@pytest.mark.parametrize(
    ("name", "start", "options", "where"),
    [
        ("a.jsonl", b'{"text": "a"}\n', {}, ":2: a line"),
        ("a.txt", b"", {}, ": a document"),
        ("a.json", b'[{"text": "a"},\n{"text": "', {}, ":2: a record"),
    ],
)
def test_a_file_that_decompresses_to_two_gigabytes_is_refused_in_bounded_memory(
    tmp_path, suffix, compress, name, start, options, where
):
    path = tmp_path / (name + suffix)
    path.write_bytes(compress(start) + compress(b"x" * 16 * MIB) * 128)
    assert path.stat().st_size < 4 * MIB

    def refuse():
        with pytest.raises(DataError, match=f"{where} is longer than max_document_bytes={LIMIT}"):
            documents(path, max_document_bytes=LIMIT, **options)

    assert peak_bytes(refuse) < 12 * LIMIT


@pytest.mark.parametrize("kind", ["txt", "json"])
def test_a_member_of_two_gigabytes_is_refused_unread(tmp_path, kind):
    header = tarfile.TarInfo(f"a.{kind}")
    header.size = 2**31
    path = sparse(tmp_path / "a.tar", header.tobuf(), 2**31 + 2048)

    def refuse():
        message = rf"a\.tar, byte 0: member 'a\.{kind}' of 2147483648 bytes is longer than max_document_bytes={LIMIT}"
        with pytest.raises(DataError, match=message):
            documents(path, max_document_bytes=LIMIT)

    assert peak_bytes(refuse) < 4 * LIMIT


def test_a_name_without_end_is_refused_unread():
    header = tarfile.TarInfo("././@LongLink")
    header.size, header.type = 2**31, tarfile.GNUTYPE_LONGNAME
    with pytest.raises(DataError, match=r"a\.tar, byte 0: a name or attributes of 2147483648 bytes; make the tar anew"):
        list(TarReader(io.BytesIO(header.tobuf(tarfile.GNU_FORMAT)), "a.tar"))


def test_limits_hold_to_the_byte(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    assert texts(tmp_path / "a.jsonl", max_document_bytes=14) == ["a"]
    (tmp_path / "b.json").write_text('[{"text": "a"}]')
    assert texts(tmp_path / "b.json", max_document_bytes=13) == ["a"]
    for name, limit in itertools.product(["a.jsonl", "b.json"], [12]):
        with pytest.raises(DataError, match=f"longer than max_document_bytes={limit}"):
            texts(tmp_path / name, max_document_bytes=limit)
