"""MosaicML MDS: the index.json of a folder of shards, and the tokens of its samples.

    {"version": 2, "shards": [{"format": "mds", "samples": N, "compression": null | "zstd:3", "column_names": [...],
      "column_encodings": [...], "column_sizes": [bytes or null, ...], "raw_data": {"basename", "bytes", "hashes"},
      "zip_data": null | {...}}, ...]}

Layout as in mosaicml/streaming, streaming/base/format/.
"""

import hashlib
import json
import math
import mmap
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from pretrain.errors import DataError
from pretrain.prepare.convert.token_file import (
    TOKEN_DTYPES,
    Chunk,
    ReadOptions,
    check_tokens,
    cut_documents,
    find_cuts,
    find_files,
    naming,
)
from pretrain.prepare.input_parts import InputFile
from pretrain.prepare.inputs.local_files import stat_local
from pretrain.prepare.inputs.opening import decompress

INDEX_NAME = "index.json"

COMPRESSIONS = {"zstd": "zstd", "gz": "gzip"}

FOUNDRY_DTYPE = "int64"
"""Data type of LLM Foundry's columns of bytes, which have none in the index."""

_NDARRAY = re.compile(r"ndarray(?::(\w+)(?::([\d,]+))?)?")


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of the index, its size, and its hex digests by algorithm."""

    path: Path
    num_bytes: int
    hashes: dict[str, str]


@dataclass(frozen=True, slots=True)
class TokenColumn:
    """The column of tokens in a sample, and its encoding.

    Attributes:
        number: Number of the column.
        sizes: Bytes of every column; None: a uint32 at the head of each sample.
        dtype: Data type of the tokens. None: by a byte before them (ndarray).
        has_shape: True: their shape is written before them (ndarray).
    """

    number: int
    sizes: tuple[int | None, ...]
    dtype: np.dtype | None
    has_shape: bool


@dataclass(frozen=True, slots=True)
class MdsEntry:
    """One shard of the index.

    Attributes:
        index: File of the index.
        raw: Uncompressed shard.
        stored: Compressed shard, or None.
        compression: `zstd`, `gzip` or none.
        num_samples: Number of samples.
        column: Column of the tokens.
    """

    index: Path
    raw: StoredFile
    stored: StoredFile | None
    compression: str
    num_samples: int
    column: TokenColumn


def find_indexes(sources: Sequence[str]) -> list[Path]:
    """Returns the indexes that `sources` name; those below a folder that has one are its parts. Raises: DataError."""
    own = [str(Path(source) / INDEX_NAME) for source in sources]
    return find_files([o if Path(o).exists() else s for o, s in zip(own, sources, strict=True)], INDEX_NAME)


def load_mds_index(path: Path, options: ReadOptions) -> list[MdsEntry]:
    """Reads one index.json.

    Raises:
        DataError: It is not one, or has shards that are not MDS, not of a known compression, or without the column.
        OSError: With its name.
    """
    where = str(path)
    try:
        raw = json.loads(path.read_bytes())
        if raw["version"] != 2:
            raise DataError(f"version {raw['version']} is not known", where=where, fix="give version 2")
        return [_parse_shard(path, shard, options) for shard in raw["shards"]]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        what = f"no index of MDS shards: {type(error).__name__} {error}"
        raise DataError(what[:200], where=where, fix="copy it again, or write the shards again") from None


def _parse_shard(index: Path, raw: dict[str, Any], options: ReadOptions) -> MdsEntry:
    where = str(index)
    if raw["format"] != "mds":
        raise DataError(f"holds shards of {raw['format']!r}", where=where, fix="give shards of mds")
    name = (raw["compression"] or "").partition(":")[0]
    if name and name not in COMPRESSIONS:
        fix = f"write the shards again with {', '.join(COMPRESSIONS)} or none"
        raise DataError(f"compression {name!r} is not read", where=where, fix=fix)
    return MdsEntry(
        index=index,
        raw=_parse_file(index, raw["raw_data"]),
        stored=_parse_file(index, raw["zip_data"]) if raw["zip_data"] else None,
        compression=COMPRESSIONS.get(name, ""),
        num_samples=int(raw["samples"]),
        column=_parse_column(where, raw, options),
    )


def _parse_file(index: Path, raw: dict[str, Any]) -> StoredFile:
    name = PurePosixPath(raw["basename"])
    if name.is_absolute() or ".." in name.parts:
        raise DataError(
            f"names a file outside its folder: {raw['basename']!r}", where=str(index), fix="correct the index"
        )
    return StoredFile(index.parent / name, int(raw["bytes"]), dict(raw["hashes"]))


def _parse_column(where: str, raw: dict[str, Any], options: ReadOptions) -> TokenColumn:
    names, sizes = raw["column_names"], tuple(raw["column_sizes"])
    if options.column not in names:
        what = f"there is no column {options.column!r}; columns: {', '.join(names) or 'none'}"
        raise DataError(what, where=where, fix="choose the one that holds the tokens")
    number = names.index(options.column)
    encoding = raw["column_encodings"][number]
    if len(sizes) != len(names) or not all(size is None or (isinstance(size, int) and size >= 0) for size in sizes):
        raise DataError("its columns have no sizes", where=where, fix="copy it again")
    if encoding == "bytes":
        return TokenColumn(number, sizes, np.dtype(options.dtype or FOUNDRY_DTYPE).newbyteorder("<"), False)
    match = _NDARRAY.fullmatch(encoding)
    if match is None or match[1] not in (None, *TOKEN_DTYPES):
        what = f"column {options.column!r} is of {encoding!r}, which is not one of tokens"
        raise DataError(what, where=where, fix="give a column of bytes or of integer ndarray")
    if options.dtype is not None and match[1] not in (None, options.dtype):
        raise DataError(f"its index says {match[1]}, not {options.dtype}", where=where, fix="leave the dtype out")
    return TokenColumn(number, sizes, np.dtype(match[1]).newbyteorder("<") if match[1] else None, match[2] is None)


# MosaicML MDS: shards of samples with named columns, one of which holds tokens.
#
#     shard    samples N, u32 | offsets, u32 [N + 1], from the start of the shard | configuration, JSON | the samples
#     sample   sizes of the columns that have no fixed one, u32 each | the columns, one after another
#     ndarray  [dtype, u8] [axes << 2 | width of the shape, u8; shape] values; what the encoding fixes is left out
#
# A sample is a document, unless the boundaries say that samples are pieces of a stream (LLM
# Foundry's --concat_tokens), which is then cut at end-of-document tokens and at the end of the
# shard. Layout as in mosaicml/streaming, streaming/base/format/mds/. Pickled columns are passed
# over unread. Memory: one shard, where it is compressed.


DTYPE_OF_CODE = {8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 32: "uint32", 33: "int32", 64: "uint64", 65: "int64"}

_COPY = "copy the shard again"


@dataclass(frozen=True, slots=True)
class MdsFile:
    """A TokenFile that is one shard, as it is stored.

    Attributes:
        file: Shard, compressed where only that exists.
        companions: File of the index.
        entry: Entry of the index.
        options: Options of the reader.
    """

    file: InputFile
    companions: tuple[InputFile, ...]
    entry: MdsEntry
    options: ReadOptions

    def tokens(self) -> Iterator[np.ndarray]:
        """Yields all tokens in order, a sample at a time."""
        for number, tokens in enumerate(self._samples()):
            yield check_tokens(tokens, 0, self.options, f"{self.file.path}, sample {number}")

    def documents(self, start: int, stop: int) -> Iterator[np.ndarray]:
        """Yields the documents of the shard, which is not cut."""
        assert (start, stop) == (0, self.file.size), "an MDS shard is one slice"
        if self.options.boundaries in ("auto", "sample"):
            return self.tokens()
        return cut_documents(self._chunks(), 0, stop, self.file.path)

    def _chunks(self) -> Iterator[Chunk]:
        position, at_start = 0, self.options.boundaries == "start"
        for tokens in self.tokens():
            yield position, tokens, find_cuts(tokens, position, self.options.eos_id, at_start)
            position += len(tokens)

    def _samples(self) -> Iterator[np.ndarray]:
        data = _load(self.file, self.entry)
        offsets = _load_offsets(data, self.entry, self.file.path)
        view = memoryview(data)
        for number in range(self.entry.num_samples):
            try:
                yield _decode(view[offsets[number] : offsets[number + 1]], self.entry.column, self.options)
            except (ValueError, IndexError) as error:
                fix = "copy the shard again, or give the dtype of its tokens"
                raise DataError(f"sample {number} is damaged: {error}", where=self.file.path, fix=fix) from None


def open_mds(sources: Sequence[str], options: ReadOptions) -> list[MdsFile]:
    """Opens the shards that `sources` name: folders with an index.json, at any depth, or the index itself.

    Raises:
        DataError: Also where a shard is missing or has another size than its index says.
    """
    entries = [entry for path in find_indexes(sources) for entry in load_mds_index(path, options)]
    return [_open(entry, options) for entry in entries]


def _open(entry: MdsEntry, options: ReadOptions) -> MdsFile:
    is_raw = entry.raw.path.exists() or entry.stored is None
    stored = entry.raw if is_raw or entry.stored is None else entry.stored
    file = stat_local(stored.path)
    if file.size != stored.num_bytes or not file.size:
        what = f"has {file.size} bytes, its index says {stored.num_bytes}"
        raise DataError(f"truncated or damaged: {what}", where=file.path, fix=_COPY)
    return MdsFile(
        replace(file, compression="" if is_raw else entry.compression), (stat_local(entry.index),), entry, options
    )


def _load(file: InputFile, entry: MdsEntry) -> bytes | mmap.mmap:
    """Returns the uncompressed bytes of a shard, mapped where they are stored as such, their hash checked."""
    with naming(entry.raw.path), open(file.path, "rb") as stream:  # noqa: PTH123 -- InputFile.path is a string
        if not file.compression:
            data: bytes | mmap.mmap = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        else:
            data = decompress(stream, file).read(entry.raw.num_bytes + 1)
    if len(data) != entry.raw.num_bytes:
        what = f"its index says {entry.raw.num_bytes} bytes uncompressed, it has {len(data)} or more"
        raise DataError(what, where=file.path, fix=_COPY)
    _check_hashes(data, entry.raw, file.path)
    return data


def _check_hashes(data: bytes | mmap.mmap, stored: StoredFile, where: str) -> None:
    for name, expected in stored.hashes.items():
        if name in hashlib.algorithms_guaranteed and not name.startswith("shake_"):
            if hashlib.new(name, data, usedforsecurity=False).hexdigest() != expected:
                raise DataError(f"damaged: its {name} is not what its index says", where=where, fix=_COPY)
            return


def _load_offsets(data: bytes | mmap.mmap, entry: MdsEntry, where: str) -> list[int]:
    """Returns where the samples begin, and where the last one ends."""
    num_samples = int.from_bytes(data[:4], "little")
    head = 4 + 4 * (num_samples + 1)
    if num_samples != entry.num_samples or head > len(data):
        what = f"has {num_samples} samples, its index says {entry.num_samples}"
        raise DataError(what, where=where, fix=_COPY)
    offsets = np.frombuffer(data, "<u4", num_samples + 1, 4).astype(np.int64)
    if offsets[0] < head or offsets[-1] != len(data) or (np.diff(offsets) < 0).any():
        raise DataError("the offsets of its samples contradict its size", where=where, fix=_COPY)
    return offsets.tolist()


def _decode(sample: memoryview, column: TokenColumn, options: ReadOptions) -> np.ndarray:
    """Returns the tokens of a sample, a view. Raises: ValueError, IndexError: They are not there."""
    num_sizes = sum(not size for size in column.sizes)
    written = iter(np.frombuffer(sample[: 4 * num_sizes], "<u4").tolist())
    sizes = [size or next(written, 0) for size in column.sizes]
    start = 4 * num_sizes + sum(sizes[: column.number])
    value = sample[start : start + sizes[column.number]]
    if len(value) != sizes[column.number] or 4 * num_sizes + sum(sizes) != len(sample):
        raise ValueError(f"its columns take up {4 * num_sizes + sum(sizes)} bytes, not {len(sample)}")
    dtype = column.dtype
    if dtype is None:
        name = DTYPE_OF_CODE.get(value[0])
        if name is None or options.dtype not in (None, name):
            raise ValueError(f"dtype code {value[0]} is not one of {options.dtype or 'tokens'}")
        dtype, value = np.dtype(name).newbyteorder("<"), value[1:]
    if column.has_shape:
        num_axes, width = value[0] >> 2, 1 << (value[0] & 3)
        shape = np.frombuffer(value[1 : 1 + num_axes * width], f"<u{width}")
        value = value[1 + num_axes * width :]
        if math.prod(shape.tolist()) * dtype.itemsize != len(value):
            raise ValueError(f"{len(value)} bytes are not {dtype.name} of the shape {shape.tolist()}")
    return np.frombuffer(value, dtype)
