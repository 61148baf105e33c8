"""What `prepare` makes of pairs, of records, of filters and of documents that come twice."""

import json
import logging
import random
from pathlib import Path

import numpy as np
import pytest

from pretrain.config.prepare import FilterConfig
from pretrain.errors import ConfigError, DataError
from pretrain.preparation import duplicates
from pretrain.preparation.filters import Document, refuse
from pretrain.preparation.prepare import prepare
from pretrain.preparation.split import TRAIN, VALIDATION
from pretrain.preparation.text_pieces import document_key
from pretrain.shards.index import load_index
from pretrain.shards.reader import ShardReader
from pretrain.tokenizer.file import load_tokenizer
from tests.helpers.corpus import WORDS, digests, write_rows
from tests.helpers.killed import count_writes, run_killed
from tests.helpers.prepare_config import prepare_config
from tests.unit.data.prepared import draw_nothing

EMPTY_SIDE = {"min_chars": 0}


def columns(folder, split=TRAIN):
    """Yields, document by document, its tokens and what else its shard has."""
    index = load_index(folder)
    for shard in index.split(split).shards:
        reader = ShardReader(folder, shard, index.dtype)
        for number in range(shard.num_members):
            tokens, starts = reader.member(number)
            others = []
            if index.kind == "pairs":
                source, source_starts = reader.source(number)
                others = np.split(source, source_starts[1:])
            if index.kind == "records":
                others = np.split(reader.loss(number), starts[1:])
            yield from zip(np.split(tokens, starts[1:]), others, strict=True)


def read_texts(folder, split=TRAIN):
    """Decodes texts, in the order of the shards."""
    index, tokenizer = load_index(folder), load_tokenizer(folder / "tokenizer.json")
    found = []
    for shard in index.split(split).shards if split in index.splits else ():
        reader = ShardReader(folder, shard, index.dtype)
        for number in range(shard.num_members):
            tokens, starts = reader.member(number)
            found += [tokenizer.decode(ids[:-1].tolist()) for ids in np.split(tokens, starts[1:])]
    return found


def test_both_sides_of_a_pair_are_encoded_and_end(tmp_path):
    rows = [{"source": f"one {n}", "target": f"eins {n}"} for n in range(20)] + [{"source": "x", "target": ""}]
    path = write_rows(tmp_path / "a.jsonl", rows)
    config = prepare_config(tmp_path / "out", [path], kind="pairs", vocab_size=300, split="hash:0", filter=EMPTY_SIDE)
    index = prepare(config, processes=1)
    assert index == load_index(tmp_path / "out") and index.kind == "pairs"
    tokenizer = load_tokenizer(tmp_path / "out/tokenizer.json")
    found = []
    for target, source in columns(tmp_path / "out"):
        assert target[-1] == source[-1] == index.eos_id
        found.append({"source": tokenizer.decode(source[:-1]), "target": tokenizer.decode(target[:-1])})
    assert found == rows
    assert index.split(TRAIN).num_bytes_text == sum(len(row["target"]) for row in rows)


def test_a_pair_is_held_out_by_both_of_its_sides(tmp_path):
    rows = [{"source": f"one {n}", "target": "same"} for n in range(200)]
    path = write_rows(tmp_path / "a.jsonl", rows)
    index = prepare(prepare_config(tmp_path / "out", [path], kind="pairs", tokenizer="char", split="hash:0.5"))
    assert 60 < index.split(VALIDATION).num_documents < 140


def test_only_what_a_record_teaches_is_learned_and_so_is_its_end(tmp_path):
    turns = [
        [("user", "abc"), ("assistant", "de")],
        [("user", "abc"), ("assistant", "de"), ("user", "f")],
        [("user", ""), ("assistant", "ab")],
    ]
    rows = [{"messages": [{"role": role, "content": text} for role, text in row]} for row in turns]
    path = write_rows(tmp_path / "a.jsonl", rows)
    config = prepare_config(tmp_path / "out", [path], kind="records", tokenizer="char", split="hash:0")
    config = config.model_copy(update={"inputs": [config.inputs[0].model_copy(update={"messages_field": "messages"})]})
    index = prepare(config, processes=1)
    assert index.kind == "records"
    assert [loss.tolist() for _, loss in columns(tmp_path / "out")] == [
        [0, 0, 0, 1, 1, 1],
        [0, 0, 0, 1, 1, 0, 0],
        [1, 1, 1],
    ]
    assert all(tokens[-1] == index.eos_id for tokens, _ in columns(tmp_path / "out"))


@pytest.mark.parametrize("template", [None, "chatml"])
def test_a_conversation_without_an_assistant_is_left_out_under_that_name(tmp_path, caplog, template):
    roles = [["user"], ["system", "user"], []]
    rows = [{"m": [{"role": role, "content": "ab"} for role in one]} for one in roles]
    chats = [[*rows, {"m": [{"role": "assistant", "content": "ab"}]}], rows]
    for name, chat in zip(("some", "none"), chats, strict=True):
        path = write_rows(tmp_path / f"{name}.jsonl", chat)
        config = prepare_config(tmp_path / name, [path], kind="records", tokenizer="char", split="hash:0")
        item = config.inputs[0].model_copy(update={"messages_field": "m", "template": template})
        config = config.model_copy(update={"inputs": [item]})
        if name == "some":
            with caplog.at_level(logging.INFO):
                prepare(config, processes=1)
            assert "skipped 2 documents: no assistant turn" in caplog.text
            assert "skipped 1 document: empty" in caplog.text
        else:
            with pytest.raises(DataError, match=r"no text to train on.*skipped: empty 1, no assistant turn 2\)"):
                prepare(config, processes=1)


@pytest.mark.parametrize("kind", ["pairs", "records"])
def test_only_texts_are_cut_in_two(tmp_path, kind):
    path = write_rows(tmp_path / "a.jsonl", [{}])
    with pytest.raises(ConfigError, match=rf"split=tail:0\.1 cuts texts in two, which kind={kind} does not allow; use"):
        prepare(prepare_config(tmp_path / "out", [path], kind=kind, split="tail:0.1"))


@pytest.mark.parametrize("template", [None, "instruction"])
def test_a_record_whose_answers_have_no_text_is_left_out_under_that_name(tmp_path, caplog, template):
    caplog.set_level(logging.INFO)
    said = [("user", "a"), ("assistant", ""), ("user", "b"), ("assistant", "c")]
    rows = [{"m": [{"role": role, "content": text} for role, text in said[:length]]} for length in (2, 2, 4)]
    path = write_rows(tmp_path / "a.jsonl", rows)
    config = prepare_config(tmp_path / "out", [path], kind="records", tokenizer="char", split="hash:0")
    item = config.inputs[0].model_copy(update={"messages_field": "m", "template": template})
    index = prepare(config.model_copy(update={"inputs": [item]}), processes=1)
    assert index.split("train").num_documents == 1
    assert "skipped 2 documents: empty answer" in caplog.text


def test_documents_need_not_end_with_a_token(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", [{"text": "ab"}, {"text": "ba"}])
    config = prepare_config(tmp_path / "out", [path], tokenizer="char", split="hash:0", end_of_document=False)
    assert prepare(config, processes=1).split(TRAIN).num_tokens == 4


# Filters.


def test_every_document_that_is_left_out_is_counted_by_its_reason(tmp_path, caplog):
    rows = [{"text": "good one", "language": "en", "stars": 1}, {"text": "no", "language": "en", "stars": 1}]
    rows += [{"text": "x" * 31, "language": "en", "stars": 1}, {"text": "gut genug", "language": "de", "stars": 1}]
    rows += [
        {"text": "which one"},
        {"text": "", "language": "en"},
        {"text": "true one", "language": "en", "stars": True},
    ]
    path = write_rows(tmp_path / "a.jsonl", rows)
    filters = {"min_chars": 3, "max_chars": 30, "require": {"language": ["en", "fr"], "stars": [1, 2]}}
    config = prepare_config(tmp_path / "out", [path], tokenizer="char", split="hash:0", filter=filters)
    with caplog.at_level(logging.INFO):
        prepare(config, processes=1)
    assert read_texts(tmp_path / "out") == ["good one"]
    record = json.loads((tmp_path / "out/parts/part-00000.json").read_text())
    assert record["num_filtered"] == {"not_required": 3, "too_long": 1, "too_short": 1}
    assert record["num_empty"] == 1
    assert "skipped 3 documents: not required" in caplog.text
    assert load_tokenizer(tmp_path / "out/tokenizer.json").token_to_id("x") is None


def test_limits_hold_for_either_side_of_a_pair():
    config = FilterConfig(min_chars=2, max_chars=3)
    sides = {("ab", "abc"): None, ("a", "abc"): "too_short", ("ab", "abcd"): "too_long", ("", ""): "empty"}
    for (source, target), reason in sides.items():
        assert refuse(Document(target, target.encode(), 0, source=source), config) == reason


def test_limits_that_leave_nothing_are_refused(tmp_path):
    limits = {"min_chars": 5, "max_chars": 4}
    with pytest.raises(ConfigError, match=r"filter\.max_chars=4 is less than filter\.min_chars=5; raise the first"):
        prepare(prepare_config(tmp_path / "out", filter=limits))


# Duplicates.


def write_twice(folder, num_documents=400):
    """Writes files with documents that come again, within and across files; returns their texts in input order."""
    rng = random.Random(1)
    distinct = [" ".join(rng.choices(WORDS, k=20)) + f" {number}" for number in range(num_documents // 3)]
    texts = rng.choices(distinct, k=num_documents)
    folder.mkdir()
    for number in range(4):
        write_rows(folder / f"{number}.jsonl", [{"text": text} for text in texts[number::4]])
    return [text for number in range(4) for text in texts[number::4]]


def config_of(tmp_path, name, **changes):
    options = {"vocab_size": 300, "split": "hash:0", "part_bytes": 4000, "filter": {"deduplicate": True}}
    return prepare_config(tmp_path / name, [tmp_path / "in"], **{**options, **changes})


@pytest.mark.long
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("rows", [7, 2**20])
def test_of_equal_documents_the_first_of_the_input_stays(tmp_path, monkeypatch, processes, rows):
    texts = write_twice(tmp_path / "in")
    monkeypatch.setattr(duplicates, "RUN_ROWS", rows)
    monkeypatch.setattr(duplicates, "BUCKET_ROWS", rows)
    prepare(config_of(tmp_path, "out"), processes=processes)
    assert read_texts(tmp_path / "out") == list(dict.fromkeys(texts))
    records = [json.loads(path.read_text()) for path in sorted((tmp_path / "out/parts").iterdir())]
    assert len(records) > 5
    assert sum(record["num_filtered"].get("duplicate", 0) for record in records) == len(texts) - len(set(texts))
    assert {path.suffix for path in (tmp_path / "out/duplicates").iterdir()} == {".first"}


def test_a_document_that_a_filter_leaves_out_hides_no_other(tmp_path):
    rows = [{"text": "same", "language": "fr"}, {"text": "same", "language": "en"}, {"text": "other", "language": "en"}]
    path = write_rows(tmp_path / "a.jsonl", rows)
    filters = {"require": {"language": ["en"]}, "deduplicate": True}
    prepare(prepare_config(tmp_path / "out", [path], tokenizer="char", split="hash:0", filter=filters), processes=1)
    assert read_texts(tmp_path / "out") == ["same", "other"]


def test_pairs_and_records_are_equal_only_if_all_of_them_is():
    keys = [
        document_key(Document("c", b"c", 0, source="ab")),
        document_key(Document("bc", b"bc", 0, source="a")),
        document_key(Document("ab", b"ab", 0, segments=(("a", False), ("b", True)))),
        document_key(Document("ab", b"ab", 0, segments=(("ab", True),))),
        document_key(Document("ab", b"ab", 0, segments=(("a", True), ("b", True)))),
    ]
    assert len(set(keys)) == len(keys)


def prepare_folder(folder: str, name: str) -> None:
    """What a process does that is killed."""
    draw_nothing()
    prepare(config_of(Path(folder), name), processes=1)


@pytest.mark.long
def test_killed_while_duplicates_are_looked_for_and_started_again_it_gives_the_same_bytes(tmp_path):
    write_twice(tmp_path / "in", 200)
    num_writes = count_writes(prepare_folder, tmp_path, "whole")
    for kill_at in random.Random(0).sample(range(5, num_writes), 5):
        name = f"killed{kill_at}"
        run_killed(prepare_folder, tmp_path, name, kill_at=kill_at)
        prepare(config_of(tmp_path, name), processes=1)
        assert digests(tmp_path / name) == digests(tmp_path / "whole")
