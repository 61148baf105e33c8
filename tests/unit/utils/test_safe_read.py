"""Files that are not what they seem: nothing blocks, nothing is read without end, and errors are of two kinds."""

import json
import os
import re

import pytest

from pretrain.utils.safe_read import (
    MAX_NESTING,
    MAX_RECORD_BYTES,
    check_fields,
    open_regular,
    parse_json,
    parse_json_at,
    read_bounded,
    read_json,
)


def test_a_record_is_read_as_it_was_written(tmp_path):
    (tmp_path / "a.json").write_text('{"a": ["\u00fc", 1.5, null]}', encoding="utf-8")
    assert read_json(tmp_path / "a.json") == {"a": ["\u00fc", 1.5, None]}
    assert read_bounded(tmp_path / "a.json", 100) == (tmp_path / "a.json").read_bytes()


def make_strange(path, kind):
    """Puts something under the name of a file that is no small file."""
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    else:
        with path.open("wb") as file:
            file.truncate(20 * 2**30)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("FIFO", "not a regular"), ("device", "not a regular"), ("folder", "not a regular"), ("huge", "larger than")],
)
def test_what_would_block_or_never_end_is_an_error_and_leaves_no_descriptor(tmp_path, kind, reason):
    make_strange(tmp_path / "a.json", kind)
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 (their number)
    with pytest.raises(OSError, match=reason):
        read_bounded(tmp_path / "a.json", MAX_RECORD_BYTES)
    if kind != "huge":
        with pytest.raises(OSError, match=reason):
            open_regular(tmp_path / "a.json")
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


@pytest.mark.parametrize("text", [b"[" * 10**5, b'{"a":' * 10**5, b"{", b"", b"\xff", b"9" * 5000])
def test_whatever_is_wrong_with_a_text_is_one_kind_of_error(text):
    with pytest.raises(ValueError, match=r"."):
        parse_json(text)


ODD = (
    "-0", "-0.0", "1e400", "-Infinity", "NaN", "123456789012345678901234567890", "1e-320", "0.1e23", " [1] ",
    '"\\ud800"', '"\\ud83d\\ude00"', '"\\u0000"', '{"a":1,"a":2}', '{"a":1,}', "01", "1.", "+1", "1 2",
    "'a'", "\ufeff1", "",
)  # fmt: skip


@pytest.mark.parametrize("text", ODD)
def test_a_text_has_the_value_and_the_error_of_pythons_own_parser(text):
    for given in (text, text.encode()):
        try:
            expected = repr(json.loads(given))
        except ValueError as error:
            with pytest.raises(ValueError, match=re.escape(str(error))):
                parse_json(given)
        else:
            assert repr(parse_json(given)) == expected


@pytest.mark.parametrize(("before", "after"), [("[", "]"), ('{"a":', "}"), ('[{"a":', "}]")])
def test_nesting_has_one_limit_whatever_reads_the_value(before, after):
    levels = MAX_NESTING // (1 + before.startswith("[{"))
    for text in (before * levels + "1" + after * levels, "[" + "[[]]," * 1000 + "{}]"):
        assert parse_json(text) == parse_json(text.encode()) == json.loads(text)
        assert parse_json_at(f" {text} x", 1) == (json.loads(text), len(text) + 1)
    deeper = f"[{before * levels}1{after * levels}]"
    for read in (parse_json, lambda text: parse_json(text.encode()), lambda text: parse_json_at(text, 0)):
        for text in (deeper, before * 10**5):
            with pytest.raises(ValueError, match="nested too deeply: more than 200 levels"):
                read(text)


@pytest.mark.parametrize(
    "read", [parse_json, lambda text: parse_json(text.encode()), lambda text: parse_json_at(text, 0)]
)
def test_a_number_that_python_does_not_read_is_told_as_a_limit(read):
    for number in ("1" * 6000, "-" + "1" * 6000):
        with pytest.raises(ValueError, match=r"^a whole number of more than 4,300 digits$"):
            read(f"[{number}]")
    assert read(f"[{'1' * 4300}]")
    with pytest.raises(json.JSONDecodeError, match="Expecting value"):
        read("[")


def test_fields_have_their_types_or_are_absent():
    types = {"step": int, "at": str}
    for sound in ({}, {"step": 2**53, "other": []}, {"step": None, "at": ""}):
        assert check_fields(sound, types) is sound
    for wrong in ({"step": "3"}, {"step": True}, {"step": 3.0}, {"step": 2**53 + 1}, {"at": 3}, [], None, "text"):
        with pytest.raises(ValueError, match=r"type|object|bits"):
            check_fields(json.loads(json.dumps(wrong)), types)
