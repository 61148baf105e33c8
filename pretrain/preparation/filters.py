"""Documents, and the filters that drop some of them.

text       `text`
pairs      `source` and, as its target, `text`
records    `segments`, each with or without a loss; `text` is their concatenation
preferences  a record with the chosen answer, and in `rejected` the one with the other
classes    `text`, and one of `labels`
tags       `text`, words with spaces between, and one of `labels` for each word
answers    `source`, a question; `text`, and one of `labels` at the answer in it, empty if it has none
choices    `source`, a question; `text`, answers a line each, and one of `labels` for each

Reasons to drop a document, in `statistics.json`; the first group is of bad items of the input, with
`on_error: skip` only:

undecodable            text that is not UTF-8; also of the default corpus
not_json               a record, or the rest of a file, that is not JSON
bad_field              a field that is absent, null or of another type
unpaired_surrogate     half a character, which JSON can spell
bad_record             a record that its kind cannot be made of, such as messages without roles
too_large              more than `max_document_bytes`
damaged                the rest of a file, archive or row group; a member without a text
bad_image              an image that cannot be decoded, or has no label or caption

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

from pretrain.config.prepare import FilterConfig, PrepareConfig
from pretrain.errors import DataError
from pretrain.utils.units import percent

UNDECODABLE = "undecodable"
NOT_JSON = "not_json"
BAD_FIELD = "bad_field"
SURROGATE = "unpaired_surrogate"
BAD_RECORD = "bad_record"
TOO_LARGE = "too_large"
DAMAGED = "damaged"
BAD_IMAGE = "bad_image"
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
MAX_UNUSED = 64
OTHER_KEYS = "other keys"
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


BLOCK_ITEMS = 1000
"""Items whose bytes are counted together (`BadItems`)."""
SHOWN_ERRORS = 3
"""First errors that are kept of each reason."""


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
    spelled: frozenset[int] | None = None  # of a template's text: segments without special tokens
    rejected: "Document | None" = None  # of a preference: the record with the rejected answer
    is_unwanted: bool = False  # of a record that is judged
    labels: tuple[Label, ...] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)  # of its record, for filters
    split: str | None = None  # if its input gives one
    dropped_bytes: int = 0  # of lines that a rule took out of it
    unused: Mapping[str, int] = field(default_factory=dict)  # keys that nothing used, counted


class BadInputError(DataError):
    """An item of the input that cannot be used: a record, a member, the rest of a file.

    `reason` is one of those above. `on_error: skip` leaves such items out, and no other errors.
    """

    def __init__(self, what: str, *, where: str = "", fix: str = "", reason: str = DAMAGED) -> None:
        super().__init__(what, where=where, fix=fix)
        self.reason = reason


class TooManyBadError(DataError):
    """More bad items than `max_skipped_share`."""


class BadLimit(NamedTuple):
    """The largest share of bad items of an input of so many bytes, as stored."""

    share: float
    input_bytes: int


def limit_of(config: PrepareConfig, input_bytes: int) -> BadLimit:
    """Returns the limit of the inputs: 0 where none skips, 1 for the default corpus."""
    skips = any(one.on_error == "skip" for one in config.inputs)
    return BadLimit(config.max_skipped_share if skips else float(not config.inputs), input_bytes)


@dataclass(slots=True)
class BadItem(Document):
    """A bad item of the input in place of its document."""

    error: str = ""  # place and problem
    num_records: int = 1
    lost_bytes: int = 0  # of the input as stored, where all of them are lost: the rest of a file


@dataclass(slots=True)
class BadItems:
    """Bad items of the input that are left out, and their share of it.

    Lost bytes: of each `BLOCK_ITEMS` items the bytes, times the share of bad ones, as a record's own
    bytes in a compressed file are not known. They only grow, so that a limit which is exceeded
    stays so, and they depend on the parts of the input alone.
    """

    num_read: int = 0  # items, good ones too
    num_bad: int = 0
    lost_bytes: int = 0  # of the input as stored
    first: dict[str, list[str]] = field(default_factory=dict)  # the first errors, by reason

    def add(self, item: BadItem) -> None:
        """Counts an item."""
        count = item.num_records
        first = {str(item.refused): [item.error]}
        self.merge(BadItems(count, count, item.lost_bytes, first))

    def merge(self, other: "BadItems") -> None:
        """Adds the items of a later part."""
        self.num_read += other.num_read
        self.num_bad += other.num_bad
        self.lost_bytes += other.lost_bytes
        for reason, errors in other.first.items():
            shown = self.first.setdefault(reason, [])
            shown += errors[: SHOWN_ERRORS - len(shown)]

    def check(self, limit: BadLimit, *, is_whole: bool = False) -> None:
        """Checks the share of the input. Raises: TooManyBadError.

        While it is read, `is_whole` is False, and only the bytes are compared.
        """
        most, input_bytes = limit
        lost = self.lost_bytes / max(input_bytes, 1)
        if lost <= most and not (is_whole and self.num_bad / max(self.num_read, 1) > most):
            return
        text = f"{self.num_bad:,} of {self.num_read:,} records are bad"
        text += f", {percent(lost)} of the input's bytes" if lost > most else ""
        reason, errors = next(iter(self.first.items()))
        raise TooManyBadError(
            f"{text}, more than max_skipped_share={most:g}; the first: {errors[0]} ({reason})",
            fix="correct the input, or raise it (--max-skipped-share): finished parts are kept",
        )


@dataclass(slots=True)
class LeftOut:
    """Documents that are left out and bytes of their text, by reason; dropped lines; bad items."""

    documents: Counter[str] = field(default_factory=Counter)
    num_bytes: Counter[str] = field(default_factory=Counter)
    num_edited: int = 0  # documents that stay, and lost lines
    edited_bytes: int = 0
    bad: BadItems = field(default_factory=BadItems)
    bad_in_block: int = 0  # whose bytes are not known one by one
    unused: Counter[str] = field(default_factory=Counter)  # keys of records, of those that stay too

    def add_unused(self, keys: Mapping[str, int]) -> None:
        """Counts keys that nothing used, those after the first `MAX_UNUSED` together."""
        for key, count in keys.items():
            name = key if key in self.unused or len(self.unused) < MAX_UNUSED else OTHER_KEYS
            self.unused[name] += count

    def add(self, reason: str, document: Document) -> None:
        """Counts a document, or a bad item in its place."""
        if isinstance(document, BadItem):
            self.documents[reason] += document.num_records
            self.bad.add(document)
            self.bad_in_block += not document.lost_bytes
            return
        self.documents[reason] += 1
        self.num_bytes[reason] += len(document.utf8) + len((document.source or "").encode())

    def end_block(self, num_good: int, num_bytes: int, limit: BadLimit) -> None:
        """Counts a block of items: good ones, and the bytes of all. Raises: TooManyBadError."""
        self.bad.num_read += num_good
        if self.bad_in_block:
            self.bad.lost_bytes += num_bytes * self.bad_in_block // (num_good + self.bad_in_block)
            self.bad_in_block = 0
        if self.bad.num_bad:
            self.bad.check(limit)


def refuse(document: Document, config: FilterConfig) -> str | None:
    """Returns the reason to drop a document on its own, or None."""
    if document.refused is not None:
        return document.refused
    if not (document.text or document.source):
        return EMPTY
    if document.rejected is not None:
        # The fields of the record are with the chosen answer.
        of_text = config.model_copy(update={"require": {}})
        if reason := refuse(document.rejected, of_text):
            return reason
    if document.segments and (reason := _refuse_segments(document)):
        return reason
    sides = [document.text] if document.source is None else [document.text, document.source]
    lengths = [len(side) for side in sides]
    if min(lengths) < config.min_chars:
        return TOO_SHORT
    if config.max_chars is not None and max(lengths) > config.max_chars:
        return TOO_LONG
    has_required = all(_is_one_of(document.fields.get(name), values) for name, values in config.require.items())
    return None if has_required else NOT_REQUIRED


def _is_one_of(value: Any, values: Iterable[Any]) -> bool:
    # In JSON, true is not 1.
    return value in [one for one in values if isinstance(value, bool) == isinstance(one, bool)]


def _refuse_segments(document: Document) -> str | None:
    learned = {number: text for number, (text, is_learned) in enumerate(document.segments) if is_learned}
    if not learned:
        return NO_ASSISTANT_TURN
    has_text = any(text.strip() and number not in document.markers for number, text in learned.items())
    return None if has_text else EMPTY_ANSWER


def select(
    documents: Iterable[Document],
    judge: Callable[[Document], str | None],
    masks: Mapping[str, np.ndarray] | None,
    left_out: LeftOut,
    limit: BadLimit,
) -> Iterator[Document]:
    """Yields the documents that are kept, and counts the others in `left_out`, by reason.

    `judge` returns the reason to leave out a document on its own, or None.
    `masks` have, by the reason, a bool for each document that the filters keep: False for one that
    is left out for it. Raises: TooManyBadError: The bad ones exceed `limit` already.
    """
    number = 0
    carried_bytes = 0
    num_good = block_bytes = 0
    for document in documents:
        if num_good + left_out.bad_in_block >= BLOCK_ITEMS:
            left_out.end_block(num_good, block_bytes, limit)
            num_good = block_bytes = 0
        if isinstance(document, BadItem):
            block_bytes += document.consumed_bytes - document.lost_bytes
        else:
            num_good += 1
            block_bytes += document.consumed_bytes
        left_out.add_unused(document.unused)
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
    left_out.end_block(num_good, block_bytes, limit)
