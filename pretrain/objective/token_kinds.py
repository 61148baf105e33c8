"""Kinds of the tokens of a row, in which `pretrain data show` tells what becomes of each.

    kinds(rows, section, vocabulary) -> kind of each token [T] that the decoder, or the only stack, reads

The record of an objective names such a function; `rows` has one row. With two stacks every kind is TARGET, or CONTEXT
where a token has no loss, and what the encoder reads is SOURCE.
"""

from enum import StrEnum
from typing import Any

from pretrain.rows import IGNORE_INDEX, Vocabulary
from pretrain.types import ModelRows


class TokenKind(StrEnum):
    """What a model does with a token."""

    TEXT = "text"  # all of it predicted
    PREFIX = "prefix"  # read in both directions, not predicted; also a part of a document that was rearranged
    LEARNED = "learned"  # predicted, of a text in part
    CONTEXT = "context"  # read, not predicted
    SOURCE = "source"  # source of a target
    TARGET = "target"  # predicted after the source
    ANSWER = "answer"  # predicted by its first and its last token; `[CLS]`, where the text has none
    QUERY = "query"  # compared with the next ones
    CHOSEN = "chosen"  # learned, the better answer; of texts that are compared, the positive
    REJECTED = "rejected"  # unlearned, the other answer to a prompt; a hard negative
    MASKED = "masked"  # predicted, the mask token in its place
    REPLACED = "replaced"  # predicted, another token in its place
    KEPT = "kept"  # predicted, the token itself in its place
    LABELLED = "labelled"  # the name of a label is predicted there
    MIDDLE = "middle"  # parts of a document that was rearranged
    SUFFIX = "suffix"
    PREFIX_AND_MIDDLE = "prefix+middle"


def text_kinds(rows: ModelRows, section: Any, vocabulary: Vocabulary) -> list[TokenKind]:
    """Returns the kinds of a text, all of which is predicted."""
    return [TokenKind.TEXT] * rows.tokens_BT.shape[1]


def learned_kinds(rows: ModelRows, section: Any, vocabulary: Vocabulary) -> list[TokenKind]:
    """Returns the kinds of a text that is predicted in part, with or without a prefix."""
    # A token has a loss if the one before it predicts it.
    before = [IGNORE_INDEX, *rows.targets_BT[0, :-1].tolist()]
    kinds = [TokenKind.CONTEXT if target == IGNORE_INDEX else TokenKind.LEARNED for target in before]
    if rows.prefix_BT is None:
        return kinds
    is_prefix = rows.prefix_BT[0].tolist()
    return [TokenKind.PREFIX if is_read else kind for is_read, kind in zip(is_prefix, kinds, strict=True)]


def target_kinds(rows: ModelRows) -> list[TokenKind]:
    """Returns the kinds of the tokens that a decoder beside an encoder reads."""
    return [TokenKind.CONTEXT if target == IGNORE_INDEX else TokenKind.TARGET for target in rows.targets_BT[0].tolist()]
