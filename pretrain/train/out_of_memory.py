"""A GPU whose memory is too small: said as an error with the peak and what to do, and a snapshot of who held it."""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

import torch

from pretrain.config.run import RunConfig
from pretrain.dist import World
from pretrain.errors import DiskError, OutOfMemoryError
from pretrain.tracking.profile import FOLDER
from pretrain.utils.io import make_dir

log = logging.getLogger(__name__)

_GIB = 2**30


@contextlib.contextmanager
def memory_explained(config: RunConfig, run_dir: Path, world: World) -> Iterator[None]:
    """Turns torch's error into ours while the body runs.

    Raises:
        OutOfMemoryError: With the peak, what of the config to change, and where the snapshot is.
    """
    if config.profile.memory_history and torch.cuda.is_available():
        torch.cuda.memory._record_memory_history(max_entries=100_000)
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise explain(error, config, world, _write_snapshot(run_dir, world.rank)) from error


def explain(error: torch.OutOfMemoryError, config: RunConfig, world: World, snapshot: Path | None) -> OutOfMemoryError:
    """Returns the error for a user."""
    peak = ""
    if torch.cuda.is_available():
        most, total = torch.cuda.max_memory_allocated(), torch.cuda.get_device_properties(0).total_memory
        peak = f", tensors held up to {most / _GIB:.1f} of {total / _GIB:.1f} GiB"
    what = f"out of GPU memory on rank {world.rank}{peak}: {str(error).splitlines()[0].removesuffix('.')}"
    return OutOfMemoryError(what, where="" if snapshot is None else str(snapshot), fix="; or ".join(_advice(config)))


def _advice(config: RunConfig) -> Iterator[str]:
    engine = config.engine
    if config.batch.micro > 1:
        yield f"use batch.micro={config.batch.micro // 2} (now {config.batch.micro}), which changes nothing else"
    if engine.activation_checkpointing != "full":
        yield "use engine.activation_checkpointing=full"
    if engine.kind != "deepspeed" or engine.zero_stage < 3:
        yield f"use engine.kind=deepspeed engine.zero_stage={3 if engine.zero_stage == 2 else 2}"
    yield "ask `pretrain plan` what fits"


def _write_snapshot(run_dir: Path, rank: int) -> Path | None:
    """Writes what holds the memory, for pytorch.org/memory_viz; None where that is not possible."""
    if not torch.cuda.is_available():
        return None
    path = run_dir / FOLDER / f"memory-rank-{rank}.pickle"
    try:
        make_dir(path.parent)
        torch.cuda.memory._dump_snapshot(str(path))
    except (DiskError, OSError, RuntimeError) as error:  # the error of the run is the one to tell
        log.warning("no memory snapshot: %s", error)
        return None
    return path
