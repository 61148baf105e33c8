"""Whether the checkpoints of a run will fit, known before its first step: arithmetic, and one trial write.

How large a checkpoint is, and how many there are at once: `pretrain/plan/course.py`.
"""

import shutil
from contextlib import suppress
from pathlib import Path

from pretrain.checkpoint.layout import list_checkpoints
from pretrain.errors import DiskError
from pretrain.utils.io import write_file


def room_problem(free: int, existing: int, checkpoint: int, num_kept: int) -> str | None:
    """Returns why checkpoints do not fit, with the numbers; None where they do.

    Args:
        free: Bytes free on the file system.
        existing: Bytes of the checkpoints there are, whose place the new ones take over time.
        checkpoint: Bytes of one.
        num_kept: How many there are going to be.
    """
    needed = checkpoint * num_kept
    if needed <= free + existing:
        return None
    there = f", beside {existing:,} bytes of checkpoints that are there" if existing else ""
    return (
        f"{num_kept} checkpoints of {checkpoint:,} bytes (those that are kept, and the one being written) need "
        f"{needed:,} bytes, and {free:,} are free{there}"
    )


def check_room(folder: Path, checkpoint: int, num_kept: int) -> None:
    """Sees that checkpoints fit on the file system of an existing folder.

    Args:
        folder: Of checkpoints.
        checkpoint: Bytes of one.
        num_kept: How many there are going to be.

    Raises:
        DiskError: They do not.
    """
    try:
        files = (file for path in list_checkpoints(folder) for file in path.iterdir())
        problem = room_problem(
            shutil.disk_usage(folder).free, sum(file.stat().st_size for file in files), checkpoint, num_kept
        )
    except OSError as error:
        raise DiskError(f"cannot be looked at: {error.strerror}", where=str(folder), fix="fix permissions") from error
    if problem is not None:
        raise DiskError(
            problem,
            where=str(folder),
            fix="free space, lower checkpoint.keep, or set run.dir to a larger file system",
        )


def try_writing(folder: Path) -> None:
    """Writes a small file, durably, and removes it: quota, permission, and a read-only disk are met here, not later.

    Raises:
        DiskError: The disk refused.
    """
    trial = folder / ".trial"
    write_file(trial, b"checkpoints are written here\n")
    with suppress(OSError):
        trial.unlink()
