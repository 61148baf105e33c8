"""Batches for the model: the rows of this rank, assembled ahead of time.

    step at position p  -->  global batch = positions [p, p + rows of the step), without skipped ones (order.py)
    rank r              -->  its contiguous share; micro-batch m is the m-th slice of that
                             ranks that share rows have the same, and each some columns of them
    stream.read         -->  the objective's rows  -->  Batch of tensors, on `workers` threads,
                             `prefetch` ahead

The cursor of a run is one integer, the position of the next step that was not trained; it is the
trainer's, and steps prefetched beyond it are dropped. Not here: state to save, and any order of its
own (`order.py`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, fields, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pretrain.config.data import BatchPlan, StepRows
from pretrain.data.mixture import RowSource
from pretrain.data.order import NO_SKIPS, SkipRanges
from pretrain.data.prefetch import Prefetcher
from pretrain.data.stream import SplitStream
from pretrain.rows import ArrayFields, TokenRows, crop_rows, cut_rows, merge_rows, move_places
from pretrain.types import Batch, Columns, ModelRows, RowMaker, StackRowsT
from pretrain.utils.rng import mix64

# A digest of which samples a step trained on, equal for every world size.
#
#     each rank:  sum over its rows of mix64(sample id, row of the global batch), mod 2**64
#     the step:   sum over the ranks, mod 2**64
#
# A sum commutes, so the cut into ranks and micro-batches does not matter; the row is mixed in, so
# the order of the rows does. It detects mistakes, not adversaries. Images have a second digest, of
# the pixels that the model reads, with a hash of them in place of the sample id. The all-reduce adds
# float64: `split64` makes two exact halves of a digest, `join64` puts their sums together.


def digest_rows(sample_ids: np.ndarray, rows: np.ndarray) -> int:
    """Returns the digest of rows, by sample id and row of the global batch, int64 [rows] both."""
    mixed = mix64(mix64(sample_ids.astype(np.uint64)) ^ rows.astype(np.uint64))
    return int(mixed.sum(dtype=np.uint64))


def hash_pixels(pixels: np.ndarray) -> np.ndarray:
    """Returns a hash of each image, uint8 [B, C, Y, X]; int64 [B].

    NH of UMAC (Black et al. 1999): sum of (x + k)(y + l) over pairs of 4-byte words, keyed by place. A
    cryptographic hash takes a tenth of the time of decoding an image.
    """
    num_bytes = pixels[0].size
    half = -(-num_bytes // 8)
    words = np.zeros(2 * half, dtype="<u4")
    keys = _hash_keys(half)
    hashes = np.empty(len(pixels), dtype=np.uint64)
    for row, image in enumerate(pixels):
        words.view(np.uint8)[:num_bytes] = image.reshape(-1)
        keyed = words + keys
        hashes[row] = (keyed[:half].astype(np.uint64) * keyed[half:]).sum(dtype=np.uint64)
    return mix64(hashes).view(np.int64)


@lru_cache(4)
def _hash_keys(half: int) -> np.ndarray:
    return mix64(np.arange(half, dtype=np.uint64)).astype("<u8").view("<u4")


def split64(digest: int) -> tuple[float, float]:
    """Returns the high and low 32 bits; float64 adds 2**21 ranks of them exactly."""
    return float(digest >> 32), float(digest & 0xFFFFFFFF)


def join64(high: float, low: float) -> int:
    """Returns the digest whose halves, summed over the ranks, are `high` and `low`."""
    return ((int(high) << 32) + int(low)) % 2**64


@dataclass(frozen=True, slots=True)
class StepCounts:
    """Counters of rows: a rank's are the sums over its micro-batches, a step's over its ranks.

    Targets have a loss; tokens are those that the model reads, of two stacks source and target,
    without padding; skipped rows could not be read; the digest is that of the sample ids, that of
    pixels 0 for text.
    """

    num_targets: int = 0
    num_tokens: int = 0
    num_skipped: int = 0
    digest: int = 0
    pixel_digest: int = 0

    def __add__(self, other: "StepCounts") -> "StepCounts":
        return StepCounts(
            self.num_targets + other.num_targets,
            self.num_tokens + other.num_tokens,
            self.num_skipped + other.num_skipped,
            (self.digest + other.digest) % 2**64,
            (self.pixel_digest + other.pixel_digest) % 2**64,
        )

    def digests(self) -> dict[str, str]:
        """Returns the digests of the ledger in 16 hex digits: `digest`, and of images `pixels`."""
        digests = {"digest": self.digest, "pixels": self.pixel_digest}
        return {name: f"{digest:016x}" for name, digest in digests.items() if digest or name == "digest"}

    def pack(self) -> tuple[float, ...]:
        """Returns the counters as float64 values that an all-reduce adds exactly."""
        digests = (*split64(self.digest), *split64(self.pixel_digest))
        return (self.num_targets, self.num_tokens, self.num_skipped, *digests)

    @staticmethod
    def unpack(values: Sequence[float]) -> "StepCounts":
        """Returns the counters whose packed values, summed over the ranks, are `values`."""
        num_targets, num_tokens, num_skipped, *halves = values
        digests = (join64(*halves[:2]), join64(*halves[2:]))
        return StepCounts(int(num_targets), int(num_tokens), int(num_skipped), *digests)


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One optimizer step of one rank: its micro-batches, and counters of its rows.

    The global batch begins at `position`; `next_position` is the cursor once it is trained.
    """

    position: int
    next_position: int
    micro_batches: list[Batch]
    counts: StepCounts

    @property
    def sample_ids(self) -> tuple[int, ...]:
        """Sample ids of this rank's rows, in order."""
        return tuple(sample for batch in self.micro_batches for sample in batch.sample_ids())


@dataclass(eq=False, repr=False)
class TrainLoader:
    """Iterates for ever over the steps of one rank, from any position.

    `start_step` steps of the run are done. `start_position` is the cursor, the `next_position` of
    the last one. `workers` threads keep `prefetch` micro-batches ready, at least those of the first
    step. `crop` leaves out the columns
    that are padding in all rows of a micro-batch, `pin_memory` pins the tensors for asynchronous
    copies to a GPU, and `stop` ends a wait for data when it returns True. `length_at` returns the
    length that the rows of a step are cut to; None: they are not cut. `window_at` returns the
    attention window of a step (`Batch.window`); None: no step has one. `columns` are those of this
    rank, where several share rows: `rank` and `world_size` then number the groups of such ranks.
    """

    stream: RowSource
    make_rows: RowMaker
    plan: BatchPlan
    _: KW_ONLY
    rank: int
    world_size: int
    start_step: int = 0
    start_position: int = 0
    skips: SkipRanges = NO_SKIPS
    workers: int = 1
    prefetch: int = 4
    crop: bool = False
    pin_memory: bool = False
    stop: Callable[[], bool] = lambda: False
    length_at: Callable[[int], int] | None = None
    window_at: Callable[[int], int | None] | None = None
    columns: Columns | None = None

    def __post_init__(self) -> None:
        assert self.plan.rows == self.plan.rows_per_rank * self.world_size
        assert 0 <= self.rank < self.world_size
        self._steps = self.plan.steps or StepRows([(self.plan.rows, 0)])
        # Place of the first row of the run, where no steps were left out.
        self._origin = self.skips.place_of(self.start_position) - self._steps.before(self.start_step)
        self._step = self.start_step
        self._at_once = self.plan.micro * self.world_size  # rows of a micro-batch of every rank
        depth = max(self.prefetch, self.plan.accumulation)
        self._prefetcher = Prefetcher(self._assemble, depth=depth, workers=self.workers, stop=self.stop)

    @property
    def wait_s(self) -> float:
        """Seconds that `next` has waited for data so far."""
        return self._prefetcher.wait_s

    def __iter__(self) -> Iterator[StepBatch]:
        return self

    def __next__(self) -> StepBatch:
        """Returns the next step. Raises: DataError; StopIteration (closed); WaitStoppedError."""
        rows = self._steps.at(self._step)
        place = self._origin + self._steps.before(self._step)
        parts = [self._prefetcher.take() for _ in range(rows // self._at_once)]
        self._step += 1
        return StepBatch(
            position=self.skips.position_of(place),
            next_position=self.skips.position_of(place + rows),
            micro_batches=[batch for batch, _ in parts],
            counts=sum((counts for _, counts in parts), StepCounts()),
        )

    def restarted(self, step: int, position: int, skips: SkipRanges) -> "TrainLoader":
        """Stops this loader; returns one that starts elsewhere, with other skips."""
        self.close()
        return replace(self, start_step=step, start_position=position, skips=skips)

    def close(self) -> None:
        """Stops the threads and joins them."""
        self._prefetcher.close()

    def _assemble(self, number: int) -> tuple[Batch, StepCounts]:
        plan, steps = self.plan, self._steps
        row = steps.before(self.start_step) + number * self._at_once
        step = steps.step_of(row)
        micro = (row - steps.before(step)) // self._at_once
        first_row = self.rank * (steps.at(step) // self.world_size) + micro * plan.micro
        first = self._origin + steps.before(step) + first_row
        parts = [self.stream.read(span) for span in self.skips.spans(range(first, first + plan.micro))]
        rows = parts[0] if len(parts) == 1 else merge_rows(parts, np.arange(plan.micro))
        read = crop_rows(rows) if self.crop else rows
        read = read if self.length_at is None else cut_rows(read, self.length_at(step))
        made = self.make_rows(read)
        places = np.arange(first_row, first_row + plan.micro)
        digest = digest_rows(rows.sample_ids_B, places)
        pixels = made.pixels_BCYX
        pixel_digest = 0 if pixels is None else digest_rows(hash_pixels(pixels), places)
        counted = (made.num_targets(), made.num_tokens(), count_skipped(rows))
        counts = StepCounts(*counted, digest, pixel_digest)
        if self.columns is not None and self.columns.rank:
            counts = StepCounts()  # the first of the ranks that share the rows has counted them
        batch = build_batch(made, self.columns, pin_memory=self.pin_memory)
        return batch if self.window_at is None else replace(batch, window=self.window_at(step)), counts


@dataclass(frozen=True, eq=False, repr=False)
class ValidationLoader:
    """Iterates over a split in its fixed order; every rank gets the same number of batches.

    Each iteration starts from the beginning, and reads the first `max_tokens` of the split (None:
    all); the other options are those of `TrainLoader`.
    """

    stream: SplitStream
    make_rows: RowMaker
    _: KW_ONLY
    micro: int
    rank: int
    world_size: int
    max_tokens: int | None = None
    crop: bool = False
    pin_memory: bool = False
    columns: Columns | None = None

    def __len__(self) -> int:
        """Returns the number of batches, the same on every rank."""
        # ZeRO-3 gathers weights in each forward, so all ranks must run as many: those that have run
        # out of windows get rows without targets.
        return -(-self.stream.num_windows(self.max_tokens) // (self.micro * self.world_size))

    def __iter__(self) -> Iterator[Batch]:
        """Yields the batches. Raises: DataError: A shard is missing or damaged."""
        prefetcher = Prefetcher(self._assemble, depth=2, workers=1, total=len(self))
        try:
            for _ in range(len(self)):
                yield prefetcher.take()
        finally:
            prefetcher.close()

    def _assemble(self, number: int) -> Batch:
        first = (number * self.world_size + self.rank) * self.micro
        rows = self.stream.read_windows(range(first, first + self.micro), self.max_tokens)
        made = self.make_rows(crop_rows(rows) if self.crop else rows)
        return build_batch(made, self.columns, pin_memory=self.pin_memory)


def count_skipped(rows: TokenRows) -> int:
    """Returns the number of skipped rows of a training batch: those without a single token."""
    return 0 if rows.num_tokens_B is None else int((rows.num_tokens_B == 0).sum())


def build_batch(made: ModelRows, columns: Columns | None = None, *, pin_memory: bool = False) -> Batch:
    """Returns the tensors of an objective's rows, or of some columns of them."""
    batch: Batch = _tensors(made)
    if columns is not None:
        batch = cut_columns(batch, columns)
    return batch.pin_memory() if pin_memory else batch


def _tensors(part: Any) -> Any:
    if isinstance(part, ArrayFields):
        return part.changed(_tensors)
    return torch.from_numpy(np.ascontiguousarray(part))


def cut_columns(rows: StackRowsT, columns: Columns) -> StackRowsT:
    """Returns the columns that a rank has of whole text rows on the host, a batch or its source.

    Rows are padded to equal parts: padding is no target, and no token of the row sees it.
    """
    num_rows, length = rows.tokens_BT.shape
    changed: dict[str, Any] = {"columns": columns}
    if rows.positions_BT is None:
        rows = replace(rows, positions_BT=torch.arange(length).expand(num_rows, length))
    if rows.documents_BT is None and rows.lengths_B is None and length % columns.ranks:
        changed["lengths_B"] = torch.full((num_rows,), length, dtype=torch.int32)
    rules = {one.name: one.metadata for one in fields(rows)}
    for name, whole_BT in rows.along("BT").items():
        cut = columns.fill if rules[name].get("whole") else columns.take
        changed[name] = cut(whole_BT, rules[name].get("padding", 0))
    first, width = columns.rank * columns.width(length), columns.width(length)

    def move(row_P: Tensor, column_P: Tensor) -> Tensor:
        is_here_P = (column_P >= first) & (column_P < first + width)
        return torch.where(is_here_P, row_P * width + column_P - first, -1)

    changed |= move_places(rows, move)
    if isinstance(rows, Batch) and rows.source is not None:
        changed["source"] = cut_columns(rows.source, columns)
    return replace(rows, **changed)
