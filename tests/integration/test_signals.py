"""Stop signals at chosen and at random moments of one logical run: each attempt ends with 75, and no step is lost."""

import os
import random
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pretrain.control import STOP_SIGNALS
from pretrain.errors import EXIT_OK, EXIT_RESUME_ME
from tests.helpers.runs import RunMaker, assert_same_run
from tests.helpers.warm_jobs import WarmJob, WarmJobs

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
engine: {{kind: ddp, zero_stage: 0, precision: fp32, device: cpu, timeout_s: 60}}
eval: {{every_steps: 7, max_tokens: 600}}
checkpoint: {{every_steps: 5}}
tracking: {{log_every_steps: 10, wandb: off}}
"""
STEPS = 30
NUM_MOMENTS = int(os.environ.get("SIGNAL_DRILLS", "20"))
# Waits in one phase of one step until a signal comes, as a slow compiler, disk or server would have it.
SLOW_PHASE = """
import os, time
from pathlib import Path
from pretrain.control.progress import Progress

enter = Progress.enter

def slow(self, phase, step=None):
    enter(self, phase, step)
    if phase == os.environ.get("SLOW_PHASE") and not Path(os.environ["MARKER"]).exists():
        Path(os.environ["MARKER"]).touch()
        time.sleep(0.7)

Progress.enter = slow
"""


@pytest.fixture(scope="module")
def jobs() -> Iterator[WarmJobs]:
    """Starts ranks in forks."""
    with WarmJobs() as server:
        yield server


@pytest.fixture(scope="module")
def runs(tmp_path_factory, corpus, jobs) -> RunMaker:
    """An uninterrupted run, and a maker of others beside it."""
    folder = tmp_path_factory.mktemp("signals")
    (folder / "slow_phase.py").write_text(SLOW_PHASE)
    maker = RunMaker(folder, corpus, CONFIG)
    job = jobs.start(maker.config("golden"), ranks=1)
    assert job.end() == EXIT_OK, job.output()
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
def test_a_signal_in_any_phase_ends_the_attempt_with_75_and_loses_nothing(runs, jobs, tmp_path, turn):
    # Each phase meets one of the signals a turn. With each attempt the run is a step further, so that one that
    # evaluates or saves comes to it.
    name = f"phases-{turn}"
    for number, phase in enumerate(PHASES):
        marker, modules = tmp_path / phase, Path(runs.config(name)).parent
        stop_after = "null" if phase != "close" else str(runs.last_row(name)["step"] + 2)
        environment = {"SLOW_PHASE": phase, "MARKER": str(marker)}
        job = jobs.start(
            runs.config(name), "extend=[slow_phase]", f"train.stop_after={stop_after}",
            ranks=1, modules=modules, **environment,
        )  # fmt: skip
        while not marker.exists():
            assert job.is_running(), f"never came to {phase}:\n{job.output()}"
            time.sleep(0.01)
        job.send(STOP_SIGNALS[(number + turn) % 3])
        assert job.end() == (EXIT_RESUME_ME if phase != "close" else EXIT_OK), f"{phase}:\n{job.output()}"
        assert "Traceback" not in job.output()
        assert_no_step_lost(runs, name, job)
    assert runs.last_row(name)["step"] > 5, "some attempts went on to the end of their step"
    job = jobs.start(runs.config(name), ranks=1)
    assert job.end() == EXIT_OK, job.output()
    assert_same_run(runs, name, "golden", STEPS)


def stop_at_random_moments(runs: RunMaker, jobs: WarmJobs, name: str, count: int, steps: int) -> int:
    """Sends `count` signals, one an attempt, at seeded moments; returns how many came to a process that still ran."""
    rng, hit, slowest_s = random.Random(6), 0, 0.0
    overrides = (f"train.steps={steps}",)
    for number in range(count):
        job = jobs.start(runs.config(name), *overrides, ranks=2)
        step = runs.last_row(name)["step"]
        if number % 2:
            # After a few more steps: training, evaluation, saving.
            target = min(step + rng.randint(0, max(2, 2 * steps // count)), steps)
            while job.is_running() and runs.last_row(name)["step"] <= target and target < steps:
                time.sleep(0.005)
            time.sleep(rng.uniform(0, 0.1))
        else:
            time.sleep(rng.uniform(0, 3))  # claiming, meeting, loading, compiling, first steps
        if not job.is_running():
            assert job.end() == EXIT_OK, job.output()
            continue
        # Slurm signals every process, `kill` one.
        job.send(rng.choice(STOP_SIGNALS), rng.choice([None, None, [0], [1]]))
        asked_at = time.monotonic()
        code = job.end()
        hit, slowest_s = hit + 1, max(slowest_s, time.monotonic() - asked_at)
        assert code == EXIT_RESUME_ME or (code == EXIT_OK and runs.last_row(name)["step"] == steps), job.output()
        assert_no_step_lost(runs, name, job)
    job = jobs.start(runs.config(name), *overrides, ranks=2)
    assert job.end() == EXIT_OK, job.output()
    print(f"{hit} of {count} signals came to a job that ran; the slowest answer took {slowest_s:.1f} s")
    return hit


@pytest.mark.long
def test_signals_at_random_moments_lose_nothing(runs, jobs):
    assert stop_at_random_moments(runs, jobs, "random", 4, STEPS) >= 2
    # Another number of ranks than golden's: the same samples.
    assert runs.last_row("random")["digest"] == runs.last_row("golden")["digest"]


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_many_signals_at_random_moments_lose_nothing(runs, jobs):
    steps = max(STEPS, 3 * NUM_MOMENTS)
    job = jobs.start(runs.config("long_golden"), f"train.steps={steps}", ranks=2)
    assert job.end(1200) == EXIT_OK, job.output()
    assert stop_at_random_moments(runs, jobs, "many", NUM_MOMENTS, steps) > NUM_MOMENTS / 2
    assert_same_run(runs, "many", "long_golden", steps)


def answers(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    caught = re.search("SigCgt:\\s*([0-9a-f]+)", Path(f"/proc/{pid}/status").read_text())
    assert caught is not None
    return bool(int(caught[1], 16) & 1 << (number - 1))


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", STOP_SIGNALS)
@pytest.mark.parametrize("delay_s", [0, 0.1, 0.5, 2.5])
def test_a_signal_to_a_launcher_that_has_just_started_ends_it_with_75(make_run, number, delay_s):
    process = make_run.start("early", "engine={kind: ddp, zero_stage: 0}")
    while not answers(process.pid, signal.SIGTERM):  # before Python runs our first line there is nobody to ask
        time.sleep(0.001)
    time.sleep(delay_s)
    process.send_signal(number)
    output = process.communicate(timeout=300)[0]
    assert process.returncode == EXIT_RESUME_ME, output
    assert "Traceback" not in output
    assert "error" not in output


@pytest.mark.parametrize("command", ["train", "launch local"])
def test_a_signal_while_the_command_line_is_imported_ends_it_with_75(make_run, command):
    process = make_run.start("early", launcher=[sys.executable, "-m", "pretrain", *command.split()])
    while not answers(process.pid, signal.SIGTERM):
        time.sleep(0.001)
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=60)[0] == ""
    assert process.returncode == EXIT_RESUME_ME
