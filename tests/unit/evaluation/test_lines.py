"""Lines of a test set."""

import gzip

import pytest

from pretrain.errors import ConfigError, DataError
from pretrain.evaluation.translation import read_parallel, read_texts, write_texts


def test_lines_are_what_line_feeds_divide(tmp_path):
    content = "\ufeffone\n\ntwo\x0bthree\u2028four\r\nfive".encode()
    (tmp_path / "a").write_bytes(content)
    (tmp_path / "b.gz").write_bytes(gzip.compress(content + b"\n"))
    expected = ["one", "", "two\x0bthree\u2028four", "five"]
    assert read_texts(tmp_path / "a") == read_texts(tmp_path / "b.gz") == expected


def test_what_is_written_has_as_many_lines_as_texts(tmp_path):
    texts = ["one", "", "two\nthree", "four\u2028five", "\u00e9"]
    write_texts(tmp_path / "out", texts)
    assert read_texts(tmp_path / "out") == ["one", "", "two three", "four five", "\u00e9"]


@pytest.mark.parametrize(
    ("name", "content", "error", "message"),
    [
        ("a", b"", DataError, "a: holds no line; give one text a line"),
        ("a", b"one\nt\xffo\n", DataError, "a:2: not UTF-8: byte 0xff; convert it"),
        ("a.gz", b"plain", DataError, "truncated or damaged gzip"),
        ("a.gz", gzip.compress(b"one\n" * 99, mtime=0)[:-9], DataError, "truncated or damaged gzip"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, name, content, error, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(error, match=message):
        read_texts(tmp_path / name)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match="nope: cannot read it: No such file"):
        read_texts(tmp_path / "nope")


def test_references_must_be_as_many_as_sources(tmp_path):
    (tmp_path / "a").write_text("one\ntwo\n")
    (tmp_path / "b").write_text("eins\n")
    with pytest.raises(DataError, match=r"b: has 1 lines, .*a has 2; give files whose lines belong together"):
        read_parallel(tmp_path / "a", tmp_path / "b")
