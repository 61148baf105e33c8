"""Agreement of the ranks in a save or load: all continue, or all raise the same error."""

import socket
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from pretrain import dist
from pretrain.dist import World
from pretrain.errors import CheckpointError, DataError, DiskError, LaunchError, LockedError, PretrainError

_KINDS = (LockedError, CheckpointError, DiskError, LaunchError, DataError)
KINDS: dict[str, type[PretrainError]] = {kind.__name__: kind for kind in _KINDS}
"""Errors that travel between ranks; if several ranks fail, the first kind here is raised."""


def agree(outcome: Callable[[], Any]) -> list[Any]:
    """Returns the JSON-able values of `outcome` on every rank, by rank. Collective.

    Raises:
        PretrainError: `outcome` raised on a rank; the same error on every rank. Errors that are not
            in `KINDS` are raised at once on their rank.
    """
    value: Any = None
    failure: dict[str, str] | None = None
    try:
        value = outcome()
    except PretrainError as error:
        kind = next((name for name, classes in KINDS.items() if isinstance(error, classes)), None)
        if kind is None:
            raise
        failure = {"kind": kind, "what": error.what, "where": error.where, "fix": error.fix}
    votes = dist.gather_objects([value, failure])
    failures = [failure for _, failure in votes if failure is not None]
    for name, classes in KINDS.items():
        for failure in failures:
            if failure["kind"] == name:
                raise classes(failure["what"], where=failure["where"], fix=failure["fix"])
    return [value for value, _ in votes]


def nothing() -> None:
    """Outcome of a rank that has no part."""


LONGEST_WAIT_S = 90.0
"""A client of NFS forgets that a file does not exist within `acdirmax`, 60 seconds by default."""
POLL_S = 0.1


def wait_for_folder(folder: Path, world: World) -> None:
    """Waits until this rank sees all files of `folder` that rank 0 sees. Collective.

    Otherwise a checkpoint which a node does not see yet would count as damaged.

    Raises:
        CheckpointError: A rank timed out after `LONGEST_WAIT_S`; on every rank.
    """
    if world.size == 1:
        return
    seen = dist.broadcast_object(_names(folder) if world.is_main else [])
    agree(lambda: wait_until_visible(folder, seen))


def _names(folder: Path) -> list[str]:
    """Returns the names in a folder; none where it is not seen. One request to the server."""
    try:
        return sorted(path.name for path in folder.iterdir())
    except OSError:
        return []


def wait_until_visible(folder: Path, names: Iterable[str]) -> None:
    """Waits until this process sees files that exist on another node. Raises: CheckpointError."""
    deadline = time.monotonic() + LONGEST_WAIT_S
    while missing := sorted(set(names) - set(_names(folder))):
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"not seen on {socket.gethostname()} in {LONGEST_WAIT_S:.0f} s, and there on another node",
                where=str(folder / missing[0]),
                fix="see whether all nodes mount the same file system there",
            )
        time.sleep(POLL_S)
