"""Documents, and the filters that drop some of them.

text       `text`
pairs      `source` and, as its target, `text`
records    `segments`, each with or without a loss; `text` is their concatenation
preferences  a record with the chosen answer, and in `rejected` the one with the other
classes    `text`, and one of `labels`
tags       `text`, words with spaces between, and one of `labels` for each word
answers    `source`, a question; `text`, and one of `labels` at the answer in it, empty if it has none
choices    `source`, a question; `text`, answers a line each, and one of `labels` for each

Reasons to drop a document, in `statistics.json`:

undecodable            text that is not UTF-8, of the default corpus or with `undecodable: skip`
not_a_page             a record of a web archive without a page of text
empty                  no text; of a pair, on neither side
no_assistant_turn      a conversation in which there is nothing to learn
empty_answer           a record whose answers are all without text
too_short, too_long    by characters; a pair by either side, a record by all its segments together,
                       a preference by either answer with its prompt
not_required           a field of its record is absent or has none of the required values
duplicate              the same bytes came before (duplicates.py)
near_duplicate         a similar document came before (selection/near_duplicates.py)
contaminated           a text of an evaluation set is in it (selection/judge.py)
language               not one of the languages to keep
c4_, gopher_, fineweb_    a rule for quality (selection/quality.py)
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from pretrain.config.prepare import FilterConfig

UNDECODABLE = "undecodable"
NOT_A_PAGE = "not_a_page"
EMPTY = "empty"
NO_ASSISTANT_TURN = "no_assistant_turn"
EMPTY_ANSWER = "empty_answer"
TOO_SHORT = "too_short"
TOO_LONG = "too_long"
NOT_REQUIRED = "not_required"
DUPLICATE = "duplicate"
NEAR_DUPLICATE = "near_duplicate"
CONTAMINATED = "contaminated"
LANGUAGE = "language"
REASONS = (
    UNDECODABLE,
    NOT_A_PAGE,
    EMPTY,
    NO_ASSISTANT_TURN,
    EMPTY_ANSWER,
    TOO_SHORT,
    TOO_LONG,
    NOT_REQUIRED,
    DUPLICATE,
    NEAR_DUPLICATE,
)


class Label(NamedTuple):
    """A label of the characters of `text` from `start` to `end`."""

    name: str | int
    start: int
    end: int


@dataclass(slots=True)
class Document:
    """One document to tokenise."""

    text: str  # may be empty; of pairs, the target
    utf8: bytes  # `text` in UTF-8
    consumed_bytes: int  # of the input, as stored
    refused: str | None = None  # reason of the reader, for what has no text
    source: str | None = None  # of a pair, may be empty; or a question
    segments: tuple[tuple[str, bool], ...] = ()  # of a record: (text, has a loss)
    markers: frozenset[int] = frozenset()  # segments that a template wrote
    spelled: frozenset[int] | None = None  # of a chat template's text: segments without special tokens
    rejected: "Document | None" = None  # of a preference: the record with the rejected answer
    labels: tuple[Label, ...] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)  # of its record, for filters
    split: str | None = None  # if its input gives one
    dropped_bytes: int = 0  # of lines that a rule took out of it


@dataclass(slots=True)
class LeftOut:
    """Documents that are left out and bytes of their text, by reason; and dropped lines."""

    documents: Counter[str] = field(default_factory=Counter)
    num_bytes: Counter[str] = field(default_factory=Counter)
    num_edited: int = 0  # documents that stay, and lost lines
    edited_bytes: int = 0

    def add(self, reason: str, document: Document) -> None:
        """Counts a document."""
        self.documents[reason] += 1
        self.num_bytes[reason] += len(document.utf8) + len((document.source or "").encode())


def refuse(document: Document, config: FilterConfig) -> str | None:
    """Returns the reason to drop a document on its own, or None."""
    if document.refused is not None:
        return document.refused
    if not (document.text or document.source):
        return EMPTY
    if document.rejected is not None and (reason := refuse(document.rejected, _of_text(config))):
        return reason
    if document.segments and not any(is_learned for _, is_learned in document.segments):
        return NO_ASSISTANT_TURN
    if document.segments and not any(
        is_learned and text.strip() and number not in document.markers
        for number, (text, is_learned) in enumerate(document.segments)
    ):
        return EMPTY_ANSWER
    shortest = longest = len(document.text)
    if document.source is not None:
        shortest = min(shortest, len(document.source))
        longest = max(longest, len(document.source))
    if shortest < config.min_chars:
        return TOO_SHORT
    if config.max_chars is not None and longest > config.max_chars:
        return TOO_LONG
    for name, wanted in config.require.items():
        value = document.fields.get(name)
        # In JSON, true is not 1.
        same_type = [one for one in wanted if isinstance(value, bool) == isinstance(one, bool)]
        if value not in same_type:
            return NOT_REQUIRED
    return None


def _of_text(config: FilterConfig) -> FilterConfig:
    """Returns the rules without those of a record's fields."""
    return config.model_copy(update={"require": {}})


def select(
    documents: Iterable[Document],
    judge: Callable[[Document], str | None],
    masks: Mapping[str, np.ndarray] | None,
    left_out: LeftOut,
) -> Iterator[Document]:
    """Yields the documents that are kept, and counts the others in `left_out`, by reason.

    `judge` returns the reason to leave out a document on its own, or None.
    `masks` have, by the reason, a bool for each document that the filters keep: False for one that
    is left out for it.
    """
    number = 0
    carried_bytes = 0
    for document in documents:
        reason = judge(document)
        if reason is None and masks:
            reason = next((name for name, mask in masks.items() if not mask[number]), None)
            number += 1
        if reason is not None:
            left_out.add(reason, document)
            # For progress: the next document that is kept accounts for them.
            carried_bytes += document.consumed_bytes
            continue
        if document.dropped_bytes:
            left_out.num_edited += 1
            left_out.edited_bytes += document.dropped_bytes
        document.consumed_bytes += carried_bytes
        carried_bytes = 0
        yield document
