"""Small runs of the user's config through the command line, as a user starts them; what they leave is read."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.doctor.check import Check
from pretrain.doctor.small import TrialOptions
from pretrain.errors import EXIT_DIVERGED, EXIT_OK
from pretrain.run.folder import RunDir
from pretrain.tracking.audit import compare
from pretrain.utils.io import write_file
from pretrain.utils.log import redact

WITHIN_S = 1800.0


@dataclass(frozen=True, slots=True)
class Trial:
    """How a command ended.

    Attributes:
        exit_code: Of it.
        output: What it printed on stdout.
        error: The first error that it printed; empty where it printed none.
    """

    exit_code: int
    output: str
    error: str


def run_command(arguments: Sequence[str], log: Path, within_s: float = WITHIN_S) -> Trial:
    """Runs `pretrain ARGUMENTS`, its messages in `log`. Raises: subprocess.TimeoutExpired."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    return end_of(start_command(arguments, log, environment), log, within_s)


def start_command(arguments: Sequence[str], log: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Starts `pretrain ARGUMENTS`, its messages in `log`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as stream:
        return subprocess.Popen(
            [sys.executable, "-m", "pretrain", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stream,
            env={**environment, "WANDB_MODE": "disabled"},
        )


def rank_environment(turn: int, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the environment of a rank that this rank starts, to meet those that the others start.

    Args:
        turn: Counts the runs of a job, from 1: each has a port of its own.
        environment: Of this rank.
    """
    kept = {name: value for name, value in environment.items() if not name.startswith("TORCHELASTIC_")}
    return kept | {"MASTER_PORT": str(int(environment["MASTER_PORT"]) + turn)}


def end_of(process: subprocess.Popen[bytes], log: Path, within_s: float = WITHIN_S) -> Trial:
    """Waits for a command. Raises: subprocess.TimeoutExpired: it is killed."""
    try:
        output, _ = process.communicate(timeout=within_s)
    finally:
        process.kill()
        process.wait()
    said = log.read_text(encoding="utf-8", errors="replace").splitlines()
    errors = [line.strip().removeprefix("error: ") for line in said if line.strip().startswith("error: ")]
    error = errors[0] if errors else (said[-1].strip() if said and process.returncode else "")
    return Trial(process.returncode, output.decode(errors="replace"), redact(error))


def read_metrics(run: RunDir) -> list[dict[str, Any]]:
    """Returns the rows of metrics.jsonl; none where there is no such file."""
    if not run.metrics.is_file():
        return []
    return [json.loads(line) for line in run.metrics.read_text(encoding="utf-8").splitlines() if line.strip()]


# Kill and resume over the ranks of a job, on several nodes: every rank starts a rank of its own,
# three times.
#
# golden    to its end
# killed    the last rank's is killed once a checkpoint is behind it; the others notice, and end by themselves
# again     the same command resumes, to its end; then the two ledgers must be equal in bits


STEPS, EVERY, KILL_AT = 24, 4, 9

DONE_WITHIN_S = 120.0

_FIRST_TURN = 10

_POLL_S = 0.01

_DONE_POLL_S = 0.5

_NAME = "kill and resume"


def kill_in_job(asked: TrialOptions, small: Callable[..., list[str]]) -> Check:
    """Trains, kills, resumes and compares, as one rank of the job; rank 0's verdict counts.

    Args:
        asked: What is tried.
        small: Makes the overrides of a small run: `small(asked, name, steps, *more)`.
    """
    is_victim = asked.place.rank == asked.place.size - 1
    mark = asked.folder / "killed.at"
    runs = [("golden", False), ("killed", is_victim), ("killed", False)]
    for turn, (name, kills) in enumerate(runs, start=_FIRST_TURN):
        overrides = small(asked, name, STEPS, f"checkpoint.every_steps={EVERY}")
        log = asked.folder / f"{name}-{turn}-rank-{asked.place.rank}.log"
        process = start_command(["train", asked.config, *overrides], log, rank_environment(turn))
        if kills:
            _kill_at(process, RunDir(asked.folder / name), mark)
        trial = end_of(process, log)
        if trial.exit_code != EXIT_OK and turn != _FIRST_TURN + 1:
            return Check(_NAME, "fail", f"{name}: exit code {trial.exit_code}: {trial.error}", f"see {log}")
    if asked.place.rank:
        return Check(_NAME, "pass", "rank 0 compares the ledgers")
    if not mark.is_file():
        fix = "nothing, or a larger config: these steps are too quick for it"
        return Check(_NAME, "warn", "the run ended before it could be killed", fix)
    different = compare(RunDir(asked.folder / "golden").audit, RunDir(asked.folder / "killed").audit)
    if different is not None:
        text = f"the resumed run is not the uninterrupted one: {different}"
        return Check(_NAME, "fail", text, f"see {asked.folder}", EXIT_DIVERGED)
    where = f"rank {asked.place.size - 1} killed at step {mark.read_text(encoding='ascii')}"
    return Check(_NAME, "pass", f"{where}, {STEPS} steps; the ledgers are equal in bits")


def say_done(asked: TrialOptions) -> None:
    """Says to the other ranks that this one reads nothing more in the folder."""
    write_file(_done(asked, asked.place.rank), b"")


def wait_for_others(asked: TrialOptions) -> bool:
    """Waits until all ranks read nothing more in the folder; returns whether they do within 2 minutes."""
    deadline = time.monotonic() + DONE_WITHIN_S
    while not all(_done(asked, rank).exists() for rank in range(asked.place.size)):
        if time.monotonic() > deadline:
            return False
        time.sleep(_DONE_POLL_S)
    return True


def _done(asked: TrialOptions, rank: int) -> Path:
    return asked.folder / f"rank-{rank}.done"


def _kill_at(process: subprocess.Popen[bytes], run: RunDir, mark: Path) -> None:
    """Kills a rank once the run's ledger has so many steps; writes down at which, unless it ends before."""
    deadline = time.monotonic() + WITHIN_S
    while process.poll() is None and time.monotonic() < deadline:
        step = len(run.audit.read_bytes().splitlines()) if run.audit.is_file() else 0
        if step >= KILL_AT:
            process.send_signal(signal.SIGKILL)
            if process.wait() == -signal.SIGKILL:
                mark.write_text(str(step), encoding="ascii")
            return
        time.sleep(_POLL_S)
