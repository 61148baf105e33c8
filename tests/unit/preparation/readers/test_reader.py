import errno
import gzip
import os
from dataclasses import replace

import pytest

from pretrain.config.prepare import InputConfig
from pretrain.errors import DataError
from pretrain.kinds.formats import FORMATS
from pretrain.preparation.filters import UNDECODABLE
from pretrain.preparation.input_parts import plan_parts
from pretrain.preparation.inputs.listing import list_inputs
from tests.helpers.reading import listing, read, touch


def part_of(*files):
    (part,) = plan_parts(files, 1 << 30)
    return part


def test_each_file_is_read_as_its_input_says(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one", "title": "two"}\n')
    (tmp_path / "b.txt").write_text("three\nfour\n")
    inputs = [
        InputConfig(path=str(tmp_path / "a.jsonl"), text_field="title"),
        InputConfig(path=str(tmp_path / "b.txt"), format="lines"),
        InputConfig(path=str(tmp_path / "a.jsonl")),
    ]
    found = read(part_of(*list_inputs(inputs)).slices, inputs)
    assert [document.text for document in found] == ["two", "three", "four", "one"]


def test_undecodable_file_is_left_out_in_the_default_corpus_and_where_its_input_says_so(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xff")
    part = part_of(*listing(tmp_path))
    for inputs in ([], [InputConfig(path=str(tmp_path), on_error="skip")]):
        (document,) = read(part.slices, inputs)
        assert document.refused == UNDECODABLE and not document.text
    with pytest.raises(DataError, match=r"a\.txt, byte 0: invalid UTF-8.* or leave such texts out \(--on-error skip"):
        list(read(part.slices, [InputConfig(path=str(tmp_path))]))
    with pytest.raises(ValueError, match=r"undecodable=skip is now a case of on_error: write on_error instead"):
        InputConfig(path=str(tmp_path), undecodable="skip")


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_undecodable_lines_are_left_out_one_by_one(tmp_path, name):
    lines = [b'{"text": "eins"}\n', b'{"text": "sch\xf6n"}\n', b'{"text": "drei"}\n']
    (tmp_path / name).write_bytes(gzip.compress(b"".join(lines)) if name.endswith("gz") else b"".join(lines))
    for format in ("jsonl", "lines"):
        one = InputConfig(path=str(tmp_path / name), format=format, on_error="skip")
        found = list(read(part_of(*list_inputs([one])).slices, [one]))
        assert [document.refused for document in found] == [None, UNDECODABLE, None]
        assert sum(document.consumed_bytes for document in found) == (tmp_path / name).stat().st_size
    assert [document.text for document in found] == [lines[0].decode()[:-1], "", lines[2].decode()[:-1]]


@pytest.mark.parametrize("encoding", ["UTF-16", "UTF-32"])
def test_text_of_another_unicode_is_known_by_its_mark(tmp_path, encoding):
    (tmp_path / "a.txt").write_text("Es war einmal\n", encoding=encoding)
    fix = rf"convert it: iconv -f {encoding} -t UTF-8 FILE > NEW_FILE"
    with pytest.raises(DataError, match=rf"a\.txt, byte 0: {encoding} by its byte-order mark, not UTF-8; {fix}"):
        list(read(part_of(*listing(tmp_path)).slices, [InputConfig(path=str(tmp_path))]))


def test_file_that_changed_after_the_listing_is_refused(tmp_path):
    touch(tmp_path, "a.txt")
    part = part_of(*listing(tmp_path))
    os.utime(tmp_path / "a.txt", ns=(0, 0))
    with pytest.raises(DataError, match=r"a\.txt: the file changed while it was being prepared; wait until it is"):
        list(read(part.slices))


@pytest.mark.parametrize("more", [b'{"text": "b"}\n', b"not JSON\n"])
def test_file_that_changes_while_it_is_read_is_refused(tmp_path, more):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n' * 2)
    documents = read(part_of(*listing(path)).slices)
    assert next(documents).text == "a"
    with path.open("ab") as file:
        file.write(more)
    os.utime(path, ns=(0, 0))
    with pytest.raises(DataError, match=r"a\.jsonl: the file changed while it was being prepared"):
        list(documents)


def test_a_file_that_shrinks_while_it_is_read_is_refused(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n' * 10_000)
    documents = read(part_of(*listing(path)).slices)
    assert next(documents).text == "a"
    os.truncate(path, 1000)
    with pytest.raises(DataError, match=r"a\.jsonl: the file changed while it was being prepared"):
        list(documents)


def test_the_other_file_of_a_pair_is_watched_too(tmp_path):
    touch(tmp_path, "a.en", "a.de")
    config = InputConfig(path=str(tmp_path / "a.en"), paired_path=str(tmp_path / "a.de"))
    part = part_of(*list_inputs([config], "pairs"))
    os.utime(tmp_path / "a.de", ns=(0, 0))
    with pytest.raises(DataError, match=r"a\.de: the file changed while it was being prepared"):
        list(read(part.slices, [config], "pairs"))


def fail(stream, piece, rule):
    raise OSError(errno.EIO, "Input/output error")
    yield


def test_a_file_that_is_gone_or_fails_is_named(tmp_path, monkeypatch):
    touch(tmp_path, "a.txt")
    part = part_of(*listing(tmp_path))

    monkeypatch.setitem(FORMATS, "text", replace(FORMATS["text"], read=f"{__name__}:fail"))
    with pytest.raises(OSError, match="Input/output error") as caught:
        list(read(part.slices))
    assert caught.value.filename == str(tmp_path / "a.txt")
    (tmp_path / "a.txt").unlink()
    with pytest.raises(FileNotFoundError) as caught:
        list(read(part.slices))
    assert str(caught.value.filename) == str(tmp_path / "a.txt")


@pytest.mark.parametrize("cut", [12, 30, -4])
def test_truncated_gzip_is_named(tmp_path, cut):
    content = gzip.compress(b'{"text": "abcdefghijklmnopqrstuvwxyz"}\n' * 3)
    (tmp_path / "a.jsonl.gz").write_bytes(content[:cut])
    with pytest.raises(
        DataError, match=r"a\.jsonl\.gz, byte \d+ \(uncompressed\): truncated or damaged gzip: .*; copy or"
    ):
        list(read(part_of(*listing(tmp_path)).slices, [InputConfig()]))
