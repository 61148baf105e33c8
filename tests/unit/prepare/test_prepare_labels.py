"""What `prepare` makes of labelled texts, and of questions with their answers."""

import json

import numpy as np
import pytest
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from pretrain.config.load import parse_section
from pretrain.config.prepare import PrepareConfig
from pretrain.config.yaml_nodes import LocatedTree
from pretrain.errors import ConfigError, DataError
from pretrain.prepare.filters import Label
from pretrain.prepare.input_parts import Share
from pretrain.prepare.labelling import LabelSet, check_labels, first_tokens, number_tokens
from pretrain.prepare.prepare import prepare
from pretrain.prepare.split import TRAIN, VALIDATION
from pretrain.rows import ANSWER_BEGINS, ANSWER_ENDS, IGNORE_INDEX
from pretrain.shards.index import load_index
from pretrain.shards.reader import ShardReader
from pretrain.tokenizer import load_tokenizer
from tests.helpers.corpus import digests, write_rows
from tests.helpers.prepare_config import labels_config

TEXTS = [("good film", "pos"), ("bad film", "neg"), ("so so", "mixed")]
SENTENCE = {"tokens": ["Anna", "saw", "Paris", "!"], "tags": ["B-PER", "O", "B-LOC", "O"]}


QUESTIONS = [
    ("Where was Ada born?", "Ada Lovelace was born in London, in 1815.", "London"),
    ("When?", "Ada Lovelace was born in London, in 1815.", "in 1815."),
    (
        "Who wrote the na\u00efve note?",
        "The note (na\u00efve, unsigned) was by \u6f22\u5b57 himself.",
        "\u6f22\u5b57 himself",
    ),
    ("Whose dog was it?", "There was no dog.", None),
]


def squad_rows(questions=QUESTIONS):
    return [
        {
            "id": str(number),
            "question": question,
            "context": context,
            "answers": {
                "text": [answer, "another"] if answer else [],
                "answer_start": [context.index(answer), 0] if answer else [],
            },
        }
        for number, (question, context, answer) in enumerate(questions)
    ]


def roberta_tokenizer(path, texts):
    """A byte-level tokenizer that joins two texts as RoBERTa's."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=320, special_tokens=special, initial_alphabet=alphabet)
    )
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), trim_offsets=True)
    tokenizer.save(str(path))
    return {"kind": "given", "path": str(path)}


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


@pytest.mark.parametrize("family", ["bert", "roberta", "document"])
def test_an_answer_is_marked_in_the_tokens_that_transformers_makes_of_both_texts(tmp_path, family):
    path = write_rows(tmp_path / "a.jsonl", squad_rows())
    given = {"bert": BERT, "document": {"kind": "bpe", "vocab_size": 300}}.get(family)
    if given is None:
        texts = [text for question, context, _ in QUESTIONS for text in (question, context)]
        given = roberta_tokenizer(tmp_path / "tokenizer.json", texts)
    index = prepare(labels_config(tmp_path / "out", path, "answers", tokenizer=given), processes=1)
    assert (index.kind, index.labels) == ("answers", ())
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "out/tokenizer.json"))
    reader = ShardReader(tmp_path / "out", index.split(TRAIN).shards[0], index.dtype)
    (tokens, starts), marks = reader.member(0), reader.labels(0)
    documents = zip(np.split(tokens, starts[1:]), np.split(marks, starts[1:]), strict=True)
    for (question, context, answer), (ids, own) in zip(QUESTIONS, documents, strict=True):
        expected = theirs(question, context, return_offsets_mapping=True)
        if family == "document":  # without a post-processor, both end as documents do
            each = [theirs(text, return_offsets_mapping=True) for text in (question, context)]
            expected = {key: each[0][key] + [extra] + each[1][key] + [extra] for key, extra in
                        (("input_ids", index.eos_id), ("offset_mapping", (0, 0)))}  # fmt: skip
        assert ids.tolist() == expected["input_ids"]
        in_text = np.flatnonzero(own != IGNORE_INDEX)
        if answer is None:
            assert own[0] == ANSWER_BEGINS | ANSWER_ENDS and not own[in_text[1:]].any()
            in_text = in_text[1:]
        else:
            (first,) = np.flatnonzero((own > 0) & (own & ANSWER_BEGINS > 0))
            (last,) = np.flatnonzero((own > 0) & (own & ANSWER_ENDS > 0))
            places = expected["offset_mapping"]
            assert context[places[first][0] : places[last][1]].strip() == answer
        # All of the text, with the token that ends it.
        separator = len(ids) - len(theirs(context, add_special_tokens=False)["input_ids"]) - 1
        assert in_text.tolist() == list(range(separator, len(ids)))


def test_questions_about_one_text_are_in_one_split(tmp_path):
    rows = squad_rows([(f"q{n} {text}?", f"text {text} is here", f"{text}") for text in range(40) for n in range(3)])
    config = labels_config(tmp_path / "out", write_rows(tmp_path / "a.jsonl", rows), "answers", tokenizer=BERT)
    index = prepare(config.model_copy(update={"split": "hash:0.3"}), processes=1)
    counts = [index.split(split).num_documents for split in (TRAIN, VALIDATION)]
    assert sum(counts) == 120 and all(count % 3 == 0 and count > 3 for count in counts)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            {"answers": {"text": ["dog"], "answer_start": [3]}},
            "answer 'dog' is not at character 3, where ' a ' is; it is at 6",
        ),
        (
            {"answers": {"text": ["cow"], "answer_start": [0]}},
            "where 'Was' is, and nowhere in 'context'; give the place",
        ),
        ({"answers": {"text": ["dog"], "answer_start": [-9]}}, "begins with text 'dog' and answer_start '-9'; give"),
        ({"answers": {"text": [" "], "answer_start": [3]}}, "begins with text ' ' and answer_start '3'; give a text"),
        ({"answers": {"text": ["dog"], "answer_start": []}}, "begins with text 'dog' and answer_start 'None'"),
        ({"answers": "dog"}, "field 'answers' is a string, not an object of text and answer_start"),
        (
            {},
            "field 'answers' is absent; fields: context, question; add it to the record, or choose one with answers_f",
        ),
        ({"answers": [], "question": " "}, "field 'question' is blank; give each question and its text some words"),
        ({"answers": [], "context": 3}, "field 'context' is a number, not a string"),
    ],
)
def test_a_record_without_an_answer_in_its_text_is_named(tmp_path, record, message):
    record = {"question": "What was it?", "context": "Was a dog there?"} | record
    path = write_rows(tmp_path / "a.jsonl", [*squad_rows(), record])
    with pytest.raises(DataError) as error:
        prepare(labels_config(tmp_path / "out", path, "answers", tokenizer=BERT), processes=1)
    assert message in str(error.value) and "a.jsonl:5" in str(error.value)


def test_answers_as_the_original_squad_lists_them_and_one_alone_are_read(tmp_path):
    rows = squad_rows()
    listed = rows[0] | {"answers": [{"text": "London", "answer_start": 25}, {"text": "born", "answer_start": 17}]}
    alone = rows[0] | {"answers": {"text": "London", "answer_start": 25}}
    none = rows[3] | {"answers": []}
    path = write_rows(tmp_path / "a.jsonl", [rows[0], listed, alone, none, rows[3]])
    index = prepare(labels_config(tmp_path / "out", path, "answers", tokenizer=BERT), processes=1)
    reader = ShardReader(tmp_path / "out", index.split(TRAIN).shards[0], index.dtype)
    first, *others = np.split(reader.labels(0), reader.member(0)[1][1:])
    assert [marks.tolist() for marks in others[:2]] == [first.tolist()] * 2
    assert others[2].tolist() == others[3].tolist()


def test_an_answer_that_the_tokenizer_leaves_nothing_of_is_refused(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2, "[SEP]": 3}, "[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.Replace("\u200b", ""), pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["[SEP]"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    path = write_rows(tmp_path / "a.jsonl", squad_rows([("a", "a \u200b b", "\u200b")]))
    given = {"kind": "given", "path": str(tmp_path / "tokenizer.json")}
    with pytest.raises(DataError, match=r"the tokenizer leaves nothing of the answer .* leave the record out"):
        prepare(labels_config(tmp_path / "out", path, "answers", tokenizer=given), processes=1)


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
