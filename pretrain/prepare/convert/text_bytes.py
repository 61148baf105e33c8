"""How many bytes of text tokens stand for: what bits per byte needs, and a source without its text does not say."""

import json

import numpy as np
from tokenizers import Tokenizer, pre_tokenizers

from pretrain.tokenizer import vocabulary_size

DECODE_TOKENS = 2**16
"""Decoded at once: an encoding takes a hundred bytes a token."""


class TextBytes:
    """Counts the UTF-8 bytes that tokens decode to, special tokens left out.

    Exact, a look-up a token, for byte-level tokenizers. Others decode: a few million tokens a second, and a byte more
    or less where a document of over DECODE_TOKENS is decoded in pieces.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._bytes = _byte_table(tokenizer) if _is_byte_level(tokenizer) else None

    def count(self, tokens: np.ndarray) -> int:
        """Returns the bytes of one document, 1-D."""
        if self._bytes is not None:
            return int(self._bytes[tokens].sum())
        pieces = (tokens[start : start + DECODE_TOKENS] for start in range(0, len(tokens), DECODE_TOKENS))
        return sum(len(self._tokenizer.decode(piece.tolist()).encode()) for piece in pieces)


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    decoder = json.loads(tokenizer.to_str())["decoder"] or {}
    while decoder.get("type") == "Sequence" and len(decoder["decoders"]) == 1:
        decoder = decoder["decoders"][0]
    return decoder.get("type") == "ByteLevel"


def _byte_table(tokenizer: Tokenizer) -> np.ndarray:
    """Returns the bytes of each id, int64 [V]: a character of the alphabet of byte-level tokenizers is one."""
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    table = np.zeros(vocabulary_size(tokenizer), np.int64)
    for content, number in tokenizer.get_vocab(with_added_tokens=True).items():
        if content not in special:
            table[number] = len(content) if alphabet.issuperset(content) else len(content.encode())
    return table
