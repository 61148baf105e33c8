"""Words of a tokenizer: normalizers, pre-tokenizers, safe cuts of texts, counts for trainers."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any
from zlib import crc32

from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

from pretrain.config.prepare import TokenizerConfig
from pretrain.utils.safe_read import parse_json

SPACE = "\u2581"
"""SentencePiece's spelling of a space; in a text, this character is read as a space."""


def build_normalizer(config: TokenizerConfig) -> normalizers.Normalizer | None:
    """Returns the normalizer of a kind; None: texts stay as they are.

    WordPiece has that of BERT: it drops control characters, sets Chinese characters apart, makes
    all white space a space, and drops accents with the case.
    """
    steps: list[normalizers.Normalizer] = []
    if config.normalizer != "none":
        steps.append(normalizers.NFC() if config.normalizer == "nfc" else normalizers.NFKC())
    if config.kind == "wordpiece":
        steps.append(normalizers.BertNormalizer(lowercase=config.lowercase))
    elif config.lowercase:
        steps.append(normalizers.Lowercase())
    if len(steps) == 2:
        return normalizers.Sequence(steps)
    return steps[0] if steps else None


def build_pre_tokenizer(kind: str, split_digits: bool) -> pre_tokenizers.PreTokenizer:
    """Returns the pre-tokenizer of a kind.

    bpe        GPT-2's: runs of one class, with a space before them
    wordpiece  BERT's: white space parts words and is dropped, each punctuation mark is a word
    unigram    a word begins with its space, further spaces are a word, and so is a run of lines;
               nothing is put before a text, so that " a" and "a" are different
    char       each character is a word
    """
    if kind == "char":
        return pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    digits = [pre_tokenizers.Digits(individual_digits=True)] if split_digits else []
    if kind == "unigram":
        words = pre_tokenizers.Split(Regex(r"[\t-\r]+| +(?= )| ?[^ \t-\r]+| +"), "isolated")
        space = pre_tokenizers.Metaspace(SPACE, prepend_scheme="never", split=False)
        return pre_tokenizers.Sequence([words, *digits, space])
    split: pre_tokenizers.PreTokenizer = pre_tokenizers.BertPreTokenizer()
    if kind == "bpe":
        split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return pre_tokenizers.Sequence([*digits, split]) if digits else split


PIECE_CHARS = 1 << 11
"""Longer texts are encoded in pieces of about this length, a tenth faster than whole ones."""

# No word of these pre-tokenizers has a non-space followed by one of these, and their normalizers
# change nothing across that place. So a cut there leaves the tokens of both sides as they were.
_SAFE_CUT = re.compile(r"(?<=\S)(?=[ \t\n])")

_CONTEXT_FREE = {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "BertNormalizer"}


def cut_text(text: str, piece_chars: int = PIECE_CHARS) -> Iterator[str]:
    """Cuts a text into pieces of at least `piece_chars`, at white space.

    The tokens of the pieces, one after another, are those of the text, where `is_cut_safe`.
    """
    start = 0
    while len(text) - start > piece_chars:
        cut = _SAFE_CUT.search(text, start + piece_chars)
        if cut is None:
            break
        yield text[start : cut.start()]
        start = cut.start()
    yield text[start:] if start else text


def is_cut_safe(tokenizer: Tokenizer) -> bool:
    """True if the tokens of `cut_text`'s pieces are the text's.

    That holds for every kind that is trained here, and for a given tokenizer with one of their
    pre-tokenizers (GPT-2, BERT). Texts of others are encoded whole.
    """
    split = state_of(tokenizer.pre_tokenizer)
    kinds = ("bpe", "wordpiece", "unigram", "char")
    states = [state_of(build_pre_tokenizer(*options)) for options in product(kinds, (False, True))]
    added = tokenizer.get_added_tokens_decoder().values()
    return (
        split in states
        and _is_context_free(state_of(tokenizer.normalizer))
        and all(token.special or _is_word(token) for token in added)
        and not getattr(tokenizer.model, "dropout", None)
    )


def state_of(part: Any) -> Any:
    """Returns a normalizer or pre-tokenizer as in tokenizer.json, without options of offsets."""
    return None if part is None else _without_offsets(parse_json(part.__getstate__()))


def _without_offsets(state: Any) -> Any:
    if isinstance(state, list):
        return [_without_offsets(one) for one in state]
    if not isinstance(state, dict):
        return state
    return {key: _without_offsets(value) for key, value in state.items() if key != "trim_offsets"}


def _is_context_free(state: Any) -> bool:
    if state is None or state["type"] in _CONTEXT_FREE:
        return True
    return state["type"] == "Sequence" and all(map(_is_context_free, state["normalizers"]))


def _is_word(token: Any) -> bool:
    """True if an ordinary added token can neither span a cut nor see across one."""
    return not (token.lstrip or token.rstrip or token.single_word or re.search(r"\s", token.content))


# WordPiece and Unigram are trained on counted words. The trainers of `tokenizers` number characters
# in the order of a hash table, another one every run: the alphabet is therefore chosen here, and
# their words have no other characters.

_SEPARATOR = "\0"
_BATCH_CHARS = 1 << 16


def count_words(texts: Iterable[str], tokenizer: Tokenizer) -> Counter[str]:
    """Counts the words of texts, by the tokenizer's normalizer and pre-tokenizer: about 4 MB/s."""
    normalizer = tokenizer.normalizer
    split = tokenizer.pre_tokenizer
    words: Counter[str] = Counter()
    for text in texts:
        for piece in cut_text(text):
            plain = piece if normalizer is None else normalizer.normalize_str(piece)
            words.update(word for word, _ in split.pre_tokenize_str(plain))
    return words


def choose_alphabet(words: Counter[str], limit: int, coverage: float = 1.0) -> list[str]:
    """Returns the most frequent characters, at most `limit`, that make up `coverage` of the text.

    Lower code points precede equals. NUL, the separator of words, is left out.
    """
    counts: Counter[str] = Counter()
    for word, count in words.items():
        for character in word:
            counts[character] += count
    del counts[_SEPARATOR]
    needed = coverage * counts.total()
    chosen: list[str] = []
    for character, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        if len(chosen) == limit or needed <= 0:
            break
        chosen.append(character)
        needed -= count
    return chosen


def most_frequent(words: Counter[str], limit: int) -> Counter[str]:
    """Returns the `limit` most frequent words; of equals an arbitrary but fixed choice."""

    def rank(item: tuple[str, int]) -> tuple[int, int, str]:
        word, count = item
        return -count, crc32(word.encode("utf-8", "surrogatepass")), word

    return words if len(words) <= limit else Counter(dict(sorted(words.items(), key=rank)[:limit]))


def repeat_words(words: Counter[str]) -> Iterator[str]:
    """Yields texts of the words, each as often as counted, for a tokenizer with `split_words`."""
    batch: list[str] = []
    room = _BATCH_CHARS
    for word, count in words.items():
        most = max(1, _BATCH_CHARS // (len(word) + 1))
        for start in range(0, count, most):
            number = min(most, count - start)
            batch.append(_SEPARATOR.join([word] * number))
            room -= number * (len(word) + 1)
            if room <= 0:
                yield _SEPARATOR.join(batch)
                batch = []
                room = _BATCH_CHARS
    if batch:
        yield _SEPARATOR.join(batch)


def split_words() -> pre_tokenizers.PreTokenizer:
    """Returns the pre-tokenizer for the texts of `repeat_words`."""
    return pre_tokenizers.Split(_SEPARATOR, "removed")
