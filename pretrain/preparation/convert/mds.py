"""MosaicML MDS: shards of samples with named columns, one of tokens, and their index.json.

    index    {"version": 2, "shards": [{"format": "mds", "samples": N, "compression": null | "zstd:3",
             "column_names": [...], "column_encodings": [...], "column_sizes": [bytes or null, ...],
             "raw_data": {"basename", "bytes", "hashes"}, "zip_data": null | {...}}, ...]}
    shard    samples N, u32 | offsets, u32 [N + 1], from the start of the shard | configuration, JSON | the samples
    sample   sizes of the columns that have no fixed one, u32 each | the columns, one after another
    ndarray  [dtype, u8] [axes << 2 | width of the shape, u8; shape] values; what the encoding fixes is left out

A sample is a document; its tokens are the column `tokens`, as in LLM Foundry. Layout as in
mosaicml/streaming, streaming/base/format/mds/. Pickled columns are not read. Memory: one shard,
where it is compressed.
"""

import hashlib
import math
import mmap
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from pretrain.errors import DataError
from pretrain.preparation.convert.token_file import TOKEN_DTYPES, ReadOptions, check_tokens, find_files, open_named
from pretrain.preparation.input_parts import InputFile
from pretrain.preparation.inputs.local_files import stat_local
from pretrain.preparation.inputs.opening import decompress
from pretrain.utils.safe_read import read_json

INDEX_NAME = "index.json"
COLUMN = "tokens"
COMPRESSIONS = {"zstd": "zstd", "gz": "gzip"}
# Data type of LLM Foundry's columns of bytes, which have none in the index.
FOUNDRY_DTYPE = "int64"
# The bits, and one more for signed integers.
DTYPE_OF_CODE = {8 * np.dtype(name).itemsize + name.startswith("int"): name for name in TOKEN_DTYPES}

_NDARRAY = re.compile(r"ndarray(?::(\w+)(?::([\d,]+))?)?")
_COPY = "copy the shard again"


@dataclass(frozen=True, slots=True)
class TokenColumn:
    """The column of tokens in a sample, and its encoding."""

    number: int
    sizes: tuple[int | None, ...]  # bytes of every column; None: a uint32 at the head of a sample
    dtype: np.dtype | None  # None: in a byte before the tokens (ndarray)
    has_shape: bool  # written before the tokens (ndarray)

    def decode(self, sample: memoryview, wanted_dtype: str | None) -> np.ndarray:
        """Returns the tokens of a sample, a view. Raises: ValueError, IndexError: damaged."""
        num_sizes = sum(not size for size in self.sizes)
        written = iter(np.frombuffer(sample[: 4 * num_sizes], "<u4").tolist())
        sizes = [size or next(written, 0) for size in self.sizes]
        start = 4 * num_sizes + sum(sizes[: self.number])
        value = sample[start : start + sizes[self.number]]
        num_bytes = 4 * num_sizes + sum(sizes)
        if len(value) != sizes[self.number] or num_bytes != len(sample):
            raise ValueError(f"its columns take up {num_bytes} bytes, not {len(sample)}")
        dtype = self.dtype
        if dtype is None:
            name = DTYPE_OF_CODE.get(value[0])
            if name is None or wanted_dtype not in (None, name):
                raise ValueError(f"dtype code {value[0]} is not one of {wanted_dtype or 'tokens'}")
            dtype = _little(name)
            value = value[1:]
        if self.has_shape:
            num_axes = value[0] >> 2
            width = 1 << (value[0] & 3)
            shape = np.frombuffer(value[1 : 1 + num_axes * width], f"<u{width}").tolist()
            value = value[1 + num_axes * width :]
            if math.prod(shape) * dtype.itemsize != len(value):
                raise ValueError(f"{len(value)} bytes are not {dtype.name} of the shape {shape}")
        return np.frombuffer(value, dtype)


@dataclass(frozen=True, slots=True)
class MdsFile:
    """A TokenFile that is one shard."""

    file: InputFile  # as it is stored, compressed where only that exists
    companions: tuple[InputFile, ...]  # the index
    options: ReadOptions
    num_bytes: int  # uncompressed
    hashes: dict[str, str]  # hex digests by algorithm, uncompressed
    num_samples: int
    column: TokenColumn

    def tokens(self) -> Iterator[np.ndarray]:
        """Yields all tokens in order, a sample at a time."""
        data = self._load()
        offsets = self._load_offsets(data)
        view = memoryview(data)
        for number in range(self.num_samples):
            try:
                sample = view[offsets[number] : offsets[number + 1]]
                tokens = self.column.decode(sample, self.options.dtype)
            except (ValueError, IndexError) as error:
                raise self._error(
                    f"sample {number} is damaged: {error}",
                    f"{_COPY}, or give the --dtype of its tokens",
                ) from None
            yield check_tokens(tokens, 0, self.options, f"{self.file.path}, sample {number}")

    def documents(self, start: int, stop: int) -> Iterator[np.ndarray]:
        """Yields the documents of the shard, which is not cut."""
        assert (start, stop) == (0, self.file.size), "an MDS shard is one slice"
        return self.tokens()

    def _load(self) -> bytes | mmap.mmap:
        """Returns the uncompressed bytes, mapped if stored so, their hash checked."""
        data: bytes | mmap.mmap
        with open_named(self.file.path) as stream:
            if not self.file.compression:
                data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
            else:
                data = decompress(stream, self.file).read(self.num_bytes + 1)
        if len(data) != self.num_bytes:
            count = f"it has {len(data)} or more"
            raise self._error(f"its index says {self.num_bytes} bytes uncompressed, {count}")
        for name, expected in self.hashes.items():
            # One hash is enough; those of SHAKE have no fixed length.
            if name in hashlib.algorithms_guaranteed and not name.startswith("shake_"):
                if hashlib.new(name, data, usedforsecurity=False).hexdigest() != expected:
                    raise self._error(f"damaged: its {name} is not what its index says")
                break
        return data

    def _load_offsets(self, data: bytes | mmap.mmap) -> list[int]:
        """Returns the offsets at which the samples begin, and the end of the last one."""
        num_samples = int.from_bytes(data[:4], "little")
        head = 4 + 4 * (num_samples + 1)
        if num_samples != self.num_samples or head > len(data):
            raise self._error(f"has {num_samples} samples, its index says {self.num_samples}")
        offsets = np.frombuffer(data, "<u4", num_samples + 1, 4).astype(np.int64)
        if offsets[0] < head or offsets[-1] != len(data) or (np.diff(offsets) < 0).any():
            raise self._error("the offsets of its samples contradict its size")
        return offsets.tolist()

    def _error(self, what: str, fix: str = _COPY) -> DataError:
        return DataError(what, where=self.file.path, fix=fix)


def open_mds(sources: Sequence[str], options: ReadOptions) -> list[MdsFile]:
    """Opens the shards that `sources` name: folders with an index.json below, or the index."""
    # Indexes below a folder that has one are its parts.
    indices = [str(Path(source) / INDEX_NAME) for source in sources]
    named = [o if Path(o).exists() else s for o, s in zip(indices, sources, strict=True)]
    return [file for path in find_files(named, INDEX_NAME) for file in _open_index(path, options)]


def _open_index(path: Path, options: ReadOptions) -> list[MdsFile]:
    """Opens the shards of one index.json. Raises: DataError: It, or a shard, cannot be read."""
    try:
        raw = read_json(path)
        if raw["version"] != 2:
            raise DataError(
                f"version {raw['version']} is not known",
                where=str(path),
                fix="give version 2",
            )
        return [_open_shard(path, shard, options) for shard in raw["shards"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        text = f"no index of MDS shards: {type(error).__name__} {error}"
        fix = "copy it again, or write the shards again"
        raise DataError(text[:200], where=str(path), fix=fix) from None


def _open_shard(index: Path, raw: dict[str, Any], options: ReadOptions) -> MdsFile:
    if raw["format"] != "mds":
        raise DataError(f"holds shards of {raw['format']!r}", where=str(index), fix="give shards of mds")
    name = (raw["compression"] or "").partition(":")[0]
    if name and name not in COMPRESSIONS:
        raise DataError(
            f"compression {name!r} is not read",
            where=str(index),
            fix=f"write the shards again with {', '.join(COMPRESSIONS)} or none",
        )
    column = _parse_column(str(index), raw, options)
    plain = raw["raw_data"]
    path = _path_of(index, plain)
    compression = ""
    stored = plain
    # A shard that was decompressed may lie in the same folder.
    if raw["zip_data"] and not path.exists():
        stored = raw["zip_data"]
        path = _path_of(index, stored)
        compression = COMPRESSIONS.get(name, "")
    file = replace(stat_local(path), compression=compression)
    if file.size != int(stored["bytes"]) or not file.size:
        raise DataError(
            f"truncated or damaged: has {file.size} bytes, its index says {int(stored['bytes'])}",
            where=file.path,
            fix=_COPY,
        )
    return MdsFile(
        file=file,
        companions=(stat_local(index),),
        options=options,
        num_bytes=int(plain["bytes"]),
        hashes=dict(plain["hashes"]),
        num_samples=int(raw["samples"]),
        column=column,
    )


def _path_of(index: Path, raw: dict[str, Any]) -> Path:
    name = PurePosixPath(raw["basename"])
    if name.is_absolute() or ".." in name.parts:
        raise DataError(
            f"names a file outside its folder: {raw['basename']!r}",
            where=str(index),
            fix="correct the index",
        )
    return index.parent / name


def _parse_column(where: str, raw: dict[str, Any], options: ReadOptions) -> TokenColumn:
    names = raw["column_names"]
    sizes = tuple(raw["column_sizes"])
    if COLUMN not in names:
        raise DataError(
            f"there is no column {COLUMN!r}; columns: {', '.join(names) or 'none'}",
            where=where,
            fix=f"write the shards again with tokens in {COLUMN!r}",
        )
    number = names.index(COLUMN)
    encoding = raw["column_encodings"][number]
    are_sizes = all(size is None or (isinstance(size, int) and size >= 0) for size in sizes)
    if len(sizes) != len(names) or not are_sizes:
        raise DataError("its columns have no sizes", where=where, fix="copy it again")
    if encoding == "bytes":
        return TokenColumn(number, sizes, _little(options.dtype or FOUNDRY_DTYPE), has_shape=False)
    match = _NDARRAY.fullmatch(encoding)
    if match is None or match[1] not in (None, *TOKEN_DTYPES):
        raise DataError(
            f"column {COLUMN!r} is of {encoding!r}, which is not one of tokens",
            where=where,
            fix="give a column of bytes or of integer ndarray",
        )
    dtype = None
    if match[1] is not None:
        options.check_dtype(match[1], where, "index")
        dtype = _little(match[1])
    return TokenColumn(number, sizes, dtype, has_shape=match[2] is None)


def _little(name: str) -> np.dtype:
    return np.dtype(name).newbyteorder("<")
