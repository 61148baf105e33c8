"""Whether the checkpoints of a run will fit, known before its first step: arithmetic, and one trial write."""

import math
import shutil
from contextlib import suppress
from pathlib import Path

from pretrain.checkpoint.layout import list_checkpoints
from pretrain.config.train import CheckpointConfig
from pretrain.errors import DiskError
from pretrain.io import write_file

_HEADER_BYTES = 160
"""Of a piece in the header of its file, and of a parameter in the manifest: names are that long at the most, mostly."""


def checkpoint_bytes(num_parameters: int, state_bytes: int, num_tensors: int, num_ranks: int) -> int:
    """Returns the size of a checkpoint: fp32 master weights, the optimizer's state, headers and manifest.

    Args:
        num_parameters: Of the model.
        state_bytes: Of fp32 optimizer state for each parameter: 8 for the two moments of AdamW.
        num_tensors: Parameters, as tensors.
        num_ranks: Each has a file, and may have a piece of each tensor and of each of its moments.
    """
    pieces_a_tensor = 1 + state_bytes // 4
    return num_parameters * (4 + state_bytes) + num_tensors * (num_ranks * pieces_a_tensor + 1) * _HEADER_BYTES


def num_at_once(config: CheckpointConfig, last_step: int) -> int:
    """Returns how many checkpoints there are at most: those kept, the one being written, and those kept for good.

    Args:
        config: What is kept, and how often one is made.
        last_step: Where the run ends.
    """
    for_good = 0
    if config.every_steps and config.keep_every_steps:
        for_good = last_step // math.lcm(config.every_steps, config.keep_every_steps)
    return config.keep + 1 + for_good


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
