"""One rank, run and noted: between the rank and the launcher of this node.

    torchrun | accelerate | deepspeed | srun  ->  this  ->  pretrain train
    SIGTERM of a launcher that gives up       ->  the rank; Slurm signals the rank itself
    the launcher dies                         ->  this process too, and the rank (PR_SET_PDEATHSIG)

A rank that was stopped with all saved (75) exits with 0 here, or the launcher would end its peers.
"""

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
from pretrain_launch.exits import last_error, note_exit, shell_code

BLOCKED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
"""Blocked until the rank can answer them: Slurm sends its signals to every process of a step."""


def _prepare_rank(parent: int) -> None:
    die_with(parent)
    signal.pthread_sigmask(signal.SIG_SETMASK, BLOCKED)


def run_rank(config: str, logs: Path, exits: Path) -> int:
    """Trains as one rank, in a process of its own; returns the exit code for the launcher."""
    rank = int(os.environ["RANK"])
    parent = os.getppid()
    signal.pthread_sigmask(signal.SIG_BLOCK, {*BLOCKED, signal.SIGCHLD})
    output = logs / f"rank-{rank:05d}.out"
    file: BinaryIO | None = None if rank == 0 else output.open("ab")
    child = subprocess.Popen(
        [sys.executable, "-m", "pretrain", "train", config],
        stdin=subprocess.DEVNULL,
        stdout=file,
        stderr=subprocess.STDOUT,  # the stderr of this process is that of a launcher
        env={"PYTHONFAULTHANDLER": "1", **os.environ},
        preexec_fn=partial(_prepare_rank, os.getpid()),
    )
    note_exit(exits, "ready", rank)
    while child.poll() is None:
        received = signal.sigwaitinfo({signal.SIGCHLD, *BLOCKED})
        if received.si_signo in (signal.SIGTERM, signal.SIGINT) and received.si_pid == parent:
            child.send_signal(signal.SIGTERM)
    code = child.returncode
    if rank == 0 or code != EXIT_OK:
        said = last_error(output) if file else ""
        note_exit(exits, "rank", rank, rank=rank, host=socket.gethostname(), code=code, said=said)
    if file:
        file.close()
    return EXIT_OK if code == EXIT_RESUME_ME else shell_code(code)


def main() -> None:
    """Runs `python -m pretrain_launch.rank CONFIG LOGS EXITS`; `deepspeed` adds --local_rank=N."""
    guard_streams()
    config, logs, exits = (text for text in sys.argv[1:] if not text.startswith("--local"))
    die_with(os.getppid())
    sys.exit(run_rank(config, Path(logs), Path(exits)))


if __name__ == "__main__":
    main()
