"""Commands of `pretrain` that another command runs, each printed as a user would type it."""

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from pretrain.errors import EXIT_USAGE, LaunchError
from pretrain.utils.io import make_dir
from pretrain.utils.process import die_with
from pretrain.utils.units import span

if TYPE_CHECKING:
    from pretrain.config.run import RunConfig

PROGRAM = (sys.executable, "-m", "pretrain")
POLL_S = 0.2
PACE_STEPS = 20
"""Steps from which the time of a step is measured."""


class CommandSteps:
    """Commands that run one after another, and the stop signals that came meanwhile.

    A command has a process group of its own: a Ctrl-C of the terminal reaches it once, by way of
    this process, which waits for its end.
    """

    def __init__(self) -> None:
        self._signals: list[int] = []
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, frame: self._signals.append(number))

    def run(self, arguments: list[str], stop: Callable[[], bool] | None = None) -> int:
        """Runs `pretrain ARGUMENTS`, stopped by SIGTERM once `stop` is true; returns its exit code.

        `python -m MODULE ...` is run as it is, by this interpreter; `> FILE` at the end of either
        is the place of its output.

        Raises: Exit, with 130, after a signal to this process, which the command has answered.
        """
        is_script = arguments[0] == "python"
        shown = arguments if is_script else ["pretrain", *arguments]
        command = [sys.executable, *arguments[1:]] if is_script else [*PROGRAM, *arguments]
        print(f"\n$ {shlex.join(shown)}".replace(" '>' ", " > "), flush=True)
        prepare = partial(die_with, os.getpid())
        options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "process_group": 0}
        with contextlib.ExitStack() as opened:
            if command[-2] == ">":
                place = make_dir(Path(command[-1]).parent) / Path(command[-1]).name
                options["stdout"] = opened.enter_context(place.open("wb"))
                command = command[:-2]
            process = subprocess.Popen(command, preexec_fn=prepare, **options)
        num_passed = 0
        while process.poll() is None:
            if num_passed < len(self._signals):
                # Each one: the second ends a run without a save.
                process.send_signal(self._signals[num_passed])
                num_passed += 1
            elif stop is not None and stop():
                stop = None
                if sys.stderr.isatty():  # the command draws its bar again, below the next line
                    sys.stderr.write("\r\x1b[K")
                text = "stopping the run, as a preemption would"
                print(f"\n-- kill -TERM {process.pid}: {text}", flush=True)
                process.terminate()
            time.sleep(POLL_S)
        if self._signals:
            raise typer.Exit(128 + signal.SIGINT)
        return process.returncode

    def check(self, arguments: list[str]) -> None:
        """Runs `pretrain ARGUMENTS`. Raises: Exit, with its code, where it fails: it says why."""
        self.refuse(self.run(arguments), arguments)

    @staticmethod
    def refuse(code: int, arguments: list[str]) -> None:
        """Ends with the exit code of a command that failed. Raises: Exit. LaunchError: It was killed."""
        if code < 0:
            raise LaunchError(f"pretrain {arguments[0]} was killed by signal {-code}")
        if code:
            raise typer.Exit(code)


@dataclass(frozen=True, slots=True)
class Wish:
    """Arguments of the commands that prepare data and train on them, with the config of the run."""

    prepare: list[str]
    train: list[str]
    data: Path
    config: "RunConfig"
    minutes: float | None = None  # of training steps; None: as many steps as the config says


def name_of_file(task: str, file: str) -> str:
    """Returns a name of data and run, by the task and the name of the file."""
    stem = re.sub("[^A-Za-z0-9._-]+", "-", Path(file).name.split(".")[0])
    return f"{task}-{stem}"[:56].rstrip("-._")  # names of runs have 64, with an ending


def fulfil(wish: Wish, dry_run: bool) -> None:
    """Prepares, trains, evaluates and prints the next command. Started again, each continues or is done.

    Raises: Exit, with the code of a command that fails. LaunchError: One was killed.
    """
    run = wish.config.folder
    evaluate = ["evaluate", str(run)]
    if dry_run:
        timed = ["train.steps=BY_PACE"] * (wish.minutes is not None)
        for arguments in (wish.prepare, wish.train + timed, evaluate):
            print(f"$ pretrain {shlex.join(arguments)}")
        return
    steps = CommandSteps()
    was_there = wish.data.exists()
    code = steps.run(wish.prepare)
    if code == EXIT_USAGE and was_there:
        print(f"-- {wish.data} is of another command: give another --name, or delete the folder", file=sys.stderr)
    steps.refuse(code, wish.prepare)
    train = wish.train
    if wish.minutes is not None:
        train = [*train, *_pace(steps, wish, wish.minutes)]
    steps.check(train)
    from pretrain.shards.index import load_index

    split = load_index(wish.data).splits.get("validation")
    has_validation = split is not None and split.num_documents > 0
    if has_validation:
        steps.check(evaluate)
    else:
        print(f"\n-- no evaluation: {wish.data} has no validation split", flush=True)
    from pretrain.training.run import next_of_run

    print(f"\nnext: {next_of_run(wish.config, has_validation)}", flush=True)


def _pace(steps: CommandSteps, wish: Wish, minutes: float) -> list[str]:
    """Returns the overrides for as many steps as the minutes have room for. Raises: as `measure_pace`."""
    step_s = measure_pace(steps, wish.train, wish.config)
    num_steps = max(int(minutes * 60 / step_s), PACE_STEPS)
    print(f"\n-- a step takes {span(step_s)}: {num_steps:,} steps in {minutes:g} minutes", flush=True)
    return [f"train.steps={num_steps}", f"eval.every_steps={max(num_steps // 4, 1)}"]


def measure_pace(steps: CommandSteps, train: list[str], config: "RunConfig") -> float:
    """Runs a few steps, in a folder of their own, which stays; returns the seconds of one.

    A second call reads the rows of the first. Raises: as `fulfil`.
    """
    from pretrain.run.folder import RunDir
    from pretrain.utils.jsonl import rows_with

    name = f"{config.run.name}-pace"
    rows = f"tracking.log_every_steps={PACE_STEPS // 4}"
    only = [
        f"run.name={name}",
        f"train.stop_after={PACE_STEPS}",
        "eval.every_steps=0",
        "checkpoint.every_steps=0",
        rows,
    ]
    steps.check([*train, *only])
    metrics = RunDir(config.folder.with_name(name)).metrics
    timed = [row["step_time_s"] for row in rows_with(metrics, "loss")]
    timed = timed[1:] or timed  # the first row has the start
    return float(sum(timed) / len(timed))
