"""Agreement of the ranks in a save or load: all continue, or all raise the same error."""

import math
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


def check_complete(votes: list[dict[str, Any]], previous: dict[str, list[int]]) -> dict[str, list[int]]:
    """Returns the shape of every parameter, where the files of all ranks are a whole model.

    A vote has `shapes` of the parameters in a rank's file, and `num_weights`, the elements of each
    there; `previous` are the shapes of the last checkpoint, if any.

    Raises:
        CheckpointError: A parameter is incomplete, has two shapes, or another than before.
    """
    shapes: dict[str, list[int]] = {}
    sizes: dict[str, int] = {}
    for vote in votes:
        for name, shape in vote["shapes"].items():
            _check_same(name, shapes.setdefault(name, shape), shape, "on another rank")
        for name, number in vote["num_weights"].items():
            sizes[name] = sizes.get(name, 0) + number
    for name, shape in shapes.items():
        if sizes.get(name, 0) != math.prod(shape):
            raise _refusal(f"{name} has {math.prod(shape):,} elements, and the ranks have {sizes.get(name, 0):,} of it")
    if previous:
        for name in sorted({*previous, *shapes}):
            _check_same(name, previous.get(name), shapes.get(name), "now")
    return shapes


def _check_same(name: str, expected: list[int] | None, shape: list[int] | None, where: str) -> None:
    if expected != shape:
        shown = ["no such parameter" if values is None else f"shape {values}" for values in (expected, shape)]
        raise _refusal(f"{name} has {shown[0]} in the save, {shown[1]} {where}")


def _refusal(what: str) -> CheckpointError:
    return CheckpointError(
        f"checkpoint not saved: {what}", fix="the checkpoints before it are good; report this as a bug"
    )


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
