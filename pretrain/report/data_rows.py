"""Rows of a stream, in words: what each document of a row says, where it lies, and what of it is a target.

    TokenRows or PairRows  ->  borders of documents  ->  text of each stretch of one kind  ->  ShownRow

A stretch is what is shown in one style: plain text, what is learned of a record and what is not, source and target of a
pair. What an objective makes of a row (masks, sentinels) are further kinds of stretch. Not here: colours and terminals
(data_show_text.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from tokenizers import Tokenizer

from pretrain.objective.causal import causal_rows
from pretrain.objective.seq2seq import pair_rows
from pretrain.rows import IGNORE_INDEX, PairRows, TokenRows


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive tokens of one kind.

    Attributes:
        kind: `text`; `learned` or `context` (not learned) of a record; `source` or `target` of a pair.
        num_tokens: Tokens.
        text: What they say, special tokens by their names.
    """

    kind: str
    num_tokens: int
    text: str


@dataclass(frozen=True, slots=True)
class ShownDocument:
    """A document, or what a row holds of it.

    Attributes:
        first: Its first token in the row; of a pair, of the target row.
        num_tokens: Tokens in the row.
        position: Position of the first token, as the model counts them.
        goes_on: It goes on after the row.
        stretches: In order; of a pair the source first.
    """

    first: int
    num_tokens: int
    position: int
    goes_on: bool
    stretches: tuple[Stretch, ...]


@dataclass(frozen=True, slots=True)
class ShownRow:
    """A row.

    Attributes:
        sample_id: As in the ledger.
        num_tokens: T.
        num_padding: Tokens behind the last document.
        num_targets: Tokens that have a loss.
        starts_inside: The first document began in an earlier row.
        source_padding: Of a pair: the same of the source row. None: not a pair.
        documents: In order.
    """

    sample_id: int
    num_tokens: int
    num_padding: int
    num_targets: int
    starts_inside: bool
    source_padding: int | None
    documents: tuple[ShownDocument, ...]


def describe_rows(rows: TokenRows | PairRows, tokenizer: Tokenizer, document_mask: bool = True) -> list[ShownRow]:
    """Returns rows in words.

    Args:
        rows: From a stream.
        tokenizer: Its tokenizer.
        document_mask: As `data.document_mask`.
    """
    target = rows.target if isinstance(rows, PairRows) else rows
    # What the decoder reads first is no part of the data.
    packed = pair_rows(rows, 0) if isinstance(rows, PairRows) else causal_rows(rows, document_mask)
    shown = []
    for number in range(len(target.tokens)):
        mine = _Row(target, number)
        spans = mine.spans()
        source: _Row | None = None
        stretches: list[Sequence[_Ids]] = [mine.stretches(*span) for span in spans]
        if isinstance(rows, PairRows):
            source = _Row(rows.source, number)
            pairs = zip(source.spans(), spans, strict=True)
            stretches = [(source.stretch(*theirs, "source"), mine.stretch(*ours, "target")) for theirs, ours in pairs]
        positions = np.arange(mine.width) if packed.positions is None else packed.positions[number]
        shown.append(
            ShownRow(
                sample_id=int(target.sample_ids[number]),
                num_tokens=mine.width,
                num_padding=mine.width - mine.filled,
                num_targets=int((packed.targets[number] != IGNORE_INDEX).sum()),
                starts_inside=mine.starts_inside,
                source_padding=None if source is None else source.width - source.filled,
                documents=tuple(
                    ShownDocument(
                        first=first,
                        num_tokens=end - first,
                        position=int(positions[first]),
                        goes_on=end == mine.width and mine.goes_on,
                        stretches=tuple(Stretch(kind, len(ids), text) for kind, ids, text in _spell(parts, tokenizer)),
                    )
                    for (first, end), parts in zip(spans, stretches, strict=True)
                ),
            )
        )
    return shown


_Ids = tuple[str, list[int]]
"""Kind of a stretch, and its tokens."""


class _Row:
    """One row of one side."""

    def __init__(self, rows: TokenRows, number: int) -> None:
        whole = rows.tokens.shape[1]
        self.width = whole - 1
        low, high = np.searchsorted(rows.starts, (number * whole, (number + 1) * whole))
        starts = (rows.starts[low:high] - number * whole).tolist()
        filled = whole if rows.num_tokens is None else int(rows.num_tokens[number])
        self.filled = min(filled, self.width)
        self.goes_on = filled == whole and self.width not in starts
        self.starts_inside = bool(self.filled) and 0 not in starts
        self._inner = [start for start in starts if 0 < start < self.filled]
        self._tokens = rows.tokens[number]
        self._learned = None if rows.learned is None else rows.learned[number]

    def spans(self) -> list[tuple[int, int]]:
        """Returns the first token of each document, and the one after its last."""
        return list(pairwise([0, *self._inner, self.filled])) if self.filled else []

    def stretch(self, first: int, end: int, kind: str) -> _Ids:
        """Returns the tokens of a document as one stretch."""
        return kind, self._tokens[first:end].tolist()

    def stretches(self, first: int, end: int) -> Sequence[_Ids]:
        """Returns the tokens of a document, cut where learned ones begin and end."""
        if self._learned is None:
            return [self.stretch(first, end, "text")]
        flags = self._learned[first:end]
        cuts = [0, *(np.flatnonzero(flags[1:] != flags[:-1]) + 1).tolist(), len(flags)]
        return [self.stretch(first + a, first + b, "learned" if flags[a] else "context") for a, b in pairwise(cuts)]


def _spell(parts: Sequence[_Ids], tokenizer: Tokenizer) -> list[tuple[str, list[int], str]]:
    """Returns the stretches of a document with their texts, which together are the text of the document."""
    spelled, before, ids_before = [], "", list[int]()
    for kind, ids in parts:
        if kind in ("source", "target"):
            spelled.append((kind, ids, _decode(tokenizer, ids)))
            continue
        ids_before = ids_before + ids
        whole = _decode(tokenizer, ids_before)
        # A character whose bytes are cut by the border of two stretches is shown as broken on both sides.
        text = whole[len(before) :] if whole.startswith(before) else _decode(tokenizer, ids)
        spelled.append((kind, ids, text))
        before = whole
    return spelled


def _decode(tokenizer: Tokenizer, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False))
