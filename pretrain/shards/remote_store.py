"""A remote folder of shards that looks like a local one: a shard is there once `path` has returned.

    path(name)    -> fetched and protected from eviction; waits, watches the stop flag, reports long waits
    release       -> as many times as `path`, and it may be evicted
    sidecar(name) -> beside the index, as long as that is kept
    renew(name)   -> read again and, if it has rotted on the disk, fetched again, once for all processes

The order of the downloads is in fetch.py.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from pretrain.errors import DataError
from pretrain.shards.cache import ShardCache, stamp, tree_bytes
from pretrain.shards.download import DownloadProgress, RemoteShardFile, download, download_once
from pretrain.shards.fetch import Fetcher, check_remote, fetch_folder, gib
from pretrain.shards.index import ShardIndex, load_index
from pretrain.shards.store import LocalStore, Patience, ShardStore, UnavailableError, WaitStoppedError, is_remote
from pretrain.utils.io import make_dir
from pretrain.utils.remote import SCHEMES, AbandonedError, check_no_secrets, without_secrets

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _InUse:
    """A shard in use: the descriptor that holds it, and how many `path` were not followed by a `release`."""

    descriptor: int
    count: int = 1


class RemoteStore:
    """See `ShardStore`."""

    fetches = True

    def __init__(
        self, url: str, cache_dir: Path, cache_bytes: int, *, stop: Callable[[], bool], patience: Patience
    ) -> None:
        """Fetches index and tokenizer; see `open_store`."""
        self._url = _folder_url(url)
        self._cache = ShardCache(cache_dir, cache_bytes)
        self._stop = stop
        self._patience = patience
        try:
            self.folder, folder_lock = fetch_folder(self._url, self._cache, patience, stop)
        except AbandonedError:
            raise WaitStoppedError from None
        self._folder_lock: int | None = folder_lock
        self._index = load_index(self.folder)
        self._shards = {shard.name: shard for split in self._index.splits.values() for shard in split.shards}
        self._owners = {name: shard for shard in self._shards.values() for name in shard.sizes}
        self._fetcher = Fetcher(self._shards, self._cache, self._fetch, self._let_go, patience.room_s)
        self._in_use: dict[str, _InUse] = {}
        self._on_pressure: list[Callable[[], object]] = []
        # Reentrant: `release` is what happens when a reader is freed, and that may be anywhere.
        self._lock = threading.RLock()

    def path(self, name: str) -> Path:
        """See `ShardStore`."""
        shard = self._shards[name]
        with self._lock:
            if name in self._in_use:
                self._in_use[name].count += 1
                return self.folder / name
        descriptor = self._cache.hold(shard)
        if descriptor is None:
            descriptor = self._wait_for(shard)
        self._link(shard)
        with self._lock:
            if name in self._in_use:
                os.close(descriptor)
                self._in_use[name].count += 1
            else:
                self._in_use[name] = _InUse(descriptor)
        return self.folder / name

    def release(self, name: str) -> None:
        """See `ShardStore`."""
        with self._lock:
            in_use = self._in_use[name]
            in_use.count -= 1
            if not in_use.count:
                os.close(self._in_use.pop(name).descriptor)

    def sidecar(self, name: str) -> Path:
        """See `ShardStore`."""
        path = self.folder / name
        file = _lengths_file(self._owners[name])
        with suppress(OSError):
            if path.stat().st_size == file.num_bytes:
                return path
        self._make_whole(file, make_dir(path.parent) / path.name)
        return path

    def renew(self, name: str) -> bool:
        """See `ShardStore`. Whoever has mapped the old file keeps it; until then it takes room, uncounted."""
        shard = self._owners[name]
        tar, table = self._cache.paths(shard)
        places = ((_tar_file(shard), tar), (_table_file(shard), table), (_lengths_file(shard), self.folder / name))
        file, path = next(place for place in places if place[0].name == name)
        _log.warning("%s/%s is damaged on this machine; fetching it again", self._url, name)
        self._make_whole(file, path)
        return True

    def upcoming(self, names: Sequence[str], *, at_once: int = 1, reader: str = "") -> None:
        """See `ShardStore`."""
        shards = [self._shards[name] for name in names[:at_once]]
        needed = sum(shard.num_bytes + shard.table_bytes for shard in shards) + tree_bytes(self.folder)
        if needed > self._cache.limit_bytes:
            raise UnavailableError(
                f"{len(shards)} shards, with their index {gib(needed)} GiB, are read at the same time, and the cache "
                f"may hold {gib(self._cache.limit_bytes)} GiB",
                where=self._url,
                fix=f"set data.cache_gib to {gib(needed)} at the very least, better to twice that",
            )
        self._let_go()  # of what was read until now; what is still needed will be mapped again
        self._fetcher.set_order(reader, names)

    def on_pressure(self, let_go: Callable[[], object]) -> None:
        """See `ShardStore`."""
        self._on_pressure.append(let_go)

    def check(self, split: str | None = None) -> None:
        """Asks the server for the size of each file that is not in the cache, many at a time."""
        splits = self._index.splits.values() if split is None else [self._index.split(split)]
        sizes: dict[str, int] = {}
        for shard in (shard for part in splits for shard in part.shards):
            sizes |= shard.sizes
            if self._cache.has(shard):
                del sizes[shard.name], sizes[shard.table.name]
            if (self.folder / shard.lengths.name).is_file():
                del sizes[shard.lengths.name]
        try:
            check_remote(self._url, sizes.items(), self._patience, self._stop)
        except AbandonedError:
            raise WaitStoppedError from None

    def close(self) -> None:
        """See `ShardStore`."""
        self._fetcher.close()
        descriptor, self._folder_lock = self._folder_lock, None
        if descriptor is not None:
            stamp(descriptor)
            os.close(descriptor)

    def _wait_for(self, shard: ShardIndex) -> int:
        """Has a shard fetched before all others; returns the descriptor that holds it."""
        since = time.monotonic()
        report_s = self._patience.report_s
        with self._fetcher.demand(shard.name):
            while True:
                if self._stop() or self._fetcher.closed:
                    raise WaitStoppedError
                progress = self._fetcher.wait(shard.name)
                descriptor = self._cache.hold(shard) if progress is None else None
                if descriptor is not None:
                    return descriptor
                if time.monotonic() - since > report_s:
                    url = f"{self._url}/{shard.name}"
                    _log.warning("waiting for %s since %.0f s: %s", url, report_s, progress or "queued")
                    report_s *= 2

    def _make_whole(self, file: RemoteShardFile, path: Path) -> None:
        """Fetches a file unless its bytes are right."""
        try:
            download_once(self._url, file, path, patience=self._patience, abandoned=self._stop)
        except AbandonedError:
            raise WaitStoppedError from None

    def _let_go(self) -> None:
        for let_go in self._on_pressure:
            let_go()

    def _link(self, shard: ShardIndex) -> None:
        """Makes the files of the cache appear in the folder; where they are is a matter of the index, so for ever."""
        for name, target in zip((shard.name, shard.table.name), self._cache.paths(shard), strict=True):
            link = self.folder / name
            if not link.is_symlink():
                make_dir(link.parent)
                with suppress(FileExistsError):  # another process was faster
                    link.symlink_to(os.path.relpath(target, link.parent))

    def _fetch(
        self, shard: ShardIndex, table: Path, tar: Path, progress: DownloadProgress, abandoned: Callable[[], bool]
    ) -> None:
        for file, path in ((_table_file(shard), table), (_tar_file(shard), tar)):
            download(self._url, file, path, patience=self._patience, progress=progress, abandoned=abandoned)


def _folder_url(url: str) -> str:
    """Returns the address of a remote folder without a slash at its end. Raises: DataError, for one that is none."""
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES or not parts.netloc:
        known = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        fix = f"use a folder, or one of {known}"
        raise DataError("no such kind of address", where=without_secrets(url), fix=fix)
    check_no_secrets(url)
    return url.rstrip("/")


def _tar_file(shard: ShardIndex) -> RemoteShardFile:
    return RemoteShardFile(shard.name, shard.num_bytes, shard.sha256)


def _table_file(shard: ShardIndex) -> RemoteShardFile:
    return RemoteShardFile(shard.table.name, shard.table_bytes, f"{shard.table.crc32:08x}")


def _lengths_file(shard: ShardIndex) -> RemoteShardFile:
    return RemoteShardFile(shard.lengths.name, shard.lengths_bytes, f"{shard.lengths.crc32:08x}")


def open_store(
    data_path: str,
    cache_dir: Path,
    cache_bytes: int,
    *,
    stop: Callable[[], bool] = lambda: False,
    patience: Patience | None = None,
) -> ShardStore:
    """Opens the shards of `data.path`.

    Of a remote folder, index.json and tokenizer.json are fetched now, and
    `load_index(store.folder)` reads them. For a local one nothing is done, and what follows has no
    meaning.

    Args:
        data_path: A folder; or an address: file, http, https, s3 or gs.
        cache_dir: Where fetched shards are kept; processes, runs and data folders share it. On a disk of this machine.
        cache_bytes: All that it may hold.
        stop: Ends every wait when it returns True.
        patience: How long a server may be away; None: as long as is usual.

    Raises:
        DataError: There is no such data, or it is not as its index says.
        DiskError: `cache_dir` cannot be used.
        LaunchError: A package that reads such addresses is missing.
        WaitStoppedError: A stop was asked for meanwhile.
    """
    if data_path.startswith("file://"):
        return LocalStore(Path(unquote(urlsplit(data_path).path)))
    if not is_remote(data_path):
        return LocalStore(Path(data_path))

    return RemoteStore(data_path, cache_dir, cache_bytes, stop=stop, patience=patience or Patience())
