"""Access to the shards of a data folder: local as they are, or remote and fetched when needed.

    open_store("data/web")          LocalStore: a path is there or it is not; nothing is done ahead
    open_store("s3://lab/data/web") RemoteStore (remote_store.py): it is there when `path` returns

Either way `folder` looks like a shard folder: the index and the tokenizer are in it from the start,
a shard and its table once `path` has returned, the lengths of its documents once `sidecar` has.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pretrain.errors import DataError
from pretrain.shards.index import check_shards, load_index
from pretrain.utils.remote import Waits


class WaitStoppedError(Exception):
    """The stop flag was set during a wait for a shard: nothing is wrong, but there is no data."""


@dataclass(frozen=True, slots=True)
class Patience(Waits):
    """Time limits of waits for a server, or for room in the cache.

    Attributes:
        room_s: Limit while all of the cache is in use: other ranks may be about to release some.
        report_s: Duration after which a wait is logged, and logged again each time it has doubled.
    """

    room_s: float = 30.0
    report_s: float = 30.0


class UnavailableError(DataError):
    """A shard is unavailable: the server is away or denies access, or the cache has no room.

    The shard itself may be intact, so it must not be skipped as damaged.
    """


class ShardStore(Protocol):
    """The shards of one data folder. Safe to use from several threads."""

    folder: Path
    fetches: bool
    """Shards are fetched: `upcoming` has an effect."""

    def path(self, name: str) -> Path:
        """Returns the path of a shard, there and verified until `release` was called as often.

        Raises:
            DataError: There is none, or another than the index says.
            UnavailableError: The server is away, or the cache is full.
            DiskError: The disk refused.
            WaitStoppedError: A stop was requested meanwhile.
        """

    def release(self, name: str) -> None:
        """Takes one `path` back."""

    def sidecar(self, name: str) -> Path:
        """Returns the path of a shard's lengths or captions, fetched alone. Raises as `path`."""

    def renew(self, name: str) -> bool:
        """Fetches a damaged file again, once for all processes; False: this is the only copy.

        `name` is that of a shard in use (`path` without `release`), or of one of its sidecars.
        Raises as `path`.
        """

    def upcoming(self, names: Sequence[str], *, at_once: int = 1, reader: str = "") -> None:
        """Replaces the list of the shards that a reader needs next.

        Args:
            names: Soonest first; fetched ahead in this order, as far as there is room.
            at_once: Number of the first that are read at the same time.
            reader: Readers of one store have lists of their own; the latest one goes first.

        Raises:
            UnavailableError: The cache has no room for those that are read at once.
        """

    def on_pressure(self, let_go: Callable[[], object]) -> None:
        """Registers `let_go`, called from any thread when unused shards should be released."""

    def check(self, split: str | None = None) -> None:
        """Checks the sizes of the files of a split (None: of all). Raises: DataError."""

    def close(self) -> None:
        """Ends downloads and every wait in `path`. Harmless the second time."""


class LocalStore:
    """A folder on a disk of this machine, or mounted."""

    fetches = False

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, name: str) -> Path:
        """Returns the path, whether or not it exists."""
        return self.folder / name

    sidecar = path

    def release(self, name: str) -> None:
        """Does nothing."""

    def renew(self, name: str) -> bool:
        """Can do nothing."""
        return False

    def upcoming(self, names: Sequence[str], *, at_once: int = 1, reader: str = "") -> None:
        """Does nothing."""

    def on_pressure(self, let_go: Callable[[], object]) -> None:
        """Does nothing."""

    def check(self, split: str | None = None) -> None:
        """One `stat` a file."""
        check_shards(self.folder, load_index(self.folder), split)

    def close(self) -> None:
        """Does nothing."""


def is_remote(data_path: str) -> bool:
    """Returns whether a `data.path` is an address that is fetched from; `file://` is a folder."""
    return "://" in data_path and not data_path.startswith("file://")
