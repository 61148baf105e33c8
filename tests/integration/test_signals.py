"""Stop signals at chosen and at random moments of one logical run: each attempt ends with 75, and no step is lost."""

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pretrain.errors import EXIT_OK, EXIT_RESUME_ME
from pretrain.run.stop import STOP_SIGNALS
from tests.helpers.documents import ROOT
from tests.helpers.fork_server import SOURCE_PATH
from tests.helpers.holds import HELD, Hold
from tests.helpers.runs import RunMaker, assert_same_run
from tests.helpers.waiting import finish, pass_time, stopwatch, wait_until
from tests.helpers.warm_jobs import WarmJob

CONFIG = """
seed: 7
run: {{dir: {runs}, name: run}}
data: {{path: {data}, lanes: 3, block_samples: 16}}
model:
  preset: llama-tiny
  max_seq_len: 32
  decoder: {{layers: 1, width: 32, heads: 4, kv_heads: 2, ff_width: 48, dropout: 0.1}}
batch: {{global_tokens: 384, seq_len: 32, micro: 2}}
optim: {{lr: 1e-3, schedule: {{warmup_steps: 5}}}}
train: {{steps: 30}}
engine: {{kind: ddp, zero_stage: 0, precision: fp32, device: cpu}}
eval: {{every_steps: 7, max_tokens: 600}}
checkpoint: {{every_steps: 5}}
tracking: {{log_every_steps: 10, wandb: off}}
"""
STEPS = 30
NUM_MOMENTS = int(os.environ.get("SIGNAL_DRILLS", "20"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory, corpus) -> RunMaker:
    """An uninterrupted run, and a maker of others beside it."""
    folder = tmp_path_factory.mktemp("signals")
    maker = RunMaker(folder, corpus, CONFIG)
    maker.train("golden", ranks=1)
    return maker


def saved_steps(runs: RunMaker, name: str) -> list[int]:
    """Steps of the checkpoints of a run."""
    return sorted(int(path.name[5:]) for path in runs.folder(name).checkpoints.glob("step-????????"))


def assert_no_step_lost(runs: RunMaker, name: str, job: WarmJob) -> None:
    """What the ledger has is what the newest checkpoint has."""
    rows, saved = runs.last_row(name)["step"], saved_steps(runs, name)
    assert rows == (saved[-1] if saved else 0), f"{rows} steps were trained, {saved} saved:\n{job.output()}"


PHASES = ["load", "data", "compile", "forward-backward", "update", "evaluate", "save", "close"]


@pytest.mark.parametrize("turn", [0, *(pytest.param(turn, marks=pytest.mark.long) for turn in (1, 2))])
def test_a_signal_in_any_phase_ends_the_attempt_with_75_and_loses_nothing(runs, tmp_path, turn):
    # Each phase meets one of the signals a turn. With each attempt the run is a step further, so that one that
    # evaluates or saves comes to it.
    name = f"phases-{turn}"
    for number, phase in enumerate(PHASES):
        hold = Hold(tmp_path, phase, phase)  # as a slow compiler, disk or server would
        stop_after = "null" if phase != "close" else str(runs.last_row(name)["step"] + 2)
        job = runs.start_warm(name, HELD, f"train.stop_after={stop_after}", ranks=1, **hold.environment)
        wait_until(lambda hold=hold: hold.is_reached, f"it came to {phase}", job.is_running, say=job.output)
        job.send(STOP_SIGNALS[(number + turn) % 3])
        assert job.end() == (EXIT_RESUME_ME if phase != "close" else EXIT_OK), f"{phase}:\n{job.output()}"
        assert "Traceback" not in job.output()
        assert_no_step_lost(runs, name, job)
    assert runs.last_row(name)["step"] > 5, "some attempts went on to the end of their step"
    runs.train(name, ranks=1)
    assert_same_run(runs, name, "golden", STEPS)


def stop_at_random_moments(runs: RunMaker, name: str, count: int, steps: int, folder: Path) -> None:
    """Sends `count` signals, one an attempt, at seeded moments.

    However fast the machine is, each attempt waits for its signal two steps behind the one before: where a signal lets
    the ranks go on, they may be a step further before they agree to stop.
    """
    rng, slowest_s = random.Random(6), 0.0
    overrides = (f"train.steps={steps}",)
    for number in range(count):
        step, last = runs.last_row(name)["step"], steps - 1 - 2 * (count - 1 - number)
        hold = Hold(folder, str(number), step=last)
        job = runs.start_warm(name, HELD, *overrides, ranks=2, **hold.environment)
        if number % 2:
            # After a few more steps: training, evaluation, saving.
            target = min(step + 1 + rng.randint(0, max(2, 2 * steps // count)), last)
            reached = lambda target=target: runs.last_row(name)["step"] >= target  # noqa: E731
            wait_until(reached, f"step {target}", job.is_running, say=job.output)
            pass_time(rng.uniform(0, 0.1))
        else:
            pass_time(rng.uniform(0, 3))  # claiming, meeting, loading, compiling, first steps
        assert job.is_running(), job.output()
        # Slurm signals every process, `kill` one.
        job.send(rng.choice(STOP_SIGNALS), rng.choice([None, None, [0], [1]]))
        answer_s = stopwatch()
        code = job.end()
        slowest_s = max(slowest_s, answer_s())
        assert code == EXIT_RESUME_ME or (code == EXIT_OK and runs.last_row(name)["step"] == steps), job.output()
        assert_no_step_lost(runs, name, job)
    runs.train(name, *overrides)
    print(f"{count} signals; the slowest answer took {slowest_s:.1f} s")


@pytest.mark.long
def test_signals_at_random_moments_lose_nothing(runs, tmp_path):
    stop_at_random_moments(runs, "random", 4, STEPS, tmp_path)
    # Another number of ranks than golden's: the same samples.
    assert runs.last_row("random")["digest"] == runs.last_row("golden")["digest"]


@pytest.mark.long
def test_many_signals_at_random_moments_lose_nothing(runs, tmp_path):
    steps = max(STEPS, 3 * NUM_MOMENTS)
    runs.train("long_golden", f"train.steps={steps}")
    stop_at_random_moments(runs, "many", NUM_MOMENTS, steps, tmp_path)
    assert_same_run(runs, "many", "long_golden", steps)


def answers(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    caught = re.search("SigCgt:\\s*([0-9a-f]+)", Path(f"/proc/{pid}/status").read_text())
    assert caught is not None
    return bool(int(caught[1], 16) & 1 << (number - 1))


def wait_until_answering(process: subprocess.Popen[str]) -> None:
    """Waits until a process takes SIGTERM: before Python runs our first line there is nobody to ask."""
    wait_until(lambda: answers(process.pid, signal.SIGTERM), "a handler", process)


@pytest.mark.long
@pytest.mark.parametrize("number", STOP_SIGNALS)
@pytest.mark.parametrize("delay_s", [0, 0.1, 0.5, 2.5])
def test_a_signal_to_a_launcher_that_has_just_started_ends_it_with_75(make_run, tmp_path, number, delay_s):
    hold = Hold(tmp_path, "early", "compile")  # from its first step on, a rank would save
    process = make_run.start("early", HELD, "engine={kind: ddp, zero_stage: 0}", **hold.environment)
    wait_until_answering(process)
    pass_time(delay_s)
    process.send_signal(number)
    output = finish(process)[0]
    assert process.returncode == EXIT_RESUME_ME, output
    assert "Traceback" not in output
    assert "error" not in output


@pytest.mark.parametrize("command", ["train", "launch local"])
def test_a_signal_while_the_command_line_is_imported_ends_it_with_75(make_run, tmp_path, command):
    (tmp_path / "typer.py").write_text("from tests.helpers.waiting import hang\nhang()\n")
    launcher = [sys.executable, "-m", "pretrain", *command.split()]
    process = make_run.start("early", launcher=launcher, PYTHONPATH=str(tmp_path))
    wait_until_answering(process)
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == ""
    assert process.returncode == EXIT_RESUME_ME


@pytest.mark.parametrize("command", ["config", "launch slurm", "launch logs"])
def test_ctrl_c_while_another_command_is_imported_ends_it_with_130_and_one_word(make_run, tmp_path, command):
    module = "import os\nfrom tests.helpers.waiting import hang\nos.write(1, b'imports\\n')\nhang()\n"
    (tmp_path / "typer.py").write_text(module)
    launcher = [sys.executable, "-m", "pretrain", *command.split()]
    process = make_run.start("early", launcher=launcher, PYTHONPATH=str(tmp_path))
    assert process.stdout is not None and process.stdout.readline() == "imports\n"
    process.send_signal(signal.SIGINT)
    assert finish(process)[0] == "interrupted\n"
    assert process.returncode == 128 + signal.SIGINT


# Stands still when one signal has a handler and the others have none, until another has come.
STANDS_STILL = """
import signal
from tests.helpers.waiting import poll_pause
real = signal.signal

def late(number, handler):
    real(number, handler)
    while number == signal.SIGTERM and not signal.sigpending():
        poll_pause()

signal.signal = late
"""


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_that_comes_when_one_of_them_has_a_handler_ends_it_with_75(make_run, tmp_path, number):
    (tmp_path / "sitecustomize.py").write_text(STANDS_STILL)
    process = make_run.start("early", launcher=[sys.executable, "-m", "pretrain", "train"], PYTHONPATH=str(tmp_path))
    wait_until_answering(process)
    process.send_signal(number)
    assert finish(process)[0] == ""
    assert process.returncode == EXIT_RESUME_ME


DRAWS_A_BAR = """#!/bin/sh
[ "$1" = launch ] || exit 0
steps=runs/quickstart/checkpoints
commit() { mkdir -p $steps/step-00000$1; touch $steps/step-00000$1/manifest.json; }
[ ! -d $steps/step-00000101 ] || { commit 700; exit 0; }
trap 'commit 101; exit 75' TERM
printf '100/700 ----' >&2
commit 100
while :; do sleep 0.1; done
"""
"""`pretrain` as far as the quickstart sees it: the bar of a run, its checkpoints and exit codes."""


def test_the_quickstart_leaves_no_half_drawn_bar_before_the_line_of_its_kill(tmp_path):
    (tmp_path / "program").write_text(DRAWS_A_BAR)
    (tmp_path / "program").chmod(0o755)
    master, slave = os.openpty()
    code = (
        "from pretrain.cli import quickstart; from pretrain.cli.wish_commands import command_steps; "
        "command_steps.PROGRAM = ['./program']; quickstart.quickstart_command()"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": SOURCE_PATH}, stdout=slave, stderr=slave
    ):
        os.close(slave)
        with os.fdopen(master, "rb") as terminal, contextlib.suppress(OSError):  # the end of a terminal is an error
            shown = b""
            while part := terminal.read1():
                shown += part
    assert b"100/700 ----\r\x1b[K\r\n-- kill -TERM" in shown, shown
    assert b"the same command continues" in shown


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ([sys.executable, "-m", "pretrain", "quickstart"], 128 + signal.SIGINT),
        pytest.param(
            ["make", "-f", str(ROOT / "Makefile"), "-o", ".venv/.run", "quickstart"],
            -signal.SIGINT,
            marks=pytest.mark.long,
        ),
    ],
    ids=["command", "make"],
)
def test_ctrl_c_ends_the_quickstart_with_its_command_and_says_what_continues(tmp_path, command, code):
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv/.run").touch()  # for make: installed
    (tmp_path / ".venv/bin").symlink_to(Path(sys.executable).parent)
    # A make below the make that runs the tests would name its folder.
    outer = {name: value for name, value in os.environ.items() if name not in ("MAKELEVEL", "MAKEFLAGS", "MFLAGS")}
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env={**outer, "PYTHONPATH": SOURCE_PATH},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # a group, to which a terminal sends Ctrl-C
    )
    assert process.stdout is not None and process.stdout.readline() == "\n"
    assert process.stdout.readline() == "$ pretrain prepare --output data/stdlib --vocab-size 2048\n"
    assert process.stdout.readline().endswith("INFO    reading for the tokenizer\n")
    os.killpg(process.pid, signal.SIGINT)
    output, _ = finish(process)
    # At once, from within the trainer of `tokenizers`: nothing that comes after it is said.
    assert output == "interrupted; finished parts are kept: the same command continues\n"
    assert process.returncode == code
    assert not list((tmp_path / "data/stdlib").glob("*tokenizer*"))
