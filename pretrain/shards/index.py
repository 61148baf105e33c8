"""The index of a shard folder: its token shards with counts, sizes and hashes.

    DIR/index.json               read and written here; small even for terabytes
    DIR/tokenizer.json           the tokenizer that made the shards; images have none
    DIR/SPLIT/NAME.tar           webdataset shards            (writer.py)
    DIR/SPLIT/NAME.idx.npy       offsets inside one shard
    DIR/SPLIT/NAME.lengths.npy   lengths of its documents

Imports neither torch nor numpy: `plan` and the launcher count tokens on a login node. No shard is
opened here.
"""

import hashlib
import json
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from pretrain.errors import DataError
from pretrain.kinds.layouts import LAYOUTS, Layout
from pretrain.utils.io import write_json
from pretrain.utils.remote import is_remote
from pretrain.utils.safe_read import parse_json, read_bounded

INDEX_NAME = "index.json"
MAX_INDEX_BYTES = 2**29
"""A hundred times the index of 20,000 shards."""

INDEX_VERSION = 3
TOKEN_BYTES = {"uint16": 2, "uint32": 4}
NPY_HEADER_BYTES = 128
REJECTED = 2
"""Bit of the loss mask, set for all tokens of the second side of preferences, and of an unwanted
record of feedback."""

IMAGES = "images"
"""Kind of data without tokens and tokenizer: one image is one document, and counts as one token."""

CAPTIONS = "captions"
"""Images, each with a text; their tokens are in a sidecar, and an image counts as one token."""

LENGTH_BYTES = 4
# Longest part of a path on common file systems.
_MAX_NAME_BYTES = 255
# The names that `prepare` gives. Others are looked at in parts, which takes 8 times as long.
_PLAIN_NAME = re.compile(r"(?:\w[\w.-]{0,99}+/)*+\w[\w.-]{0,99}+", re.ASCII)

_REBUILD = "run `pretrain prepare` again"


def _check_name(name: str) -> str:
    """Returns a relative path that stays inside the folder. Raises: ValueError."""
    if _PLAIN_NAME.fullmatch(name):
        return name
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name:
        raise ValueError(f"leaves the shard folder: {name!r}")
    if any(len(part.encode(errors="replace")) > _MAX_NAME_BYTES for part in path.parts):
        raise ValueError(f"is no file name: {name[:40]!r}...")
    return name


FileName = Annotated[str, AfterValidator(_check_name)]
"""Path relative to the shard folder, with `/`."""

Count = Annotated[int, Field(strict=True, ge=0)]


@dataclass(frozen=True, slots=True)
class Sidecar:
    """An array of a shard in a file of its own: name, CRC32 of its bytes, columns."""

    name: FileName
    crc32: Count
    num_columns: Count


class ShardFile(NamedTuple):
    """A file of a shard; its digest, hex, is a SHA-256 (64 digits) or a CRC32 (8 digits)."""

    name: str
    num_bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """One shard: name, size and SHA-256 (hex) of its tar, and its sidecars.

    A member is one run of whole documents; tokens of pairs are those of the targets. The table has
    the offset of every member, the lengths the tokens of every document, known without the tar.
    Captions of images, uint32 [1, columns]: N + 1 bounds of N captions, then their tokens.
    """

    name: FileName
    num_bytes: Count
    sha256: str
    num_tokens: Count
    num_documents: Count
    num_members: Count
    table: Sidecar
    lengths: Sidecar
    captions: Sidecar | None = None

    @property
    def table_bytes(self) -> int:
        """Size of the table."""
        return NPY_HEADER_BYTES + self.num_members * self.table.num_columns * 8

    @property
    def lengths_bytes(self) -> int:
        """Size of the lengths."""
        return NPY_HEADER_BYTES + self.num_documents * self.lengths.num_columns * LENGTH_BYTES

    @property
    def files(self) -> tuple[ShardFile, ...]:
        """The tar, its table, the lengths of its documents, and captions, if any."""
        files = (
            ShardFile(self.name, self.num_bytes, self.sha256),
            ShardFile(self.table.name, self.table_bytes, f"{self.table.crc32:08x}"),
            ShardFile(self.lengths.name, self.lengths_bytes, f"{self.lengths.crc32:08x}"),
        )
        if self.captions is None:
            return files
        num_bytes = NPY_HEADER_BYTES + self.captions.num_columns * LENGTH_BYTES
        return (*files, ShardFile(self.captions.name, num_bytes, f"{self.captions.crc32:08x}"))

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each of its files, by name."""
        return {file.name: file.num_bytes for file in self.files}


@dataclass(frozen=True, slots=True)
class SplitIndex:
    """The shards of one split, in the order of part and number.

    `num_bytes_text` are the UTF-8 bytes of the source text, the denominator of bits per byte.
    """

    num_tokens: Count
    num_documents: Count
    num_bytes_text: Count
    shards: tuple[ShardIndex, ...]


def build_split(shards: list[ShardIndex], num_bytes_text: int) -> SplitIndex:
    """Returns the split that consists of `shards`, in that order, with the totals filled in."""
    num_tokens = sum(shard.num_tokens for shard in shards)
    num_documents = sum(shard.num_documents for shard in shards)
    return SplitIndex(num_tokens, num_documents, num_bytes_text, tuple(shards))


@dataclass(frozen=True, slots=True)
class DataIndex:
    """A whole shard folder.

    Its kind is `text`, `pairs` (source and target), `records` (tokens with a loss mask),
    `preferences` (such a record with each of two answers, the chosen one first), `feedback` (such a
    record, wanted or not), `classes` (texts with a label), `tags` (texts whose words have labels),
    `images` (with a label) or `captions` (images with a text). There is a split `train`, and maybe
    `validation`.
    """

    tokenizer_sha256: str  # of DIR/tokenizer.json, hex; empty for images
    vocab_size: Count  # ids that the tokenizer can produce, unpadded; every token is below it
    dtype: str  # uint16 or uint32
    eos_id: Count  # ends each document
    splits: dict[str, SplitIndex]
    kind: str = "text"
    labels: tuple[str, ...] = ()  # names, by their number in the shards
    begin_id: Count | None = None  # begins each document of a kind that is `begun`; None: nothing does
    # Addresses of tars that others made, by name: they are not in the folder.
    tars: dict[str, str] = field(default_factory=dict)

    @property
    def layout(self) -> Layout:
        """Record of the kind of data."""
        return LAYOUTS[self.kind]

    @property
    def has_images(self) -> bool:
        """True of images, with labels or captions."""
        return self.layout.images

    @property
    def has_tokenizer(self) -> bool:
        """True unless the data are images."""
        return self.layout.has_tokenizer

    def split(self, name: str) -> SplitIndex:
        """Returns a split by name. Raises: DataError, naming the splits that there are."""
        if name not in self.splits:
            fix = f"use one of: {', '.join(sorted(self.splits))}"
            if name == "validation":
                share = "tail:0.05" if self.layout.running_text else "hash:0.1"
                fix += f"; or prepare another folder with --split {share}"
            raise DataError(f"there is no split {name!r}", where=INDEX_NAME, fix=fix)
        return self.splits[name]


def write_index(folder: Path, index: DataIndex) -> None:
    """Writes DIR/index.json: the commit point of `pretrain prepare`. Raises: DiskError."""
    fields = {name: value for name, value in asdict(index).items() if value not in ((), None, {})}
    for shard in (shard for split in fields["splits"].values() for shard in split["shards"]):
        if shard["captions"] is None:
            del shard["captions"]
    write_json(folder / INDEX_NAME, {"version": INDEX_VERSION, **fields})


def load_index(folder: Path) -> DataIndex:
    """Reads and validates DIR/index.json; opens no shard.

    Raises:
        DataError: No folder, no index, not JSON, another version, a field that is missing or of the
            wrong type, totals that do not add up, a name that stands twice or leaves the folder.
    """
    path = folder / INDEX_NAME
    if not folder.is_dir():
        option = f"--output {shlex.quote(str(folder))}"
        command = f"run `pretrain prepare` with {option} (a recipe's first lines have the whole command)"
        raise DataError(
            "no such shard folder",
            where=str(folder),
            fix=f"{command}, or correct the path (data.path)",
        )
    try:
        raw = parse_json(read_bounded(path, MAX_INDEX_BYTES))
    except FileNotFoundError:
        raise DataError(
            f"holds no {INDEX_NAME}",
            where=str(folder),
            fix="run `pretrain prepare` to the end, or correct the path (data.path)",
        ) from None
    except OSError as error:
        raise DataError(
            f"cannot be read: {error.strerror}",
            where=str(path),
            fix="check its permissions",
        ) from None
    except ValueError as error:
        raise DataError(f"not JSON: {error}", where=str(path), fix=_REBUILD) from None
    try:
        version = _version_of(raw)
        if version == INDEX_VERSION:
            return _checked(_INDEX.validate_python(raw))
    except ValueError as error:
        raise DataError(
            _describe(error) if isinstance(error, ValidationError) else str(error),
            where=str(path),
            fix=_REBUILD,
        ) from None
    if version > INDEX_VERSION:
        age = f"newer than {INDEX_VERSION}, the newest this release reads"
        fix = "upgrade pretrain"
    else:
        age = f"older than {INDEX_VERSION}, the only one this release reads"
        fix = f"{_REBUILD} into a new folder"
    raise DataError(f"index version {version} is {age}", where=str(path), fix=fix)


_INDEX = TypeAdapter(DataIndex)


def _version_of(raw: Any) -> int:
    if not isinstance(raw, dict):
        raise ValueError("the top level must be a JSON object")
    for name in ("version", "kind"):
        if name not in raw:
            raise ValueError(f"field {name!r} is missing")
    if type(raw["version"]) is not int:
        raise ValueError(f"field 'version' must be an integer, not {raw['version']!r}"[:200])
    return raw["version"]


def _describe(error: ValidationError) -> str:
    """Returns the first problem of an index, with the dotted name of its field."""
    first = error.errors(include_url=False)[0]
    named = f"field '{'.'.join(map(str, first['loc']))}'"
    if first["type"] == "missing":
        return f"{named} is missing"
    if first["type"] == "value_error":
        return f"{named} {first['ctx']['error']}"
    return f"{named}: {first['msg']}, not {first['input']!r}"[:200]


def _checked(index: DataIndex) -> DataIndex:
    """Returns an index whose fields agree. Raises: ValueError."""
    if index.kind not in LAYOUTS:
        raise ValueError(f"field 'kind' must be one of {', '.join(LAYOUTS)}, not {index.kind!r}")
    if index.dtype not in TOKEN_BYTES:
        raise ValueError(f"field 'dtype' must be one of {', '.join(TOKEN_BYTES)}, not {index.dtype!r}")
    if index.layout.names_labels and not 0 < len(index.labels) == len(set(index.labels)):
        raise ValueError("field 'labels' must list different texts")
    _check_ids(index)
    if "train" not in index.splits:
        raise ValueError("there is no split 'train'")
    for name, split in index.splits.items():
        _check_split(index, name, split)
    _check_names(index)
    return index


def _check_names(index: DataIndex) -> None:
    shards = chain.from_iterable(split.shards for split in index.splits.values())
    names = [name for shard in shards for name in _names_of(shard)]
    different = set(names)
    if len(different) < len(names):
        twice = sorted(name for name, count in Counter(names).items() if count > 1)
        raise ValueError(f"listed twice: {', '.join(twice)}")
    for name, address in index.tars.items():
        if name not in different or not is_remote(address):
            raise ValueError(f"field 'tars' has no address of a shard: {name!r}, {address[:80]!r}")


def _names_of(shard: ShardIndex) -> Iterator[str]:
    """Yields the names of the files of a shard; sizes and digests would double the time."""
    yield from (shard.name, shard.table.name, shard.lengths.name)
    if shard.captions is not None:
        yield shard.captions.name


def _check_ids(index: DataIndex) -> None:
    if not index.eos_id < index.vocab_size <= 2 ** (8 * TOKEN_BYTES[index.dtype]):
        ids = f"eos_id {index.eos_id}, vocab_size {index.vocab_size} and dtype {index.dtype}"
        raise ValueError(f"{ids} contradict each other")
    if index.begin_id is not None and index.begin_id >= index.vocab_size:
        raise ValueError(f"begin_id {index.begin_id} and vocab_size {index.vocab_size} contradict each other")


def _check_split(index: DataIndex, name: str, split: SplitIndex) -> None:
    for counted in ("num_tokens", "num_documents"):
        total = sum(getattr(shard, counted) for shard in split.shards)
        stated = getattr(split, counted)
        if total != stated:
            raise ValueError(f"field 'splits.{name}.{counted}' is {stated}, but its shards have {total}")
    columns = (index.layout.table_columns, index.layout.length_columns)
    for shard in split.shards:
        if (shard.table.num_columns, shard.lengths.num_columns) != columns:
            raise ValueError(f"the sidecars of {shard.name} do not have the columns of {index.kind}")
        if (shard.captions is not None) != index.layout.captions:
            raise ValueError(f"field 'captions' of {shard.name} does not go with the kind {index.kind}")


def check_shards(folder: Path, index: DataIndex, split: str | None = None) -> None:
    """Checks the sizes of a split's files (None: of all), one `stat` each. Raises: DataError."""
    splits = index.splits.values() if split is None else [index.split(split)]
    listed = (file for part in splits for shard in part.shards for file in shard.files)
    files = [file for file in listed if file.name not in index.tars]
    bad = []
    for file in files:
        path = folder / file.name
        if not path.is_file():
            bad.append(f"{file.name} is missing")
        elif path.stat().st_size != file.num_bytes:
            bad.append(f"{file.name} has {path.stat().st_size} bytes, not {file.num_bytes}")
    if bad:
        raise DataError(", ".join(bad), where=str(folder), fix=f"copy these files again or {_REBUILD}")


def data_hash(index: DataIndex) -> str:
    """Returns the SHA-256 (hex) of tokenizer, dtype, labels and shards; files may be renamed."""
    parts = [index.tokenizer_sha256, str(index.vocab_size), index.dtype, str(index.eos_id)]
    parts += [] if index.layout.running_text else [index.kind]
    parts += [json.dumps(index.labels)] if index.labels else []
    for name in sorted(index.splits):
        parts += [name, *(shard.sha256 for shard in index.splits[name].shards)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
