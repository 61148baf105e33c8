"""`pretrain quickstart`: a real run from nothing, stopped once on purpose.

    prepare  ->  train on two ranks, stopped by SIGTERM (exit code 75)
             ->  the same command continues  ->  generate  ->  report

Each step is a command of its own, printed as a user would type it. A second start continues what
it finds, as each command does.
"""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

import typer

from pretrain.errors import EXIT_RESUME_ME, LaunchError
from pretrain.utils.process import die_with

RECIPE = "quickstart"
VOCABULARY = 2048
# Most functions of the corpus are methods, and a token of a name holds the space before it.
PROMPT = "class Reader:\n    def"
PROGRAM = (sys.executable, "-m", "pretrain")
POLL_S = 0.2


def quickstart_command() -> None:
    """Run the whole path in this folder: prepare, train on 2 CPU ranks, stop, resume, generate.

    It writes data/stdlib and runs/quickstart, from the source of Python's own standard library:
    nothing is downloaded. The same command continues what was interrupted.

    Example: pretrain quickstart
    """
    from pretrain.config.load import load_config
    from pretrain.run.folder import RunDir
    from pretrain.utils.units import clock_time

    began = time.monotonic()
    config = load_config(RECIPE)
    run = RunDir(config.folder)
    stop_at = config.checkpoint.every_steps
    steps = _Steps()
    steps.check(["prepare", "--output", str(config.data.path), "--vocab-size", str(VOCABULARY)])
    train = ["launch", "local", RECIPE, "--ranks", "2"]
    if run.newest_step() < stop_at:
        # A commit is never taken back, unlike the metrics of a run that was killed: no stale row.
        code = steps.run(train, stop=lambda: run.newest_step() >= stop_at)
        if code != EXIT_RESUME_ME:
            text = f"the stopped run ended with exit code {code}"
            raise typer.Exit(code) if code > 0 else LaunchError(text)
        if run.newest_step() <= stop_at:
            raise LaunchError(f"the stop left no checkpoint after that of step {stop_at}")
        committed = f"step {run.newest_step()} is committed, the same command continues"
        print(f'\n-- exit code {code}, "resume me": {committed}', flush=True)
    if run.newest_step() < config.train.steps:
        steps.check(train)
    else:
        print(f"\n-- {run.path} is finished; remove the folder to train it again", flush=True)
    # So small a model copies on and on: a rare token that is drawn once, and what it has said.
    drawn = ["--top-p", "0.9", "--repetition-penalty", "1.1"]
    steps.check(["generate", str(run.path), "--prompt", PROMPT, *drawn])
    page = run.path / "report.html"
    steps.check(["report", str(run.path), "--output", str(page)])
    print(f"\n-- the quickstart is over, after {clock_time(time.monotonic() - began)}. Curves and facts: {page}")
    print("-- now your own text: pretrain prepare --input FOLDER --output data/mine")
    print("   then a config: pretrain recipes cp quickstart mine.yaml, and data.path=data/mine", flush=True)


class _Steps:
    """The commands of the quickstart, one after another, and the stop signals that came meanwhile.

    A command has a process group of its own: a Ctrl-C of the terminal reaches it once, by way of
    this process, which waits for its end.
    """

    def __init__(self) -> None:
        self._signals: list[int] = []
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, frame: self._signals.append(number))

    def run(self, arguments: list[str], stop: Callable[[], bool] | None = None) -> int:
        """Runs `pretrain ARGUMENTS`, stopped by SIGTERM once `stop` is true; returns its exit code.

        Raises: Exit, with 130, after a signal to this process, which the command has answered.
        """
        print(f"\n$ pretrain {shlex.join(arguments)}", flush=True)
        prepare = partial(die_with, os.getpid())
        process = subprocess.Popen(
            [*PROGRAM, *arguments], stdin=subprocess.DEVNULL, process_group=0, preexec_fn=prepare
        )
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
        code = self.run(arguments)
        if code < 0:
            raise LaunchError(f"pretrain {arguments[0]} was killed by signal {-code}")
        if code:
            raise typer.Exit(code)
