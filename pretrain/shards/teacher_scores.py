"""Largest scores of a teacher for each token of a split, in tars beside the shards.

    SPLIT/NAME.teacher.tar       for each member of the shard NAME.tar, of its tokens
        00000007.ids.npy         [tokens, G] ids of the G largest scores of the next token
        00000007.scores.npy      [tokens, G] float16: these scores less the largest
        00000007.rest.npy        [tokens, 2] float32: the largest score, log of the other mass
    SPLIT/NAME.teacher.idx.npy   int64 [members, 6]: place and CRC32 of the data of each
    teacher.json                 identity of teacher and data, G, temperature; CRC32 of each table

A tar appears under its name when it is whole, and its table after it: what a killed process has
done stays. teacher.json names the tables when all are there. The bytes are a function of shard and
teacher. Not here: the teacher.
"""

import mmap
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from tarfile import RECORDSIZE
from typing import Any, NamedTuple

import numpy as np

from pretrain.errors import DataError
from pretrain.shards.index import NPY_HEADER_BYTES, DataIndex, ShardIndex, data_hash
from pretrain.shards.reader import MAX_OPEN_SHARDS, load_table
from pretrain.shards.writer import TAR_BLOCK, npy_header, tar_header, write_sidecar
from pretrain.utils.io import AtomicWriter, write_json
from pretrain.utils.safe_read import read_json

TEACHER_FILE = "teacher.json"
_ARRAYS = ("ids", "scores", "rest")
_AGAIN = "run `pretrain distill` again"


@dataclass(frozen=True, slots=True)
class TeacherIdentity:
    """Origin of scores: other ones are stale."""

    teacher: str  # fingerprint of its weights
    data: str  # `data_hash`
    top_k: int
    temperature: float
    seq_len: int  # tokens of a window that the teacher reads


class TopScores(NamedTuple):
    """Largest scores of the next of N tokens: int64 [N, G], float32 [N, G], float32 [N, 2]."""

    ids: np.ndarray
    scores: np.ndarray
    rest: np.ndarray


def empty_scores(num_tokens: int, top_k: int) -> TopScores:
    """Returns room for the scores of some tokens."""
    ids, scores = np.zeros((num_tokens, top_k), np.int64), np.zeros((num_tokens, top_k), np.float32)
    return TopScores(ids, scores, np.zeros((num_tokens, 2), np.float32))


def _file_of(folder: Path, shard: ShardIndex, ending: str) -> Path:
    return (folder / shard.name).with_suffix(ending)


def is_written(folder: Path, shard: ShardIndex) -> bool:
    """Returns whether the scores of a shard are whole."""
    return _file_of(folder, shard, ".teacher.idx.npy").is_file()


def write_scores(folder: Path, shard: ShardIndex, members: Iterable[TopScores], id_dtype: str) -> None:
    """Writes the scores of a shard's members, one at a time. Raises: DiskError."""
    tar = AtomicWriter(_file_of(folder, shard, ".teacher.tar"))
    offset = 0
    rows = []
    for number, member in enumerate(members):
        dtypes: list[np.dtype[Any]] = [np.dtype(name) for name in (id_dtype, "f2", "f4")]
        row: list[int] = []
        for name, dtype, array in zip(_ARRAYS, dtypes, member, strict=True):
            data = array.astype(dtype.newbyteorder("<")).tobytes()
            size = NPY_HEADER_BYTES + len(data)
            header = tar_header(f"{number:08d}.{name}.npy", size) + npy_header(dtype, array.shape)
            padding = bytes(-size % TAR_BLOCK)
            for piece in (header, data, padding):
                tar.write(piece)
            row += [offset + len(header), zlib.crc32(data)]
            offset += len(header) + len(data) + len(padding)
        rows.append(row)
    end = offset + 2 * TAR_BLOCK
    tar.write(bytes(2 * TAR_BLOCK + -end % RECORDSIZE))
    tar.commit()
    write_sidecar(_file_of(folder, shard, ".teacher.idx.npy"), np.array(rows, dtype="<i8"))


def begin_scores(folder: Path, identity: TeacherIdentity) -> None:
    """Names the origin of scores that are being written. Raises: DataError: Other ones are there."""
    path = folder / TEACHER_FILE
    if not path.is_file():
        write_json(path, asdict(identity))
        return
    stored = read_json(path)
    if difference := _difference(stored, identity):
        raise DataError(f"scores that are there {difference}", where=str(path), fix="remove it and *.teacher.*")


def end_scores(folder: Path, identity: TeacherIdentity, shards: Iterable[ShardIndex]) -> int:
    """Names the tables of all shards; returns the bytes of their tars."""
    tables, num_bytes = {}, 0
    for shard in shards:
        tables[shard.name] = zlib.crc32(_file_of(folder, shard, ".teacher.idx.npy").read_bytes())
        num_bytes += _file_of(folder, shard, ".teacher.tar").stat().st_size
    write_json(folder / TEACHER_FILE, asdict(identity) | {"tables": tables})
    return num_bytes


def _difference(found: Mapping[str, Any], wanted: TeacherIdentity) -> str:
    words = {
        "data": "are of other data",
        "teacher": "are of another teacher",
        "temperature": f"have temperature {found.get('temperature')}, not {wanted.temperature}",
        "top_k": f"have top_k {found.get('top_k')}, not {wanted.top_k}",
        "seq_len": f"are of windows of {found.get('seq_len')} tokens, not {wanted.seq_len}",
    }
    return next((text for key, text in words.items() if found.get(key) != getattr(wanted, key)), "")


def read_identity(folder: Path) -> TeacherIdentity:
    """Returns the origin of whole scores. Raises: DataError: There are none, or a part."""
    path = folder / TEACHER_FILE
    if not path.is_file():
        raise DataError(
            "has no scores of a teacher",
            where=str(folder),
            fix="write them: pretrain distill TEACHER",
        )
    stored = read_json(path)
    if "tables" not in stored:
        raise DataError("scores of only a part of the shards", where=str(path), fix=_AGAIN)
    return TeacherIdentity(**{key: stored[key] for key in TeacherIdentity.__slots__})


class StoredScores:
    """Scores of the tokens of a split, by their place in it."""

    def __init__(self, folder: Path, index: DataIndex, split: str = "train") -> None:
        """Opens them. Raises: DataError: They are of other data, incomplete or damaged."""
        self.identity = read_identity(folder)
        if self.identity.data != data_hash(index):
            text = "scores of a teacher that read other data than these"
            raise DataError(text, where=str(folder / TEACHER_FILE), fix=_AGAIN)
        self._folder = folder
        self._shards = index.splits[split].shards
        self._id_dtype = np.dtype(index.dtype).newbyteorder("<")
        token_bytes = self._id_dtype.itemsize
        counts = [load_table(folder, shard, token_bytes)[:, 1] for shard in self._shards]
        self._sizes = np.concatenate(counts)
        self._starts = np.cumsum(self._sizes) - self._sizes
        self._members = [(shard, number) for shard, count in enumerate(counts) for number in range(len(count))]
        crcs = read_json(folder / TEACHER_FILE)["tables"]
        self._tables = [
            self._load_table(shard, len(count), crcs) for shard, count in zip(self._shards, counts, strict=True)
        ]
        self._map = lru_cache(MAX_OPEN_SHARDS)(self._open)
        self._member = lru_cache(64 * MAX_OPEN_SHARDS)(self._read)

    def _load_table(self, shard: ShardIndex, num_members: int, crcs: Mapping[str, int]) -> np.ndarray:
        path = _file_of(self._folder, shard, ".teacher.idx.npy")
        content = path.read_bytes() if path.is_file() else b""
        header = npy_header(np.dtype("<i8"), (num_members, 2 * len(_ARRAYS)))
        if zlib.crc32(content) != crcs.get(shard.name) or not content.startswith(header):
            raise DataError("is missing, or not the table that was written", where=str(path), fix=_AGAIN)
        return np.frombuffer(content, "<i8", offset=len(header)).reshape(num_members, -1)

    def find(self, places_N: np.ndarray) -> TopScores:
        """Returns the scores of tokens by their places. Raises: DataError: They are damaged."""
        top = empty_scores(len(places_N), self.identity.top_k)
        members_N = np.searchsorted(self._starts, places_N, side="right") - 1
        for member in np.unique(members_N).tolist():
            of_member = members_N == member
            rows = places_N[of_member] - self._starts[member]
            arrays = self._member(member)
            for out, array in zip(top, arrays, strict=True):
                out[of_member] = array[rows]
        return top

    def _open(self, shard: int) -> mmap.mmap:
        path = _file_of(self._folder, self._shards[shard], ".teacher.tar")
        try:
            with path.open("rb") as file:
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise DataError(f"cannot be read: {error}", where=str(path), fix=_AGAIN) from None

    def _read(self, member: int) -> tuple[np.ndarray, ...]:
        """Returns views of the arrays of a member, whose CRC32s are checked."""
        return tuple(self._views(member))

    def _views(self, member: int) -> Iterator[np.ndarray]:
        shard, number = self._members[member]
        mapped, size = self._map(shard), int(self._sizes[member])
        columns = (self.identity.top_k, self.identity.top_k, 2)
        dtypes: list[np.dtype[Any]] = [self._id_dtype, np.dtype("<f2"), np.dtype("<f4")]
        row = self._tables[shard][number].reshape(-1, 2).tolist()
        for (offset, crc32), width, dtype, name in zip(row, columns, dtypes, _ARRAYS, strict=True):
            is_there = offset + size * width * dtype.itemsize <= len(mapped)
            array = np.frombuffer(mapped, dtype, size * width, offset) if is_there else np.empty(0, dtype)
            if zlib.crc32(array.data) != crc32:
                path = _file_of(self._folder, self._shards[shard], ".teacher.tar")
                text = f"{number:08d}.{name}.npy is damaged: its CRC32 does not match"
                raise DataError(text, where=str(path), fix=f"remove it and its table, and {_AGAIN}")
            yield array.reshape(size, width)
