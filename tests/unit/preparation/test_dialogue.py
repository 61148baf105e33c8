"""A dialogue from documentation: what is drawn, from what, and that no held-out question is in the training."""

import gzip
import json
import re
import string
from random import Random

import pytest

from pretrain.errors import ConfigError, DataError
from pretrain.preparation.dialogue import documented
from pretrain.preparation.dialogue.dialogue_files import HELD_OUT, DialogueMaker, write_dialogue
from pretrain.preparation.dialogue.question import UNKNOWN
from pretrain.preparation.dialogue.stories import Story


def records(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture(scope="module")
def maker():
    return DialogueMaker()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dialogue") / "made"
    write_dialogue(folder, 3000, seed=5)
    return folder


def test_a_seed_makes_the_same_files_and_another_seed_others(folder, tmp_path):
    write_dialogue(tmp_path / "same", 3000, seed=5)
    write_dialogue(tmp_path / "other", 20, seed=6)
    for file in sorted(folder.iterdir()):
        assert (tmp_path / "same" / file.name).read_bytes() == file.read_bytes()
        assert (tmp_path / "other" / file.name).read_bytes() != file.read_bytes()
    with pytest.raises(ConfigError, match="same"):
        write_dialogue(tmp_path / "same", 20)


def test_no_held_out_question_is_in_the_training(folder):
    alone, held_out = set(), set()
    for record in records(folder / "held_out.jsonl"):
        text = "\n".join(one["content"] for one in record["messages"][:-1])
        held_out.add(text)
        if record["kind"] in ("number", "fact"):  # others depend on what was said before
            alone.add(text)
    assert len(held_out) == sum(HELD_OUT.values()) == 200
    begun, lines = set(), set()
    for file in ("conversations", "practice", "texts"):
        for record in records(folder / f"{file}.jsonl"):
            text = record["text"] if file == "texts" else "\n".join(one["content"] for one in record["messages"])
            parts = text.split("\n")
            lines |= {*parts}
            begun |= {"\n".join(parts[:count]) for count in (1, 2)}
    assert len(lines) > 5000
    assert alone & lines == held_out & begun == set()


def test_a_held_out_sum_is_held_out_in_every_phrasing_and_order(maker):
    numbers = {
        tuple(sorted(re.findall(r"\d+", one.asked))): one for one in maker.held_out(Random(1)) if " + " in one.asked
    }
    for questions in (next(maker.trained(Random(seed), set())) for seed in range(2000)):
        one = questions[0]
        if one.key.startswith("plus"):
            assert tuple(sorted(re.findall(r"\d+", one.asked))) not in numbers


def test_a_leak_is_refused(maker):
    drawn = next(maker.trained(Random(3), set()))
    with pytest.raises(DataError, match="a held-out question is in the training"):
        next(maker.trained(Random(3), {drawn[0].key}))


def test_answers_to_texts_stand_in_them_and_the_rest_is_unknown():
    random = Random(0)
    for _ in range(500):
        one = Story(random).ask()
        answer = one.answer.removeprefix("the ")
        assert (answer in one.text) == (one.answer != UNKNOWN)
        assert one.kind == ("unknown" if one.answer == UNKNOWN else "text")


def test_functions_are_those_that_one_module_documents():
    by_name = {one.name: one for one in documented.read_functions()}
    assert by_name["heapify"].module == "heapq" and by_name["heappush"].arguments == ("heap", "item")
    assert by_name["gcd"].purpose == "Greatest Common Divisor"
    assert "compile" not in by_name and "_siftup" not in by_name  # of `re`, and built in; private


def test_commands_are_those_of_the_pages_and_none_where_there_are_no_pages(tmp_path, monkeypatch):
    page = '.TH LS "1" "2022" "GNU coreutils 9.1"\n.SH NAME\nls \\- list directory contents\n.SH SYNOPSIS\n.B ls\n'
    (tmp_path / "ls.1.gz").write_bytes(gzip.compress(page.encode()))
    (tmp_path / "git.1.gz").write_bytes(gzip.compress(page.replace("GNU coreutils", "Git").encode()))
    for folder, commands in ((tmp_path, [("ls", "list directory contents")]), (tmp_path / "none", [])):
        monkeypatch.setattr(documented, "MANUALS", folder)
        documented._pages.cache_clear()
        assert documented.read_commands() == commands
    documented._pages.cache_clear()


def test_definitions_are_first_senses_of_nouns_and_none_without_a_dictionary(tmp_path, monkeypatch):
    entries = {
        "abbey": "abbey\n    n 1: a church of monks\n    2: a convent\n       ruled by an abbess\n",
        "clay": "clay\n    n 1: a fine-grained soil that is plastic [syn: {mud}]\n",
        "hearth": "hearth\n    n : the home; `driven from\n        hearth'\n",
        "kite": "kite\n    v 1: fly\n",
    }
    index, content = "", ""
    for word, text in entries.items():
        index += f"{word}\t{encoded(len(content))}\t{encoded(len(text))}\n"
        content += text
    (tmp_path / "wn.index").write_text(index)
    (tmp_path / "wn.dict.dz").write_bytes(gzip.compress(content.encode()))
    monkeypatch.setattr(documented, "WORDNET", tmp_path / "wn.index")
    assert documented.read_definitions() == [("abbey", "a church of monks")]
    monkeypatch.setattr(documented, "WORDNET", tmp_path / "none.index")
    assert documented.read_definitions() == []


def encoded(number):
    """A number as an index of dictd has it, of two digits to the base of 64."""
    digits = string.ascii_uppercase + string.ascii_lowercase + string.digits + "+/"
    return digits[number // 64] + digits[number % 64]
