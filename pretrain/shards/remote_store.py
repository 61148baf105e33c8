"""A remote folder of shards that looks like a local one: a shard is there once `path` has returned.

    path(name)    -> fetched and protected from eviction; reports long waits, ends at the stop flag
    release       -> as many times as `path`, and it may be evicted
    sidecar(name) -> in the folder of the index, as long as that is kept
    renew(name)   -> read again and, if damaged on the disk, fetched again, once for all processes

The order of the downloads is in fetch.py.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit

from pretrain.errors import DataError
from pretrain.shards.cache import ShardCache, stamp, tree_bytes
from pretrain.shards.download import download_once
from pretrain.shards.fetch import Fetcher, check_remote, fetch_folder, gib
from pretrain.shards.index import INDEX_NAME, ShardFile, ShardIndex, load_index
from pretrain.shards.store import LocalStore, Patience, ShardStore, UnavailableError, WaitStoppedError, is_remote
from pretrain.utils.io import make_dir
from pretrain.utils.remote import SCHEMES, AbandonedError, check_no_secrets, without_secrets

_log = logging.getLogger(__name__)


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
        self._fetcher = Fetcher(self._address_of, self._shards, self._cache, self._let_go, patience)
        # Descriptors that keep each shard, one for each `path` without its `release`.
        self._in_use: dict[str, list[int]] = {}
        self._on_pressure: list[Callable[[], object]] = []
        # Reentrant: `release` is what happens when a reader is freed, and that may be anywhere.
        self._lock = threading.RLock()

    def path(self, name: str) -> Path:
        """See `ShardStore`."""
        shard = self._shards[name]
        descriptor = self._cache.hold(shard)
        if descriptor is None:
            descriptor = self._wait_for(shard)
        self._link(shard)
        with self._lock:
            self._in_use.setdefault(name, []).append(descriptor)
        return self.folder / name

    def release(self, name: str) -> None:
        """See `ShardStore`."""
        with self._lock:
            os.close(self._in_use[name].pop())

    def sidecar(self, name: str) -> Path:
        """See `ShardStore`."""
        path = self.folder / name
        file = next(file for file in self._owners[name].files if file.name == name)
        with suppress(OSError):
            if path.stat().st_size == file.num_bytes:
                return path
        self._make_whole(file, make_dir(path.parent) / path.name)
        return path

    def renew(self, name: str) -> bool:
        """See `ShardStore`. An old file that is still mapped takes room, uncounted."""
        shard = self._owners[name]
        file = next(file for file in shard.files if file.name == name)
        cached = dict(zip((shard.name, shard.table.name), self._cache.paths(shard), strict=True))
        path = cached.get(name, self.folder / name)
        _log.warning("%s is damaged on this machine; fetching it again", self._address_of(name))
        self._make_whole(file, path)
        return True

    def upcoming(self, names: Sequence[str], *, at_once: int = 1, reader: str = "") -> None:
        """See `ShardStore`."""
        shards = [self._shards[name] for name in names[:at_once]]
        needed = sum(shard.num_bytes + shard.table_bytes for shard in shards) + tree_bytes(self.folder)
        if needed > self._cache.limit_bytes:
            raise UnavailableError(
                f"{len(shards)} shards, with their index {gib(needed)} GiB, are read at the same time, and "
                f"the cache may hold {gib(self._cache.limit_bytes)} GiB",
                where=self._url,
                fix=f"set data.cache_gib to {gib(needed)} at the very least, better to twice that",
            )
        self._let_go()  # a shard that is still needed will be mapped again
        self._fetcher.set_order(reader, names)

    def on_pressure(self, let_go: Callable[[], object]) -> None:
        """See `ShardStore`."""
        self._on_pressure.append(let_go)

    def check(self, split: str | None = None) -> None:
        """See `ShardStore`; asks the server for the sizes of files that are not in the cache."""
        splits = self._index.splits.values() if split is None else [self._index.split(split)]
        sizes: dict[str, int] = {}
        for shard in (shard for part in splits for shard in part.shards):
            sizes |= shard.sizes
            if self._cache.has(shard):
                del sizes[shard.name], sizes[shard.table.name]
            for file in shard.files[2:]:  # those of `sidecar`
                if (self.folder / file.name).is_file():
                    del sizes[file.name]
        try:
            check_remote(self._url, sizes.items(), self._address_of, self._patience, self._stop)
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
                    url = self._address_of(shard.name)
                    _log.warning("waiting for %s since %.0f s: %s", url, report_s, progress or "queued")
                    report_s *= 2

    def _make_whole(self, file: ShardFile, path: Path) -> None:
        """Fetches a file unless its bytes are right."""
        try:
            download_once(self._address_of(file.name), file, path, patience=self._patience, abandoned=self._stop)
        except AbandonedError:
            raise WaitStoppedError from None

    def _address_of(self, name: str) -> str:
        """Returns the address of a file; a tar that others made has its own."""
        return self._index.tars.get(name, f"{self._url}/{name}")

    def _let_go(self) -> None:
        for let_go in self._on_pressure:
            let_go()

    def _link(self, shard: ShardIndex) -> None:
        """Links the files of the cache into the folder, for ever: the index fixes their places."""
        for name, target in zip((shard.name, shard.table.name), self._cache.paths(shard), strict=True):
            link = self.folder / name
            if not link.is_symlink():
                make_dir(link.parent)
                with suppress(FileExistsError):  # another process was faster
                    link.symlink_to(os.path.relpath(target, link.parent))


def _folder_url(url: str) -> str:
    """Returns the address of a remote folder without a slash at its end. Raises: DataError."""
    if url.startswith("file://"):  # by `open_store`, which knows the folder
        return url
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES or not parts.netloc:
        schemes = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        raise DataError("no such kind of address", where=without_secrets(url), fix=f"use a folder, or one of {schemes}")
    check_no_secrets(url)
    return url.rstrip("/")


def open_store(
    data_path: str,
    cache_dir: Path,
    cache_bytes: int,
    *,
    stop: Callable[[], bool] = lambda: False,
    patience: Patience | None = None,
) -> ShardStore:
    """Opens the shards of `data.path`: a folder, or a file, http, https, s3 or gs address.

    A folder may have the index of tars at addresses alone; they are fetched as those of a remote one.

    Index and tokenizer of a remote folder are fetched now, into `store.folder`. Its shards are kept
    in `cache_dir`, on a disk of this machine, at most `cache_bytes` of all; `stop` ends every wait
    when it returns True, and `patience` limits waits for a server.

    Raises:
        DataError: Missing or damaged data.
        DiskError: `cache_dir` cannot be used.
        LaunchError: A package that reads such addresses is missing.
        WaitStoppedError: A stop was requested meanwhile.
    """
    if data_path.startswith("file://"):
        data_path = unquote(urlsplit(data_path).path)
    if not is_remote(data_path):
        folder = Path(data_path)
        if not (folder / INDEX_NAME).is_file() or not load_index(folder).tars:
            return LocalStore(folder)
        data_path = f"file://{folder.absolute()}"
    return RemoteStore(data_path, cache_dir, cache_bytes, stop=stop, patience=patience or Patience())
