"""What is run for one rank, as pure functions: the argument list and the environment."""

import os
import sys
from collections.abc import Mapping, Sequence


def rank_command(config: str, overrides: Sequence[str]) -> list[str]:
    """Returns the argument list that trains `config` as one rank."""
    return [sys.executable, "-m", "pretrain", "train", config, *overrides]


def rank_environment(
    base: Mapping[str, str], rank: int, world_size: int, port: int, threads: int | None = None
) -> dict[str, str]:
    """Returns the environment of one rank of a job on this machine, the variables torchrun sets.

    Args:
        base: The launcher's environment.
        rank: Which rank.
        world_size: How many.
        port: Of the rendezvous on the loopback interface.
        threads: CPU threads a rank, unless OMP_NUM_THREADS is set already; None: an even share of the cores.
    """
    share = threads or max(1, (os.cpu_count() or 1) // world_size)
    return {
        "OMP_NUM_THREADS": str(share),
        "PYTHONFAULTHANDLER": "1",  # a crash in native code prints the Python stacks
        **base,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
