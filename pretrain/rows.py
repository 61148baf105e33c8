"""Rows of tokens, in numpy: what the data layer yields, what objectives make of it, and what ids mean. No torch.

    data  -->  TokenRows or PairRows  --objective-->  ModelRows  --loader-->  types.Batch

Rows are raw: whole documents side by side, or text that is cut where a row ends. A sample id is unique over the epochs
of a run, so that whatever depends on (seed, sample id) changes from epoch to epoch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

IGNORE_INDEX = -100
"""Target id of a position that has no loss."""


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Rows as they come from the shards.

    Attributes:
        tokens: [B, W+1], the shards' dtype. The last column is only the target of the one before it: it is the first
            token of another row.
        starts: int64 [any], ascending: places in `tokens`, flattened, at which a document starts.
        num_tokens: int64 [B]: tokens of each row that are real; the rest is padding. None: all of them.
        sample_ids: int64 [B].
        loss_mask: bool [B, W+1]: tokens that are targets. None: all.
        labels: int16 [B, W+1]: number of the label that a token has, IGNORE_INDEX where it has none. None: no labels.
    """

    tokens: np.ndarray
    starts: np.ndarray
    num_tokens: np.ndarray | None
    sample_ids: np.ndarray
    loss_mask: np.ndarray | None = None
    labels: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class PairRows:
    """Rows of pairs: document n of a source row belongs to document n of the target row.

    Attributes:
        source: [B, S+1]; the last column is never read.
        target: [B, T+1].
    """

    source: TokenRows
    target: TokenRows


@dataclass(frozen=True, slots=True)
class SourceRows:
    """What an encoder reads; the fields of `types.Source`.

    Attributes:
        tokens: int64 [B, S].
        positions: int64 [B, S], or None: 0..S-1 in every row.
        documents: int32 [B, S], or None: each row is one document.
    """

    tokens: np.ndarray
    positions: np.ndarray | None = None
    documents: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class ModelRows:
    """Rows as a model takes them; the fields of `types.Batch`.

    Attributes:
        inputs: int64 [B, T].
        targets: int64 [B, T], IGNORE_INDEX where there is no loss: tokens, or numbers of labels. The label of a whole
            document is at its first token.
        positions: int64 [B, T], or None: 0..T-1 in every row.
        documents: int32 [B, T], or None: each row is one document; padding has negative numbers.
        prefix: bool [B, T]: tokens that all of their document sees under a causal mask. None: none.
        target_positions: int64 [P], ascending: indices into the flattened `targets` that have a loss, where they are
            few: the head is computed there only. None: everywhere.
        source: What the encoder reads, where the model has two stacks.
        num_targets: Targets that are not IGNORE_INDEX.
        num_padding: Positions that are padding, those of the source with them.
        sample_ids: int64 [B].
    """

    inputs: np.ndarray
    targets: np.ndarray
    num_targets: int
    sample_ids: np.ndarray
    positions: np.ndarray | None = None
    documents: np.ndarray | None = None
    prefix: np.ndarray | None = None
    target_positions: np.ndarray | None = None
    source: SourceRows | None = None
    num_padding: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens that the model reads: of two stacks source and target, and no padding."""
        return self.inputs.size + (0 if self.source is None else self.source.tokens.size) - self.num_padding


WordFinder = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""`find(ids_BT, apart_BT)`: whether each token begins a word, bool [B, T]. Ids int64 [B, T]; apart, bool [B, T]: the
token begins a text. A row's first token begins both."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What the ids of a tokenizer mean.

    Attributes:
        size: Ids, those that pad it to a multiple left out.
        eos: Ends a document, in every shard.
        special: bool [size]: whether an id is a special token.
        pad, bos, start, mask: As `model.special_tokens`; None: there is no such token.
        sentinels: Ids of <extra_id_0>, <extra_id_1>, ...
        named: Id of each special token by its content.
        find_words: Tells which tokens of rows begin a word. None: not asked for.
    """

    size: int
    eos: int
    special: np.ndarray
    pad: int | None = None
    bos: int | None = None
    start: int | None = None
    mask: int | None = None
    sentinels: tuple[int, ...] = ()
    named: Mapping[str, int] = field(default_factory=dict)
    find_words: WordFinder | None = None


def select_rows(rows: TokenRows, chosen: np.ndarray) -> TokenRows:
    """Returns some rows, in ascending order. `chosen`: bool [B]."""
    width = rows.tokens.shape[1]
    row, column = np.divmod(rows.starts, width)
    kept = chosen[row]
    number = np.cumsum(chosen) - 1
    return TokenRows(
        tokens=rows.tokens[chosen],
        starts=number[row[kept]] * width + column[kept],
        num_tokens=None if rows.num_tokens is None else rows.num_tokens[chosen],
        sample_ids=rows.sample_ids[chosen],
        loss_mask=None if rows.loss_mask is None else rows.loss_mask[chosen],
        labels=None if rows.labels is None else rows.labels[chosen],
    )
