"""Background downloads into the cache: shards needed now first, then upcoming ones.

    set_order(names)   fetched in that order, a few at a time, as far as there is room
    demand(name)       precedes all of these, and may take the room of what is needed later
    wait(name)         sleeps until something has changed; returns the progress

A shard that could not be fetched ahead is no error until it is demanded; then it is retried once.
Files and locks are in cache.py, attempts and hashes in download.py.
"""

import errno
import hashlib
import logging
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from pretrain.errors import DataError
from pretrain.shards.cache import Fill, ShardCache
from pretrain.shards.download import DownloadProgress, data_errors, download, read_small
from pretrain.shards.index import INDEX_NAME, DataIndex, ShardIndex, load_index
from pretrain.shards.store import Patience, UnavailableError
from pretrain.utils.io import write_file
from pretrain.utils.remote import POLL_S, AbandonedError, call_remote, stat_url

# Downloads ahead at a time; one more thread serves what is demanded.
PARALLEL = 4
# Interval of looking for room, and for processes that need some.
LISTEN_S = 1.0
JOIN_S = 2.0

_log = logging.getLogger(__name__)


class Fetcher:
    """Daemon threads of one remote folder, started with the first request."""

    def __init__(
        self,
        address_of: Callable[[str], str],
        shards: Mapping[str, ShardIndex],
        cache: ShardCache,
        let_go: Callable[[], None],
        patience: Patience,
    ) -> None:
        """Starts nothing yet.

        `address_of` returns the address of a file by its name; `let_go` releases unused shards, in
        the threads, when a process lacks room.
        """
        self._address_of = address_of
        self._shards = shards
        self._cache = cache
        self._let_go = let_go
        self._patience = patience
        self._asked_at = cache.asked_at()
        self._changed = threading.Condition()
        self._orders: dict[str, tuple[str, ...]] = {}
        self._demanded: Counter[str] = Counter()
        self._active: dict[str, DownloadProgress] = {}
        self._failed: dict[str, Exception] = {}
        # Descriptors that keep the shards that were brought in and are still wanted.
        self._kept: dict[str, int] = {}
        self._full_until = 0.0
        self._threads: list[threading.Thread] = []
        self.closed = False

    def set_order(self, reader: str, names: Sequence[str]) -> None:
        """Replaces the shards that a reader will need; its order precedes the other readers'."""
        with self._changed:
            orders = {other: order for other, order in self._orders.items() if other != reader}
            self._orders = {reader: tuple(names), **orders}
            for name in list(self._kept):
                if not self._cache.has(self._shards[name]):
                    os.close(self._kept.pop(name))  # its room was taken for what was needed sooner
                self._drop_unwanted(name)
            self._failed = {name: error for name, error in self._failed.items() if name in self._demanded}
            self._full_until = 0.0
            self._start()

    @contextmanager
    def demand(self, name: str) -> Iterator[None]:
        """Has a shard brought in before all others while the context lasts."""
        with self._changed:
            if name not in self._demanded:
                self._failed.pop(name, None)
            self._demanded[name] += 1
            self._start()
        try:
            yield
        finally:
            with self._changed:
                self._demanded[name] -= 1
                if not self._demanded[name]:
                    del self._demanded[name]
                self._drop_unwanted(name)

    def wait(self, name: str) -> DownloadProgress | None:
        """Waits for a moment or a change; returns a shard's progress, if any. Raises: its error."""
        with self._changed:
            if name in self._failed:
                raise self._failed[name]
            if name in self._active or name not in self._kept:
                self._changed.wait(POLL_S)
            return self._active.get(name)

    def close(self) -> None:
        """Ends the threads, but for those that wait for a silent server: they end later."""
        with self._changed:
            self.closed = True
            self._changed.notify_all()
        deadline = time.monotonic() + JOIN_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        with self._changed:
            for name in list(self._kept):
                self._drop_unwanted(name)

    def _start(self) -> None:
        while len(self._threads) <= PARALLEL and not self.closed:
            self._threads.append(threading.Thread(target=self._work, name="fetch", daemon=True))
            self._threads[-1].start()
        self._changed.notify_all()

    def _unwanted(self, name: str) -> bool:
        """Returns whether a shard is no longer asked for. Lock-free: reads replaced objects."""
        wanted = name in self._demanded or any(name in order for order in self._orders.values())
        return self.closed or not wanted

    def _drop_unwanted(self, name: str) -> None:
        if name in self._kept and self._unwanted(name):
            os.close(self._kept.pop(name))

    def _next_job(self) -> str | None:
        """Returns which shard to bring in now, if any."""
        for name in self._demanded:
            if name not in self._active and name not in self._failed:
                return name
        ahead = sum(name not in self._demanded for name in self._active)
        if ahead >= PARALLEL or time.monotonic() < self._full_until:
            return None
        done = self._kept.keys() | self._active.keys() | self._failed.keys()
        return next((name for order in self._orders.values() for name in order if name not in done), None)

    def _work(self) -> None:
        """One thread: brings in shard after shard."""
        while True:
            with self._changed:
                while (name := self._next_job()) is None and not self.closed:
                    self._changed.wait(LISTEN_S)
                    self._listen()
                if self.closed or name is None:
                    return
                progress = self._active[name] = DownloadProgress()
            descriptor = None
            error = None
            try:
                descriptor = self._bring(self._shards[name], progress)
            except AbandonedError:
                pass
            except Exception as caught:  # raised again where the shard is needed
                error = caught
            with self._changed:
                del self._active[name]
                if error is not None:
                    self._failed[name] = error
                    if name not in self._demanded:
                        _log.warning("could not fetch ahead: %s", error)
                if descriptor is not None:
                    if name in self._kept:
                        os.close(self._kept.pop(name))
                    self._kept[name] = descriptor
                    self._drop_unwanted(name)
                self._changed.notify_all()

    def _listen(self) -> None:
        """Releases unused shards if a process has asked for room."""
        asked_at = self._cache.asked_at()
        if asked_at != self._asked_at:
            self._asked_at = asked_at
            self._let_go()

    def _bring(self, shard: ShardIndex, progress: DownloadProgress) -> int | None:
        """Fetches a shard; returns the descriptor that keeps it, None if no room or unwanted."""

        def fetch(table: Path, tar: Path) -> None:
            # The tar last: with it the shard is there.
            for file, path in ((shard.files[1], table), (shard.files[0], tar)):
                download(
                    self._address_of(file.name),
                    file,
                    path,
                    patience=self._patience,
                    progress=progress,
                    abandoned=lambda: self._unwanted(shard.name),
                )

        full_since: float | None = None
        descriptor = None
        try:
            while not self._unwanted(shard.name):
                descriptor = self._cache.expect(shard) if descriptor is None else descriptor
                demanded = shard.name in self._demanded
                outcome = self._cache.fill(shard, fetch, urgent=demanded)
                if outcome is Fill.THERE and descriptor is not None:
                    result = descriptor
                    descriptor = None
                    return result
                if outcome is Fill.FULL and not demanded:
                    self._full_until = time.monotonic() + LISTEN_S
                    return None
                progress.trouble = outcome.value.format(self._cache.fetched_by(shard))
                if outcome is Fill.FULL:
                    self._cache.ask_for_room()
                    self._listen()
                    if full_since is None:
                        full_since = time.monotonic()
                        continue  # we may have been the ones
                    if time.monotonic() - full_since > self._patience.room_s:
                        raise self._full_error(shard)
                time.sleep(POLL_S)
            return None
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def _full_error(self, shard: ShardIndex) -> UnavailableError:
        size = shard.num_bytes + shard.table_bytes
        used = self._cache.bytes_in_use()
        return UnavailableError(
            f"the cache is full of shards in use, {gib(used)} of {gib(self._cache.limit_bytes)} GiB, and "
            f"{shard.name} needs {gib(size)} GiB",
            where=str(self._cache.folder),
            fix=f"set data.cache_gib to {gib(used + size)} at the very least, better to twice that",
        )


def gib(num_bytes: int) -> str:
    """Returns a size in GiB, rounded up to the third decimal."""
    return f"{math.ceil(1000 * num_bytes / 2**30) / 1000:.3f}"


# Files of a remote folder that are fetched before any shard:
#
#     URL/index.json -> CACHE/folders/HASH OF ITS BYTES/index.json, and tokenizer.json, prepare.json
#
# The index of a cached folder never changes: a replaced index has another hash, so another folder.
# Links to its shards, the lengths of their documents and bins are in the same folder.

# Files that the server is asked about at a time.
QUESTIONS = 16


def fetch_folder(url: str, cache: ShardCache, patience: Patience, stop: Callable[[], bool]) -> tuple[Path, int]:
    """Fetches index, tokenizer and prepare.json; returns their folder and its descriptor.

    Raises: as `download`.
    """
    content = read_small(f"{url}/{INDEX_NAME}", patience=patience, abandoned=stop)
    folder, descriptor = cache.hold_folder(hashlib.sha256(content).hexdigest()[:32])
    try:
        # Written at every start, so that it is whole even after a crash.
        write_file(folder / INDEX_NAME, content)
        try:
            index = load_index(folder)
        except DataError as error:
            raise DataError(error.what, where=f"{url}/{INDEX_NAME}", fix=error.fix) from None
        if index.has_tokenizer and not (folder / "tokenizer.json").is_file():
            write_file(folder / "tokenizer.json", _read_tokenizer(url, index, patience, stop))
        if not (folder / "prepare.json").is_file():
            # The record of the normalisation is optional. Where files may not be listed, S3 says of one
            # that is missing that it is forbidden.
            try:
                record = read_small(f"{url}/prepare.json", patience=patience, abandoned=stop)
                write_file(folder / "prepare.json", record)
            except DataError as error:
                _log.info("how the text was normalised is not known: %s", error)
    except BaseException:
        os.close(descriptor)
        raise
    return folder, descriptor


def _read_tokenizer(url: str, index: DataIndex, patience: Patience, stop: Callable[[], bool]) -> bytes:
    content = read_small(f"{url}/tokenizer.json", patience=patience, abandoned=stop)
    digest = hashlib.sha256(content).hexdigest()
    if digest != index.tokenizer_sha256:
        raise DataError(
            f"is not the tokenizer of the index: its sha256 is {digest} instead of {index.tokenizer_sha256}",
            where=f"{url}/tokenizer.json",
            fix="upload the tokenizer that the shards were made with",
        )
    return content


def check_remote(
    url: str,
    sizes: Iterable[tuple[str, int]],
    address_of: Callable[[str], str],
    patience: Patience,
    stop: Callable[[], bool],
) -> None:
    """Asks for the size of files of a folder, by name and expected size. Raises: DataError, AbandonedError."""

    def complaint(pair: tuple[str, int]) -> str:
        name, size = pair
        if stop():
            raise AbandonedError
        try:
            address = address_of(name)
            num_bytes = call_remote(address, lambda: stat_url(address)["size"], patience, stop)
        except OSError as error:
            # The server is away: nothing is known of the other files either.
            if error.errno == errno.EIO:
                raise
            return f"{name} cannot be fetched: {error.strerror}"
        return "" if num_bytes in (None, size) else f"{name} has {num_bytes} bytes, not {size}"

    with ThreadPoolExecutor(QUESTIONS) as pool, data_errors():
        bad = [text for text in pool.map(complaint, sizes) if text]
    if bad:
        raise DataError(", ".join(bad), where=url, fix="upload these files again")
