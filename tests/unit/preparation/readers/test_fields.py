"""Fields inside others, columns of bytes and lists of strings: the same in each format of records."""

import json
import tarfile

import pyarrow
import pyarrow.parquet
import pytest

from pretrain.errors import DataError
from tests.helpers.reading import documents, texts
from tests.unit.preparation.readers.test_webdataset import pack

FORMATS = ("a.jsonl", "a.json", "a.parquet", "a.arrow", "a.tar")


def write(path, *records):
    """Writes records in the format of a file's name."""
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(records)), path)
    elif path.suffix == ".arrow":
        table = pyarrow.Table.from_pylist(list(records))
        with pyarrow.ipc.new_file(str(path), table.schema) as writer:
            writer.write_table(table)
    elif path.suffix == ".tar":
        members = [(f"{number}.json", json.dumps(one).encode()) for number, one in enumerate(records)]
        path.write_bytes(pack(members, tarfile.GNU_FORMAT))
    elif path.suffix == ".json":
        path.write_text(json.dumps(records))
    else:
        path.write_text("".join(json.dumps(one) + "\n" for one in records))
    return path


@pytest.mark.parametrize("name", FORMATS)
def test_a_field_inside_others_is_named_by_its_path(tmp_path, name):
    parts = [{"text": "first"}, {"text": "second"}]
    path = write(tmp_path / name, {"doc": {"text": "inner", "lang": "en"}, "parts": parts, "n": 1})
    assert texts(path, text_field="doc.text") == ["inner"]
    assert texts(path, text_field="parts.1.text") == ["second"]
    (pair,) = documents(path, kind="pairs", source_field="doc.text", target_field="parts.0.text", fields=("doc.lang",))
    assert (pair.source, pair.text, pair.fields) == ("inner", "first", {"doc.lang": "en"})
    for wrong in ("doc.other", "parts.2.text", "parts.x", "n.text"):
        with pytest.raises(DataError, match=rf"field '{wrong}' is absent; fields: "):
            texts(path, text_field=wrong)
    columnar = name in ("a.parquet", "a.arrow")
    with pytest.raises(DataError, match="there is no column 'no.text'" if columnar else "field 'no.text' is absent"):
        texts(path, text_field="no.text")


@pytest.mark.parametrize("name", FORMATS)
def test_a_field_with_a_dot_in_its_own_name_comes_first(tmp_path, name):
    path = write(tmp_path / name, {"doc": {"text": "inner"}, "doc.text": "outer", "a.b": {"c": "deep"}})
    assert texts(path, text_field="doc.text") == ["outer"]
    assert texts(path, text_field="a.b.c") == ["deep"]


@pytest.mark.parametrize("name", FORMATS)
def test_conversations_inside_others(tmp_path, name):
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    path = write(tmp_path / name, {"data": {"turns": turns}})
    (document,) = documents(path, kind="records", messages_field="data.turns")
    assert document.segments == (("a", False), ("b", True))


@pytest.mark.parametrize("name", FORMATS)
def test_a_list_of_strings_is_a_text_with_a_joiner(tmp_path, name):
    path = write(tmp_path / name, {"text": ["one", "two"], "doc": {"lines": ["a", "b"]}}, {"text": [], "doc": None})
    assert texts(path, joiner=" ") == ["one two", ""]
    assert documents(path, joiner="\n", text_field="doc.lines", on_error="skip")[0].text == "a\nb"
    with pytest.raises(
        DataError, match=r"'text' is a list, not a string; .*, or join its strings: joiner of the input"
    ):
        texts(path)
    tags = write(tmp_path / f"tags-{name}", {"tokens": ["x", "y"], "tags": ["A", "B"]})
    (document,) = documents(tags, kind="tags", joiner="-")
    assert document.text == "x y"


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
@pytest.mark.parametrize("kind", [pyarrow.binary(), pyarrow.large_binary(), pyarrow.binary_view()])
def test_bytes_are_read_as_utf8(tmp_path, name, kind):
    if name == "a.parquet" and kind == pyarrow.binary_view():
        pytest.skip("pyarrow writes no such column")
    table = pyarrow.table({"text": pyarrow.array([b"sch\xc3\xb6n", b"sch\xf6n"], kind)})
    table = table.append_column("doc", pyarrow.array([{"text": b"a"}, {"text": b"b"}]))
    path = tmp_path / name
    if name == "a.parquet":
        pyarrow.parquet.write_table(table, path)
    else:
        with pyarrow.ipc.new_stream(str(path), table.schema) as writer:
            writer.write_table(table)
    assert texts(path, text_field="doc.text") == ["a", "b"]
    with pytest.raises(DataError, match=r"row 2: invalid UTF-8: invalid start byte"):
        texts(path)
    first, second = documents(path, on_error="skip")
    assert (first.text, second.refused) == ("sch\u00f6n", "undecodable")


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_names_that_are_there_twice(tmp_path, name):
    def save(*columns):
        table = pyarrow.Table.from_arrays([column for _, column in columns], names=[name for name, _ in columns])
        if path.suffix == ".parquet":
            pyarrow.parquet.write_table(table, path)
        else:
            with pyarrow.ipc.new_stream(str(path), table.schema) as writer:
                writer.write_table(table)

    path = tmp_path / name
    words = pyarrow.array(["a", "b"])
    save(("text", words), ("id", words), ("id", words))
    assert texts(path) == ["a", "b"]
    save(("text", words), ("text", words))
    with pytest.raises(DataError, match=rf"{name}: 2 columns have the name 'text'; rename one"):
        texts(path)
    save(("doc", pyarrow.StructArray.from_arrays([words, words], names=["text", "text"])))
    with pytest.raises(DataError, match=rf"{name}, row 1: .*duplicate field names.*; rename one"):
        texts(path, text_field="doc.text")
