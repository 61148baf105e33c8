"""Texts to arrays of ids."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from pretrain.data.tokenizer.roles import eos_id
from pretrain.data.tokenizer.vocabulary import token_dtype, vocabulary_size

BATCH_CHARS = 1 << 18
"""Characters handed to the encoder at once. An encoding takes a hundred bytes a token, so this bounds memory."""


@dataclass(frozen=True, slots=True)
class Encoder:
    """A tokenizer with what writing tokens needs, computed once.

    Attributes:
        tokenizer: Encodes plain text.
        eos: The end-of-document token, an array of one; its dtype is that of all tokens.
    """

    tokenizer: Tokenizer
    eos: np.ndarray

    def encode(self, texts: list[str]) -> Iterator[np.ndarray]:
        """Encodes texts together; yields the ids of each, without special tokens.

        Single-threaded where TOKENIZERS_PARALLELISM=false. The cost is that of `encode_batch_fast`.
        """
        for encoding in self.tokenizer.encode_batch_fast(texts, add_special_tokens=False):
            yield np.fromiter(encoding.ids, self.eos.dtype, len(encoding))


def build_encoder(tokenizer: Tokenizer) -> Encoder:
    """Returns an encoder. Raises: DataError, where the tokenizer has no end-of-document token."""
    return Encoder(tokenizer, np.array([eos_id(tokenizer)], token_dtype(vocabulary_size(tokenizer))))
