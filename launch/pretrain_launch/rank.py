"""Runs one rank, and notes how it ended: between the rank and whatever starts ranks on this node.

    torchrun | accelerate | deepspeed | srun  ->  this  ->  pretrain train
    SIGTERM of a launcher that gives up       ->  the rank; Slurm's own signals reach the rank by themselves
    the launcher dies                         ->  so do we, and the rank with us (PR_SET_PDEATHSIG)

A rank that was stopped with all saved (75) is no failure to its launcher: we return 0, or it would end its peers.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import BinaryIO

from pretrain.errors import EXIT_OK, EXIT_RESUME_ME
from pretrain.utils.process import die_with, guard_streams
from pretrain_launch.exits import last_error, note_rank

HELD_BACK = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
"""Blocked from the launcher on, until the rank can answer them: Slurm sends its signals to every process of a step."""


def _prepare_rank(parent: int) -> None:
    """Runs in the rank before its program."""
    die_with(parent)
    signal.pthread_sigmask(signal.SIG_SETMASK, HELD_BACK)


def run_rank(config: str, logs: Path, exits: Path) -> int:
    """Trains as one rank, in a process of its own; returns what the launcher shall see.

    Args:
        config: The resolved config.
        logs: Folder that takes what ranks other than 0 print; rank 0 prints into the job's output.
        exits: Folder that takes how it ended.
    """
    rank, parent = int(os.environ["RANK"]), os.getppid()
    signal.pthread_sigmask(signal.SIG_BLOCK, {*HELD_BACK, signal.SIGCHLD})
    output = logs / f"rank-{rank:05d}.out"
    file: BinaryIO | None = None if rank == 0 else output.open("ab")
    child = subprocess.Popen(
        [sys.executable, "-m", "pretrain", "train", config],
        stdin=subprocess.DEVNULL,
        stdout=file,
        stderr=file,
        env={"PYTHONFAULTHANDLER": "1", **os.environ},
        preexec_fn=partial(_prepare_rank, os.getpid()),
    )
    while child.poll() is None:
        received = signal.sigwaitinfo({signal.SIGCHLD, *HELD_BACK})
        if received.si_signo in (signal.SIGTERM, signal.SIGINT) and received.si_pid == parent:
            child.send_signal(signal.SIGTERM)
    code = child.returncode
    if rank == 0 or code != EXIT_OK:
        note_rank(exits, rank, socket.gethostname(), code, last_error(output) if file else "")
    if file:
        file.close()
    return EXIT_OK if code == EXIT_RESUME_ME else 128 - code if code < 0 else code


def main() -> None:
    """Runs `python -m pretrain_launch.rank CONFIG LOGS EXITS`; `deepspeed` adds --local_rank."""
    guard_streams()
    parser = argparse.ArgumentParser()
    for name in ("config", "logs", "exits"):
        parser.add_argument(name)
    parser.add_argument("--local_rank", "--local-rank")
    arguments = parser.parse_args()
    die_with(os.getppid())
    sys.exit(run_rank(arguments.config, Path(arguments.logs), Path(arguments.exits)))


if __name__ == "__main__":
    main()
