"""ASCII texts by a table of words: the tokens of `tokenizers`, in a table of bounded size."""

import random

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers

from pretrain.tokenizer import ascii_words
from pretrain.tokenizer.ascii_words import PATTERNS, ascii_words_of
from tests.unit.tokenizer.test_kinds import LICENSE, train

BPE = train("bpe")
PARTS = [
    *("'s", "'S", "'ll", "'RE", "'", "  ", " ", "\n", "\r\n", "\t", "\v", "\f", "\x1c", "\x1f", "\0", "\x7f", "a"),
    *("Zb", "the", "1", "23", "4567", ".", "_", "--", "(x)", "<|endoftext|>", "'tis", " 'd", "\n\n  "),
]


def copy(tokenizer):
    same = Tokenizer.from_str(tokenizer.to_str())
    same.encode_special_tokens = True
    return same


def random_texts(number):
    rng = random.Random(0)
    for _ in range(number):
        yield "".join(rng.choices(PARTS, k=rng.randint(0, 14)))
        yield "".join(chr(rng.randrange(128)) for _ in range(rng.randint(0, 12)))


@pytest.mark.parametrize("number", range(len(PATTERNS)), ids=["gpt2", "digits", "llama3", "qwen2"])
@pytest.mark.parametrize("normalizer", [None, normalizers.NFKC()], ids=["plain", "nfkc"])
def test_ids_are_those_of_the_tokenizer(number, normalizer, monkeypatch):
    monkeypatch.setattr(ascii_words, "MAX_WORDS", 500)
    tokenizer = copy(BPE)
    tokenizer.pre_tokenizer = PATTERNS[number][0]
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    words = ascii_words_of(tokenizer, "H")
    texts = [*LICENSE, *random_texts(1000)]
    for text, encoding in zip(texts, tokenizer.encode_batch_fast(texts, add_special_tokens=False), strict=True):
        assert np.frombuffer(words.encode(text), np.uint16).tolist() == encoding.ids, text
        assert len(words) <= 500
    assert max(map(len, words)) <= ascii_words.MAX_WORD_CHARS


def with_ordinary_token(tokenizer):
    tokenizer.add_tokens([AddedToken("the")])


def with_dropout(tokenizer):
    tokenizer.model.dropout = 0.1


@pytest.mark.parametrize(
    "change",
    [
        with_ordinary_token,
        with_dropout,
        lambda tokenizer: setattr(tokenizer, "normalizer", normalizers.Lowercase()),
        lambda tokenizer: setattr(tokenizer, "encode_special_tokens", False),
        lambda tokenizer: setattr(tokenizer, "pre_tokenizer", pre_tokenizers.Whitespace()),
        lambda tokenizer: setattr(tokenizer, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)),
    ],
    ids=["ordinary token", "dropout", "lowercase", "special tokens meant", "other words", "space before"],
)
def test_other_tokenizers_have_no_table(change):
    tokenizer = copy(BPE)
    change(tokenizer)
    assert ascii_words_of(tokenizer, "H") is None


@pytest.mark.parametrize("kind", ["wordpiece", "unigram", "char"])
def test_other_kinds_have_no_table(kind):
    assert ascii_words_of(train(kind), "H") is None
