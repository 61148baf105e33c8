"""What the special tokens of any tokenizer mean, known by their contents."""

import re

import numpy as np
from tokenizers import Tokenizer

from pretrain.config.model import SpecialTokens
from pretrain.errors import DataError
from pretrain.rows import Vocabulary
from pretrain.tokenizer.begins import build_word_finder
from pretrain.tokenizer.layout import EOS
from pretrain.tokenizer.vocabulary import vocabulary_size

KNOWN_EOS = (EOS, "</s>", "<|end_of_text|>", "<|eot_id|>", "<eos>", "<|eos|>", "[EOS]", "[SEP]")
"""Special tokens that released tokenizers end a document with, the most specific first."""

KNOWN_PAD = ("<pad>", "[PAD]", "<|pad|>", "<|padding|>", "<|finetune_right_pad_id|>")
KNOWN_BOS = ("<s>", "<bos>", "<|begin_of_text|>", "<|startoftext|>", "[BOS]", "[CLS]")
KNOWN_UNK = ("<unk>", "[UNK]", "<|unk|>")
KNOWN_MASK = ("[MASK]", "<mask>", "<|mask|>")

_SENTINEL = re.compile(r"<extra_id_(\d+)>")


def special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Returns the special tokens of a tokenizer, by content."""
    decoder = tokenizer.get_added_tokens_decoder()
    return {token.content: number for number, token in decoder.items() if token.special}


def _first_of(known: tuple[str, ...], special: dict[str, int]) -> int | None:
    return next((special[content] for content in known if content in special), None)


def eos_id(tokenizer: Tokenizer) -> int:
    """Returns the id of the special token that ends a document.

    Raises:
        DataError: None of `KNOWN_EOS` is a special token of this tokenizer.
    """
    special = special_ids(tokenizer)
    found = _first_of(KNOWN_EOS, special)
    if found is None:
        raise DataError(
            f"the tokenizer has no end-of-document token; its special tokens are {sorted(special) or 'none'}",
            fix=f"add {EOS} to it, or name it in tokenizer.special_tokens",
        )
    return found


def special_tokens_of(tokenizer: Tokenizer) -> SpecialTokens:
    """Returns the ids of the special tokens that mean something to training or decoding.

    A decoder with an encoder begins with what begins a text (`<s>`, `[CLS]`), or where there is no such token, as in
    T5 and Marian, with the padding.
    """
    special = special_ids(tokenizer)
    pad, bos = _first_of(KNOWN_PAD, special), _first_of(KNOWN_BOS, special)
    return SpecialTokens(
        pad=pad,
        bos=bos,
        eos=_first_of(KNOWN_EOS, special),
        start=pad if bos is None else bos,
        mask=_first_of(KNOWN_MASK, special),
    )


def nameable_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Returns the special tokens that a prompt may name, by content: all but those that begin, end or fill a text."""
    others = {*KNOWN_EOS, *KNOWN_PAD, *KNOWN_BOS, *KNOWN_UNK}
    return {content: number for content, number in special_ids(tokenizer).items() if content not in others}


def sentinel_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Returns the ids of <extra_id_0>, <extra_id_1>, ..., up to the first that is not there."""
    matches = ((_SENTINEL.fullmatch(content), number) for content, number in special_ids(tokenizer).items())
    found = {int(match[1]): number for match, number in matches if match}
    last = next(number for number in range(len(found) + 1) if number not in found)
    return tuple(found[number] for number in range(last))


def describe_vocabulary(tokenizer: Tokenizer, special: SpecialTokens, whole_words: bool = False) -> Vocabulary:
    """Returns what the ids of a tokenizer mean to an objective.

    Args:
        tokenizer: Of the data.
        special: Ids with a meaning, `eos` among them.
        whole_words: Tell which tokens begin a word.
    """
    assert special.eos is not None, "documents end"
    named, size = special_ids(tokenizer), vocabulary_size(tokenizer)
    is_special = np.ones(size, dtype=bool)  # an id that no token has is not one that a text may hold
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
