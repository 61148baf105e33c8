"""Small runs of the user's config through the command line, as a user starts them; what they leave is read."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.log import redact
from pretrain.rundir import RunDir

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
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as stream:
        done = subprocess.run(
            [sys.executable, "-m", "pretrain", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stream,
            env={**os.environ, "WANDB_MODE": "disabled"},
            timeout=within_s,
        )
    said = log.read_text(encoding="utf-8", errors="replace").splitlines()
    errors = [line.strip().removeprefix("error: ") for line in said if line.strip().startswith("error: ")]
    error = errors[0] if errors else (said[-1].strip() if said and done.returncode else "")
    return Trial(done.returncode, done.stdout.decode(errors="replace"), redact(error))


def read_metrics(run: RunDir) -> list[dict[str, Any]]:
    """Returns the rows of metrics.jsonl; none where there is no such file."""
    if not run.metrics.is_file():
        return []
    return [json.loads(line) for line in run.metrics.read_text(encoding="utf-8").splitlines() if line.strip()]
