"""Texts to arrays of ids."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from tokenizers import Encoding, Tokenizer

from pretrain.data.ragged import Ragged
from pretrain.data.tokenizer.roles import eos_id, special_ids, special_tokens_of
from pretrain.data.tokenizer.vocabulary import token_dtype, vocabulary_size

BATCH_CHARS = 1 << 18
"""Characters handed to the encoder at once. An encoding takes a hundred bytes a token, so this bounds memory."""


@dataclass(frozen=True, slots=True)
class Encoder:
    """A tokenizer with what writing tokens needs, computed once.

    Attributes:
        tokenizer: Encodes plain text.
        eos: The end-of-document token, an array of one; its dtype is that of all tokens.
        bos: The token that begins a text, an array of one; empty where there is none.
    """

    tokenizer: Tokenizer
    eos: np.ndarray
    bos: np.ndarray

    def encode(self, texts: list[str], markers: Sequence[int] = ()) -> Ragged:
        """Encodes texts together; returns the ids of each, without special tokens.

        Single-threaded where TOKENIZERS_PARALLELISM=false. The cost is that of `encode_batch_fast`.

        Args:
            texts: No special token is meant where one is named,
            markers: but in the texts of these numbers, which a template wrote.
        """
        encodings = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        if not markers:
            return self._ids(encodings)
        ids = [encoding.ids for encoding in encodings]
        for number in markers:
            ids[number] = self._encode_marker(texts[number])
        lengths = np.fromiter(map(len, ids), np.int64, len(ids))
        return Ragged(np.fromiter(chain.from_iterable(ids), self.eos.dtype, int(lengths.sum())), lengths)

    def _encode_marker(self, text: str) -> list[int]:
        ids: list[int] = []
        names = special_ids(self.tokenizer)
        longest_first = sorted(map(re.escape, names), key=len, reverse=True)
        for part in re.split(f"({'|'.join(longest_first)})", text):
            if part in names:
                ids.append(names[part])
            elif part:
                ids += self.tokenizer.encode(part, add_special_tokens=False).ids
        return ids

    def encode_placed(self, texts: list[str]) -> tuple[Ragged, list[list[tuple[int, int]]]]:
        """Encodes texts together; returns the ids of each, and of each the characters that its tokens are made of."""
        encodings = self.tokenizer.encode_batch(texts, add_special_tokens=False)
        return self._ids(encodings), [encoding.offsets for encoding in encodings]

    def _ids(self, encodings: list[Encoding]) -> Ragged:
        lengths = np.fromiter(map(len, encodings), np.int64, len(encodings))
        ids = chain.from_iterable(encoding.ids for encoding in encodings)
        return Ragged(np.fromiter(ids, self.eos.dtype, int(lengths.sum())), lengths)


def build_encoder(tokenizer: Tokenizer) -> Encoder:
    """Returns an encoder. Raises: DataError, where the tokenizer has no end-of-document token."""
    dtype, bos = token_dtype(vocabulary_size(tokenizer)), special_tokens_of(tokenizer).bos
    return Encoder(tokenizer, np.array([eos_id(tokenizer)], dtype), np.array([] if bos is None else [bos], dtype))
