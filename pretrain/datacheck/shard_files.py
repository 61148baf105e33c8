"""Byte-for-byte check of the files of a shard folder against its index.

    sidecars      -> CRC32 and shape; offsets, counts and lengths of documents as in the index and in the members
    each member   -> CRC32 of every array; ids below the vocabulary; document starts that ascend from 0
    each tar      -> sha256 of the whole

All damage is reported at once: the first damaged member of each shard, or bytes between its members. Not here:
the tokenizer (reading.py), and what a stream makes of the shards (replay.py).
"""

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pretrain.datacheck.hash import TokenSums
from pretrain.datacheck.progress_bar import StartPhase, Tick, share_of
from pretrain.errors import DataError
from pretrain.rows import IGNORE_INDEX
from pretrain.shards.index import LABELLED, DataIndex
from pretrain.shards.reader import ShardReader, ShardSet
from pretrain.shards.store import ShardStore

CHUNK_BYTES = 1 << 24
MAX_THREADS = 8
MAX_NAMED = 5
"""Damaged files that an error names; of more it gives the number."""

_FIX = "copy this shard again or run `pretrain prepare` again"


@dataclass(frozen=True, slots=True)
class CheckedFiles:
    """What was read.

    Attributes:
        num_shards: Tars, each with its sidecars.
        num_members: Members of all tars.
        num_bytes: Bytes of all tars.
        token_sums: Token sums of each split (hash.py); of pairs, those of the targets.
    """

    num_shards: int
    num_members: int
    num_bytes: int
    token_sums: dict[str, int]


def check_files(store: ShardStore, index: DataIndex, start_phase: StartPhase) -> CheckedFiles:
    """Reads every byte of a shard folder. Costs a CRC32 and a SHA-256 of it, on up to `MAX_THREADS` cores.

    Args:
        store: Where the shards are; that they exist and have their sizes has been checked.
        index: What they should be.
        start_phase: For a progress bar.

    Raises:
        DataError: Something is not as the index says; names shard and member.
    """
    sets = {name: ShardSet(store, index, name) for name, split in index.splits.items() if split.num_tokens}
    shards = [(name, number) for name, entries in sets.items() for number in range(len(entries))]
    entries = [entry for opened in sets.values() for entry in opened.split.shards]
    num_bytes = sum(entry.num_bytes for entry in entries)
    tick = start_phase("files", 2 * num_bytes)
    sums = TokenSums(index.vocab_size)
    with ThreadPoolExecutor(min(os.cpu_count() or 1, MAX_THREADS)) as pool:
        found = list(pool.map(lambda place: _check_shard(sets[place[0]], place[1], sums, tick), shards))
    _raise_all([error for error in found if isinstance(error, DataError)])
    token_sums = dict.fromkeys(index.splits, 0)
    for (name, _), result in zip(shards, found, strict=True):
        assert isinstance(result, int)
        token_sums[name] = (token_sums[name] + result) % 2**64
    return CheckedFiles(len(entries), sum(entry.num_members for entry in entries), num_bytes, token_sums)


def _check_shard(shards: ShardSet, place: int, sums: TokenSums, tick: Tick) -> int | DataError:
    """Returns the sum of its tokens, or what is wrong with it."""
    shard = shards.split.shards[place]
    try:
        reader, lengths = shards.reader(place), _Lengths(shards, place)
        total = 0
        for number in range(shard.num_members):
            total += _check_member(reader, number, shards.index, lengths, sums)
            tick(share_of(shard.num_bytes, shard.num_members, number))
        if (digest := _hash_file(shards.folder / shard.name, tick)) != shard.sha256:
            raise DataError(
                f"sha256 is {digest[:12]}, the index says {shard.sha256[:12]}, although every member is intact",
                where=shard.name,
                fix=_FIX,
            )
    except DataError as error:
        return error
    return total % 2**64


class _Lengths:
    """The lengths of a shard's documents in its sidecar, against those in its members, which come in order."""

    def __init__(self, shards: ShardSet, place: int) -> None:
        self._name = shards.split.shards[place].lengths.name
        self._left = {side: shards.lengths(place, side) for side in _sides(shards.index.kind)}

    def check(self, side: str, found: np.ndarray) -> None:
        """Compares those of the next member. Raises: DataError: They are others."""
        expected, self._left[side] = np.split(self._left[side], [len(found)])
        if not np.array_equal(expected, found):
            raise DataError("its lengths are not those of the documents", where=self._name, fix=_FIX)


def _sides(kind: str) -> tuple[str, ...]:
    return ("tokens", "source") if kind == "pairs" else ("tokens",)


def _check_member(reader: ShardReader, number: int, index: DataIndex, lengths: _Lengths, sums: TokenSums) -> int:
    """Returns the sum of a member's tokens; the target's, of pairs."""
    tokens, starts = reader.member(number)
    lengths.check("tokens", _check_ragged(reader, f"{number:08d}.tokens.npy", tokens, starts, index))
    if index.kind == "pairs":
        values, value_starts = reader.source(number)
        lengths.check("source", _check_ragged(reader, f"{number:08d}.source.npy", values, value_starts, index))
        if len(value_starts) != len(starts):
            raise _contradiction(reader, f"{number:08d}.source.npy has {len(value_starts)} documents of {len(starts)}")
    if index.kind == "records" and int(reader.loss(number).max()) > 1:
        raise _contradiction(reader, f"{number:08d}.loss.npy holds more than 0 and 1")
    if index.kind in LABELLED:
        labels = reader.labels(number)
        if ((labels != IGNORE_INDEX) & ((labels < 0) | (labels >= len(index.labels)))).any():
            raise _contradiction(reader, f"{number:08d}.labels.npy holds labels that are none of {len(index.labels)}")
    return sums(tokens)


def _check_ragged(
    reader: ShardReader, name: str, values: np.ndarray, starts: np.ndarray, index: DataIndex
) -> np.ndarray:
    """Returns the lengths of a member's documents on one side."""
    if int(values.max()) >= index.vocab_size:
        raise _contradiction(reader, f"{name} holds token {int(values.max())}, the vocabulary {index.vocab_size} ids")
    bounds = np.append(starts.astype(np.int64), len(values))
    lengths = np.diff(bounds)
    if bounds[0] != 0 or (lengths <= 0).any():
        raise _contradiction(reader, f"{name}: its documents do not follow one another")
    return lengths


def _contradiction(reader: ShardReader, what: str) -> DataError:
    return DataError(what, where=reader.name, fix=_FIX)


def _hash_file(path: Path, tick: Tick) -> str:
    sha256 = hashlib.sha256()
    try:
        with path.open("rb", buffering=0) as file:
            while chunk := file.read(CHUNK_BYTES):
                sha256.update(chunk)
                tick(len(chunk))
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", where=str(path), fix=_FIX) from None
    return sha256.hexdigest()


def _raise_all(errors: Sequence[DataError]) -> None:
    if len(errors) == 1:
        raise errors[0]
    if errors:
        named = ", ".join(f"{error.where}: {error.what}" for error in errors[:MAX_NAMED])
        more = f", and {len(errors) - MAX_NAMED} more" if len(errors) > MAX_NAMED else ""
        raise DataError(
            f"{len(errors)} shards are damaged: {named}{more}",
            fix="copy these shards again or run `pretrain prepare` again",
        )
