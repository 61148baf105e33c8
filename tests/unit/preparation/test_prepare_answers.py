"""What `prepare` makes of questions with their answers in a text or among several."""

import numpy as np
import pytest
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from pretrain.errors import DataError
from pretrain.kinds.layouts.answers import ANSWER_BEGINS, ANSWER_ENDS
from pretrain.kinds.layouts.choices import CHOICE_IS_FIRST, CHOICE_IS_RIGHT
from pretrain.kinds.layouts.triples import IS_POSITIVE, IS_QUERY, TEXT_BEGINS, group_of
from pretrain.preparation.prepare import prepare
from pretrain.preparation.split import TRAIN, VALIDATION
from pretrain.rows import IGNORE_INDEX
from pretrain.shards.reader import ShardReader
from pretrain.tokenizer.file import fit_documents
from tests.helpers.corpus import write_rows
from tests.helpers.prepare_config import labels_config

BERT = {"kind": "wordpiece", "vocab_size": 200, "roles": "bert"}

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


def byte_tokenizer(path, texts, family):
    """A byte-level tokenizer that joins two texts as RoBERTa's, or as LLaMA's."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=320, special_tokens=special, initial_alphabet=alphabet)
    )
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), trim_offsets=True)
    if family == "llama":
        pair = ["<s>", "$A", "<s>:1", "$B:1"]
        tokenizer.post_processor = processors.TemplateProcessing(["<s>", "$A"], pair, [("<s>", 0)])
    tokenizer.save(str(path))
    return {"kind": "given", "path": str(path)}


@pytest.mark.parametrize("family", ["bert", "roberta", "llama", "document"])
def test_an_answer_is_marked_in_the_tokens_that_transformers_makes_of_both_texts(tmp_path, family):
    """By the tokenizer of an export, which ends the second text, and joins them if that of the data does not."""
    path = write_rows(tmp_path / "a.jsonl", squad_rows())
    given = {"bert": BERT, "document": {"kind": "bpe", "vocab_size": 300}}.get(family)
    if given is None:
        texts = [text for question, context, _ in QUESTIONS for text in (question, context)]
        given = byte_tokenizer(tmp_path / "tokenizer.json", texts, family)
    index = prepare(labels_config(tmp_path / "out", path, "answers", tokenizer=given), processes=1)
    assert (index.kind, index.labels) == ("answers", ())
    content = (tmp_path / "out/tokenizer.json").read_bytes()
    exported = fit_documents(content, index.eos_id, "out")
    assert (exported == content) == (family in ("bert", "roberta"))
    (tmp_path / "exported.json").write_bytes(exported)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "exported.json"))
    reader = ShardReader(tmp_path / "out", index.split(TRAIN).shards[0], index.dtype)
    (tokens, starts), marks = reader.member(0), reader.labels(0)
    documents = zip(np.split(tokens, starts[1:]), np.split(marks, starts[1:]), strict=True)
    for (question, context, answer), (ids, own) in zip(QUESTIONS, documents, strict=True):
        expected = theirs(question, context, return_offsets_mapping=True)
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


CHOICES = [
    {"question": "Who barks?", "choices": ["a cat", "a dog"], "label": 1},
    {"question": "Who flies?", "choices": ["a bird in the air", "a dog", "no one"], "label": "a bird in the air"},
    {"question": "Who swims?", "choices": {"text": ["a cat", "a fish"], "label": ["A", "B"]}, "label": "B"},
    {"question": "Who runs?", "choices": ["a dog", "a fish"], "label": "0"},
]


def test_each_choice_is_the_pair_that_transformers_makes_of_it_and_the_question(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", CHOICES)
    index = prepare(labels_config(tmp_path / "out", path, "choices", tokenizer=BERT), processes=1)
    assert (index.kind, index.split(TRAIN).num_documents) == ("choices", 4)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "out/tokenizer.json"))
    reader = ShardReader(tmp_path / "out", index.split(TRAIN).shards[0], index.dtype)
    (tokens, starts), marks = reader.member(0), reader.labels(0)
    documents = zip(np.split(tokens, starts[1:]), np.split(marks, starts[1:]), strict=True)
    for record, right, (ids, own) in zip(CHOICES, (1, 0, 1, 0), documents, strict=True):
        choices = record["choices"]
        choices = choices["text"] if isinstance(choices, dict) else choices
        pairs = [
            theirs(record["question"], choice, return_token_type_ids=True, add_special_tokens=True)
            for choice in choices
        ]
        assert ids.tolist() == [number for pair in pairs for number in pair["input_ids"]]
        first = np.cumsum([0, *(len(pair["input_ids"]) for pair in pairs[:-1])])
        expected = np.array([kind for pair in pairs for kind in pair["token_type_ids"]])
        assert np.flatnonzero(own == 0).tolist() == np.flatnonzero(expected == 1).tolist()
        assert np.flatnonzero(own > 0).tolist() == first.tolist()
        assert [mark & CHOICE_IS_RIGHT > 0 for mark in own[first]] == [n == right for n in range(len(choices))]
        assert [mark & CHOICE_IS_FIRST > 0 for mark in own[first]] == [n == 0 for n in range(len(choices))]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"label": 2}, "field 'label' is '2', and none of 2 choices; use 0 to 1, or a text"),
        ({"label": -1}, "field 'label' is '-1', and none of 2 choices"),
        ({"label": True}, "field 'label' is 'True', and none of 2 choices"),
        ({"label": "c"}, "field 'label' is 'c', and none of 2 choices"),
        ({}, "field 'label' is 'None', and none of 2 choices"),
        ({"label": 0, "choices": {"text": ["a", "b"], "label": ["A", "B"]}}, "none of 2 choices; use A, B"),
        ({"label": 0, "choices": ["a"]}, "field 'choices' has 1 of two choices or more; leave the record out"),
        ({"label": 0, "choices": ["a", " "]}, "choices[1] is no text; give each choice some words"),
        ({"label": 0, "choices": "a"}, "field 'choices' is a string, not a list, or as many of text and label"),
        ({"label": 0, "question": ""}, "field 'question' is blank"),
    ],
)
def test_a_record_without_its_right_choice_is_named(tmp_path, record, message):
    record = {"question": "What?", "choices": ["a", "b"]} | record
    path = write_rows(tmp_path / "a.jsonl", [*CHOICES, record])
    with pytest.raises(DataError) as error:
        prepare(labels_config(tmp_path / "out", path, "choices", tokenizer=BERT), processes=1)
    assert message in str(error.value) and "a.jsonl:5" in str(error.value)


TRIPLES = [
    {"query": "who barks", "positive": "a dog", "negatives": ["a cat", "a bird in the air"], "group": "a"},
    {"query": "who flies", "positive": "a bird"},
    {"query": "who swims", "positive": "a fish", "negatives": "a dog", "group": 7},
]


def test_each_text_of_a_record_is_a_document_whose_first_token_says_what_it_is(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", TRIPLES)
    index = prepare(labels_config(tmp_path / "out", path, "triples", tokenizer=BERT), processes=1)
    assert (index.kind, index.split(TRAIN).num_documents) == ("triples", 3)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "out/tokenizer.json"))
    reader = ShardReader(tmp_path / "out", index.split(TRAIN).shards[0], index.dtype)
    (tokens, starts), marks = reader.member(0), reader.labels(0)
    groups = []
    for record, ids, own in zip(TRIPLES, np.split(tokens, starts[1:]), np.split(marks, starts[1:]), strict=True):
        negatives = record.get("negatives", [])
        texts = [record["query"], record["positive"], *([negatives] if isinstance(negatives, str) else negatives)]
        each = [theirs(text)["input_ids"] for text in texts]
        assert ids.tolist() == [token for text in each for token in text]
        (first,) = np.nonzero(own & TEXT_BEGINS)
        assert first.tolist() == np.cumsum([0, *map(len, each[:-1])]).tolist()
        assert [mark & (IS_QUERY | IS_POSITIVE) for mark in own[first]] == [IS_QUERY, IS_POSITIVE, *[0] * len(each[2:])]
        groups.append(group_of(int(own[0]), int(own[1])))
    assert groups[1] == 0 and 0 not in (groups[0], groups[2]) and groups[0] != groups[2]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"query": "who"}, "field 'positive'"),
        ({"query": " ", "positive": "a dog"}, "field 'query' is blank; give each question and its text some words"),
        ({"query": "who", "positive": "a dog", "negatives": ["a", ""]}, "negatives[1] is no text; give each hard"),
        ({"query": "who", "positive": "a dog", "negatives": 3}, "negatives[0] is no text"),
        ({"query": "who", "positive": "a dog", "group": [1]}, "field 'group' is a list, not a string or a whole"),
    ],
)
def test_a_record_without_its_texts_is_named(tmp_path, record, message):
    path = write_rows(tmp_path / "a.jsonl", [*TRIPLES, record])
    with pytest.raises(DataError) as error:
        prepare(labels_config(tmp_path / "out", path, "triples", tokenizer=BERT), processes=1)
    assert message in str(error.value) and "a.jsonl:4" in str(error.value)


def test_texts_of_a_group_are_in_one_split(tmp_path):
    rows = [{"query": f"q {n}", "positive": f"p {n}", "group": n % 20} for n in range(400)]
    config = labels_config(tmp_path / "out", write_rows(tmp_path / "a.jsonl", rows), "triples", tokenizer=BERT)
    index = prepare(config.model_copy(update={"split": "hash:0.3"}), processes=1)
    groups = {}
    for name, split in index.splits.items():
        reader = ShardReader(tmp_path / "out", split.shards[0], index.dtype)
        (_, starts), marks = reader.member(0), reader.labels(0)
        groups[name] = set(map(group_of, marks[starts].tolist(), marks[starts + 1].tolist()))
    assert not set.intersection(*groups.values()) and len(set.union(*groups.values())) == 20


@pytest.mark.parametrize("kind", ["answers", "choices", "triples"])
def test_a_text_without_a_token_behind_its_answer_is_refused(tmp_path, kind):
    with pytest.raises(ValueError, match=f"kind={kind} needs end_of_document=true: a token behind"):
        labels_config(tmp_path / "out", tmp_path, kind, tokenizer=BERT, end_of_document=False)
