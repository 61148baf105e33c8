"""Rows of tokens in numpy, raw and as a model takes them, and the meaning of ids. No torch.

    data  -->  TokenRows  --RowMaker of an objective-->  ModelRows  --loader-->  types.Batch

A row of an image is one document whose tokens, all 0, stand for its vectors; its pixels are beside.
Rows are raw: whole documents side by side, or text that is cut where a row ends. A sample id is
unique over the epochs of a run, so that functions of (seed, sample id) change from epoch to
epoch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

CROP_MULTIPLE = 8

IGNORE_INDEX = -100
"""Target id of a position that has no loss."""


# First axes of the arrays of rows: a value a row, or a value a row and position.
_ROW = {"axes": ("row",)}
_CELL = {"axes": ("row", "position")}


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Rows as they come from the shards; of pairs the target's, with their source.

    Rows are selected, merged and cropped by the axes of the fields: a new array is a line here.
    """

    # [B, W+1], the shards' dtype. The last column is a target only: the first token of another row.
    tokens: np.ndarray = field(metadata=_CELL)
    starts: np.ndarray  # int64 [any], ascending: starts of documents in the flattened `tokens`
    # int64 [B]: tokens of each row before padding. None: all
    num_tokens: np.ndarray | None = field(metadata=_ROW)
    sample_ids: np.ndarray = field(metadata=_ROW)  # int64 [B]
    # bool [B, W+1]: tokens that are targets. None: all
    loss_mask: np.ndarray | None = field(default=None, metadata=_CELL)
    # int16 [B, W+1]: number of a label, or mark of an answer; or IGNORE_INDEX
    labels: np.ndarray | None = field(default=None, metadata=_CELL)
    # uint8 [B, C, Y, X]: images, as augmented. None: text
    pixels: np.ndarray | None = field(default=None, metadata=_ROW)
    # float32 [B, 2]: number of the label of an image that was mixed in, and its share of the target,
    # at most a half. None: labels are whole.
    mixed: np.ndarray | None = field(default=None, metadata=_ROW)
    # Pairs only: [B, S+1], the last column is never read. Its document n belongs to document n of
    # the same row here.
    source: "TokenRows | None" = None

    def along(self, axis: str) -> dict[str, np.ndarray]:
        """Returns the arrays that have an axis, `row` or `position`, by field."""
        arrays = {}
        for one in fields(self):
            array = getattr(self, one.name)
            if array is not None and axis in one.metadata.get("axes", ()):
                arrays[one.name] = array
        return arrays


def _becomes(tensor: str) -> dict[str, Any]:
    """Returns the metadata of an array that becomes a tensor of a batch; its suffix says the axes (`types`)."""
    return {"tensor": tensor}


@dataclass(frozen=True, slots=True)
class SourceRows:
    """Input of an encoder."""

    tokens: np.ndarray = field(metadata=_becomes("tokens_BT"))  # int64
    # int64; None: 0..S-1 in every row
    positions: np.ndarray | None = field(default=None, metadata=_becomes("positions_BT"))
    # int32; None: each row is one document
    documents: np.ndarray | None = field(default=None, metadata=_becomes("documents_BT"))


@dataclass(frozen=True, slots=True)
class PairRows:
    """Two answers to each of A prompts, documents of a row."""

    # int64: tokens of the answers, at `ModelRows.target_positions`
    targets: np.ndarray = field(metadata=_becomes("targets_P"))
    # int64: 2 n for the chosen answer of pair n, 2 n + 1 for the other
    sides: np.ndarray = field(metadata=_becomes("sides_P"))
    keys: np.ndarray = field(metadata=_becomes("keys_A"))  # int64: hash of the tokens of the pair
    # float64: log-probabilities of both answers by the model that training began with. None: they are
    # not known yet.
    reference: np.ndarray | None = field(default=None, metadata=_becomes("reference_A2"))


@dataclass(frozen=True, slots=True)
class ModelRows:
    """Rows as a model takes them; what becomes a tensor is described in `types.Batch`.

    A target is a token, the number of a label, or a number whose meaning and place the row maker of
    the objective defines.
    """

    inputs: np.ndarray = field(metadata=_becomes("tokens_BT"))
    targets: np.ndarray = field(metadata=_becomes("targets_BT"))
    num_targets: int  # targets that are not IGNORE_INDEX
    sample_ids: np.ndarray  # int64 [B]
    positions: np.ndarray | None = field(default=None, metadata=_becomes("positions_BT"))
    documents: np.ndarray | None = field(default=None, metadata=_becomes("documents_BT"))
    prefix: np.ndarray | None = field(default=None, metadata=_becomes("prefix_BT"))
    target_positions: np.ndarray | None = field(default=None, metadata=_becomes("target_positions_P"))
    token_types: np.ndarray | None = field(default=None, metadata=_becomes("token_types_BT"))
    source: SourceRows | None = None  # input of the encoder of a model with two stacks
    pixels: np.ndarray | None = field(default=None, metadata=_becomes("pixels_BCYX"))
    mixed: np.ndarray | None = field(default=None, metadata=_becomes("mixed_P2"))
    pairs: PairRows | None = None  # answers to be compared; `targets` then count the pairs
    draws: np.ndarray | None = field(default=None, metadata=_becomes("draws_P"))
    num_padding: int = 0  # positions of padding, in the source too

    @property
    def num_tokens(self) -> int:
        """Tokens that the model reads: of two stacks source and target, and no padding."""
        return self.inputs.size + (0 if self.source is None else self.source.tokens.size) - self.num_padding


RowMaker = Callable[[TokenRows], ModelRows]
"""Makes of rows what a model reads and predicts: numpy, in the loader's threads, a pure function."""

WordFinder = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""`find(ids_BT, apart_BT)`: whether each token begins a word, bool [B, T]. Ids int64 [B, T]; apart,
bool [B, T]: the token begins a text. A row's first token begins both."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Meaning of the ids of a tokenizer; None: there is no such token."""

    size: int  # without ids that pad it to a multiple
    eos: int  # ends a document, in every shard
    special: np.ndarray  # bool [size]: whether an id is a special token
    pad: int | None = None
    bos: int | None = None
    start: int | None = None
    mask: int | None = None
    sentinels: tuple[int, ...] = ()  # ids of <extra_id_0>, <extra_id_1>, ...
    named: Mapping[str, int] = field(default_factory=dict)  # id of each special token by its content
    find_words: WordFinder | None = None  # None: not asked for


def cut_rows(rows: TokenRows, length: int) -> TokenRows:
    """Returns rows of running text cut into rows of `length` tokens, a divisor of theirs, one after another.

    The last column of a part is the first one of the next, as with rows of that length from the
    beginning.
    """
    assert rows.loss_mask is None and rows.labels is None and rows.source is None, "running text"
    num_rows, width = rows.tokens.shape
    parts, rest = divmod(width - 1, length)
    assert not rest, "rows are cut into whole ones"
    windows = np.lib.stride_tricks.sliding_window_view(rows.tokens, length + 1, axis=1)[:, ::length]
    row, column = np.divmod(rows.starts, width)
    part, place = np.divmod(column, length)
    first = (row * parts + part) * (length + 1) + place  # where the start is among the inputs
    last = (row * parts + part) * (length + 1) - 1  # and, of the first token of a part, in the part before it
    starts = np.concatenate([first[part < parts], last[(place == 0) & (part > 0)]])
    num_tokens = None
    if rows.num_tokens is not None:
        remaining = rows.num_tokens[:, None] - length * np.arange(parts)
        num_tokens = np.clip(remaining, 0, length + 1).reshape(-1)
    tokens = windows.reshape(num_rows * parts, length + 1)
    return TokenRows(tokens, np.sort(starts), num_tokens, np.repeat(rows.sample_ids, parts))


def select_rows(rows: TokenRows, chosen: np.ndarray) -> TokenRows:
    """Returns some rows, in ascending order. `chosen`: bool [B]."""
    width = rows.tokens.shape[1]
    row, column = np.divmod(rows.starts, width)
    inside = chosen[row]
    number = np.cumsum(chosen) - 1
    changed: dict[str, Any] = {"starts": number[row[inside]] * width + column[inside]}
    for name, array in rows.along("row").items():
        changed[name] = array[chosen]
    if rows.source is not None:
        changed["source"] = select_rows(rows.source, chosen)
    return replace(rows, **changed)


def crop_rows(rows: TokenRows) -> TokenRows:
    """Removes columns that are padding in every row, down to a multiple of `CROP_MULTIPLE`."""
    assert rows.num_tokens is not None, "rows of known length"
    width = rows.tokens.shape[1]
    longest = min(int(rows.num_tokens.max(initial=1)), width - 1)
    new_width = min(width, -(-longest // CROP_MULTIPLE) * CROP_MULTIPLE + 1)
    row, column = np.divmod(rows.starts, width)
    inside = column < new_width
    changed: dict[str, Any] = {"starts": row[inside] * new_width + column[inside]}
    for name, array in rows.along("position").items():
        changed[name] = array[:, :new_width]
    if rows.source is not None:
        changed["source"] = crop_rows(rows.source)
    return replace(rows, **changed)


def merge_rows(parts: Sequence[TokenRows], places: np.ndarray) -> TokenRows:
    """Puts the rows of all parts, one after another, at `places`, int64 [rows of all parts]."""
    if any(part.num_tokens is not None for part in parts):
        parts = [_with_counts(part) for part in parts]
    each = [part.along("row") for part in parts]
    for arrays in each:
        assert arrays.keys() == each[0].keys(), "sources of one mixture are packed alike"
    back = np.argsort(places)
    merged: dict[str, Any] = {"num_tokens": None}
    for name in each[0]:
        whole = np.concatenate([arrays[name] for arrays in each])
        merged[name] = whole[back]
    width = parts[0].tokens.shape[1]
    starts = []
    first = 0
    for part in parts:
        starts.append(part.starts + first * width)
        first += len(part.tokens)
    row, column = np.divmod(np.concatenate(starts), width)
    merged["starts"] = np.sort(places[row] * width + column)
    sources = [part.source for part in parts if part.source is not None]
    if sources:
        assert len(sources) == len(parts), "sources of one mixture are of one kind"
        merged["source"] = merge_rows(sources, places)
    return TokenRows(**merged)


def _with_counts(rows: TokenRows) -> TokenRows:
    """Returns rows with counts of tokens: only a part with skipped rows has them, a complete one is full."""
    if rows.num_tokens is not None:
        return rows
    num_rows, width = rows.tokens.shape
    return replace(rows, num_tokens=np.full(num_rows, width))
