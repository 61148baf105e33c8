"""Byte-for-byte check of the files of a shard folder against its index.

    sidecars     -> CRC32 and shape; offsets, counts and lengths as in the index and in the members
    each member  -> CRC32 of every array; ids below the vocabulary; document starts ascend from 0
    each tar     -> sha256 of the whole
    first tars   -> samples as webdataset itself reads them, for the tools that know no index

All damage is reported at once: the first damaged member of each shard, or bytes between members.
Not here: the tokenizer (reading.py), and the rows that a stream makes of the shards (replay.py).
"""

import hashlib
import io
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from pretrain.datacheck.hash import TokenSums
from pretrain.errors import DataError
from pretrain.rows import IGNORE_INDEX
from pretrain.shards.index import REJECTED, DataIndex, ShardIndex, SplitIndex
from pretrain.shards.reader import ShardReader, ShardSet
from pretrain.shards.store import ShardStore

Tick = Callable[[float], None]
"""Called with an amount of progress, from any thread."""

MAX_THREADS = 8
MAX_NAMED = 5
"""Damaged files that an error names; of more it gives the number."""

FIX = "copy this file again or run `pretrain prepare` again"


def check_files(store: ShardStore, index: DataIndex, tick: Tick) -> dict[str, int]:
    """Reads every byte of a shard folder twice, for CRC32 and SHA-256, on `MAX_THREADS` cores.

    The files exist and have their sizes. `tick` is called with the bytes that were read.

    Returns:
        The token sum of each split (hash.py); of pairs, that of the targets.

    Raises:
        DataError: A file is not as in the index; names shard and member.
    """
    sums = TokenSums(index.vocab_size)
    names = [name for name, split in index.splits.items() if split.num_tokens]
    sets = [ShardSet(store, index, name) for name in names]
    places = [(shards, number) for shards in sets for number in range(len(shards))]
    with ThreadPoolExecutor(min(os.cpu_count() or 1, MAX_THREADS)) as pool:
        parts = list(pool.map(lambda place: _check_shard(place[0], place[1], sums, tick), places))
    raise_all([error for error in parts if isinstance(error, DataError)])
    token_sums = dict.fromkeys(index.splits, 0)
    for (shards, _), total in zip(places, parts, strict=True):
        assert isinstance(total, int)
        token_sums[shards.name] = (token_sums[shards.name] + total) % 2**64
    return token_sums


def check_with_webdataset(store: ShardStore, index: DataIndex) -> int:
    """Compares the first shard of each split with the samples that webdataset reads, and returns their number.

    Raises:
        DataError: Other tools would read other samples; names the shard.
    """
    import webdataset  # imports torch where it is installed: seconds

    total = 0
    for name, split in index.splits.items():
        if not split.shards:
            continue
        shards = ShardSet(store, index, name)
        reader = shards.reader(0)
        # A list, because a string would be expanded: {a..b} in the name of a folder is no range.
        urls = [str((shards.folder / split.shards[0].name).absolute())]
        num_samples = 0
        for sample in webdataset.WebDataset(urls, shardshuffle=False, empty_check=False):
            for member, values in zip(("tokens.npy", "docs.npy"), reader.member(num_samples), strict=True):
                if member not in sample or not np.array_equal(np.load(io.BytesIO(sample[member])), values):
                    raise _contradiction(reader, f"webdataset reads another {member} in sample {num_samples}")
            num_samples += 1
        if num_samples != split.shards[0].num_members:
            raise _contradiction(
                reader,
                f"webdataset reads {num_samples} samples of {split.shards[0].num_members}",
            )
        total += num_samples
    return total


def shard_totals(*splits: SplitIndex) -> dict[str, int]:
    """Returns the numbers of shards, of their members, and of bytes of their tars."""
    shards = [shard for split in splits for shard in split.shards]
    return {
        "shards": len(shards),
        "members": sum(shard.num_members for shard in shards),
        "bytes": sum(shard.num_bytes for shard in shards),
    }


def token_sides(index: DataIndex) -> tuple[str, ...]:
    """Returns the names of the arrays that hold tokens."""
    return ("tokens", "source") if index.layout.has_source else ("tokens",)


def _check_shard(shards: ShardSet, place: int, sums: TokenSums, tick: Tick) -> int | DataError:
    """Returns the sum of a shard's tokens, or the first damage in it."""
    shard = shards.split.shards[place]
    sides = token_sides(shards.index)
    total = 0
    try:
        reader = shards.reader(place)
        expected = {side: shards.lengths(place, side) for side in sides}
        actual: dict[str, list[np.ndarray]] = {side: [] for side in sides}
        for number in range(shard.num_members):
            lengths = {side: _check_ragged(reader, number, side, shards.index) for side in sides}
            _check_beside(reader, number, lengths, shards.index)
            for side in sides:
                actual[side].append(lengths[side])
            total += sums(reader.member(number)[0])
            tick(shard.num_bytes / shard.num_members)
        if any(not np.array_equal(expected[side], np.concatenate(actual[side])) for side in sides):
            raise DataError(
                "its lengths are not those of the documents",
                where=shard.lengths.name,
                fix=FIX,
            )
        check_hash(shards.folder, shard, tick)
    except DataError as error:
        return error
    return total % 2**64


def _check_ragged(reader: ShardReader, number: int, side: str, index: DataIndex) -> np.ndarray:
    """Returns the lengths of a member's documents on one side."""
    values, starts = reader.source(number) if side == "source" else reader.member(number)
    name = f"{number:08d}.{side}.npy"
    if (token := int(values.max())) >= index.vocab_size:
        raise _contradiction(
            reader,
            f"{name} holds token {token}, the vocabulary {index.vocab_size} ids",
        )
    bounds = np.append(starts.astype(np.int64), len(values))
    lengths = np.diff(bounds)
    if bounds[0] != 0 or (lengths <= 0).any():
        raise _contradiction(reader, f"{name}: its documents do not follow one another")
    return lengths


def _check_beside(reader: ShardReader, number: int, lengths: dict[str, np.ndarray], index: DataIndex) -> None:
    """Checks what a member has beside its tokens: as many sources, a loss mask, or labels."""
    if index.layout.has_source and len(lengths["source"]) != len(lengths["tokens"]):
        text = f"has {len(lengths['source'])} documents of {len(lengths['tokens'])}"
        raise _contradiction(reader, f"{number:08d}.source.npy {text}")
    if index.layout.loss_mask:
        most = 1 | REJECTED if index.layout.two_sides or index.layout.judged else 1
        if int(reader.loss(number).max()) > most:
            raise _contradiction(reader, f"{number:08d}.loss.npy holds more than 0 to {most}")
    if index.layout.has_labels:
        labels = reader.labels(number)
        count = len(index.labels) or 1 + index.layout.most_mark
        if ((labels != IGNORE_INDEX) & ((labels < 0) | (labels >= count))).any():
            raise _contradiction(
                reader,
                f"{number:08d}.labels.npy holds labels that are none of {count}",
            )


def _contradiction(reader: ShardReader, what: str) -> DataError:
    return DataError(what, where=reader.name, fix=FIX)


def check_hash(folder: Path, shard: ShardIndex, tick: Tick) -> None:
    """Compares the SHA-256 of a shard whose members are intact with the index. Raises: DataError."""
    path = folder / shard.name
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", where=str(path), fix=FIX) from None
    tick(shard.num_bytes)
    if digest != shard.sha256:
        raise DataError(
            f"sha256 is {digest[:12]}, the index says {shard.sha256[:12]}, although every member is intact",
            where=shard.name,
            fix=FIX,
        )


def raise_all(errors: Sequence[DataError]) -> None:
    """Raises one error of all, if there are any."""
    if len(errors) == 1:
        raise errors[0]
    if errors:
        named = ", ".join(f"{error.where}: {error.what}" for error in errors[:MAX_NAMED])
        more = f", and {len(errors) - MAX_NAMED} more" if len(errors) > MAX_NAMED else ""
        raise DataError(
            f"{len(errors)} shards are damaged: {named}{more}",
            fix="copy these files again or run `pretrain prepare` again",
        )
