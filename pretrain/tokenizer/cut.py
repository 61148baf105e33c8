"""Long texts in pieces, and which tokenizers do not notice."""

import json
import re
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer

from pretrain.tokenizer.rules import TextRules, split_characters

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
