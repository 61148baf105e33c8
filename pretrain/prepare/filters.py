"""Which documents are left out, and why.

    documents -> select -> documents that are kept; a count for each reason:

undecodable            a file of the default corpus that is not UTF-8
empty                  no text; of a pair, on neither side
too_short, too_long    by characters; a pair by either side, a record by all its segments together
not_required           a field of its record is absent or has none of the values asked for
duplicate              the same bytes came before (duplicates.py)
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from pretrain.config.prepare import FilterConfig
from pretrain.prepare.documents import Document

UNDECODABLE = "undecodable"
EMPTY = "empty"
TOO_SHORT = "too_short"
TOO_LONG = "too_long"
NOT_REQUIRED = "not_required"
DUPLICATE = "duplicate"
REASONS = (UNDECODABLE, EMPTY, TOO_SHORT, TOO_LONG, NOT_REQUIRED, DUPLICATE)


@dataclass(frozen=True, slots=True)
class FilterRule:
    """The filters of a config."""

    config: FilterConfig = field(default_factory=FilterConfig)

    @property
    def fields(self) -> tuple[str, ...]:
        """Fields of records that `refuse` looks at."""
        return tuple(self.config.require)

    def refuse(self, document: Document) -> str | None:
        """Returns why a document is left out whatever the others are, or None."""
        if document.is_undecodable:
            return UNDECODABLE
        if not (document.text or document.source):
            return EMPTY
        config = self.config
        lengths = [len(document.text)] if document.source is None else [len(document.source), len(document.text)]
        if min(lengths) < config.min_chars:
            return TOO_SHORT
        if config.max_chars is not None and max(lengths) > config.max_chars:
            return TOO_LONG
        if config.require and not self._has_required(document):
            return NOT_REQUIRED
        return None

    def _has_required(self, document: Document) -> bool:
        for name, wanted in self.config.require.items():
            value = document.fields.get(name)
            # In JSON, true is not 1.
            if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in wanted):
                return False
        return True


def select(
    documents: Iterable[Document], rule: FilterRule, first: np.ndarray | None, left_out: Counter[str]
) -> Iterator[Document]:
    """Yields the documents that are kept.

    Args:
        documents: In order. What one that is left out took from the input is added to the next.
        rule: The filters.
        first: bool, one for each document that the filters keep: no other came before it. None: not asked.
        left_out: Counts the others by reason.
    """
    number = carried_bytes = 0
    for document in documents:
        reason = rule.refuse(document)
        if reason is None and first is not None:
            reason, number = (None if first[number] else DUPLICATE), number + 1
        if reason is not None:
            left_out[reason] += 1
            carried_bytes += document.consumed_bytes
            continue
        document.consumed_bytes += carried_bytes
        carried_bytes = 0
        yield document
