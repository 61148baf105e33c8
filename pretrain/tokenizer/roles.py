"""Vocabulary of any tokenizer: its size, its special tokens, and the tokens that begin a word."""

import json
import re
from dataclasses import dataclass
from itertools import count, pairwise, takewhile
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import Tokenizer, pre_tokenizers

from pretrain.errors import DataError
from pretrain.rows import Vocabulary, WordFinder
from pretrain.tokenizer.special_tokens import EOS, SENTINEL
from pretrain.tokenizer.words import SPACE
from pretrain.utils.safe_read import parse_json

if TYPE_CHECKING:
    from pretrain.config.model import SpecialTokens


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """Returns one more than the largest id (ids need not be dense)."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def token_dtype(size: int) -> str:
    """Returns the name of the smallest dtype that holds ids below `size`: uint16 or uint32."""
    return "uint16" if size <= 1 << 16 else "uint32"


KNOWN_EOS = (EOS, "</s>", "<|end_of_text|>", "<|eot_id|>", "<eos>", "<|eos|>", "[EOS]", "[SEP]")
"""Special tokens that released tokenizers end a document with, the most specific first."""

KNOWN_PAD = ("<pad>", "[PAD]", "<|pad|>", "<|padding|>", "<|finetune_right_pad_id|>")
KNOWN_BOS = ("<s>", "<bos>", "<|begin_of_text|>", "<|startoftext|>", "[BOS]", "[CLS]")
KNOWN_UNK = ("<unk>", "[UNK]", "<|unk|>")
KNOWN_MASK = ("[MASK]", "<mask>", "<|mask|>")


def special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Returns the special tokens of a tokenizer, by content."""
    decoder = tokenizer.get_added_tokens_decoder()
    return {token.content: number for number, token in decoder.items() if token.special}


def _first_of(known: tuple[str, ...], special: dict[str, int]) -> int | None:
    return next((special[content] for content in known if content in special), None)


def eos_id(tokenizer: Tokenizer, name: str | None = None) -> int:
    """Returns the id of the special token that ends a document: the named, or the first known one.

    Raises: DataError: There is none.
    """
    special = special_ids(tokenizer)
    number = _first_of(KNOWN_EOS if name is None else (name,), special)
    if number is None:
        tokens = f"its special tokens are {sorted(special) or 'none'}"
        fix = f"add {EOS} to it, or name it in tokenizer.special_tokens"
        text = "the tokenizer has no end-of-document token"
        if name is not None:
            text, fix = f"{text} {name}", "name one of these in tokenizer.eos"
        raise DataError(f"{text}; {tokens}", fix=fix)
    return number


def start_id(tokenizer: Tokenizer) -> int | None:
    """Returns the token that its post-processor puts in front of a text; None: none, or others too (BERT, T5)."""
    plain, whole = (tokenizer.encode("a", add_special_tokens=added).ids for added in (False, True))
    return whole[0] if whole[1:] == plain else None


def separator_ids(tokenizer: Tokenizer) -> list[int]:
    """Returns the tokens that its post-processor puts between two texts (BERT: [SEP]), if any."""
    encoding = tokenizer.encode("a", "a", add_special_tokens=True)
    sides = encoding.sequence_ids
    last = max((place for place, side in enumerate(sides) if side == 0), default=-1)
    return list(encoding.ids[last + 1 : sides.index(1)]) if 1 in sides else []


def unknown_id(tokenizer: Tokenizer) -> int | None:
    """Returns the token that stands for text that the vocabulary lacks; None: there is none."""
    name = _unknown_token(parse_json(tokenizer.to_str())["model"])
    return None if name is None else tokenizer.token_to_id(name)


def _unknown_token(model: dict[str, Any]) -> str | None:
    """Returns the name of the unknown token, by the entry `model` of a tokenizer.json."""
    if model.get("unk_id") is not None:
        return str(model["vocab"][model["unk_id"]][0])
    return model.get("unk_token")


def special_tokens_of(tokenizer: Tokenizer) -> "SpecialTokens":
    """Returns the ids of special tokens that training or decoding uses.

    A decoder with an encoder begins with the token that begins a text (`<s>`, `[CLS]`), or without
    one, as in T5 and Marian, with the padding.
    """
    # Sections of models take 0.15 s to import, which each worker of `prepare` would pay.
    from pretrain.config.model import SpecialTokens

    special = special_ids(tokenizer)
    pad = _first_of(KNOWN_PAD, special)
    bos = _first_of(KNOWN_BOS, special)
    return SpecialTokens(
        pad=pad,
        bos=bos,
        eos=_first_of(KNOWN_EOS, special),
        start=pad if bos is None else bos,
        mask=_first_of(KNOWN_MASK, special),
    )


def nameable_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Returns the special tokens that a prompt may name: none that begins, ends or fills a text."""
    special = special_ids(tokenizer)
    names = {*KNOWN_EOS, *KNOWN_PAD, *KNOWN_BOS, *KNOWN_UNK}
    return {content: number for content, number in special.items() if content not in names}


def sentinel_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Returns the ids of <extra_id_0>, <extra_id_1>, ..., up to the first that is not there."""
    special = special_ids(tokenizer)
    names = (SENTINEL.format(number) for number in count())
    return tuple(special[name] for name in takewhile(special.__contains__, names))


def describe_vocabulary(tokenizer: Tokenizer, special: "SpecialTokens", whole_words: bool = False) -> Vocabulary:
    """Returns the vocabulary of an objective.

    `special` are the ids of its special tokens, `eos` among them; with `whole_words`, the result
    has a finder of tokens that begin a word.
    """
    assert special.eos is not None, "documents end"
    named = special_ids(tokenizer)
    size = vocabulary_size(tokenizer)
    is_special = np.ones(size, dtype=bool)  # an id without a token is not in any text
    is_special[list(tokenizer.get_vocab(with_added_tokens=True).values())] = False
    is_special[list(named.values())] = True
    return Vocabulary(
        size=size,
        eos=special.eos,
        special=is_special,
        pad=special.pad,
        bos=special.bos,
        start=special.start,
        mask=special.mask,
        sentinels=sentinel_ids(tokenizer),
        named=named,
        find_words=build_word_finder(tokenizer) if whole_words else None,
    )


# Words are those of the tokenizer's own pre-tokenizer (`Encoding.word_ids`).
#
#     WordPiece, BPE that marks the end of a word   by the token, or the one before it: two tables
#     byte-level BPE, Unigram, characters           tokens -> their text -> pre-tokenizer -> tokens
#
# The second is needed where a word depends on its surroundings: of three spaces two are a word, and
# the third belongs to the next one; "t" is a word behind "'" and "don", and none behind "ca". It
# takes about a microsecond a token, the tables ten nanoseconds.

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_UNREADABLE = re.compile("[\udc80-\udcff]")
_UNKNOWN = "\ufffd"


def build_word_finder(tokenizer: Tokenizer) -> WordFinder:
    """Returns a finder of words in rows, see `Vocabulary.find_words`.

    The first token of a row begins a word, even where the row was cut from a text. A special token
    is a word, and so is any other that is found in a text before it is torn into words; but the
    unknown token is a part of the word whose characters it stands for.
    """
    size = vocabulary_size(tokenizer)
    described = parse_json(tokenizer.to_str())
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
        return _find_marked(opens | alone, alone)
    if suffix := model.get("end_of_word_suffix"):
        return _find_marked(alone, np.array([name.endswith(suffix) for name in names]) | alone)
    split = tokenizer.pre_tokenizer
    if split is None or _marks_spaces(described["pre_tokenizer"]):
        # SentencePiece as others convert it splits nothing: there a word begins with a space.
        split = pre_tokenizers.Metaspace(SPACE, prepend_scheme="never")
    is_bytes = '"ByteLevel"' in json.dumps(described["pre_tokenizer"])
    spelled = [_spell(name, is_bytes, bool(model.get("byte_fallback"))) for name in names]
    if unknown in names:
        spelled[names.index(unknown)] = _UNKNOWN.encode()
    return SplitWords(split, spelled, np.array([len(spelling) for spelling in spelled]), alone)


def _marks_spaces(state: dict[str, Any]) -> bool:
    """Returns whether a pre-tokenizer replaces spaces, and does no more."""
    return all(step["type"] == "Metaspace" for step in state.get("pretokenizers", [state]))


def _spell(name: str, is_bytes: bool, falls_back: bool) -> bytes:
    """Returns the bytes that a token stands for."""
    if is_bytes:
        return bytes(BYTE_OF.get(character, ord("?")) for character in name)
    if falls_back and (match := _BYTE.fullmatch(name)):
        return bytes.fromhex(match[1])
    return name.replace(SPACE, " ").encode()


def _byte_alphabet() -> dict[str, int]:
    """Returns the byte of each character of byte-level BPE (Radford et al. 2019, released code)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(rest)}


BYTE_OF = _byte_alphabet()


def _find_marked(opens: np.ndarray, closes: np.ndarray) -> WordFinder:
    """Returns a finder by tables, bool [V]: the token begins a word, the next one begins a word."""

    def find(ids_BT: np.ndarray, apart_BT: np.ndarray) -> np.ndarray:
        begins_BT = opens[ids_BT] | apart_BT
        begins_BT[:, 1:] |= closes[ids_BT[:, :-1]]
        begins_BT[:, 0] = True
        return begins_BT

    return find


@dataclass(frozen=True, slots=True)
class SplitWords:
    """Words as a pre-tokenizer finds them in the text that tokens spell.

    `spelled` are the bytes of each token, `sizes` their number, int64 [V]; a token that is `alone`,
    bool [V], is a word, and no part of the text around it.
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
        ids = ids_BT.ravel()
        begins = begins_BT.ravel()
        is_alone = is_alone_BT.ravel()
        edges = np.append(np.flatnonzero(begins), len(begins)).tolist()
        for first, end in pairwise(edges):
            if end - first > 1 and not is_alone[first]:
                begins[first + 1 : end] = self._within(ids[first:end])[1:]
        return begins.reshape(begins_BT.shape)

    def _within(self, ids: np.ndarray) -> np.ndarray:
        """Returns a mask of tokens that have the first byte of a word."""
        joined = b"".join([self.spelled[number] for number in ids.tolist()])
        # A text that is cut within a character has invalid bytes; each is read as a character.
        text = joined.decode(errors="surrogateescape")
        words = self.split.pre_tokenize_str(_UNREADABLE.sub(_UNKNOWN, text))
        # A word begins where the last one ends: dropped white space belongs to the next one.
        places = np.array([0, *(span[1] for _, span in words[:-1])], dtype=np.int64)
        if not text.isascii():
            places = _byte_starts(text)[places]
        is_first = np.zeros(len(joined) + 1, dtype=np.int64)
        is_first[places + 1] = 1
        before = np.cumsum(is_first)
        ends = np.cumsum(self.sizes[ids])
        return before[ends] > before[ends - self.sizes[ids]]


def _byte_starts(text: str) -> np.ndarray:
    """Returns the byte offset of each character in UTF-8; an invalid byte is one character."""
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
    widths = 1 + (codes >= 0x80) + (codes >= 0x800) + (codes >= 0x10000)
    widths[(codes >= 0xDC80) & (codes <= 0xDCFF)] = 1
    return np.cumsum(widths) - widths
