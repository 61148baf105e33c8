"""Tokens of ASCII texts by their words, for byte-level BPE: less than half of the time of `tokenizers`.

    text -> words, by the pre-tokenizer's pattern -> ids of each word, of the BPE once, then of a table

A byte-level BPE reads each word apart, and most words of a text came before. In ASCII the classes of
the patterns are the same in `re` and in `tokenizers`, in each version of Unicode. Texts with
other characters, and other tokenizers, are not read here.
"""

import re
from array import array
from collections.abc import Callable
from typing import Any

from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from pretrain.tokenizer.roles import BYTE_OF
from pretrain.tokenizer.words import build_pre_tokenizer, state_of

MAX_WORDS = 1 << 17
MAX_WORD_CHARS = 64
"""Words and their longest that are kept: some 25 MB."""

_CHARACTER_OF = {byte: character for character, byte in BYTE_OF.items() if byte < 128}
_IDENTITY = ("NFC", "NFD", "NFKC", "NFKD")
"""Normalizers that leave ASCII as it is."""


def _isolated(pattern: str) -> pre_tokenizers.PreTokenizer:
    """Returns a pre-tokenizer as released tokenizers spell it: words of a pattern, then their bytes."""
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_ASCII = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\nA-Za-z0-9]?[A-Za-z]+|[0-9]{1,3}| ?[^\sA-Za-z0-9]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2_ASCII = r"'(?:[sdmt]|ll|ve|re)| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+"
# A digit ends what is before it, as the end of a text does.
_DIGITS_ASCII = r"'(?:[sdmt]|ll|ve|re)| ?[A-Za-z]+|[0-9]| ?[^\sA-Za-z0-9]+|\s+(?![^\s0-9])|\s+"

PATTERNS: tuple[tuple[pre_tokenizers.PreTokenizer, str], ...] = (
    (build_pre_tokenizer("bpe", split_digits=False), _GPT2_ASCII),
    (build_pre_tokenizer("bpe", split_digits=True), _DIGITS_ASCII),
    (_isolated(_LLAMA3), _LLAMA3_ASCII),
    (_isolated(_LLAMA3.replace("{1,3}", "")), _LLAMA3_ASCII.replace("{1,3}", "")),  # Qwen 2
)
"""Pre-tokenizers, and the pattern of their words in ASCII."""


class AsciiWords(dict[str, bytes]):
    """Ids of words, as the bytes of an array of `typecode`; filled as words are met."""

    def __init__(self, pattern: str, model: Any, typecode: str) -> None:
        super().__init__()
        self._split: Callable[[str], list[str]] = re.compile(pattern, re.ASCII).findall
        self._model = model
        self._typecode = typecode

    def encode(self, text: str) -> bytes:
        """Returns the ids of an ASCII text."""
        return b"".join(map(self.__getitem__, self._split(text)))

    def __missing__(self, word: str) -> bytes:
        tokens = self._model.tokenize(word.translate(_CHARACTER_OF))
        ids = array(self._typecode, [token.id for token in tokens]).tobytes()
        if len(word) <= MAX_WORD_CHARS:
            if len(self) >= MAX_WORDS:
                self.clear()
            self[word] = ids
        return ids


def ascii_words_of(tokenizer: Tokenizer, typecode: str) -> AsciiWords | None:
    """Returns a table for a tokenizer; None: it has another pre-tokenizer, or reads more than words."""
    model, normalizer = tokenizer.model, state_of(tokenizer.normalizer)
    added = tokenizer.get_added_tokens_decoder().values()
    is_plain = (
        isinstance(model, models.BPE)
        and not model.dropout
        and (normalizer is None or normalizer["type"] in _IDENTITY)
        # Special tokens in a text are text.
        and tokenizer.encode_special_tokens
        and all(token.special for token in added)
    )
    if not is_plain:
        return None
    state = state_of(tokenizer.pre_tokenizer)
    matching = (pattern for split, pattern in PATTERNS if state_of(split) == state)
    pattern = next(matching, None)
    return None if pattern is None else AsciiWords(pattern, model, typecode)
