"""Small runs of the user's config through the command line, as a user starts them; what they leave is read."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.run.folder import RunDir
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
