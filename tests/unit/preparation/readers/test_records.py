import json

import pyarrow
import pyarrow.parquet
import pytest

from pretrain.errors import DataError
from tests.helpers.reading import documents

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
]


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_pairs_have_a_source_and_a_target(tmp_path):
    path = write(tmp_path / "a.jsonl", {"en": "one", "de": "eins", "id": 7}, {"en": "", "de": "\u00e9"})
    found = documents(path, kind="pairs", source_field="en", target_field="de", fields=("id",))
    assert [(document.source, document.text) for document in found] == [("one", "eins"), ("", "\u00e9")]
    assert [document.utf8 for document in found] == [b"eins", "\u00e9".encode()]
    assert [document.fields for document in found] == [{"id": 7}, {}]


def test_of_prompt_and_response_the_response_is_learned(tmp_path):
    (document,) = documents(write(tmp_path / "a.jsonl", {"prompt": "2+2=", "response": "4"}), kind="records")
    assert document.segments == (("2+2=", False), ("4", True))
    assert (document.text, document.utf8, document.source) == ("2+2=4", b"2+2=4", None)


ALPACA = [
    {"instruction": "Add.", "input": "1 and 2", "output": "3"},
    {"instruction": "Say it.", "input": "", "output": "It."},
    {"instruction": "Say no.", "output": "No."},
]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet"])
def test_instructions_with_an_input_are_read_whole(tmp_path, name):
    path = tmp_path / name
    if name == "a.parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ALPACA), path)
    elif name == "a.json":
        path.write_text(json.dumps(ALPACA))
    else:
        write(path, *ALPACA)
    both = ["Add.\n\n1 and 2", "Say it.", "Say no."]
    named = {"prompt_field": ["instruction", "input"], "response_field": "output"}
    for options in ({}, named):
        found = documents(path, kind="records", **options)
        assert [one.segments for one in found] == [
            ((prompt, False), (record["output"], True)) for prompt, record in zip(both, ALPACA, strict=True)
        ]
    alone = documents(path, kind="records", prompt_field=["instruction"], response_field="output")
    assert [one.segments[0][0] for one in alone] == ["Add.", "Say it.", "Say no."]
    (tmp_path / "lacks.jsonl").write_text('{"instruction": "x", "input": ""}\n')
    with pytest.raises(
        DataError,
        match=r"field 'output' is absent; fields: input, instruction; add it to the record, or choose one with resp",
    ):
        documents(tmp_path / "lacks.jsonl", kind="records")
    with pytest.raises(DataError, match=r"'input' belongs to the instruction.*use prompt_field=\[instruction, input\]"):
        documents(path, kind="records", prompt_field="instruction", response_field="output")


def test_of_a_chat_what_the_assistant_says_is_learned(tmp_path):
    path = write(tmp_path / "a.jsonl", {"chat": CHAT}, {"chat": []})
    first, second = documents(path, kind="records", messages_field="chat")
    assert first.segments == (("Be brief.", False), ("Hi", False), ("Hello", True))
    assert first.text == "Be brief.HiHello"
    assert (second.segments, second.text) == ((), "")


def test_messages_of_sharegpt_are_read_as_others(tmp_path):
    said = [("system", "Be brief."), ("human", "Hi"), ("gpt", "Hello")]
    theirs = [{"from": role, "value": text} for role, text in said]
    mixed = [{"role": role, "content": text} for role, text in said]
    path = write(tmp_path / "a.jsonl", {"m": CHAT}, {"m": theirs}, {"m": mixed})
    first, *others = documents(path, kind="records", messages_field="m")
    assert [one.segments for one in others] == [first.segments] * 2


@pytest.mark.parametrize(
    ("kind", "options", "record", "message"),
    [
        (
            "pairs",
            {},
            {"source": "a"},
            "field 'target' is absent; fields: source; add it to the record, or choose one with target_field",
        ),
        ("pairs", {}, {"source": ["a"], "target": "b"}, "field 'source' is a list, not a string; .*source_field"),
        ("pairs", {}, {"source": "\ud800", "target": "b"}, r"unpaired surrogate '\\ud800'"),
        ("records", {}, {"messages": CHAT}, "'prompt' is absent; .*; give messages_field: messages .inputs.0.messag"),
        (
            "records",
            {},
            {"prompt": "a", "response": 1},
            "a number, not a string; .*; make it a string, or choose another",
        ),
        (
            "records",
            {},
            {"prompt": "a"},
            "'response' is absent; .*; add it to the record, or choose one with response_",
        ),
        ("records", {"messages_field": "m"}, {"m": "Hi"}, "field 'm' is a string, not a list; .*with messages_field"),
        ("records", {"messages_field": "m"}, {"c": CHAT}, "'m' is absent; .*; give messages_field: c .inputs.0.mess"),
        ("records", {"messages_field": "m"}, ALPACA[0], "'m' is absent; .*; leave messages_field out .inputs.0.messag"),
        ("records", {"messages_field": "m"}, {"m": ["Hi"]}, r"m\[0\] is a string, not an object; write"),
        ("records", {"messages_field": "m"}, {"m": [CHAT[0], {"role": "user"}]}, r"m\[1\]\.content is absent; write"),
        (
            "records",
            {"messages_field": "m"},
            {"m": [{"from": "human", "text": "Hi"}]},
            r"m\[0\]\.content is absent; write",
        ),
        (
            "records",
            {"messages_field": "m"},
            {"m": [{"role": "user", "content": None}]},
            r"m\[0\]\.content is null, not a string",
        ),
        (
            "records",
            {"messages_field": "m"},
            {"m": [{"role": "bard", "content": "Hi"}]},
            r"m\[0\]\.role is 'bard', which is not known; use one of system, .*assistant",
        ),
        (
            "records",
            {"messages_field": "m"},
            {"m": [{"role": "user", "content": "\udfff"}]},
            r"unpaired surrogate '\\udfff' in the text; remove it",
        ),
    ],
)
def test_a_malformed_record_is_named_with_its_line(tmp_path, kind, options, record, message):
    good = {"source": "a", "target": "b", "prompt": "a", "response": "b", "m": CHAT}
    path = write(tmp_path / "a.jsonl", good, record)
    with pytest.raises(DataError, match=rf"a\.jsonl:2: .*{message}"):
        documents(path, kind=kind, **options)
