"""Reads a plan as the ranks of a run would, with kills, and accounts for every sample.

    world size, rows  ->  by step, then rank, then micro-batch, as in data/loader.py
    at some steps     ->  all that was opened or read ahead is dropped; only the cursor is kept
    each part         ->  sample ids, hashes, owned tokens  ->  Reading: sums, each sample once

Deliberately not here: processes. A rank keeps nothing between two reads that another could miss, so
one thread after another reads what it would.
"""

import gc
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from pretrain.config.data import BatchPlan
from pretrain.data.order import random_bits, rank_bits
from pretrain.data.prefetch import Prefetcher
from pretrain.datacheck.hash import RowHashes, TokenSums, hash_rows
from pretrain.datacheck.reading import MAX_MICRO, ReadingPlan
from pretrain.datacheck.shard_files import Tick
from pretrain.errors import DataError

THREADS = 2
PREFETCH = 4


@dataclass(frozen=True, slots=True)
class Reading:
    """A plan, read once: sums over its rows, and over the tokens that they own (hash.py)."""

    world_sizes: tuple[int, ...]  # ranks; of several, those of the starts in turn
    restarts: int  # kills of all ranks, each followed by a start from the cursor
    num_rows: int
    num_samples: int  # of the plan; the other rows are of the next epoch
    num_tokens: int
    token_sum: int
    hashes: RowHashes
    seconds: float


def not_exactly_once(course: ReadingPlan, world_sizes: Sequence[int], what: str) -> DataError:
    """Returns the error of a reading that is wrong."""
    return DataError(
        f"not exactly once: {what}",
        where=f"{course.name}, world size {', '.join(map(str, world_sizes))}",
        fix="verify again; if nothing changes the folder meanwhile, report this as a bug",
    )


def plan_ranks(rows: int, world_size: int) -> BatchPlan:
    """Divides a global batch over ranks, in micro-batches of at most `MAX_MICRO` rows."""
    share = rows // world_size
    micro = max(size for size in range(1, min(share, MAX_MICRO) + 1) if share % size == 0)
    return BatchPlan(rows, share, micro, share // micro)


def rank_rows(plan: BatchPlan, world_size: int, number: int) -> range:
    """Returns the positions of part `number` of a reading: by step, then rank, then micro-batch."""
    step, rest = divmod(number, world_size * plan.accumulation)
    rank, micro = divmod(rest, plan.accumulation)
    first = step * plan.rows + rank * plan.rows_per_rank + micro * plan.micro
    return range(first, first + plan.micro)


def choose_kills(num_steps: int, restarts: int, world_sizes: Sequence[int]) -> list[int]:
    """Returns steps before which all ranks are killed: up to `restarts` of 1 to `num_steps` - 1."""
    if num_steps < 2:
        return []
    order = rank_bits(random_bits("kills", (num_steps, *world_sizes), num_steps - 1))
    return sorted((order[:restarts] + 1).tolist())


def read_course(
    course: ReadingPlan,
    world_sizes: tuple[int, ...],
    *,
    limit: int,
    restarts: int,
    sums: TokenSums,
    tick: Tick,
) -> Reading:
    """Reads the first `limit` rows of a plan, with at most `restarts` kills.

    Of several world sizes each start takes the next. `tick` is called with the rows read.

    Raises:
        DataError: A shard is damaged; or a sample came twice, or never.
    """
    started = time.perf_counter()
    num_steps = -(-limit // course.batch_rows)
    kills = choose_kills(num_steps, restarts, world_sizes)
    account = _Account(course, world_sizes)
    num_tokens = token_sum = 0
    hashes = RowHashes()
    # Without earlier objects, a collection is cheap. Each start needs one: a stream is a cycle, and
    # would keep its bins in memory and the shards mapped.
    gc.freeze()
    try:
        for number, steps in enumerate(pairwise([0, *kills, num_steps])):
            world_size = world_sizes[number % len(world_sizes)]
            for part in _read_parts(course, world_size, range(*steps), limit, sums):
                account.add(part.sample_ids)
                num_tokens += part.num_tokens
                token_sum += part.token_sum
                hashes += part.hashes
                tick(len(part.sample_ids))
            gc.collect()
    finally:
        gc.unfreeze()
    num_samples = account.check(limit)
    token_sum %= 2**64
    seconds = time.perf_counter() - started
    counts = (limit, num_samples, num_tokens, token_sum)
    return Reading(world_sizes, len(kills), *counts, hashes, seconds)


@dataclass(frozen=True, slots=True)
class _Part:
    """Sample ids of a micro-batch, and the sums over it."""

    sample_ids: np.ndarray
    num_tokens: int
    token_sum: int
    hashes: RowHashes


def _read_parts(course: ReadingPlan, world_size: int, steps: range, limit: int, sums: TokenSums) -> Iterator[_Part]:
    """Yields the micro-batches of all ranks from a start to the next kill."""
    plan = plan_ranks(course.batch_rows, world_size)
    read = course.open()

    def read_part(number: int) -> _Part:
        rows = rank_rows(plan, world_size, number)
        cursor = steps.start * plan.rows
        positions = range(cursor + rows.start, min(cursor + rows.stop, limit))
        if not positions:
            return _Part(np.empty(0, np.int64), 0, 0, RowHashes())
        part = read(positions)
        low, high = course.owned(part)
        columns = np.arange(part.tokens_BT.shape[1])
        owned = part.tokens_BT[(columns >= low[:, None]) & (columns < high[:, None])]
        return _Part(part.sample_ids_B, len(owned), sums(owned), hash_rows(part))

    prefetcher = Prefetcher(read_part, depth=PREFETCH, workers=THREADS)
    try:
        for _ in range(len(steps) * world_size * plan.accumulation):
            yield prefetcher.take()
    finally:
        prefetcher.close()


class _Account:
    """Books the samples of a reading, each at most once."""

    def __init__(self, course: ReadingPlan, world_sizes: tuple[int, ...]) -> None:
        self._course, self._world_sizes = course, world_sizes
        self._seen = np.zeros(course.num_samples, dtype=bool)
        self._later: set[int] = set()

    def add(self, sample_ids: np.ndarray) -> None:
        """Books samples. Raises: DataError: One came before."""
        later = sample_ids[sample_ids >= len(self._seen)].tolist()
        ids = sample_ids[sample_ids < len(self._seen)]
        again = [*ids[self._seen[ids]].tolist(), *self._later.intersection(later)]
        if again:
            raise self._error(f"sample {again[0]} came twice")
        self._seen[ids] = True
        self._later.update(later)

    def check(self, num_rows: int) -> int:
        """Returns the number of samples. Raises: DataError: Rows share one, or one is missing."""
        num_samples = int(self._seen.sum())
        num_different = num_samples + len(self._later)
        if num_different < num_rows:
            raise self._error(f"{num_rows} rows hold only {num_different} different samples")
        if num_rows == self._course.num_rows and num_samples < len(self._seen):
            raise self._error(f"sample {int(np.argmin(self._seen))} never came")
        return num_samples

    def _error(self, what: str) -> DataError:
        return not_exactly_once(self._course, self._world_sizes, what)
