import gzip
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretrain.errors import DataError
from pretrain.preparation.inputs.opening import zstd
from tests.helpers.reading import documents, texts

COMPRESS = {"": bytes, ".gz": gzip.compress, ".zst": zstd.compress}


def test_the_field_is_read_and_blank_lines_and_a_byte_order_mark_are_passed_over(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"body": "x\\ny", "id": 1}\r\n\n  \n{"body": ""}')
    assert texts(path, text_field="body") == ["x\ny", ""]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_compressed_lines_read_as_the_plain_ones(tmp_path, suffix):
    content = b"".join(b'{"text": "%d"}\n' % number for number in range(100))
    (tmp_path / "a.jsonl").write_bytes(content)
    (tmp_path / f"b.jsonl{suffix}").write_bytes(COMPRESS[suffix](content[:500]) + COMPRESS[suffix](content[500:]))
    assert texts(tmp_path / f"b.jsonl{suffix}", part_bytes=10) == texts(tmp_path / "a.jsonl", part_bytes=10)
    assert texts(tmp_path / "a.jsonl") == [str(number) for number in range(100)]


def test_consumed_bytes_add_up_to_the_size_on_disk(tmp_path):
    content = b"".join(b'{"text": "%d"}\n' % number for number in range(1000))
    for suffix, compress in COMPRESS.items():
        path = tmp_path / f"a.jsonl{suffix}"
        path.write_bytes(compress(content))
        assert sum(document.consumed_bytes for document in documents(path)) == path.stat().st_size


def test_invalid_utf8_is_named_with_its_byte(tmp_path):
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "a"}\n{"text": "\xe9"}\n')
    with pytest.raises(DataError, match=r"b\.jsonl, byte 24: invalid UTF-8: byte 0xe9"):
        texts(tmp_path / "b.jsonl")


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{'text': 1}", r":3: not JSON: Expecting property name.*; write one JSON object a line"),
        ('{"text": "a"', r":3: not JSON: "),
        ("[" * 100_000, r":3: JSON beyond a limit: nested too deeply: more than 200 levels; change it, or leave"),
        (
            '{"text": "a", "n": -' + "1" * 6000 + "}",
            r":3: JSON beyond a limit: a whole number of more than 4,300 digits; ",
        ),
        ('["text"]', r":3: not a JSON object; write"),
        (
            '{"body": "a", "id": 1}',
            r":3: field 'text' is absent; fields: body, id; add it to the record, or choose one with --text-field",
        ),
        ('{"text": null}', r":3: field 'text' is null, not a string; fields: text"),
        ('{"text": 1.5}', r":3: field 'text' is a number, not a string"),
        ('{"text": {}}', r":3: field 'text' is an object, not a string"),
        ("{}", r":3: field 'text' is absent; fields: none"),
        (r'{"text": "\ud800"}', r":3: unpaired surrogate '\\ud800' in the text"),
    ],
)
def test_bad_line_is_named_with_its_number_in_whatever_part(tmp_path, line, message, suffix):
    content = f'{{"text": "a"}}\n\n{line}\n{{"text": "b"}}\n'.encode()
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(COMPRESS[suffix](content))
    with pytest.raises(DataError, match=message):
        texts(path, part_bytes=5)


@given(st.lists(st.text(max_size=12), max_size=12), st.integers(1, 60), st.booleans())
def test_lines_cut_into_parts_come_once_each_in_order(tmp_path_factory, rows, part_bytes, last_newline):
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    content = "\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in rows)
    path.write_bytes((content + "\n" * last_newline).encode())
    assert texts(path, part_bytes=part_bytes) == rows


def test_fields_that_filters_ask_for_come_along(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a", "language": "en", "score": 1}\n{"text": "b"}\n')
    found = [document.fields for document in documents(path, fields=("language", "source"))]
    assert found == [{"language": "en"}, {}]


def test_marks_of_joined_files_are_dropped_at_the_beginning_of_lines_and_named_inside(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('\ufeff{"text": "a"}\n\ufeff{"text": "\ufeffb"}\n')
    assert texts(path) == ["a", "\ufeffb"]
    path.write_text('{"text": "a"}\ufeff{"text": "b"}\n')
    with pytest.raises(
        DataError, match=r"a\.jsonl:1: not JSON: Extra data.*; a byte-order mark is in it: end each file"
    ):
        texts(path)
    for name, content in (("a.json", '\ufeff{"text": "a"}\n\ufeff{"text": "b"}'), ("b.txt", "\ufeffa\n\ufeffb")):
        (tmp_path / name).write_text(content)
    assert (texts(tmp_path / "a.json"), texts(tmp_path / "b.txt")) == (["a", "b"], ["a\nb"])
