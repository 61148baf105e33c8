"""Cache of fetched shards on a local disk: entries, locks, fills and evictions."""

import enum
import fcntl
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from pretrain.errors import DataError
from pretrain.shards.cache_locks import LockSet, lock, try_lock
from pretrain.shards.index import ShardIndex
from pretrain.utils.io import make_dir


@dataclass(slots=True)
class Entry:
    """A shard, or the folder of an address.

    Attributes:
        lock: Lock file; shared lock while the entry is in use.
        soon: Lock file; shared lock while the entry will be used soon.
        paths: Files of the shard, or the folder.
        num_bytes: Size of these.
        used_at: When it was last used, ns.
        expected_at: When somebody last said that it will be used soon.
        promised: Bytes that are promised to a download.
    """

    lock: Path
    soon: Path | None = None
    paths: list[Path] = field(default_factory=list)
    num_bytes: int = 0
    used_at: int = 0
    expected_at: int = 0
    promised: int = 0

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
        # Only the lock of a shard stays as long as room is made: that of a file goes with who fetches it again.
        if ".tmp-" in kind or (kind == "lock" and item.stat().st_size):
            suspects.add(key)
    promised = {key: _promised(shards, key) for key in suspects}
    entries: dict[str, Entry] = {}
    # Only now: a download that ends meanwhile is counted as a promise, as files, or as both, but not as nothing.
    for item in os.scandir(shards):
        key = item.name.partition(".")[0]
        if key not in entries:
            entries[key] = Entry(shards / f"{key}.lock", shards / f"{key}.soon", promised=promised.pop(key, 0))
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
            lock = folders / f"{item.name}.lock"
            used_at = (lock if lock.exists() else Path(item.path)).stat().st_mtime_ns
            entries[item.name] = Entry(lock, paths=[Path(item.path)], num_bytes=tree_bytes(item.path), used_at=used_at)
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
    with LockSet() as locked:
        if locked.add(key, [path]):
            for leftover in shards.glob(f"{key}.*.tmp-*"):
                leftover.unlink(missing_ok=True)
            os.truncate(path, 0)
            return 0
    content = path.read_text().split()
    return int(content[1]) if len(content) == 2 else 0


# Layout of the cache, which processes, runs and data folders of a machine share:
#
#     DIR/shards/SHA256.tar              a whole, verified shard; two data folders that share it share this file
#     DIR/shards/SHA256.CRC32.idx.npy    its sidecar, there before the tar is
#     DIR/shards/SHA256.lock             shared: in use; exclusive: being fetched or evicted; contains the process id
#                                        and the bytes promised to a download
#     DIR/shards/SHA256.soon             shared: will be used soon
#     DIR/folders/HASH/                  index, tokenizer, lengths and bins of an address
#     DIR/folders/HASH.lock              shared: the address is open; exclusive: being evicted
#     DIR/.lock                          exclusive: room is being made
#     DIR/.room                          touched by a process that finds no room
#
# All locks are flocks, which end with their process: the files that a killed one leaves count for
# nothing, and the next process removes them. Entries in use are never evicted; entries needed soon
# only for a shard that is needed now, the last to be needed first; the rest by least recent use.


_SHA256 = re.compile("[0-9a-f]{64}")


class Fill(enum.Enum):
    """Outcome of an attempt to bring a shard in."""

    THERE = "it is there"
    BUSY = "process {} is at it"
    FULL = "there is no room in the cache"


class ShardCache:
    """Shards by the hash of their content, and what lies beside them; in all at most `limit_bytes`.

    What is written into the folder of an address counts from then on. Safe to use from threads and processes.
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
        """Returns whether a shard and its sidecar are there: two `stat`, nothing is read. Files of
        a wrong size, which somebody else must have written, are not."""
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
        """Returns the folder of an address, made if need be: it stays until the descriptor that
        comes with it is closed."""
        descriptor = lock(self._folders / f"{key}.lock", fcntl.LOCK_SH)
        stamp(descriptor)
        return make_dir(self._folders / key), descriptor

    def expect(self, shard: ShardIndex) -> int | None:
        """Marks a shard, there or not, as used soon until the returned descriptor is closed.

        Returns None for the moment in which another process evicts it. What is expected last is needed last.
        """
        descriptor = try_lock(self._lock_path(shard).with_suffix(".soon"), fcntl.LOCK_SH)
        if descriptor is not None:
            stamp(descriptor)
        return descriptor

    def fill(self, shard: ShardIndex, fetch: Callable[[Path, Path], None], *, urgent: bool) -> Fill:
        """Brings a shard in, unless it is there or another process is at it.

        Args:
            shard: Which.
            fetch: Called with the paths of the sidecar and of the tar; makes both.
            urgent: It is needed now: room may be taken from what is expected.

        Raises:
            Exception: The one that `fetch` raises.
        """
        lock_path = self._lock_path(shard)
        descriptor = None if self.has(shard) else try_lock(lock_path, fcntl.LOCK_EX)
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
        """Returns the id of the process that fetches a shard now, as far as one can see."""
        with suppress(OSError):
            return self._lock_path(shard).read_text().partition(" ")[0] or "?"
        return "?"

    def ask_for_room(self) -> None:
        """Asks all processes to release the shards that they keep open without need."""
        (self.folder / ".room").touch()

    def asked_at(self) -> int:
        """Returns when it was last asked for room, as a number that grows."""
        with suppress(FileNotFoundError):
            return (self.folder / ".room").stat().st_mtime_ns
        return 0

    def bytes_in_use(self) -> int:
        """Returns the bytes that cannot be evicted now: shards in use, and promised room."""
        total = 0
        with self._alone():
            for key, entry in self._scan().items():
                with LockSet() as locked:
                    if entry.promised or not locked.add(key, entry.locks(with_soon=False)):
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
        with LockSet() as victims:
            # First the entries that no process expects, then, for an urgent shard, the others.
            for with_soon, keys in ((True, by_use), (False, by_need if urgent else [])):
                for key in keys:
                    if excess <= 0:
                        break
                    if key not in victims.paths and victims.add(key, entries[key].locks(with_soon=with_soon)):
                        excess -= entries[key].num_bytes
            if excess > 0:
                return False
            for key, lock_paths in victims.paths.items():
                # The tar first: a sidecar alone is nothing that `has` would believe. The locks last.
                for path in (*sorted(entries[key].paths, key=lambda path: path.suffix != ".tar"), *lock_paths):
                    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        return True


def stamp(file: Path | int) -> None:
    """Sets the times of a file to now, finer than the kernel would: in order of the calls."""
    now = time.time_ns()
    os.utime(file, ns=(now, now))
