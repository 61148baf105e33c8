"""The index of a shard folder: its token shards with counts, sizes and hashes.

    DIR/index.json               read and written here; small even for terabytes
    DIR/tokenizer.json           the tokenizer that made the shards
    DIR/SPLIT/NAME.tar           webdataset shards            (writer.py)
    DIR/SPLIT/NAME.idx.npy       offsets inside one shard     (sidecars.py)
    DIR/SPLIT/NAME.lengths.npy   lengths of its documents     (sidecars.py)

Needs neither torch nor numpy, so that `plan` and the launcher can count tokens on a login node in
milliseconds. No shard is opened here.
"""

import hashlib
import json
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from pretrain.errors import DataError
from pretrain.utils.io import write_json

INDEX_NAME = "index.json"
INDEX_VERSION = 3
TOKEN_BYTES = {"uint16": 2, "uint32": 4}
NPY_HEADER_BYTES = 128
TABLE_COLUMNS = {"text": 6, "pairs": 12, "records": 8, "classes": 8, "tags": 8}
"""Columns of a shard's table, by the kind of data (see writer.py)."""

LENGTH_COLUMNS = {"text": 1, "pairs": 2, "records": 1, "classes": 1, "tags": 1}
"""Columns of the lengths of its documents; of pairs, the target's and the source's."""

LABELLED = ("classes", "tags")
"""Kinds whose documents have labels, which the index names: one a document, or one a word."""

LENGTH_BYTES = 4
_MAX_NAME_BYTES = 255
"""Longest part of a path on common file systems."""

_REBUILD = "run `pretrain prepare` again"


@dataclass(frozen=True, slots=True)
class Sidecar:
    """An array beside a shard: its name, relative to the shard folder, the CRC32 of its bytes, its columns."""

    name: str
    crc32: int
    num_columns: int


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """One shard.

    Attributes:
        name: Path of the tar, relative to the shard folder, with `/`.
        num_bytes: Size of the tar.
        sha256: SHA-256 of the tar, hex.
        num_tokens: Tokens in all its members; of pairs, those of the targets.
        num_documents: Documents in all its members.
        num_members: Members; each is one run of whole documents.
        table: The offset of every member.
        lengths: The tokens of every document: known without the tar.
    """

    name: str
    num_bytes: int
    sha256: str
    num_tokens: int
    num_documents: int
    num_members: int
    table: Sidecar
    lengths: Sidecar

    @property
    def table_bytes(self) -> int:
        """Size that the table must have."""
        return NPY_HEADER_BYTES + self.num_members * self.table.num_columns * 8

    @property
    def lengths_bytes(self) -> int:
        """Size that the lengths must have."""
        return NPY_HEADER_BYTES + self.num_documents * self.lengths.num_columns * LENGTH_BYTES

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each of its files, by name."""
        return {
            self.name: self.num_bytes,
            self.table.name: self.table_bytes,
            self.lengths.name: self.lengths_bytes,
        }


@dataclass(frozen=True, slots=True)
class SplitIndex:
    """The shards of one split, in their fixed order.

    Attributes:
        num_tokens: Tokens of the split.
        num_documents: Documents of the split.
        num_bytes_text: UTF-8 bytes of the source text, the denominator of bits per byte.
        shards: In the order of part and number.
    """

    num_tokens: int
    num_documents: int
    num_bytes_text: int
    shards: tuple[ShardIndex, ...]


def build_split(shards: list[ShardIndex], num_bytes_text: int) -> SplitIndex:
    """Returns the split that consists of `shards`, in that order, with the totals filled in."""
    num_tokens = sum(shard.num_tokens for shard in shards)
    num_documents = sum(shard.num_documents for shard in shards)
    return SplitIndex(num_tokens, num_documents, num_bytes_text, tuple(shards))


@dataclass(frozen=True, slots=True)
class DataIndex:
    """A whole shard folder.

    Attributes:
        tokenizer_sha256: SHA-256 of DIR/tokenizer.json, hex.
        vocab_size: Ids that the tokenizer can produce, unpadded; every token is below it.
        dtype: `uint16` or `uint32`.
        eos_id: Token that ends each document.
        splits: `train`, and `validation` where there is one.
        kind: `text`, `pairs` (source and target), `records` (tokens with a loss mask), `classes`
            (texts with a label) or `tags` (texts whose words have labels).
        labels: Names of the labels of labelled documents, by their number in the shards.
    """

    tokenizer_sha256: str
    vocab_size: int
    dtype: str
    eos_id: int
    splits: dict[str, SplitIndex]
    kind: str = "text"
    labels: tuple[str, ...] = ()

    def split(self, name: str) -> SplitIndex:
        """Returns a split by name. Raises: DataError, naming the splits that there are."""
        if name not in self.splits:
            known = ", ".join(sorted(self.splits))
            raise DataError(f"there is no split {name!r}", where=INDEX_NAME, fix=f"use one of: {known}")
        return self.splits[name]


def write_index(folder: Path, index: DataIndex) -> None:
    """Writes DIR/index.json atomically: the commit point of `pretrain prepare`. Raises: DiskError."""
    fields = {name: value for name, value in asdict(index).items() if name != "labels" or value}
    write_json(folder / INDEX_NAME, {"version": INDEX_VERSION, **fields})


def load_index(folder: Path) -> DataIndex:
    """Reads and validates DIR/index.json; opens no shard.

    Raises:
        DataError: No folder, no index, not JSON, of another version, a field that is missing or of
            the wrong type, totals that do not add up, a name that stands twice or leaves the
            folder.
    """
    path = folder / INDEX_NAME
    if not folder.is_dir():
        raise DataError("no such shard folder", where=str(folder), fix="run `pretrain prepare` or correct data.path")
    try:
        raw = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise DataError(
            f"holds no {INDEX_NAME}", where=str(folder), fix="run `pretrain prepare` to the end, or correct data.path"
        ) from None
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", where=str(path), fix="check its permissions") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"not JSON: {error}", where=str(path), fix=_REBUILD) from None
    top = _Fields(raw, str(path), "")
    version = top.integer("version")
    if version > INDEX_VERSION:
        raise DataError(
            f"index version {version} is newer than {INDEX_VERSION}, the newest this release reads",
            where=str(path),
            fix="upgrade pretrain",
        )
    if version < INDEX_VERSION:
        raise DataError(
            f"index version {version} is older than {INDEX_VERSION}, the only one this release reads",
            where=str(path),
            fix=f"{_REBUILD} into a new folder",
        )
    return _parse_index(top)


def check_shards(folder: Path, index: DataIndex, split: str | None = None) -> None:
    """Checks that shards and sidecars exist with their sizes: one `stat` a file.

    Args:
        folder: The shard folder.
        index: Index of the folder.
        split: Only this split. None: all.

    Raises:
        DataError: Some are not; one line that lists all of them.
    """
    splits = index.splits.values() if split is None else [index.split(split)]
    bad: list[str] = []
    for part in splits:
        for shard in part.shards:
            for name, size in shard.sizes.items():
                path = folder / name
                if not path.is_file():
                    bad.append(f"{name} is missing")
                elif path.stat().st_size != size:
                    bad.append(f"{name} has {path.stat().st_size} bytes, not {size}")
    if bad:
        raise DataError(", ".join(bad), where=str(folder), fix=f"copy these files again or {_REBUILD}")


def data_hash(index: DataIndex) -> str:
    """Returns the SHA-256 (hex) of tokenizer, dtype, labels and every split's shards.

    File names are not part of it: a moved or renamed folder is the same data.
    """
    parts = [index.tokenizer_sha256, str(index.vocab_size), index.dtype, str(index.eos_id)]
    parts += [index.kind] if index.kind != "text" else []
    parts += [json.dumps(index.labels)] if index.labels else []
    for name in sorted(index.splits):
        parts += [name, *(shard.sha256 for shard in index.splits[name].shards)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


class _Fields:
    """Typed access to the fields of one JSON object; every complaint names the file and the dotted field."""

    def __init__(self, value: Any, where: str, prefix: str) -> None:
        self.where = where
        self.prefix = prefix
        if not isinstance(value, dict):
            raise DataError(f"{prefix or 'the top level'} must be a JSON object", where=where, fix=_REBUILD)
        self.values: dict[str, Any] = value

    def _get(self, name: str, kind: type, noun: str) -> Any:
        field = f"{self.prefix}{name}"
        if name not in self.values:
            raise self.error(f"field {field!r} is missing")
        value = self.values[name]
        if not isinstance(value, kind) or isinstance(value, bool):
            raise self.error(f"field {field!r} must be {noun}, not {value!r}"[:200])
        return value

    def error(self, what: str) -> DataError:
        return DataError(what, where=self.where, fix=_REBUILD)

    def integer(self, name: str) -> int:
        value: int = self._get(name, int, "an integer")
        if value < 0:
            raise self.error(f"field '{self.prefix}{name}' must not be negative: {value}")
        return value

    def text(self, name: str) -> str:
        value: str = self._get(name, str, "text")
        return value

    def path(self, name: str) -> str:
        """A relative path that stays inside the folder."""
        value = self.text(name)
        path = PurePosixPath(value)
        if not value or path.is_absolute() or ".." in path.parts or "\\" in value or "\0" in value:
            raise self.error(f"field '{self.prefix}{name}' leaves the shard folder: {value!r}")
        if any(len(part.encode(errors="replace")) > _MAX_NAME_BYTES for part in path.parts):
            raise self.error(f"field '{self.prefix}{name}' is no file name: {value[:40]!r}...")
        return value

    def object(self, name: str) -> "_Fields":
        return _Fields(self._get(name, dict, "a JSON object"), self.where, f"{self.prefix}{name}.")

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of different texts, at least one."""
        values = self._get(name, list, "a list")
        if not values or not all(isinstance(value, str) for value in values) or len(set(values)) < len(values):
            raise self.error(f"field '{self.prefix}{name}' must list different texts")
        return tuple(values)

    def objects(self, name: str) -> list["_Fields"]:
        values = self._get(name, list, "a list")
        return [_Fields(item, self.where, f"{self.prefix}{name}.{i}.") for i, item in enumerate(values)]


def _parse_index(top: _Fields) -> DataIndex:
    splits = top.object("splits")
    index = DataIndex(
        tokenizer_sha256=top.text("tokenizer_sha256"),
        vocab_size=top.integer("vocab_size"),
        dtype=top.text("dtype"),
        eos_id=top.integer("eos_id"),
        splits={name: _parse_split(splits.object(name)) for name in splits.values},
        kind=top.text("kind"),
        labels=top.texts("labels") if top.text("kind") in LABELLED else (),
    )
    if index.kind not in TABLE_COLUMNS:
        raise top.error(f"field 'kind' must be one of {', '.join(TABLE_COLUMNS)}, not {index.kind!r}")
    if index.dtype not in TOKEN_BYTES:
        raise top.error(f"field 'dtype' must be one of {', '.join(TOKEN_BYTES)}, not {index.dtype!r}")
    largest = 2 ** (8 * TOKEN_BYTES[index.dtype])
    if not index.eos_id < index.vocab_size <= largest:
        raise top.error(
            f"eos_id {index.eos_id}, vocab_size {index.vocab_size} and dtype {index.dtype} contradict each other"
        )
    if "train" not in index.splits:
        raise top.error("there is no split 'train'")
    shards = [shard for split in index.splits.values() for shard in split.shards]
    columns = TABLE_COLUMNS[index.kind], LENGTH_COLUMNS[index.kind]
    for shard in shards:
        if (shard.table.num_columns, shard.lengths.num_columns) != columns:
            raise top.error(f"the sidecars of {shard.name} do not have the columns of {index.kind}")
    names = [name for shard in shards for name in (shard.name, shard.table.name, shard.lengths.name)]
    if len(set(names)) < len(names):
        twice = sorted(name for name, count in Counter(names).items() if count > 1)
        raise top.error(f"listed twice: {', '.join(twice)}")
    return index


def _parse_split(fields: _Fields) -> SplitIndex:
    shards = [_parse_shard(item) for item in fields.objects("shards")]
    split = build_split(shards, fields.integer("num_bytes_text"))
    for name in ("num_tokens", "num_documents"):
        total = getattr(split, name)
        stated = fields.integer(name)
        if total != stated:
            raise fields.error(f"field '{fields.prefix}{name}' is {stated}, but its shards have {total}")
    return split


def _parse_shard(fields: _Fields) -> ShardIndex:
    return ShardIndex(
        name=fields.path("name"),
        num_bytes=fields.integer("num_bytes"),
        sha256=fields.text("sha256"),
        num_tokens=fields.integer("num_tokens"),
        num_documents=fields.integer("num_documents"),
        num_members=fields.integer("num_members"),
        table=_parse_sidecar(fields.object("table")),
        lengths=_parse_sidecar(fields.object("lengths")),
    )


def _parse_sidecar(fields: _Fields) -> Sidecar:
    return Sidecar(fields.path("name"), fields.integer("crc32"), fields.integer("num_columns"))
