import io
import json
import random
from collections import Counter

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from pretrain.errors import DataError
from pretrain.preparation.input_parts import plan_parts
from tests.helpers.reading import documents, listing, read, texts


def write(path, columns, rows_a_group=10, **options):
    table = pyarrow.table(columns)
    pyarrow.parquet.write_table(table, path, row_group_size=rows_a_group, **options)
    return path


@pytest.mark.parametrize("part_bytes", [50, 300, 1 << 20])
def test_row_groups_cut_into_parts_come_once_each_in_order(tmp_path, part_bytes):
    rng = random.Random(0)
    rows = ["".join(rng.choices("abc", k=rng.randrange(30))) for _ in range(95)]
    path = write(tmp_path / "a.parquet", {"id": list(range(95)), "text": rows})
    found = documents(path, part_bytes=part_bytes)
    assert [document.text for document in found] == rows
    assert sum(document.consumed_bytes for document in found) == path.stat().st_size


@pytest.mark.parametrize("options", [{"compression": "zstd"}, {"use_dictionary": False}, {"data_page_version": "2.0"}])
def test_encodings_make_no_difference(tmp_path, options):
    path = write(tmp_path / "a.parquet", {"text": ["\u00e9", "", "b"] * 10}, **options)
    assert texts(path) == ["\u00e9", "", "b"] * 10


def test_large_strings_and_empty_row_groups_are_read(tmp_path):
    schema = pyarrow.schema([("text", pyarrow.large_string())])
    with pyarrow.parquet.ParquetWriter(tmp_path / "a.parquet", schema) as writer:
        for rows in ([], ["a", "b"], [], ["c"]):
            writer.write_table(pyarrow.table({"text": rows}, schema=schema))
    assert texts(tmp_path / "a.parquet", part_bytes=1) == ["a", "b", "c"]


def test_only_the_columns_that_are_needed_are_read(tmp_path):
    rng = random.Random(0)
    columns = {"text": ["a"] * 10, "image": [rng.randbytes(10_000) for _ in range(10)]}
    path = write(tmp_path / "a.parquet", columns, use_dictionary=False)
    content = bytearray(path.read_bytes())
    start = pyarrow.parquet.ParquetFile(path).metadata.row_group(0).column(1).data_page_offset
    content[start : start + 50_000] = bytes(50_000)
    path.write_bytes(content)
    assert texts(path) == ["a"] * 10
    with pytest.raises(DataError, match="damaged, or not Parquet"):
        documents(path, fields=("image",))


def test_records_and_fields_come_from_columns(tmp_path):
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    path = write(tmp_path / "a.parquet", {"chat": [chat, []], "language": ["en", None]})
    found = documents(path, kind="records", messages_field="chat", fields=("language", "absent"))
    assert [document.segments for document in found] == [(("Hi", False), ("Hello", True)), ()]
    assert [document.fields for document in found] == [{"language": "en"}, {"language": None}]


@pytest.mark.parametrize("as_text", [False, True], ids=["structs", "json"])
def test_tools_and_the_system_prompt_are_read_beside_messages_without_the_nulls_of_a_schema(tmp_path, as_text):
    template = (
        "{{ tools|tojson }}{% for m in messages %}<{{ m.role }}>{{ m.content or m.tool_calls|tojson }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    tools = [[{"name": "look", "x": 1}], [{"name": "go", "y": 2}]]
    calls = [
        [{"function": {"name": name, "arguments": arguments}}] for name, arguments in (("l", {"x": 1}), ("g", {"y": 2}))
    ]
    chats = [
        [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": one, "weight": 1}] for one in calls
    ]
    columns = {
        "tools": [json.dumps(one) for one in tools] if as_text else tools,
        "messages": chats,
        "system": ["S", None],
    }
    path = write(tmp_path / "a.parquet", columns)
    found = documents(path, kind="records", messages_field="messages", template={"jinja": template})
    assert [document.text for document in found] == [
        '[{"name": "look", "x": 1}]<system>S<user>Hi<assistant>[{"function": {"name": "l", "arguments": {"x": 1}}}]',
        '[{"name": "go", "y": 2}]<user>Hi<assistant>[{"function": {"name": "g", "arguments": {"y": 2}}}]',
    ]
    assert [document.unused for document in found] == [{}, {}]


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        (
            {"body": ["a"]},
            {},
            r"a\.parquet: there is no column 'text'; columns: body; choose another with --text-field, or text_field",
        ),
        ({"source": ["a"]}, {"kind": "pairs"}, "there is no column 'target'; .* choose another with target_field"),
        ({"text": ["a"] * 11 + [None]}, {}, r"a\.parquet, row 12: field 'text' is null, not a string"),
        ({"text": [1]}, {}, r"a\.parquet, row 1: field 'text' is a number, not a string"),
        ({"text": [b"a", b"\xff"]}, {}, r"a\.parquet, row 2: invalid UTF-8: invalid start byte"),
        ({"text": ["a", "bb"]}, {"max_document_bytes": 1}, "row 2: a document is longer than max_document_bytes=1"),
        (
            {"prompt": ["a", "b"], "response": ["a", "b"], "weight": [1, 0]},
            {"kind": "records"},
            r"a\.parquet, row 2: field 'weight' says that the record is not learned",
        ),
    ],
)
def test_what_cannot_be_used_is_named_with_its_row(tmp_path, columns, options, message):
    with pytest.raises(DataError, match=message):
        documents(write(tmp_path / "a.parquet", columns), **options)


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_columns_that_nothing_read_are_counted_once_a_row_of_conversations_alone(tmp_path, suffix):
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    columns = {"messages": [chat] * 5, "score": [1, 2, 3, None, 5], "weight": [1] * 5, "id": ["x"] * 5}
    path = tmp_path / f"a.{suffix}"
    if suffix == "parquet":
        write(path, columns, rows_a_group=2)
    else:
        table = pyarrow.table(columns)
        with pyarrow.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    found = documents(path, kind="records", messages_field="messages", template="chatml")
    counts = Counter()
    for document in found:
        counts.update(document.unused)
    # How many are null is in the column, which Parquet's reader leaves unread.
    assert counts == {"score": 5 if suffix == "parquet" else 4, "weight": 5, "id": 5}
    assert all(not one.unused for one in documents(write(tmp_path / "b.parquet", {"text": ["a"], "id": [1]})))


def test_text_that_is_not_utf8_is_named_with_its_row(tmp_path):
    column = pyarrow.array([b"a"] * 13 + [b"\xff", b"b"]).view(pyarrow.string())
    path = write(tmp_path / "a.parquet", {"text": column})
    with pytest.raises(DataError, match=r"a\.parquet, row 14: invalid UTF-8: invalid start byte"):
        texts(path)


def test_damage_is_named(tmp_path):
    sink = io.BytesIO()
    write(sink, {"text": ["abcdefgh" * 100] * 50}, compression="zstd", use_dictionary=False)
    content = bytearray(sink.getvalue())
    path = tmp_path / "a.parquet"
    for damaged in (content[:-20], b"", b"PAR1", content[:4] + bytes(60) + content[64:]):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"a\.parquet: damaged, or not Parquet: .*; copy or write the file again"):
            texts(path)


def test_what_pyarrow_does_not_read_is_a_limit_and_no_damage(tmp_path, monkeypatch):
    def refuse(*arguments, **options):
        raise pyarrow.ArrowNotImplementedError("Support for codec 'lzo' not built")

    path = write(tmp_path / "a.parquet", {"text": ["a"]})
    monkeypatch.setattr(pyarrow.parquet.ParquetFile, "iter_batches", refuse)
    with pytest.raises(
        DataError, match=r"a\.parquet: a limit of pyarrow, no damage: Support for codec 'lzo' not built;"
    ):
        texts(path)


def test_a_long_value_that_many_rows_share_is_decoded_once_at_a_time(tmp_path):
    """A file of a few KB would else take the memory of all its rows."""
    long = "a" * (8 << 20)
    column = pyarrow.DictionaryArray.from_arrays([0] * 100, [long]).cast(pyarrow.dictionary("int32", "string"))
    path = write(tmp_path / "a.parquet", {"text": column}, rows_a_group=100, compression="zstd", store_schema=False)
    assert path.stat().st_size < 10_000
    before = pyarrow.default_memory_pool().max_memory()
    (part,) = plan_parts(listing(path), 1 << 20)
    assert sum(len(document.text) == len(long) for document in read(part.slices)) == 100
    assert pyarrow.default_memory_pool().max_memory() <= before + (200 << 20)
