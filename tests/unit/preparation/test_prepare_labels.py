"""What `prepare` makes of labelled texts."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from pretrain.config.load import parse_section
from pretrain.config.prepare import PrepareConfig
from pretrain.config.yaml_nodes import LocatedTree
from pretrain.errors import ConfigError, DataError
from pretrain.preparation.filters import Label
from pretrain.preparation.input_parts import Share
from pretrain.preparation.labelling import LabelSet, check_labels, first_tokens, number_tokens
from pretrain.preparation.prepare import prepare
from pretrain.preparation.split import TRAIN, VALIDATION
from pretrain.rows import IGNORE_INDEX
from pretrain.shards.index import load_index
from pretrain.shards.reader import ShardReader
from pretrain.tokenizer.file import load_tokenizer
from tests.helpers.corpus import digests, write_rows
from tests.helpers.prepare_config import labels_config

TEXTS = [("good film", "pos"), ("bad film", "neg"), ("so so", "mixed")]
SENTENCE = {"tokens": ["Anna", "saw", "Paris", "!"], "tags": ["B-PER", "O", "B-LOC", "O"]}


def class_rows(number=30):
    return [{"text": f"{TEXTS[n % 3][0]} {n}", "label": TEXTS[n % 3][1]} for n in range(number)]


def labelled(folder, split=TRAIN):
    """Yields, document by document, its text and [(token, name of its label)] of those that have one."""
    index, tokenizer = load_index(folder), load_tokenizer(folder / "tokenizer.json")
    for shard in index.split(split).shards:
        reader = ShardReader(folder, shard, index.dtype)
        for number in range(shard.num_members):
            (tokens, starts), labels = reader.member(number), reader.labels(number)
            for ids, marks in zip(np.split(tokens, starts[1:]), np.split(labels, starts[1:]), strict=True):
                (places,) = np.nonzero(marks != IGNORE_INDEX)
                found = [(tokenizer.id_to_token(ids[place]), index.labels[marks[place]]) for place in places]
                yield tokenizer.decode(ids.tolist()), found


BERT = {"kind": "wordpiece", "vocab_size": 200, "roles": "bert"}


def test_a_class_is_at_the_token_that_begins_its_text(tmp_path):
    rows = class_rows()
    config = labels_config(tmp_path / "out", write_rows(tmp_path / "a.jsonl", rows), "classes", tokenizer=BERT)
    index = prepare(config, processes=1)
    assert index == load_index(tmp_path / "out")
    assert (index.kind, index.labels) == ("classes", ("mixed", "neg", "pos"))
    assert list(labelled(tmp_path / "out")) == [(row["text"], [("[CLS]", row["label"])]) for row in rows]
    tokenizer = load_tokenizer(tmp_path / "out/tokenizer.json")
    reader = ShardReader(tmp_path / "out", index.split(TRAIN).shards[0], index.dtype)
    tokens, starts = reader.member(0)
    for ids in np.split(tokens, starts[1:]):
        assert [tokenizer.id_to_token(ids[0]), tokenizer.id_to_token(ids[-1])] == ["[CLS]", "[SEP]"]
    assert index.split(TRAIN).num_bytes_text == sum(len(row["text"]) for row in rows)


def test_without_a_token_that_begins_texts_a_class_is_at_the_first_of_the_text(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", [{"text": "ab", "label": 1}, {"text": "ba", "label": 0}])
    prepare(labels_config(tmp_path / "out", path, "classes", tokenizer={"kind": "char"}), processes=1)
    assert [found for _, found in labelled(tmp_path / "out")] == [[("a", "1")], [("b", "0")]]


def test_tags_are_at_the_first_token_of_each_word(tmp_path):
    words = [f"w{n}ords" for n in range(40)]
    rows = [SENTENCE] * 3 + [{"tokens": words, "tags": ["O", "B-LOC"] * 20}]
    config = labels_config(tmp_path / "out", write_rows(tmp_path / "a.jsonl", rows), "tags", tokenizer=BERT)
    assert prepare(config, processes=1).labels == ("B-LOC", "B-PER", "O")
    tokenizer = load_tokenizer(tmp_path / "out/tokenizer.json")
    for row, (_, found) in zip(rows, labelled(tmp_path / "out"), strict=True):
        first = [tokenizer.encode(word, add_special_tokens=False).tokens[0] for word in row["tokens"]]
        assert found == list(zip(first, row["tags"], strict=True))


@pytest.mark.parametrize("kind", ["bpe", "unigram", "char"])
def test_tags_find_their_words_whatever_a_token_takes_of_the_space_before(tmp_path, kind):
    words = ["the", "stra\u00dfe", "has", "two", "na\u00efve", "\u6f22\u5b57", "in", "it"]
    rows = [{"tokens": words, "tags": list(range(len(words)))}] * 4
    size = None if kind == "char" else 330
    config = labels_config(
        tmp_path / "out", write_rows(tmp_path / "a.jsonl", rows), "tags", tokenizer={"kind": kind, "vocab_size": size}
    )
    prepare(config, processes=1)
    index, tokenizer = load_index(tmp_path / "out"), load_tokenizer(tmp_path / "out/tokenizer.json")
    whole = tokenizer.encode(" ".join(words), add_special_tokens=False)
    reader = ShardReader(tmp_path / "out", index.split(TRAIN).shards[0], index.dtype)
    (tokens, starts), labels = reader.member(0), reader.labels(0)
    for ids, marks in zip(np.split(tokens, starts[1:]), np.split(labels, starts[1:]), strict=True):
        assert ids.tolist() == [*whole.ids, index.eos_id]
        (places,) = np.nonzero(marks != IGNORE_INDEX)
        assert marks[places].tolist() == list(range(len(words)))
        # A slow reference: the first token that has a character of the word.
        start, expected = 0, []
        for word in words:
            inside = range(start, start + len(word))
            expected.append(next(n for n, (a, b) in enumerate(whole.offsets) if any(a <= c < b for c in inside)))
            start += len(word) + 1
        assert places.tolist() == expected


def test_a_word_that_a_tokenizer_leaves_nothing_of_has_no_label_and_its_neighbours_keep_theirs():
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, "[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.Replace("\u200b", ""), pre_tokenizers.Whitespace()
    text = "a \u200b b \u200b"
    labels = [Label("one", 0, 1), Label("two", 2, 3), Label("three", 4, 5), Label("four", 6, 7)]
    places = first_tokens(labels, tokenizer.encode(text).offsets)
    assert places.tolist() == [0, 2, 1, 2]
    known = LabelSet(("one", "two", "three", "four"), is_given=True)
    assert number_tokens(labels, places, 2, known, TRAIN, text).tolist() == [0, 2]


def test_of_words_that_share_a_token_the_first_has_it():
    known, labels = LabelSet(("x", "y"), is_given=True), [Label("x", 0, 1), Label("y", 2, 3)]
    places = first_tokens(labels, [(0, 3)])
    assert number_tokens(labels, places, 1, known, TRAIN, "a b").tolist() == [0]


def test_labels_that_are_numbers_are_sorted_by_value(tmp_path):
    rows = [{"text": f"t{n}", "label": n} for n in (10, 9, 2)] + [{"text": "t1", "label": "1"}]
    path = write_rows(tmp_path / "a.jsonl", rows)
    assert prepare(labels_config(tmp_path / "out", path, "classes"), processes=1).labels == ("1", "2", "9", "10")


def test_numbers_are_places_in_names_that_are_given(tmp_path):
    rows = [{"tokens": ["a", "b"], "tags": [2, "O"]}]
    path = write_rows(tmp_path / "a.jsonl", rows)
    config = labels_config(tmp_path / "out", path, "tags", tokenizer={"kind": "char"}, labels=["O", "X", "Y"])
    prepare(config, processes=1)
    assert [name for _, found in labelled(tmp_path / "out") for _, name in found] == ["Y", "O"]


def test_numbers_that_are_names_are_no_places():
    known = LabelSet(("1", "2"), is_given=True)
    assert known.number(1, TRAIN, "") == 0
    with pytest.raises(DataError, match=r"label 0 is not one of labels \(1, 2\)"):
        known.number(0, TRAIN, "")


def test_a_label_that_only_the_validation_split_has_is_refused_by_name(tmp_path):
    train = write_rows(tmp_path / "train.jsonl", class_rows())
    held = write_rows(tmp_path / "held.jsonl", [{"text": "what is this", "label": "odd"}])
    config = PrepareConfig.model_validate(
        {
            "output": str(tmp_path / "out"),
            "kind": "classes",
            "inputs": [{"path": str(train), "split": "train"}, {"path": str(held), "split": "validation"}],
        }
    )
    message = (
        r"the document that begins 'what is this': label 'odd' of the validation split is not one of the training "
        r"split's \(mixed, neg, pos\); correct it, or give the head a label that no text trains: "
        r'labels=\["mixed", "neg", "odd", "pos"\]$'
    )
    with pytest.raises(DataError, match=message):
        prepare(config, processes=1)
    assert not any((tmp_path / "out").glob("*.json"))
    given = config.model_copy(update={"labels": ["odd", "neg", "pos", "mixed"]})
    index = prepare(given, processes=1)
    assert index.labels == ("odd", "neg", "pos", "mixed")
    assert [name for _, ((_, name),) in labelled(tmp_path / "out", VALIDATION)] == ["odd"]


def test_a_label_that_is_none_of_those_given_is_refused(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", class_rows())
    with pytest.raises(DataError, match=r"label 'mixed' is not one of labels \(neg, pos\); add it to labels, or"):
        prepare(labels_config(tmp_path / "out", path, "classes", labels=["neg", "pos"]), processes=1)


@pytest.mark.parametrize(
    ("kind", "row", "message"),
    [
        (
            "classes",
            {"text": "a"},
            r"a\.jsonl:1: field 'label' is absent; fields: text; add it to the record, or choose one with label_field",
        ),
        ("classes", {"text": "a", "label": 1.5}, r"field 'label' is a number, not a string or a whole number; give"),
        ("classes", {"text": "a", "label": None}, r"field 'label' is null, not a string or a whole number; give each"),
        ("classes", {"text": "a", "label": ""}, r"field 'label' is empty; give each label a name"),
        (
            "tags",
            {"tokens": "a b", "tags": []},
            r"field 'tokens' is a string, not a list; .* choose another with words_fi",
        ),
        (
            "tags",
            {"tokens": ["a"]},
            r"field 'tags' is absent; fields: tokens; add it to the record, or choose one with tags_field",
        ),
        (
            "tags",
            {"tokens": ["a", "b"], "tags": [1]},
            r"'tokens' has 2 words and 'tags' 1 tags; give each word one tag",
        ),
        ("tags", {"tokens": ["a", " "], "tags": [1, 1]}, r"tokens\[1\] is blank; give words with characters in them"),
        ("tags", {"tokens": [3], "tags": [1]}, r"tokens\[0\] is a number, not a string; give words"),
        ("tags", {"tokens": ["a"], "tags": [[]]}, r"tags\[0\] is a list, not a string or a whole number; give each"),
        ("tags", {"tokens": ["\ud800"], "tags": [1]}, r"unpaired surrogate '\\ud800' in the text; remove it"),
    ],
)
def test_a_record_without_its_labels_is_an_error_with_its_place(tmp_path, kind, row, message):
    path = write_rows(tmp_path / "a.jsonl", [row])
    with pytest.raises(DataError, match=message):
        prepare(labels_config(tmp_path / "out", path, kind), processes=1)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"labels": ["a"]}, r"labels go with kind=classes, tags or images, not text; leave them out"),
        ({"kind": "tags", "labels": ["a", "a"]}, r"labels names one twice: a, a"),
        (
            {"kind": "tags", "inputs": [{"path": "x", "normalize": {"steps": ["lowercase"]}}]},
            r"inputs\.0\.normalize would move words away from their tags; use tokenizer\.lowercase instead",
        ),
    ],
)
def test_configs_that_contradict_labels_are_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        parse_section(PrepareConfig, LocatedTree({"output": "x", **values}, {}), "a.yaml")


def test_there_must_be_labels_and_not_more_than_a_shard_can_tell_apart():
    with pytest.raises(DataError, match=r"there is no labelled document to train on; give more data"):
        check_labels([])
    with pytest.raises(
        DataError, match=r"32768 labels are more than 32767; is label_field \(or tags_field\) the right"
    ):
        check_labels(map(str, range(2**15)))


def test_the_same_text_is_in_one_split_whatever_its_label(tmp_path):
    rows = [{"text": f"text {n}", "label": label} for n in range(60) for label in ("a", "b")]
    path = write_rows(tmp_path / "a.jsonl", rows)
    prepare(labels_config(tmp_path / "out", path, "classes", split="hash:0.5"), processes=1)
    train, held = ({text for text, _ in labelled(tmp_path / "out", split)} for split in (TRAIN, VALIDATION))
    assert train and held and not train & held


def test_shares_and_processes_write_the_same_bytes_and_the_card_counts_labels(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", class_rows(400))
    config = labels_config(tmp_path / "one", path, "classes", split="hash:0.2", part_bytes=3000)
    index = prepare(config, processes=1)
    other = config.model_copy(update={"output": str(tmp_path / "two")})
    assert prepare(other, share=Share(1, 2), processes=2) is None
    assert prepare(other, share=Share(2, 2), processes=1) == index
    assert digests(tmp_path / "one") == digests(tmp_path / "two")
    counts = {split: dict.fromkeys(index.labels, 0) for split in (TRAIN, VALIDATION)}
    for split, found in counts.items():
        for _, ((_, name),) in labelled(tmp_path / "one", split):
            found[name] += 1
    statistics = json.loads((tmp_path / "one/statistics.json").read_text())
    assert {split: facts["labels"] for split, facts in statistics["splits"].items()} == counts
    card = (tmp_path / "one/data_card.md").read_text()
    assert "| label | train | validation |\n|---|---|---|\n" in card
    assert f"| mixed | {counts[TRAIN]['mixed']} | {counts[VALIDATION]['mixed']} |" in card


def test_parquet_has_labels_in_columns(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"words": [["a", "b"], ["b"]], "ner_tags": [[0, 1], [1]]})
    parquet.write_table(table, tmp_path / "a.parquet")
    fields = {"words_field": "words", "tags_field": "ner_tags"}
    config = labels_config(
        tmp_path / "out", tmp_path / "a.parquet", "tags", fields=fields, tokenizer={"kind": "char"}, labels=["O", "X"]
    )
    prepare(config, processes=1)
    assert [found for _, found in labelled(tmp_path / "out")] == [[("a", "O"), ("b", "X")], [("b", "X")]]
