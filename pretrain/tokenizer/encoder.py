"""Texts to arrays of ids."""

import json
import re
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from pretrain.shards.sidecars import RaggedArrays
from pretrain.tokenizer.roles import eos_id, special_ids, special_tokens_of, token_dtype, vocabulary_size

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

    def encode(self, texts: list[str], markers: Sequence[int] = ()) -> RaggedArrays:
        """Encodes texts together; returns the ids of each, without special tokens.

        Single-threaded where TOKENIZERS_PARALLELISM=false. The cost is that of `encode_batch_fast`.

        Args:
            texts: No special token is meant where one is named,
            markers: but in the texts of these numbers, which a template wrote.
        """
        encodings = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        if not markers:
            return self._join(encoding.ids for encoding in encodings)
        ids = [encoding.ids for encoding in encodings]
        for number in markers:
            ids[number] = self._encode_marker(texts[number])
        return self._join(ids)

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

    def encode_placed(self, texts: list[str]) -> tuple[RaggedArrays, list[list[tuple[int, int]]]]:
        """Encodes texts together; returns the ids of each, and of each the characters that its tokens are made of."""
        encodings = self.tokenizer.encode_batch(texts, add_special_tokens=False)
        return self._join(encoding.ids for encoding in encodings), [encoding.offsets for encoding in encodings]

    def _join(self, ids: Iterable[list[int]]) -> RaggedArrays:
        """Returns the ids of texts, one list a text, as arrays."""
        # A third faster than numpy's fromiter, which asks a Python object for each id.
        values, lengths = array("I"), []
        for one in ids:
            values.fromlist(one)
            lengths.append(len(one))
        return RaggedArrays(np.frombuffer(values, np.uintc).astype(self.eos.dtype), np.array(lengths, np.int64))


def build_encoder(tokenizer: Tokenizer) -> Encoder:
    """Returns an encoder. Raises: DataError, where the tokenizer has no end-of-document token."""
    dtype, bos = token_dtype(vocabulary_size(tokenizer)), special_tokens_of(tokenizer).bos
    return Encoder(tokenizer, np.array([eos_id(tokenizer)], dtype), np.array([] if bos is None else [bos], dtype))


# Tokens for people to look at.


_REPLACEMENT = "\ufffd"


def display_tokens(tokenizer: Tokenizer, ids: Iterable[int]) -> list[str]:
    r"""Returns what each id stands for, one string each, special tokens by their names.

    White space is itself. Bytes of a character that another token completes are written as escapes: `\xe2\x96`. An id
    that the vocabulary does not have is the empty string.
    """
    of_bytes = tokenizer.decoder is not None and json.loads(tokenizer.decoder.__getstate__())["type"] == "ByteLevel"
    return [_display(tokenizer, number, of_bytes) for number in ids]


def _display(tokenizer: Tokenizer, number: int, of_bytes: bool) -> str:
    text = str(tokenizer.decode([number], skip_special_tokens=False))
    if _REPLACEMENT not in text:
        return text
    content = str(tokenizer.id_to_token(number))
    if of_bytes and all(character in _BYTE_OF for character in content):
        return bytes(_BYTE_OF[character] for character in content).decode("utf-8", "backslashreplace")
    if content.startswith("<0x"):
        return bytes([int(content[3:5], 16)]).decode("utf-8", "backslashreplace")
    return text


def _byte_spellings() -> dict[str, int]:
    """The byte of each character of a byte-level vocabulary: printable ones are themselves, others follow U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTE_OF = _byte_spellings()
