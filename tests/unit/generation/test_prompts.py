"""Where prompts come from."""

import io
import os

import pytest

from pretrain.errors import ConfigError, DataError
from pretrain.generation.text import find_prompts


def test_prompts_of_the_command_line_come_in_order():
    assert list(find_prompts(["b", "", "a\nb"], None)) == ["b", "", "a\nb"]


def test_a_file_has_a_prompt_a_line_whatever_ends_it(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_bytes("\ufeffone\r\n\ntw\u00f6 \n three".encode())
    assert list(find_prompts([], str(file))) == ["one", "", "tw\u00f6 ", " three"]


def test_a_file_is_read_as_it_is_needed(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_bytes(b"one\n\xff\n")
    prompts = find_prompts([], str(file))
    assert next(prompts) == "one"
    with pytest.raises(DataError, match=r"prompts\.txt:2: not UTF-8: byte 0xff; convert it"):
        next(prompts)


def test_a_file_of_records_has_a_text_in_each_and_no_label(tmp_path):
    file = tmp_path / "texts.jsonl"
    file.write_text('{"text": "one\\ntwo", "label": "gold"}\n\n{"prompt": "asked", "text": "three"}\n')
    assert list(find_prompts([], str(file), "--text")) == ["one\ntwo", "three"]
    assert list(find_prompts([], str(file))) == ["one\ntwo", "asked"]
    file.write_text('{"text": "one"}\n{"question": "two"}\n{"text": 3}\nfour\n')
    texts = find_prompts([], str(file), "--text")
    assert next(texts) == "one"
    with pytest.raises(DataError, match=r"texts\.jsonl:2: field 'text' is absent; fields: question; .*name text"):
        next(texts)
    for line, what in (('{"text": 3}', "field 'text' is a number, not a string"), ("four", "not JSON")):
        file.write_text(line)
        with pytest.raises(DataError, match=what):
            next(find_prompts([], str(file), "--text"))
    file.rename(tmp_path / "texts.json")
    with pytest.raises(ConfigError, match=r"a \.json is one list of records.*write a \.jsonl"):
        find_prompts([], str(tmp_path / "texts.json"))


@pytest.fixture
def feed_stdin(monkeypatch):
    """Puts a file descriptor in the place of standard input."""
    opened = []

    def feed(descriptor):
        opened.append(io.TextIOWrapper(os.fdopen(descriptor, "rb")))
        monkeypatch.setattr("sys.stdin", opened[-1])

    yield feed
    for file in opened:
        file.close()


def piped(text):
    reading, writing = os.pipe()
    os.write(writing, text.encode())
    os.close(writing)
    return reading


@pytest.mark.parametrize("file", [None, "-"])
def test_what_is_piped_in_is_read(feed_stdin, file):
    feed_stdin(piped("one\ntwo\n"))
    assert list(find_prompts([], file)) == ["one", "two"]


def test_what_is_redirected_in_is_read(feed_stdin, tmp_path):
    (tmp_path / "prompts").write_text("one\n")
    feed_stdin(os.open(tmp_path / "prompts", os.O_RDONLY))
    assert list(find_prompts([], None)) == ["one"]


def test_standard_input_is_left_alone_where_prompts_were_given(feed_stdin):
    feed_stdin(piped("one\n"))
    assert list(find_prompts(["a"], None)) == ["a"]


def test_nothing_is_given_at_a_terminal_and_from_the_null_device(feed_stdin, monkeypatch):
    feed_stdin(os.open(os.devnull, os.O_RDONLY))
    assert find_prompts([], None) is None
    master, slave = os.openpty()
    feed_stdin(slave)
    assert find_prompts([], None) is None
    os.close(master)
    monkeypatch.setattr("sys.stdin", None)
    assert find_prompts([], None) is None


def test_nothing_in_a_pipe_is_no_prompts(feed_stdin):
    feed_stdin(piped(""))
    assert list(find_prompts([], None)) == []


def test_what_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"nope\.txt: cannot read it: No such file or directory; check the path"):
        find_prompts([], str(tmp_path / "nope.txt"))
    with pytest.raises(ConfigError, match="cannot read it: Is a directory"):
        find_prompts([], str(tmp_path))
    with pytest.raises(ConfigError, match="--prompt and --file were both given; give one of them"):
        find_prompts(["a"], "-")
    with pytest.raises(ConfigError, match="--prompt is not UTF-8; put the text in a file"):
        find_prompts([os.fsdecode(b"a\xff")], None)
