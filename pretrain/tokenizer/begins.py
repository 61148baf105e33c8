"""Which tokens of a text begin a word: the words that the tokenizer's own pre-tokenizer makes (`Encoding.word_ids`).

    WordPiece, BPE that marks the end of a word     a token says it itself, or the one before it: two tables
    byte-level BPE, Unigram, characters             tokens -> the text that they spell -> pre-tokenizer -> tokens

The second is needed where a word depends on what lies around it: of three spaces two are a word, and the third is of
the next one; "t" is a word behind "'" and "don", and none behind "ca". It takes about a microsecond a token, the tables
ten nanoseconds.
"""

import json
import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from tokenizers import Tokenizer, pre_tokenizers

from pretrain.rows import WordFinder
from pretrain.tokenizer.rules import SPACE
from pretrain.tokenizer.vocabulary import vocabulary_size

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_UNREADABLE = re.compile("[\udc80-\udcff]")
_UNKNOWN = "\ufffd"


def build_word_finder(tokenizer: Tokenizer) -> WordFinder:
    """Returns what finds the words of rows: `find(ids_BT, apart_BT) -> begins_BT`, see `Vocabulary.find_words`.

    A row that was cut from a text may begin in a word; its first token begins one all the same. A special token is a
    word, and so is any other that is found in a text before it is torn into words; but the unknown token is a part of
    the word whose characters it stands for.
    """
    size, described = vocabulary_size(tokenizer), json.loads(tokenizer.to_str())
    model = described["model"]
    unknown = _unknown_token(model)
    alone = np.zeros(size, dtype=bool)
    for number, added in tokenizer.get_added_tokens_decoder().items():
        alone[number] = added.content != unknown
    names = [""] * size
    for token, number in tokenizer.get_vocab(with_added_tokens=True).items():
        names[number] = token
    if prefix := model.get("continuing_subword_prefix"):
        opens = np.array([not name.startswith(prefix) for name in names])
        return MarkedWords(opens | alone, alone)
    if suffix := model.get("end_of_word_suffix"):
        return MarkedWords(alone, np.array([name.endswith(suffix) for name in names]) | alone)
    # SentencePiece as others convert it has no pre-tokenizer: there a word is what begins with a space.
    split = tokenizer.pre_tokenizer or pre_tokenizers.Metaspace(SPACE, prepend_scheme="never")
    is_bytes = '"ByteLevel"' in json.dumps(described["pre_tokenizer"])
    spelled = [_spell(name, is_bytes, bool(model.get("byte_fallback"))) for name in names]
    if unknown in names:
        spelled[names.index(unknown)] = _UNKNOWN.encode()
    return SplitWords(split, spelled, np.array([len(spelling) for spelling in spelled]), alone)


def _unknown_token(model: dict[str, Any]) -> str | None:
    number = model.get("unk_id")
    return model.get("unk_token") if number is None else model["vocab"][number][0]


def _spell(name: str, is_bytes: bool, falls_back: bool) -> bytes:
    """Returns the bytes that a token stands for."""
    if is_bytes:
        return bytes(_BYTE_OF.get(character, ord("?")) for character in name)
    if falls_back and (match := _BYTE.fullmatch(name)):
        return bytes.fromhex(match[1])
    return name.replace(SPACE, " ").encode()


def _byte_alphabet() -> dict[str, int]:
    """Returns the byte that each character of byte-level BPE stands for (Radford et al. 2019, released code)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


@dataclass(frozen=True, slots=True)
class MarkedWords:
    """Words of a tokenizer whose tokens say where one begins or ends.

    Attributes:
        opens: bool [V]: the token begins a word.
        closes: bool [V]: the next token begins a word.
    """

    opens: np.ndarray
    closes: np.ndarray

    def __call__(self, ids_BT: np.ndarray, apart_BT: np.ndarray) -> np.ndarray:
        begins_BT = self.opens[ids_BT] | apart_BT
        begins_BT[:, 1:] |= self.closes[ids_BT[:, :-1]]
        begins_BT[:, 0] = True
        return begins_BT


@dataclass(frozen=True, slots=True)
class SplitWords:
    """Words as a pre-tokenizer finds them in the text that tokens spell.

    Attributes:
        split: The pre-tokenizer.
        spelled: Bytes of each token.
        sizes: int64 [V]: their number.
        alone: bool [V]: tokens that are a word, and no part of the text around them.
    """

    split: pre_tokenizers.PreTokenizer
    spelled: list[bytes]
    sizes: np.ndarray
    alone: np.ndarray

    def __call__(self, ids_BT: np.ndarray, apart_BT: np.ndarray) -> np.ndarray:
        is_alone_BT = self.alone[ids_BT]
        begins_BT = apart_BT | is_alone_BT
        begins_BT[:, 1:] |= is_alone_BT[:, :-1]
        begins_BT[:, 0] = True
        ids, begins, is_alone = ids_BT.ravel(), begins_BT.ravel(), is_alone_BT.ravel()
        edges = np.append(np.flatnonzero(begins), len(begins)).tolist()
        for first, end in pairwise(edges):
            if end - first > 1 and not is_alone[first]:
                begins[first + 1 : end] = self._within(ids[first:end])[1:]
        return begins.reshape(begins_BT.shape)

    def _within(self, ids: np.ndarray) -> np.ndarray:
        """Returns which tokens of a text have the first byte of a word."""
        joined = b"".join([self.spelled[number] for number in ids.tolist()])
        # A text that is cut within a character has bytes that are none; each is read as a character of its own.
        text = joined.decode(errors="surrogateescape")
        words = self.split.pre_tokenize_str(_UNREADABLE.sub(_UNKNOWN, text))
        # A word begins where the last one ends: white space that the pre-tokenizer drops belongs to what follows.
        places = np.array([0, *(span[1] for _, span in words[:-1])], dtype=np.int64)
        if not text.isascii():
            places = _byte_starts(text)[places]
        is_first = np.zeros(len(joined) + 1, dtype=np.int64)
        is_first[places + 1] = 1
        before, ends = np.cumsum(is_first), np.cumsum(self.sizes[ids])
        return before[ends] > before[ends - self.sizes[ids]]


def _byte_starts(text: str) -> np.ndarray:
    """Returns where each character begins in UTF-8, unreadable ones as the byte that they were."""
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
    widths = 1 + (codes >= 0x80) + (codes >= 0x800) + (codes >= 0x10000)
    widths[(codes >= 0xDC80) & (codes <= 0xDCFF)] = 1
    return np.cumsum(widths) - widths
