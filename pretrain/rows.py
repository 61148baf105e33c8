"""Rows as they come from the shards, the loops over arrays of rows, and the meaning of ids. No torch.

    data  -->  TokenRows  --RowMaker of an objective-->  types.Batch, in numpy  --loader-->  in torch

A row of an image is one document whose tokens, all 0, stand for its vectors; its pixels are beside.
Rows are raw: whole documents side by side, or text that is cut where a row ends. A sample id is
unique over the epochs of a run, so that functions of (seed, sample id) change from epoch to
epoch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from typing import Any, Generic, Self, TypeVar

import numpy as np

CROP_MULTIPLE = 8

IGNORE_INDEX = -100
"""Target id of a position that has no loss."""

Array = TypeVar("Array")
"""`np.ndarray` or `torch.Tensor`."""


@dataclass(frozen=True, slots=True)
class ArrayFields(Generic[Array]):
    """Arrays whose suffixes say their axes (legend in `types`): a new one is a line in its class.

    Rows are selected, merged, cut and moved by loops over the fields. Metadata of a field:
        padding: Value in columns that are added, by default 0.
        whole: A rank with some columns has all of it.
        absent: Function of rows that returns the value that None stands for.
        place: Ascending indices into the flattened rows, where the arrays of the same axis belong.
    """

    def along(self, axes: str) -> dict[str, Array]:
        """Returns the arrays whose first axes are these, by field."""
        arrays = {}
        for one in fields(self):
            array = getattr(self, one.name)
            if hasattr(array, "dtype") and axes_of(one.name).startswith(axes):
                arrays[one.name] = array
        return arrays

    def changed(self, change: Callable[[Any], Any]) -> Self:
        """Returns the same with another for each array, and for each part that has arrays."""
        changed = {}
        for one in fields(self):
            part = getattr(self, one.name)
            if hasattr(part, "dtype") or isinstance(part, ArrayFields):
                changed[one.name] = change(part)
        return replace(self, **changed)

    def to(self, device: Any, *, non_blocking: bool = True) -> Self:
        """Returns the tensors on a device of torch, copied asynchronously from pinned memory."""
        return self.changed(lambda part: part.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """Returns the tensors in pinned memory, from which copies to a GPU are asynchronous."""
        return self.changed(lambda part: part.pin_memory())


def axes_of(name: str) -> str:
    """Returns the suffix of a field."""
    return name.rpartition("_")[2]


@dataclass(frozen=True, slots=True)
class Rows(ArrayFields[Array]):
    """Rows of tokens with what they have at every stage, from the shards to the model.

    Attributes:
        tokens_BT: Ids; of images zeros, one for each vector of a row.
        sample_ids_B: int64 identity of each row's sample. None: not from shards, or a source.
        pixels_BCYX: Images, uint8 as decoded and augmented, or floating point as normalised by
            `model.input`. None: the rows are text.
    """

    tokens_BT: Array
    _: KW_ONLY
    sample_ids_B: Array | None = None
    pixels_BCYX: Array | None = None

    def carried(self) -> dict[str, Any]:
        """Returns what a row maker leaves as it is, by field: all of this class but the tokens."""
        names = [one.name for one in fields(Rows) if one.name != "tokens_BT"]
        return {name: getattr(self, name) for name in names}


def _width(rows: Rows[np.ndarray]) -> int:
    return rows.tokens_BT.shape[1]


@dataclass(frozen=True, slots=True)
class TokenRows(Rows[np.ndarray]):
    """Rows as they come from the shards; of pairs the target's, with their source.

    `tokens_BT` has the dtype of the shards and T + 1 columns. The last one is a target only, the
    first token of another row; of a source it is never read.

    Attributes:
        starts: int64: starts of documents in the flattened tokens.
        num_tokens_B: int64 tokens of each row before padding. None: all.
        loss_mask_BT: bool; tokens that are targets. None: all.
        labels_BT: int16 number of a label, or mark of an answer, or whether a record is wanted; or
            IGNORE_INDEX.
        mixed_B2: float32 number of the label of an image that was mixed in, and its share of the
            target, at most a half. None: labels are whole.
        places_BT: int64 place of each token in its split, in the order of shards; -1: padding. None:
            not asked for.
        source: Source of pairs; its document n belongs to document n of the same row here.
    """

    sample_ids_B: np.ndarray
    starts: np.ndarray = field(metadata={"place": True})
    num_tokens_B: np.ndarray | None = field(default=None, metadata={"absent": _width})
    loss_mask_BT: np.ndarray | None = None
    labels_BT: np.ndarray | None = None
    mixed_B2: np.ndarray | None = None
    places_BT: np.ndarray | None = None
    source: "TokenRows | None" = None


RowsT = TypeVar("RowsT", bound=Rows[Any])

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
    assert rows.loss_mask_BT is None and rows.labels_BT is None and rows.source is None, "running text"
    num_rows, width = rows.tokens_BT.shape
    parts, rest = divmod(width - 1, length)
    assert not rest, "rows are cut into whole ones"
    row, column = np.divmod(rows.starts, width)
    part, place = np.divmod(column, length)
    first = (row * parts + part) * (length + 1) + place  # where the start is among the inputs
    last = (row * parts + part) * (length + 1) - 1  # and, of the first token of a part, in the part before it
    starts = np.concatenate([first[part < parts], last[(place == 0) & (part > 0)]])
    changed: dict[str, Any] = {}
    for name, array in rows.along("B").items():
        changed[name] = np.repeat(array, parts, axis=0)
    for name, array in rows.along("BT").items():
        windows = np.lib.stride_tricks.sliding_window_view(array, length + 1, axis=1)[:, ::length]
        changed[name] = windows.reshape(num_rows * parts, length + 1)
    if rows.num_tokens_B is not None:
        remaining = rows.num_tokens_B[:, None] - length * np.arange(parts)
        changed["num_tokens_B"] = np.clip(remaining, 0, length + 1).reshape(-1)
    return replace(rows, **changed, starts=np.sort(starts))


def select_rows(rows: TokenRows, chosen: np.ndarray) -> TokenRows:
    """Returns some rows, in ascending order. `chosen`: bool [B]."""
    firsts = (np.cumsum(chosen) - 1) * rows.tokens_BT.shape[1]
    changed: dict[str, Any] = {name: array[chosen] for name, array in rows.along("B").items()}
    changed |= move_places(rows, lambda row, at: np.where(chosen[row], firsts[row] + at, -1))
    if rows.source is not None:
        changed["source"] = select_rows(rows.source, chosen)
    return replace(rows, **changed)


def crop_rows(rows: TokenRows) -> TokenRows:
    """Removes columns that are padding in every row, down to a multiple of `CROP_MULTIPLE`."""
    assert rows.num_tokens_B is not None, "rows of known length"
    width = rows.tokens_BT.shape[1]
    longest = min(int(rows.num_tokens_B.max(initial=1)), width - 1)
    new_width = min(width, -(-longest // CROP_MULTIPLE) * CROP_MULTIPLE + 1)
    changed = move_places(rows, lambda row, at: np.where(at < new_width, row * new_width + at, -1))
    for name, array in rows.along("BT").items():
        changed[name] = array[:, :new_width]
    if rows.source is not None:
        changed["source"] = crop_rows(rows.source)
    return replace(rows, **changed)


def merge_rows(parts: Sequence[RowsT], places: np.ndarray) -> RowsT:
    """Puts the rows of all parts, of one width, one after another at `places`, int64 [all rows]."""
    back = np.argsort(places)
    merged: dict[str, Any] = {}
    for one in fields(parts[0]):
        values = [getattr(part, one.name) for part in parts]
        if one.metadata.get("place"):
            merged |= _merge_places(parts, one.name, places)
        elif any(isinstance(value, Rows) for value in values):
            merged[one.name] = merge_rows(values, places)
        elif axes_of(one.name).startswith("B") and any(value is not None for value in values):
            whole = [_present(part, one.name, one.metadata) for part in parts]
            merged[one.name] = np.concatenate(whole)[back]
    return replace(parts[0], **merged)


def _present(rows: Rows[np.ndarray], name: str, metadata: Mapping[str, Any]) -> np.ndarray:
    """Returns an array of rows, or what its absence stands for."""
    array: np.ndarray | None = getattr(rows, name)
    if array is not None:
        return array
    assert "absent" in metadata, f"all parts or none have {name}"
    return np.broadcast_to(metadata["absent"](rows), rows.tokens_BT.shape[: len(axes_of(name))])


def move_places(rows: Rows[Any], move: Callable[[Any, Any], Any]) -> dict[str, Any]:
    """Returns the places in the flattened rows, and the arrays that belong to them, after a move.

    `move(row, column)` returns the new places, and -1 for those that are left out.
    """
    width = rows.tokens_BT.shape[1]
    changed: dict[str, Any] = {}
    for one in fields(rows):
        places = getattr(rows, one.name)
        if one.metadata.get("place") and places is not None:
            moved = move(places // width, places % width)
            stays = moved >= 0
            changed |= {name: array[stays] for name, array in rows.along(axes_of(one.name)).items()}
            changed[one.name] = moved[stays]
    return changed


def _merge_places(parts: Sequence[RowsT], name: str, places: np.ndarray) -> dict[str, Any]:
    """Returns the places of all parts with their arrays; None, where a part has none."""
    together = parts[0].along(axes_of(name))
    if any(getattr(part, name) is None for part in parts):
        return dict.fromkeys(together)
    width = parts[0].tokens_BT.shape[1]
    moved = []
    first = 0
    for part in parts:
        row, column = np.divmod(getattr(part, name), width)
        moved.append(places[first + row] * width + column)
        first += len(part.tokens_BT)
    order = np.argsort(np.concatenate(moved))
    merged = {}
    for one in together:
        merged[one] = np.concatenate([getattr(part, one) for part in parts])[order]
    return merged | {name: np.concatenate(moved)[order]}
