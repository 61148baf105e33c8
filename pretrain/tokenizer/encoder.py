"""Encoding of texts to arrays of ids, and the display of ids."""

import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from tokenizers import Tokenizer

from pretrain.shards.ragged import RaggedArrays
from pretrain.tokenizer.ascii_words import AsciiWords, ascii_words_of
from pretrain.tokenizer.roles import BYTE_OF, eos_id, special_ids, token_dtype, vocabulary_size
from pretrain.utils.safe_read import parse_json

BATCH_CHARS = 1 << 18
"""Characters encoded at once: an encoding takes a hundred bytes a token, so this bounds memory."""


@dataclass(frozen=True, slots=True)
class Encoder:
    """A tokenizer of plain text, with arrays of the tokens that end and begin a document.

    The dtype of `eos` is that of all tokens; `bos` may be empty. `words` encodes ASCII texts, where
    the tokenizer allows.
    """

    tokenizer: Tokenizer
    eos: np.ndarray
    bos: np.ndarray
    words: AsciiWords | None

    def encode(
        self,
        texts: list[str],
        markers: Sequence[int] = (),
        encoded: Mapping[int, list[int]] = MappingProxyType({}),
    ) -> RaggedArrays:
        """Encodes plain texts together: the name of a special token is encoded as text.

        `markers` are the numbers of texts that a template wrote: special tokens in these are meant.
        `encoded` has the ids of texts that are encoded already. Single-threaded where
        TOKENIZERS_PARALLELISM=false.
        """
        parts = [b""] * len(texts)
        unread = []
        for number, text in enumerate(texts):
            if number in encoded:
                parts[number] = self._pack(encoded[number])
            elif self.words is not None and text.isascii():
                parts[number] = self.words.encode(text)
            else:
                unread.append(number)
        plain = [texts[number] for number in unread]
        encodings = self.tokenizer.encode_batch_fast(plain, add_special_tokens=False)
        for number, encoding in zip(unread, encodings, strict=True):
            parts[number] = self._pack(encoding.ids)
        for number in markers:
            parts[number] = self._pack(self._encode_marker(texts[number]))
        return self._join(parts)

    def encode_conversation(
        self, text: str, spans: Sequence[tuple[int, int]], *, has_special: bool
    ) -> tuple[list[int], np.ndarray]:
        """Encodes the text of a chat template as a whole, as transformers does.

        Special tokens in it are meant if `has_special`. Returns the ids, and their loss mask, uint8
        [tokens]: 1 where a character of the token is in one of `spans`.
        """
        self.tokenizer.encode_special_tokens = not has_special
        try:
            encoding = self.tokenizer.encode(text, add_special_tokens=False)
        finally:
            self.tokenizer.encode_special_tokens = True
        starts, ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
        mask = np.zeros(len(starts), np.uint8)
        for first, last in spans:
            mask |= (starts < last) & (ends > first)
        return encoding.ids, mask

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
        """Encodes texts together; returns the ids, and the character spans of each text's tokens."""
        encodings = self.tokenizer.encode_batch(texts, add_special_tokens=False)
        ids = self._join([self._pack(encoding.ids) for encoding in encodings])
        return ids, [encoding.offsets for encoding in encodings]

    def _pack(self, ids: list[int]) -> bytes:
        # A third faster than numpy, which asks a Python object for each id.
        return array(self.eos.dtype.char, ids).tobytes()

    def _join(self, parts: Sequence[bytes]) -> RaggedArrays:
        lengths = np.array(list(map(len, parts)), np.int64) // self.eos.itemsize
        return RaggedArrays(np.frombuffer(b"".join(parts), self.eos.dtype), lengths)


def build_encoder(tokenizer: Tokenizer, eos: int | None = None, bos: int | None = None) -> Encoder:
    """Returns an encoder; `eos` ends a document (None: `eos_id`), `bos` begins one (None: nothing).

    Raises: DataError, where nothing ends one.
    """
    dtype = token_dtype(vocabulary_size(tokenizer))
    end = np.array([eos_id(tokenizer) if eos is None else eos], dtype)
    begin = np.array([] if bos is None else [bos], dtype)
    return Encoder(tokenizer, end, begin, ascii_words_of(tokenizer, end.dtype.char))


_REPLACEMENT = "\ufffd"


def display_tokens(tokenizer: Tokenizer, ids: Iterable[int]) -> list[str]:
    r"""Returns a string for each id, special tokens by their names.

    White space is itself. Bytes of a character that another token completes are written as escapes:
    `\xe2\x96`. An id outside the vocabulary is the empty string.
    """
    state = {} if tokenizer.decoder is None else parse_json(tokenizer.decoder.__getstate__())
    of_bytes = state.get("type") == "ByteLevel"
    return [_display(tokenizer, number, of_bytes) for number in ids]


def _display(tokenizer: Tokenizer, number: int, of_bytes: bool) -> str:
    text = str(tokenizer.decode([number], skip_special_tokens=False))
    if _REPLACEMENT not in text:
        return text
    content = str(tokenizer.id_to_token(number))
    if of_bytes and all(character in BYTE_OF for character in content):
        spelled = bytes(BYTE_OF[character] for character in content)
    elif content.startswith("<0x"):
        spelled = bytes([int(content[3:5], 16)])
    else:
        return text
    return spelled.decode("utf-8", "backslashreplace")
