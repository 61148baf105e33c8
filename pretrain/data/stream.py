"""Rows of tokens by number: finds each sample's bytes in the shards by arithmetic, and copies them.

    position  --SampleOrder-->  sample j  -->  tokens [j*T, j*T + T] of X
    x in X    -->  epoch x div N, offset x mod N  --bisect-->  shard  --bisect-->  member  -->  a view of the tar
    window w  -->  tokens [w*T, w*T + T] of the shards in their fixed order                      (validation)

Holds no state but caches: any row can be read at any time, from any thread, at the same cost. Deliberately not here:
batches, ranks and threads (loader.py).
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import numpy as np

from pretrain.data.damage import DamagePolicy
from pretrain.data.lookahead import Layout, Lookahead
from pretrain.data.order import SampleOrder, shard_order
from pretrain.errors import DataError
from pretrain.rows import TokenRows
from pretrain.shards.index import DataIndex
from pretrain.shards.reader import MAX_OPEN_SHARDS, ShardReader, ShardSet
from pretrain.shards.store import ShardStore

EPOCHS_KEPT = 4


class TokenStream:
    """The samples of one split: in training order by position, or in the fixed order of windows."""

    def __init__(
        self,
        folder: Path | ShardStore,
        index: DataIndex,
        split: str,
        *,
        seq_len: int,
        seed: int = 0,
        lanes: int = 1,
        block_samples: int = 1,
        max_open_shards: int = MAX_OPEN_SHARDS,
        damage: DamagePolicy | None = None,
    ) -> None:
        """Opens no shard yet.

        Args:
            folder: Shard folder, or its store.
            index: Index of the folder.
            split: Name of the split.
            seq_len: Tokens a sample, T.
            seed: Seed of the sample order; windows do not depend on it.
            lanes: Lanes of the sample order (`order.py`).
            block_samples: Places of a lane that are shuffled together (`order.py`).
            max_open_shards: Mapped files to keep, each with a file descriptor.
            damage: Policy for unreadable rows. None: they are errors.

        Raises:
            DataError: There is no such split, or it is empty.
        """
        shards = ShardSet(folder, index, split, max_open_shards)
        self.split, self.index, self.seq_len = shards.split, index, seq_len
        num_tokens = self.split.num_tokens
        self.order = SampleOrder(num_tokens, seq_len, seed=seed, lanes=lanes, block_samples=block_samples)
        self._shards, self._damage = shards, damage or DamagePolicy()
        self._reader = self._damage.reader(shards)
        self._lookahead = Lookahead(shards.store, shards.split, split) if shards.store.fetches else None
        self._sizes = np.array([shard.num_tokens for shard in self.split.shards], dtype=np.int64)
        self._epoch_layout = lru_cache(EPOCHS_KEPT)(self._build_epoch_layout)
        self._fixed_layout = self._build_layout(np.arange(len(self._sizes)))

    def read(self, positions: range) -> TokenRows:
        """Reads the samples at some positions of the run.

        Raises:
            DataError: A shard is missing or damaged; names shard and member.
        """
        if self._lookahead is not None and positions:
            self._lookahead.follow(self.order, self._epoch_layout, positions.start)
        samples = self.order.samples(positions)
        copier = _RowCopier(self.seq_len + 1, self.index.dtype, self.index.eos_id)
        for sample in samples.tolist():
            try:
                self._copy_sample(copier, sample * self.seq_len)
            except DataError as error:
                self._damage.skip(error, self._shards, sample)
                copier.clear_row()
        return copier.finish(samples, None)

    def num_windows(self, max_tokens: int | None = None) -> int:
        """Returns how many windows cover the first `max_tokens` tokens (None: all), so that each but the first token
        is a target once."""
        num_tokens = min(self.split.num_tokens, max_tokens or self.split.num_tokens)
        return -(-(num_tokens - 1) // self.seq_len)

    def read_windows(self, windows: range, max_tokens: int | None = None) -> TokenRows:
        """Reads windows of the fixed order; rows past the end are padded with the end-of-document token.

        Raises:
            DataError: A shard is missing or damaged; names shard and member.
        """
        num_tokens = min(self.split.num_tokens, max_tokens or self.split.num_tokens)
        if self._lookahead is not None and windows:
            first, end = windows.start * self.seq_len, windows.stop * self.seq_len + 1
            self._lookahead.follow_fixed(self._fixed_layout, first, end, num_tokens)
        copier = _RowCopier(self.seq_len + 1, self.index.dtype, self.index.eos_id)
        starts = np.array(windows, dtype=np.int64) * self.seq_len
        sizes = np.clip(num_tokens - starts, 0, self.seq_len + 1)
        for window, start, size in zip(windows, starts.tolist(), sizes.tolist(), strict=True):
            try:
                copier.copy(self._reader, self._fixed_layout, start, size)
            except DataError as error:
                self._damage.skip(error, self._shards, window)
                copier.clear_row()
            else:
                copier.pad(self.seq_len + 1 - size)
        return copier.finish(np.array(windows, dtype=np.int64), sizes)

    def _copy_sample(self, copier: "_RowCopier", start: int) -> None:
        """Copies the T + 1 tokens of X from `start`, through as many epochs as they reach into."""
        wanted, num_tokens = self.seq_len + 1, self.split.num_tokens
        epoch, offset = divmod(start, num_tokens)
        while offset + wanted > num_tokens:
            copier.copy(self._reader, self._epoch_layout(epoch), offset, num_tokens - offset)
            wanted -= num_tokens - offset
            epoch, offset = epoch + 1, 0
        copier.copy(self._reader, self._epoch_layout(epoch), offset, wanted)

    def _build_epoch_layout(self, epoch: int) -> Layout:
        return self._build_layout(shard_order(len(self._sizes), self.order.seed, epoch))

    def _build_layout(self, order: np.ndarray) -> Layout:
        ends = np.cumsum(self._sizes[order])
        return order.tolist(), (ends - self._sizes[order]).tolist()


class _RowCopier:
    """Collects pieces of rows, which are views of shards, and where documents start in them; copies them at once."""

    def __init__(self, width: int, dtype: str, fill: int) -> None:
        self._width, self._dtype, self._fill = width, dtype, fill
        self._at = 0
        self._pieces: list[np.ndarray] = []
        self._cleared: list[int] = []
        self._starts: list[np.ndarray] = []
        self._shifts: list[int] = []

    def copy(self, open_shard: Callable[[int], ShardReader], layout: Layout, offset: int, wanted: int) -> None:
        """Appends `wanted` tokens of a sequence of shards from `offset`, through members and shards."""
        # Called for each row: what costs time is the number of steps in Python, so there is no further call.
        shards, shard_starts = layout
        while wanted:
            slot = bisect_right(shard_starts, offset) - 1
            reader = open_shard(shards[slot])
            member_starts, within = reader.member_starts, offset - shard_starts[slot]
            member = bisect_right(member_starts, within) - 1
            tokens, docs = reader.member(member)
            within -= member_starts[member]
            piece = tokens[within : within + wanted]
            size = len(piece)
            places = docs.data
            low = bisect_left(places, within)
            high = bisect_left(places, within + size, low)
            if low < high:
                self._starts.append(docs[low:high])
                self._shifts.append(self._at - within)
            self._pieces.append(piece)
            self._at += size
            offset, wanted = offset + size, wanted - size

    def pad(self, missing: int) -> None:
        """Appends padding."""
        if missing:
            self._pieces.append(np.full(missing, self._fill, dtype=self._dtype))
            self._at += missing

    def clear_row(self) -> None:
        """Takes back what there is of a row that is not complete, and makes all of it padding."""
        row, done = divmod(self._at, self._width)
        self._at -= done
        while done:
            done -= len(self._pieces.pop())
        while self._starts and int(self._starts[-1][0]) + self._shifts[-1] >= self._at:
            self._starts.pop(), self._shifts.pop()
        self._cleared.append(row)
        self.pad(self._width)

    def finish(self, sample_ids: np.ndarray, num_tokens: np.ndarray | None) -> TokenRows:
        """Returns the rows; `num_tokens` are those that were real, of rows that were not cleared. None: all."""
        if self._cleared:
            num_tokens = np.full(self._at // self._width, self._width) if num_tokens is None else num_tokens
            num_tokens[self._cleared] = 0
        tokens = np.concatenate(self._pieces) if self._pieces else np.empty(0, self._dtype)
        starts = np.empty(0, np.int64)
        if self._starts:
            shifts = np.repeat(self._shifts, [len(part) for part in self._starts])
            starts = np.add(np.concatenate(self._starts), shifts, dtype=np.int64)
        return TokenRows(tokens.reshape(-1, self._width), starts, num_tokens, sample_ids)
