"""Runs the command line: as a fresh process, or forked from one that has imported what it needs.

    run_cli("config", "a.yaml", cwd=folder)               a process of its own, as a user starts it
    run_warm("train", "a.yaml", cwd=folder, ranks=2)      the same code in forks, without the seconds that torch takes
    run_light("config", "a.yaml", cwd=folder)             in a fork that has imported what a login node runs, no torch

In all, what the command printed and its exit code come back: those of rank 0, and the code that a launcher returns.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.helpers.fork_server import SOURCE_PATH, ForkServer
from tests.helpers.waiting import LIMIT_S
from tests.helpers.warm_jobs import start_warm

LIGHT = ForkServer("pretrain.cli", "typer.rich_utils")
"""The command line and no more."""
LOGIN = ForkServer(
    "pretrain.cli.commands", "typer.rich_utils", "pretrain.config.load", "pretrain.plan.plan_table",
    "pretrain.plan.search", "pretrain_launch.local", "pretrain_launch.manifests", "pretrain_launch.runs",
)  # fmt: skip
"""For what a login node runs: configs, plans and launchers; numpy and torch are not among their modules."""


@dataclass(frozen=True)
class Result:
    """How a command ended."""

    code: int
    stdout: str
    stderr: str

    @property
    def errors(self) -> list[str]:
        """The lines that are errors, quoted ones too, without the word."""
        lines = (line.strip() for line in self.stderr.splitlines())
        return [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]


Warm = Callable[..., Result]
"""What the fixture `warm` is: `run_warm`."""


def run_cli(*arguments: str, cwd: Path, timeout: float | None = LIMIT_S, **environment: str) -> Result:
    """Runs `pretrain ARGUMENTS` in a new process. `timeout`: None where it may take longer than any event does."""
    done = subprocess.run(
        [sys.executable, "-m", "pretrain", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": SOURCE_PATH, "OMP_NUM_THREADS": "1", **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    return Result(done.returncode, done.stdout, done.stderr)


def run_warm(*arguments: str, cwd: Path, **options: Any) -> Result:
    """Runs `pretrain ARGUMENTS` in a fork, or as the ranks of a run without a launcher: see `start_warm`."""
    with tempfile.TemporaryDirectory() as folder:
        job = start_warm(*arguments, cwd=cwd, output=Path(folder), **options)
        code = job.end()
        return Result(code, *(path.read_text() for path in job.files[0]))


def run_light(*arguments: str, cwd: Path, **options: Any) -> Result:
    """Runs `pretrain ARGUMENTS` in a fork that imports torch only if the command does."""
    return run_warm(*arguments, cwd=cwd, server=LOGIN, **options)
