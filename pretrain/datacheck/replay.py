"""Reads a course as the ranks of a run would, some of them killed on the way, and keeps account of every sample.

    world size, rows a step  ->  step by step, rank by rank, micro-batch by micro-batch, as data/loader.py cuts them
    at some steps            ->  all that was opened or read ahead is dropped; only the cursor is kept
    each part                ->  sample ids, hashes, owned tokens  ->  Reading: sums, and whether each came exactly once

Deliberately not here: processes. A rank holds nothing between two reads that another could miss, so one thread after
another reads what it would.
"""

import contextlib
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
from pretrain.datacheck.progress_bar import Tick
from pretrain.datacheck.reading import MAX_MICRO, Read, ReadingPlan
from pretrain.errors import DataError
from pretrain.rows import PairRows

THREADS = 2
PREFETCH = 4

_REPORT = "verify again; if nothing changes the folder meanwhile, report this as a bug"


@dataclass(frozen=True, slots=True)
class Reading:
    """A course, read once.

    Attributes:
        world_sizes: Ranks; of several, those of the starts in turn.
        restarts: Times that all ranks were killed and went on from the cursor.
        num_rows: Rows read.
        num_samples: Samples of the course that came.
        num_tokens: Tokens that they own.
        token_sum: Sum over these tokens (hash.py).
        hashes: Hashes of the rows.
        seconds: It took.
    """

    world_sizes: tuple[int, ...]
    restarts: int
    num_rows: int
    num_samples: int
    num_tokens: int
    token_sum: int
    hashes: RowHashes
    seconds: float


def plan_ranks(rows: int, world_size: int) -> BatchPlan:
    """Cuts a global batch over ranks, in micro-batches of at most `MAX_MICRO` rows."""
    share = rows // world_size
    micro = max(size for size in range(1, min(share, MAX_MICRO) + 1) if share % size == 0)
    return BatchPlan(rows, share, micro, share // micro)


def rank_rows(plan: BatchPlan, world_size: int, number: int) -> range:
    """Returns the positions of part `number` of a reading: step by step, rank by rank, micro-batch by micro-batch."""
    step, rest = divmod(number, world_size * plan.accumulation)
    rank, micro = divmod(rest, plan.accumulation)
    first = step * plan.rows + rank * plan.rows_per_rank + micro * plan.micro
    return range(first, first + plan.micro)


def choose_kills(num_steps: int, restarts: int, world_sizes: Sequence[int]) -> list[int]:
    """Returns the steps before which all ranks are killed: up to `restarts` of 1 to `num_steps` - 1, ascending."""
    if num_steps < 2:
        return []
    order = rank_bits(random_bits("kills", (num_steps, *world_sizes), num_steps - 1))
    return sorted((order[:restarts] + 1).tolist())


def read_course(
    course: ReadingPlan, world_sizes: tuple[int, ...], *, limit: int, restarts: int, sums: TokenSums, tick: Tick
) -> Reading:
    """Reads the first `limit` rows of a course.

    Args:
        course: What is read.
        world_sizes: Ranks, that divide a global batch; of several, each start has the next.
        limit: Rows, at most those of the course.
        restarts: Kills, at most.
        sums: For the owned tokens.
        tick: Called with the number of rows read.

    Raises:
        DataError: A shard is damaged; or a sample came twice, or never.
    """
    started = time.perf_counter()
    rows, account = course.batch_rows, _Account(course, world_sizes)
    num_steps = -(-limit // rows)
    kills = choose_kills(num_steps, restarts, world_sizes)
    with _cheap_collections():
        for number, (first_step, last_step) in enumerate(pairwise([0, *kills, num_steps])):
            attempt = _Attempt(course, world_sizes[number % len(world_sizes)], first_step * rows, limit, sums)
            prefetcher = Prefetcher(attempt.read_part, depth=PREFETCH, workers=THREADS)
            try:
                for _ in range((last_step - first_step) * attempt.parts_a_step):
                    part = prefetcher.take()
                    account.add(part)
                    tick(len(part.sample_ids))
            finally:
                prefetcher.close()
            del attempt, prefetcher
            gc.collect()
    num_samples = account.check(limit)
    total, seconds = account.total, time.perf_counter() - started
    return Reading(
        world_sizes, len(kills), limit, num_samples, total.num_tokens, total.token_sum, total.hashes, seconds
    )


@contextlib.contextmanager
def _cheap_collections() -> Iterator[None]:
    """Collections within look at what was made within: a stream is a cycle, and would keep the shards of every start
    mapped, and its bins in memory."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@dataclass(frozen=True, slots=True)
class _Part:
    """What is kept of a micro-batch."""

    sample_ids: np.ndarray
    num_tokens: int
    token_sum: int
    hashes: RowHashes


_NOTHING = _Part(np.empty(0, np.int64), 0, 0, RowHashes())


class _Attempt:
    """The ranks of a run from a start to the next kill."""

    def __init__(self, course: ReadingPlan, world_size: int, cursor: int, limit: int, sums: TokenSums) -> None:
        self._course, self._cursor, self._limit, self._sums = course, cursor, limit, sums
        self._plan, self._world_size = plan_ranks(course.batch_rows, world_size), world_size
        self._read: Read = course.open()

    @property
    def parts_a_step(self) -> int:
        """Micro-batches of a step, over all ranks."""
        return self._world_size * self._plan.accumulation

    def read_part(self, number: int) -> _Part:
        """Reads micro-batch `number`, counted over all ranks from the start. Raises: DataError: A shard is damaged."""
        rows = rank_rows(self._plan, self._world_size, number)
        positions = range(self._cursor + rows.start, min(self._cursor + rows.stop, self._limit))
        if not positions:
            return _NOTHING
        read = self._read(positions)
        target = read.target if isinstance(read, PairRows) else read
        low, high = self._course.owned(target)
        columns = np.arange(target.tokens.shape[1])
        owned = target.tokens[(columns >= low[:, None]) & (columns < high[:, None])]
        return _Part(target.sample_ids, len(owned), self._sums(owned), hash_rows(read))


class _Account:
    """Which samples came, and the sums over them."""

    def __init__(self, course: ReadingPlan, world_sizes: tuple[int, ...]) -> None:
        self._where = f"{course.name}, world size {', '.join(map(str, world_sizes))}"
        self._course = course
        self._seen = np.zeros(course.num_samples, dtype=bool)
        self._later: set[int] = set()
        self.total = _NOTHING

    def add(self, part: _Part) -> None:
        """Books a part. Raises: DataError: A sample came before."""
        ids = part.sample_ids
        later = ids[ids >= len(self._seen)].tolist()
        ids = ids[ids < len(self._seen)]
        again = [*ids[self._seen[ids]].tolist(), *self._later.intersection(later)]
        if again:
            raise self._error(f"sample {again[0]} came twice")
        self._seen[ids] = True
        self._later.update(later)
        total = self.total
        num_tokens, token_sum = total.num_tokens + part.num_tokens, (total.token_sum + part.token_sum) % 2**64
        self.total = _Part(total.sample_ids, num_tokens, token_sum, total.hashes + part.hashes)

    def check(self, num_rows: int) -> int:
        """Returns how many samples came. Raises: DataError: Some rows were the same sample, or a sample is missing."""
        num_samples = int(self._seen.sum())
        if num_samples + len(self._later) < num_rows:
            raise self._error(f"{num_rows} rows hold only {num_samples + len(self._later)} different samples")
        if num_rows == self._course.num_rows and num_samples < len(self._seen):
            missing = int(np.argmin(self._seen))
            raise self._error(f"sample {missing} never came")
        return num_samples

    def _error(self, what: str) -> DataError:
        return DataError(f"not exactly once: {what}", where=self._where, fix=_REPORT)
