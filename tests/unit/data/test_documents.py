import gzip
import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretrain.data.documents import Reader
from pretrain.data.sources import (
    list_inputs,
    plan_parts,
)
from pretrain.errors import DataError


def touch(folder, *names):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)


def read(path, part_bytes=1 << 20, **options):
    parts = plan_parts(list_inputs([str(path)]), part_bytes)
    return [
        document.text for part in parts for document in Reader(**{"text_field": "text", **options}).read(part.slices)
    ]


def test_file_is_one_document_byte_for_byte(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\r\ntwo\rthree\n\xef\xbb\xbf\x00")
    (document,) = Reader("text").read(plan_parts(list_inputs([str(path)]), 1)[0].slices)
    assert document.utf8 == path.read_bytes() == document.text.encode()


def test_jsonl_reads_the_field_and_passes_over_blank_lines_and_a_byte_order_mark(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"body": "x\\ny", "id": 1}\r\n\n  \n{"body": ""}')
    assert read(path, text_field="body") == ["x\ny", ""]


def test_gzip_jsonl_reads_as_the_plain_one(tmp_path):
    content = b"".join(b'{"text": "%d"}\n' % number for number in range(100))
    (tmp_path / "a.jsonl").write_bytes(content)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(content))
    assert read(tmp_path / "b.jsonl.gz", 10) == read(tmp_path / "a.jsonl", 10) == [str(n) for n in range(100)]


def test_consumed_bytes_add_up_to_the_size_on_disk(tmp_path):
    content = b"".join(b'{"text": "%d"}\n' % number for number in range(1000))
    (tmp_path / "a.jsonl").write_bytes(content)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(content))
    (tmp_path / "c.txt").write_bytes(b"text")
    for file in list_inputs([str(tmp_path)]):
        (part,) = plan_parts([file], 1 << 20)
        assert sum(document.consumed_bytes for document in Reader("text").read(part.slices)) == file.size


def test_invalid_utf8_is_named_with_its_byte(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"abc\xff")
    with pytest.raises(DataError, match=r"a\.txt@3: invalid UTF-8: byte 0xff \(invalid start byte\); convert the file"):
        read(tmp_path / "a.txt")
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "a"}\n{"text": "\xe9"}\n')
    with pytest.raises(DataError, match=r"b\.jsonl@24: invalid UTF-8: byte 0xe9"):
        read(tmp_path / "b.jsonl")


def test_undecodable_file_is_passed_over_only_on_request(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xff")
    (part,) = plan_parts(list_inputs([str(tmp_path)]), 1)
    (document,) = Reader("text", skip_undecodable=True).read(part.slices)
    assert document.is_undecodable and not document.text


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{'text': 1}", r":3: not JSON: Expecting property name.*; write one JSON object a line"),
        ('{"text": "a"', r":3: not JSON: "),
        ("[" * 100_000, r":3: not JSON: "),
        ('["text"]', r":3: not a JSON object; write"),
        ('{"body": "a", "id": 1}', r":3: field 'text' is absent; fields: body, id; choose one with --text-field"),
        ('{"text": null}', r":3: field 'text' is null, not a string; fields: text"),
        ('{"text": 1.5}', r":3: field 'text' is a number, not a string"),
        ('{"text": {}}', r":3: field 'text' is an object, not a string"),
        ("{}", r":3: field 'text' is absent; fields: none"),
        (r'{"text": "\ud800"}', r":3: unpaired surrogate '\\ud800' in the text"),
    ],
)
def test_bad_line_is_named_with_its_number_in_whatever_part(tmp_path, line, message, compress):
    content = f'{{"text": "a"}}\n\n{line}\n{{"text": "b"}}\n'.encode()
    path = tmp_path / ("a.jsonl.gz" if compress else "a.jsonl")
    path.write_bytes(gzip.compress(content) if compress else content)
    with pytest.raises(DataError, match=message):
        read(path, part_bytes=5)


@pytest.mark.parametrize(("cut", "message"), [(30, "truncated or damaged gzip"), (12, "truncated or damaged gzip")])
def test_truncated_gzip_is_named(tmp_path, cut, message):
    content = gzip.compress(b'{"text": "abcdefghijklmnopqrstuvwxyz"}\n' * 3)
    (tmp_path / "a.jsonl.gz").write_bytes(content[:cut])
    with pytest.raises(DataError, match=rf"a\.jsonl\.gz@0 \(uncompressed\): {message}.*; copy or compress"):
        read(tmp_path / "a.jsonl.gz")


def test_something_else_that_is_called_gz_is_named(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(b'{"text": "a"}\n')
    with pytest.raises(DataError, match="truncated or damaged gzip: Not a gzipped file"):
        read(tmp_path / "a.jsonl.gz")


def test_file_that_changed_after_the_listing_is_refused(tmp_path):
    touch(tmp_path, "a.txt")
    (part,) = plan_parts(list_inputs([str(tmp_path)]), 1)
    os.utime(tmp_path / "a.txt", ns=(0, 0))
    with pytest.raises(DataError, match=r"a\.txt: the file changed while it was being prepared"):
        list(Reader("text").read(part.slices))


@given(st.lists(st.text(max_size=12), max_size=12), st.integers(1, 60), st.booleans())
def test_jsonl_cut_into_parts_gives_every_line_once_in_order(tmp_path_factory, texts, part_bytes, last_newline):
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    content = "\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in texts)
    path.write_bytes((content + "\n" * last_newline).encode())
    assert read(path, part_bytes) == texts
