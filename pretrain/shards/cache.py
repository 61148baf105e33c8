"""Cache of fetched shards on a local disk, shared by the processes, runs and data folders of a machine.

    DIR/shards/SHA256.tar              a whole, verified shard, for all data folders that have it
    DIR/shards/SHA256.CRC32.idx.npy    its sidecar, there before the tar is
    DIR/shards/SHA256.lock             shared: in use; exclusive: being fetched or evicted; contains
                                       the process id and the bytes promised to a download
    DIR/shards/SHA256.soon             shared: will be used soon
    DIR/folders/HASH/                  index, tokenizer, lengths and bins of an address
    DIR/folders/HASH.lock              shared: the address is open; exclusive: being evicted
    DIR/.lock                          exclusive: room is being made
    DIR/.room                          touched by a process that finds no room

Entries in use are never evicted; entries needed soon only for a shard that is needed now, the last
to be needed first; the rest by least recent use.
"""

import enum
import fcntl
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from pretrain.errors import DataError, DiskError
from pretrain.shards.index import ShardIndex
from pretrain.utils.io import make_dir, take_flock

_SHA256 = re.compile("[0-9a-f]{64}")


# All locks are flocks, which end with their process: the files that a killed one leaves count for
# nothing, and the next process removes them. The owner of an exclusive lock may remove its file;
# processes that waited for it notice, and take the lock of the new one.


def lock(path: Path, operation: int = fcntl.LOCK_EX) -> int:
    """Waits for a file's lock, released by closing the descriptor. Raises: DiskError, without locks too."""
    descriptor = try_lock(path, operation, wait_s=math.inf)
    assert descriptor is not None
    return descriptor


def try_lock(path: Path, operation: int = fcntl.LOCK_EX, wait_s: float = 0.0) -> int | None:
    """As `lock`; returns None where another process has it after `wait_s` seconds."""
    while True:
        descriptor = None
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            if not take_flock(descriptor, operation, wait_s):
                os.close(descriptor)
                return None
            # The owner may have removed the file meanwhile: then this lock guards nothing.
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), path.stat()):
                    return descriptor
            os.close(descriptor)
        except OSError as error:
            if descriptor is not None:
                os.close(descriptor)
            raise DiskError(
                f"cannot lock here: {error.strerror or error}",
                where=str(path),
                fix="set data.cache_dir to a folder on a disk of this machine",
            ) from error


def lock_all(locked: ExitStack, paths: list[Path]) -> bool:
    """Locks all of some files, until `locked` is closed, or none; returns whether it did."""
    with ExitStack() as taken:
        for path in paths:
            descriptor = try_lock(path)
            if descriptor is None:
                return False
            taken.callback(os.close, descriptor)
        locked.push(taken.pop_all())
    return True


@dataclass(slots=True)
class Entry:
    """A shard, or the folder of an address: its files or itself, with size and times in ns."""

    lock: Path  # shared lock while the entry is in use
    soon: Path | None = None  # shared lock while the entry will be used soon
    paths: list[Path] = field(default_factory=list)
    num_bytes: int = 0
    used_at: int = 0
    expected_at: int = 0  # the last announcement that it will be used soon
    promised: int = 0  # bytes for a download

    @property
    def taken(self) -> int:
        """Bytes that are not free for other entries."""
        return max(self.num_bytes, self.promised)

    def locks(self, *, with_soon: bool) -> list[Path]:
        """Returns the locks that its removal needs; `with_soon`: only if no process expects it."""
        return [self.lock, self.soon] if with_soon and self.soon is not None else [self.lock]


def scan_shards(shards: Path) -> dict[str, Entry]:
    """Returns the shards by hash, after removing the traces of dead processes."""
    suspects = set()
    for item in os.scandir(shards):
        key, _, kind = item.name.partition(".")
        # Only the lock of a shard stays while room is made: that of a file goes with its download.
        if ".tmp-" in kind or (kind == "lock" and item.stat().st_size):
            suspects.add(key)
    promised = {key: _promised(shards, key) for key in suspects}
    entries: dict[str, Entry] = {}
    # Only now: a download that ends meanwhile counts as a promise, as files, or as both.
    for item in os.scandir(shards):
        key = item.name.partition(".")[0]
        if key not in entries:
            soon = shards / f"{key}.soon"
            entries[key] = Entry(shards / f"{key}.lock", soon, promised=promised.pop(key, 0))
        entry = entries[key]
        if item.name.endswith((".tar", ".npy")):
            entry.paths.append(Path(item.path))
            entry.num_bytes += item.stat().st_size
            entry.used_at = max(entry.used_at, item.stat().st_mtime_ns)
        elif item.name.endswith(".soon"):
            entry.expected_at = item.stat().st_mtime_ns
    return entries


def scan_folders(folders: Path) -> dict[str, Entry]:
    """Returns the folders of addresses, by the hash of their index."""
    entries = {}
    for item in os.scandir(folders):
        if item.is_dir(follow_symlinks=False):
            path = Path(item.path)
            lock_path = folders / f"{item.name}.lock"
            used_at = (lock_path if lock_path.exists() else path).stat().st_mtime_ns
            entries[item.name] = Entry(lock_path, paths=[path], num_bytes=tree_bytes(path), used_at=used_at)
    return entries


def tree_bytes(folder: Path | str) -> int:
    """Returns what the files below a folder take, where they are more than links."""
    total = 0
    with suppress(FileNotFoundError):  # what is replaced or removed meanwhile
        for item in os.scandir(folder):
            if item.is_dir(follow_symlinks=False):
                total += tree_bytes(item.path)
            elif not item.is_symlink():
                with suppress(FileNotFoundError):
                    total += item.stat().st_size
    return total


def _promised(shards: Path, key: str) -> int:
    """Returns how many bytes are promised to a download; cleans up where there is none any more."""
    path = shards / f"{key}.lock"
    with ExitStack() as locked:
        if lock_all(locked, [path]):
            for leftover in shards.glob(f"{key}.*.tmp-*"):
                leftover.unlink(missing_ok=True)
            os.truncate(path, 0)
            return 0
    content = path.read_text().split()
    return int(content[1]) if len(content) == 2 else 0


class Fill(enum.Enum):
    """Outcome of an attempt to bring a shard in."""

    THERE = "it is there"
    BUSY = "process {} is at it"
    FULL = "there is no room in the cache"


class ShardCache:
    """Shards by the hash of their content, and folders of addresses; in all at most `limit_bytes`.

    Files in the folder of an address count too. Safe to use from threads and processes.
    """

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        """Makes the folder. Raises: DiskError, also where the file system has no locks."""
        self.folder = folder
        self.limit_bytes = limit_bytes
        self._shards = make_dir(folder / "shards")
        self._folders = make_dir(folder / "folders")
        os.close(lock(folder / ".lock"))

    def paths(self, shard: ShardIndex) -> tuple[Path, Path]:
        """Returns the paths of a shard and its sidecar. Raises: DataError: Its hash is none."""
        if not _SHA256.fullmatch(shard.sha256):
            raise DataError(
                f"its sha256 in the index is none: {shard.sha256[:80]!r}",
                where=shard.name,
                fix="run `pretrain prepare` again",
            )
        tar = self._shards / f"{shard.sha256}.tar"
        return tar, self._shards / f"{shard.sha256}.{shard.table.crc32:08x}.idx.npy"

    def has(self, shard: ShardIndex) -> bool:
        """Returns whether a shard and its sidecar are there with their sizes: two `stat`."""
        wanted = zip(self.paths(shard), (shard.num_bytes, shard.table_bytes), strict=True)
        try:
            return all(path.stat().st_size == size for path, size in wanted)
        except OSError:
            return False

    def hold(self, shard: ShardIndex) -> int | None:
        """Marks a shard, if it is there, as in use until the returned descriptor is closed."""
        if not self.has(shard):
            return None
        descriptor = try_lock(self._lock_path(shard), fcntl.LOCK_SH)
        if descriptor is not None and not self.has(shard):
            os.close(descriptor)
            return None
        if descriptor is not None:
            stamp(self.paths(shard)[0])
        return descriptor

    def hold_folder(self, key: str) -> tuple[Path, int]:
        """Returns the folder of an address, made if need be, kept until the descriptor is closed."""
        descriptor = lock(self._folders / f"{key}.lock", fcntl.LOCK_SH)
        stamp(descriptor)
        return make_dir(self._folders / key), descriptor

    def expect(self, shard: ShardIndex) -> int | None:
        """Marks a shard, there or not, as used soon until the returned descriptor is closed.

        Returns None while another process evicts it. The last one expected is needed last.
        """
        descriptor = try_lock(self._lock_path(shard).with_suffix(".soon"), fcntl.LOCK_SH)
        if descriptor is not None:
            stamp(descriptor)
        return descriptor

    def fill(self, shard: ShardIndex, fetch: Callable[[Path, Path], None], *, urgent: bool) -> Fill:
        """Brings a shard in, unless it is there or another process is at it.

        `fetch` makes both files, the sidecar and the tar; its errors are raised. For an `urgent`
        shard, room may be taken from what is expected.
        """
        lock_path = self._lock_path(shard)
        descriptor = None if self.has(shard) else try_lock(lock_path)
        if descriptor is None:
            return Fill.THERE if self.has(shard) else Fill.BUSY
        try:
            if self.has(shard):
                return Fill.THERE
            for leftover in self._shards.glob(f"{shard.sha256}.*.tmp-*"):
                leftover.unlink(missing_ok=True)  # of a process that died: we have the lock
            if not self._promise(shard, descriptor, urgent):
                return Fill.FULL
            tar, table = self.paths(shard)
            fetch(table, tar)
            return Fill.THERE
        finally:
            os.ftruncate(descriptor, 0)
            os.close(descriptor)

    def fetched_by(self, shard: ShardIndex) -> str:
        """Returns the id of the process that fetches a shard now; "?" where it is unknown."""
        with suppress(OSError):
            return self._lock_path(shard).read_text().partition(" ")[0] or "?"
        return "?"

    def ask_for_room(self) -> None:
        """Asks all processes to release the shards that they keep open without need."""
        (self.folder / ".room").touch()

    def asked_at(self) -> int:
        """Returns the time of the last `ask_for_room`, ns; 0: never."""
        with suppress(FileNotFoundError):
            return (self.folder / ".room").stat().st_mtime_ns
        return 0

    def bytes_in_use(self) -> int:
        """Returns the bytes that cannot be evicted now: shards in use, and promised room."""
        total = 0
        with self._alone():
            for entry in self._scan().values():
                with ExitStack() as locked:
                    if entry.promised or not lock_all(locked, entry.locks(with_soon=False)):
                        total += entry.taken
        return total

    def _lock_path(self, shard: ShardIndex) -> Path:
        return self.paths(shard)[0].with_suffix(".lock")

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Takes the exclusive lock of the cache, for some milliseconds."""
        descriptor = lock(self.folder / ".lock")
        try:
            yield
        finally:
            os.close(descriptor)

    def _promise(self, shard: ShardIndex, descriptor: int, urgent: bool) -> bool:
        """Makes room for a shard and records it in the lock file, whose lock we have."""
        size = shard.num_bytes + shard.table_bytes
        with self._alone():
            entries = self._scan()
            entries.pop(shard.sha256, None)
            taken = sum(entry.taken for entry in entries.values())
            if not self._evict(entries, taken + size - self.limit_bytes, urgent):
                return False
            os.ftruncate(descriptor, 0)  # what a process that died here has left
            os.pwrite(descriptor, f"{os.getpid()} {size}\n".encode(), 0)
        return True

    def _scan(self) -> dict[str, Entry]:
        """Returns what there is: by hashes of 64 digits the shards, of 32 the folders."""
        return {**scan_shards(self._shards), **scan_folders(self._folders)}

    def _evict(self, entries: dict[str, Entry], excess: int, urgent: bool) -> bool:
        """Evicts `excess` bytes or more, or nothing; returns whether there is room now."""
        there = [key for key, entry in entries.items() if entry.paths]
        by_use = sorted(there, key=lambda key: entries[key].used_at)
        by_need = sorted(there, key=lambda key: -entries[key].expected_at)
        victims: dict[str, list[Path]] = {}
        with ExitStack() as locked:
            # First the entries that no process expects, then, for an urgent shard, the others.
            for with_soon, keys in ((True, by_use), (False, by_need if urgent else [])):
                for key in keys:
                    if excess <= 0:
                        break
                    locks = entries[key].locks(with_soon=with_soon)
                    if key not in victims and lock_all(locked, locks):
                        victims[key] = locks
                        excess -= entries[key].num_bytes
            if excess > 0:
                return False
            for key, locks in victims.items():
                # The tar first: `has` does not believe a sidecar alone. The locks last.
                files = sorted(entries[key].paths, key=lambda path: path.suffix != ".tar")
                for path in (*files, *locks):
                    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        return True


def stamp(file: Path | int) -> None:
    """Sets the times of a file to now, finer than the kernel would: in order of the calls."""
    now = time.time_ns()
    os.utime(file, ns=(now, now))
