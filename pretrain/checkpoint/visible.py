"""Files that another node has, on a file system that shows them late: a client of NFS remembers what was not there."""

import socket
import time
from collections.abc import Iterable
from pathlib import Path

from pretrain import dist
from pretrain.checkpoint.vote import agree
from pretrain.dist import World
from pretrain.errors import CheckpointError

LONGEST_WAIT_S = 90.0
"""A client of NFS forgets within `acdirmax`, 60 seconds unless it was mounted otherwise."""
POLL_S = 0.1


def wait_for_folder(folder: Path, world: World) -> None:
    """Waits until this rank sees all files of `folder` that rank 0 sees. Collective; one rank alone waits for nothing.

    So a checkpoint that one node does not see yet is not taken for a damaged one.

    Raises:
        CheckpointError: Some rank does not see them in `LONGEST_WAIT_S`; on every rank.
    """
    if world.size == 1:
        return
    seen = dist.broadcast_object(_names(folder) if world.is_main else [])
    agree(lambda: wait_until_visible(folder, seen))


def _names(folder: Path) -> list[str]:
    """Returns the names in a folder; none where it is not seen. Asks the server once, however many files there are."""
    try:
        return sorted(path.name for path in folder.iterdir())
    except OSError:
        return []


def wait_until_visible(folder: Path, names: Iterable[str]) -> None:
    """Waits until this process sees files that are there.

    Raises:
        CheckpointError: One of them stays unseen for `LONGEST_WAIT_S`; names it and this machine.
    """
    deadline = time.monotonic() + LONGEST_WAIT_S
    while missing := sorted(set(names) - set(_names(folder))):
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"not seen on {socket.gethostname()} in {LONGEST_WAIT_S:.0f} s, and there on another node",
                where=str(folder / missing[0]),
                fix="see whether all nodes mount the same file system there",
            )
        time.sleep(POLL_S)
