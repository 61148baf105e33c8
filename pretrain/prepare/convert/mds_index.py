"""The index.json of a folder of MosaicML MDS shards: which shards, and where the tokens are in a sample.

    {"version": 2, "shards": [{"format": "mds", "samples": N, "compression": null | "zstd:3", "column_names": [...],
      "column_encodings": [...], "column_sizes": [bytes or null, ...], "raw_data": {"basename", "bytes", "hashes"},
      "zip_data": null | {...}}, ...]}

Layout as in mosaicml/streaming, streaming/base/format/.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from pretrain.errors import DataError
from pretrain.prepare.convert.files import find_files
from pretrain.prepare.convert.token_file import TOKEN_DTYPES, ReadOptions

INDEX_NAME = "index.json"
COMPRESSIONS = {"zstd": "zstd", "gz": "gzip"}
FOUNDRY_DTYPE = "int64"
"""What LLM Foundry writes into a column of bytes, which does not say it."""

_NDARRAY = re.compile(r"ndarray(?::(\w+)(?::([\d,]+))?)?")


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of the index.

    Attributes:
        path: Where it is.
        num_bytes: Its size.
        hashes: Hex digests of it by the name of the algorithm.
    """

    path: Path
    num_bytes: int
    hashes: dict[str, str]


@dataclass(frozen=True, slots=True)
class TokenColumn:
    """Where the tokens are in a sample, and how they are written.

    Attributes:
        number: Among the columns.
        sizes: Bytes of every column; None: they stand at the head of each sample, as uint32.
        dtype: Of the tokens. None: a byte before them says it (ndarray).
        has_shape: Their shape stands before them (ndarray).
    """

    number: int
    sizes: tuple[int | None, ...]
    dtype: np.dtype | None
    has_shape: bool


@dataclass(frozen=True, slots=True)
class MdsEntry:
    """One shard of the index.

    Attributes:
        index: The index.json.
        raw: The shard.
        stored: What of it is compressed, or None.
        compression: `zstd`, `gzip` or none.
        num_samples: Samples.
        column: Where their tokens are.
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
        raise DataError(f"names a file outside its folder: {raw['basename']!r}", where=str(index), fix="mend the index")
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
