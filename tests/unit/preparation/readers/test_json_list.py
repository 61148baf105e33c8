import gzip
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretrain.errors import DataError
from tests.helpers.reading import documents, texts

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@pytest.fixture
def tiny_chunks(monkeypatch):
    monkeypatch.setattr("pretrain.preparation.readers.json.CHUNK_BYTES", 3)


@given(
    st.lists(st.tuples(st.text(max_size=20), VALUES), max_size=6),
    st.sampled_from([None, 1]),
    st.booleans(),
    st.integers(1, 40),
)
def test_every_record_comes_once_in_order_wherever_chunks_end(tmp_path_factory, rows, indent, is_ascii, chunk):
    path = tmp_path_factory.mktemp("json") / "a.json"
    records = [{"more": more, "text": text} for text, more in rows]
    path.write_text(json.dumps(records, indent=indent, ensure_ascii=is_ascii), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pretrain.preparation.readers.json.CHUNK_BYTES", chunk)
        assert [(document.text, document.fields) for document in documents(path, fields=("more",))] == [
            (text, {"more": more}) for text, more in rows
        ]


def test_one_object_is_one_record(tmp_path):
    (tmp_path / "a.json").write_bytes(b'\xef\xbb\xbf \n{"text": "a"}\n ')
    assert texts(tmp_path / "a.json") == ["a"]


def test_consumed_bytes_add_up_to_the_size_on_disk(tmp_path):
    content = json.dumps([{"text": str(number)} for number in range(1000)]).encode()
    (tmp_path / "a.json").write_bytes(content)
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(content))
    for path in tmp_path.iterdir():
        assert sum(document.consumed_bytes for document in documents(path)) == path.stat().st_size


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", r"a\.json:1: not JSON: the file ends early; write a list of records"),
        ("[", r"a\.json:1: not JSON: the file ends early"),
        ("\n\n3", r"a\.json:3: not a JSON object"),
        ('[{"text": "a"},\n "b"]', r"a\.json:2: not a JSON object"),
        ('[{"text": "a"},\n ]', r"a\.json:2: not a JSON object"),
        ('[{"text": "a"},\n {"text":\n "b]', r"a\.json:3: not JSON: Unterminated string"),
        ('[{"text": "a"},\n {"text":', r"a\.json:2: not JSON: Expecting value"),
        ('[{"text": "a"}\n {"text": "b"}]', r"a\.json:2: not JSON: ',' or '\]' is missing; separate records by commas"),
        ('[{"text": "a"}\n', r"a\.json:2: not JSON: ',' or '\]' is missing"),
        ('[{"text": "a"}]\n\n[]', r"a\.json:3: text after the list; give one list"),
        ('{"text": "a"}\n["b"]', r"a\.json:2: not a JSON object"),
        (
            '[\n{"text": "a"},\n{"body": "b"}]',
            r"a\.json:3: field 'text' is absent; fields: body; add it to the record, or choose one with",
        ),
        ('[{"text": "a",\n b: 1, "c": "' + "d" * 50 + '"}]', r"a\.json:2: not JSON: Expecting property name"),
        ('[{"n": ' + "1" * 6000 + "}]", r"a\.json:1: JSON beyond a limit: a whole number of more than 4,300 digits"),
        (
            '[{"text": ' + "[" * 100_000,
            r"a\.json:1: JSON beyond a limit: nested too deeply: more than 200 levels; change the record",
        ),
    ],
)
def test_malformed_json_is_named_with_its_line(tmp_path, tiny_chunks, content, message):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(DataError, match=message):
        texts(tmp_path / "a.json")


def test_invalid_utf8_is_named_with_its_byte(tmp_path, tiny_chunks):
    (tmp_path / "a.json").write_bytes(b'\xef\xbb\xbf[{"text": "\xc3\xa9\xc3("}]')
    with pytest.raises(DataError, match=r"a\.json, byte 16: invalid UTF-8: byte 0xc3"):
        texts(tmp_path / "a.json")
    (tmp_path / "a.json").write_bytes(b'[{"text": "\xc3')
    with pytest.raises(DataError, match=r"a\.json, byte 11: invalid UTF-8: byte 0xc3 \(unexpected end of data\)"):
        texts(tmp_path / "a.json")


def test_records_one_after_the_other_are_read_too(tmp_path, tiny_chunks):
    (tmp_path / "a.json").write_text('{"text": "a"}\n{"text": "b"}{"text": "c"}\n')
    assert texts(tmp_path / "a.json") == ["a", "b", "c"]
