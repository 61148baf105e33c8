"""Access to the shards of a data folder: local as they are, or remote and fetched when they are needed.

    open_store("data/web")          LocalStore: a path is there or it is not; nothing is done ahead, nothing costs
    open_store("s3://lab/data/web") RemoteStore (remote.py): a path is there when `path` returns

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
    """A shard was waited for when the stop flag was set: nothing is wrong, but there is no data."""


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
    """Whether it matters to say what is `upcoming`."""

    def path(self, name: str) -> Path:
        """Returns where a shard lies, once it is there and verified; it stays there until as many `release`.

        Raises:
            DataError: There is none, or another than the index says.
            UnavailableError: It cannot be had now.
            DiskError: It cannot be written down.
            WaitStoppedError: A stop was asked for meanwhile.
        """

    def release(self, name: str) -> None:
        """Takes one `path` back."""

    def sidecar(self, name: str) -> Path:
        """Returns where the lengths of a shard's documents lie, once they are there; they stay. No shard is fetched.

        Raises as `path`.
        """

    def renew(self, name: str) -> bool:
        """Fetches a damaged file again, once for all processes that find the damage.

        Args:
            name: Name of a shard in use (`path` without `release`), of its table, or of its lengths.

        Returns:
            Whether it is now; False: nothing can be done, this is the only copy. Raises as `path`.
        """

    def upcoming(self, names: Sequence[str], *, at_once: int = 1, reader: str = "") -> None:
        """Says which shards come next, in the order of need; replaces what was said before.

        Args:
            names: Soonest first. What is fetched ahead follows this order, as far as there is room.
            at_once: So many of the first are read at the same time.
            reader: Who says so: readers of one store have orders of their own; the latest to speak goes first.

        Raises:
            UnavailableError: There can be no room for those that are read at once; says how much is needed.
        """

    def on_pressure(self, let_go: Callable[[], object]) -> None:
        """Registers `let_go`, called from any thread when unused shards should be released."""

    def check(self, split: str | None = None) -> None:
        """Checks that each shard and its sidecars (None: of all splits) exist and have their sizes; nothing is read.

        Raises:
            DataError: Some are not or have not; lists all of them.
        """

    def close(self) -> None:
        """Ends what is done in the background, and every wait in `path`. Harmless the second time."""


class LocalStore:
    """A folder on a disk of this machine, or mounted."""

    fetches = False

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, name: str) -> Path:
        """Returns where a shard is or should be."""
        return self.folder / name

    def release(self, name: str) -> None:
        """Does nothing."""

    def sidecar(self, name: str) -> Path:
        """Returns where a sidecar is or should be."""
        return self.folder / name

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
