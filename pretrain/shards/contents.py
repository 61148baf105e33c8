"""What lies in a cache: shards, and the folders of addresses; how much each takes, and when it was used."""

import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from pretrain.shards.cache_locks import LockSet


@dataclass(slots=True)
class Entry:
    """A shard, or the folder of an address.

    Attributes:
        lock: Held shared by who uses it.
        soon: Held shared by who will use it soon.
        paths: Its files, or the folder.
        num_bytes: What these take.
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
        """Bytes that nobody else can have."""
        return max(self.num_bytes, self.promised)

    def locks(self, *, with_soon: bool) -> list[Path]:
        """Returns what must be locked by who removes it; with `soon`, only where nobody expects it."""
        return [self.lock, self.soon] if with_soon and self.soon is not None else [self.lock]


def scan_shards(shards: Path) -> dict[str, Entry]:
    """Returns the shards that there are by hash, after the traces of processes that died are removed."""
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
