"""Long texts in pieces, and which tokenizers do not notice."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any
from zlib import crc32

from tokenizers import Tokenizer, pre_tokenizers

from pretrain.tokenizer.special_tokens import TextRules, split_characters

PIECE_CHARS = 1 << 11

"""Longer texts are encoded in pieces of about this many characters, a tenth faster than whole ones."""

# No word of the pre-tokenizers of rules.py holds a non-space followed by one of these, and their normalizers change
# nothing across that place. So a cut there leaves the tokens of both sides as they were.
_SAFE_CUT = re.compile(r"(?<=\S)(?=[ \t\n])")

_CONTEXT_FREE = {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "BertNormalizer"}


def cut_text(text: str, piece_chars: int = PIECE_CHARS) -> Iterator[str]:
    """Cuts a text where no token of a tokenizer that `is_cut_safe` can span, into pieces of at least `piece_chars`.

    The tokens of the pieces, one after another, are the tokens of the text. A text with no white space stays whole.
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
    """Whether the tokens of `cut_text`'s pieces are those of the text.

    Said of every kind that is trained here, and of a given tokenizer that tears texts into words as one of them does
    (GPT-2, BERT); not of others, whose texts are encoded whole.
    """
    split = _state(tokenizer.pre_tokenizer)
    known = [_state(rules) for rules in _splitters()]
    return (
        split in known
        and _is_context_free(_state(tokenizer.normalizer))
        and all(token.special or _is_word(token) for token in tokenizer.get_added_tokens_decoder().values())
        and not getattr(tokenizer.model, "dropout", None)
    )


def _splitters() -> list[Any]:
    both = [TextRules(split_digits=split_digits) for split_digits in (False, True)]
    return [
        split_characters(),
        *(split for rules in both for split in (rules.split_bytes(), rules.split_bert(), rules.split_pieces())),
    ]


def _state(part: Any) -> Any:
    """What a normalizer or pre-tokenizer is, as in tokenizer.json; without what concerns offsets only."""
    return None if part is None else _without_offsets(json.loads(part.__getstate__()))


def _without_offsets(state: Any) -> Any:
    if isinstance(state, list):
        return [_without_offsets(entry) for entry in state]
    if isinstance(state, dict):
        return {key: _without_offsets(value) for key, value in state.items() if key != "trim_offsets"}
    return state


def _is_context_free(state: Any) -> bool:
    if state is None or state["type"] in _CONTEXT_FREE:
        return True
    return state["type"] == "Sequence" and all(map(_is_context_free, state["normalizers"]))


def _is_word(token: Any) -> bool:
    """Whether an ordinary added token can neither span a cut nor see across one."""
    return not (token.lstrip or token.rstrip or token.single_word or re.search(r"\s", token.content))


# The words of the training texts, counted, and their characters: what WordPiece and Unigram are
# trained on.
#
# The trainers of `tokenizers` number characters in the order in which a hash table gives them,
# another one every run. Their characters are therefore chosen here, and the words that they see
# hold no others.


_SEPARATOR = "\0"

_BATCH_CHARS = 1 << 16


def count_words(texts: Iterable[str], tokenizer: Tokenizer) -> Counter[str]:
    """Returns how often each word stands in the texts, by the tokenizer's normalizer and pre-tokenizer.

    About 4 MB/s; memory for the words that differ.
    """
    normalizer, split = tokenizer.normalizer, tokenizer.pre_tokenizer
    words: Counter[str] = Counter()
    for text in texts:
        for piece in cut_text(text):
            plain = piece if normalizer is None else normalizer.normalize_str(piece)
            words.update(word for word, _ in split.pre_tokenize_str(plain))
    return words


def choose_alphabet(words: Counter[str], limit: int, coverage: float = 1.0) -> list[str]:
    """Returns the most frequent characters, no more than `limit`, until they make up `coverage` of the text.

    Of equals the lower code points come first. NUL is none: it parts words.
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
    """Returns the `limit` most frequent words; of equally frequent ones a choice that does not depend on spelling."""
    if len(words) <= limit:
        return words
    ranked = sorted(
        words.items(), key=lambda item: (-item[1], crc32(item[0].encode("utf-8", "surrogatepass")), item[0])
    )
    return Counter(dict(ranked[:limit]))


def repeat_words(words: Counter[str]) -> Iterator[str]:
    """Yields texts of the words, each as often as it was counted, for a trainer whose tokenizer has `split_words`."""
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
                batch, room = [], _BATCH_CHARS
    if batch:
        yield _SEPARATOR.join(batch)


def split_words() -> pre_tokenizers.PreTokenizer:
    """Returns the pre-tokenizer that takes the texts of `repeat_words` apart."""
    return pre_tokenizers.Split(_SEPARATOR, "removed")
