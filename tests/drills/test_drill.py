"""`pretrain drill` on real runs: it passes where nothing is wrong, says what is wrong elsewhere, and leaves nothing."""

import json
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from pretrain.drill.attempt import MARK, marked
from pretrain.drill.drill_folder import CACHES
from pretrain.errors import EXIT_RESUME_ME, EXIT_USAGE
from tests.helpers.cli import Result, run_cli
from tests.helpers.runs import ROOT, SOURCE_PATH, RunMaker
from tests.helpers.waiting import finish, wait_until

ALONE = ("engine={kind: single, zero_stage: 0}",)
IN_16_BITS = ("engine={kind: auto, zero_stage: 0, precision: bf16}",)


# Dropout depends on the attempt. The first of the killed run does not come to its end, where the drill is late.
DRIFTING = """
import pretrain.run.folder as rundir
import pretrain.training.step as noise
from pretrain.run.heartbeat import Progress
from tests.helpers.waiting import poll_pause

real, enter_phase, number, waits = rundir.begin_attempt, Progress.enter, 0, False

def begin(run, name, facts):
    global number, waits
    record = real(run, name, facts)
    number = len(record["attempts"])
    waits = name == "killed" and number == 1
    return record

def seed(config, world, step, micro):
    import torch
    torch.manual_seed(number)

def enter(progress, phase, step=None):
    enter_phase(progress, phase, step)
    while waits and phase == "save" and progress.now.step == 11:
        poll_pause()

rundir.begin_attempt, noise.seed_noise, Progress.enter = begin, seed, enter
"""


def drill(maker: RunMaker, output: Path, *arguments: str) -> Result:
    """Runs a drill of the tiny config; it may start a run many times."""
    command = ("drill", str(maker.config()), *arguments, "--output", str(output))
    return run_cli(*command, cwd=ROOT, timeout=None)


@pytest.mark.long
@pytest.mark.parametrize("engine", [ALONE, IN_16_BITS], ids=["fp32", "bf16"])
def test_one_kill_of_one_process_changes_nothing_and_other_settings_are_refused(make_run, tmp_path, engine):
    output = tmp_path / "drill"
    options = (*engine, "--steps", "12", "--every", "2", "--kills", "1")
    done = drill(make_run, output, *options, "--json")
    assert done.code == 0, done.stdout + done.stderr
    facts = json.loads(done.stdout)
    assert facts["passed"] and facts["problems"] == [] and facts["kills"] == 1 and facts["steps"] == 12
    assert "kill 1 of 1: rank 0" in done.stderr
    state = json.loads((output / "drill.json").read_text())
    assert len(state["kills"]) == 1 and state["kills"][0]["exit_code"] == 128 + signal.SIGKILL
    refused = drill(make_run, output, *options, "--seed", "1")
    assert refused.code == EXIT_USAGE
    fix = "give another --output, or the same settings to continue"
    assert refused.errors == [f"{output}: this drill was begun with another seed (0, not 1); {fix}"]


@pytest.mark.long
@pytest.mark.parametrize("engine", [(), IN_16_BITS], ids=["zero2", "ddp"])
def test_kills_of_ranks_launcher_and_all_at_once_change_nothing(make_run, tmp_path, engine):
    options = (
        *engine,
        "--ranks",
        "2",
        "--every",
        "3",
        "--kills",
        "4",
        "--steps",
        "20",
        "--target",
        "any",
        "--seed",
        "3",
    )
    part = drill(make_run, tmp_path / "drill", *options, "--at-most", "2")
    assert part.code == EXIT_RESUME_ME
    assert part.stdout == "2 of 4 kills are done; the same command continues\n"
    done = drill(make_run, tmp_path / "drill", *options)
    assert done.code == 0, done.stdout + done.stderr
    assert "passed: " in done.stdout


@pytest.mark.long
def test_a_run_that_draws_anew_after_a_restart_fails_the_drill(make_run, tmp_path):
    (tmp_path / "drifting.py").write_text(DRIFTING)
    output = tmp_path / "drill"
    config = str(make_run.config())
    command = ["--extend", "drifting", "drill", config, *ALONE, "extend=[drifting]", "--steps", "12", "--every", "2"]
    done = run_cli(
        *command,
        "--kills",
        "2",
        "--seed",
        "5",
        "--output",
        str(output),
        cwd=ROOT,
        timeout=None,
        PYTHONPATH=f"{SOURCE_PATH}:{tmp_path}",
    )
    assert done.code == 1, done.stdout + done.stderr
    assert "FAILED: " in done.stdout and "process left" not in done.stdout
    assert "the ledgers differ: step" in done.stdout
    assert "/weight differs in" in done.stdout


@pytest.mark.long
def test_an_interrupted_drill_leaves_nothing_running_and_goes_on(make_run, tmp_path):
    output = tmp_path / "drill"
    command = [
        "-m",
        "pretrain",
        "drill",
        str(make_run.config()),
        "--ranks",
        "2",
        "--kills",
        "1",
        "--output",
        str(output),
    ]
    process = subprocess.Popen([sys.executable, *command, "--steps", "12"], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    mark = wait_until(lambda: _mark_of_children(process.pid), "it has started a launcher", process)
    process.send_signal(signal.SIGINT)
    finish(process)
    assert process.returncode == 128 + signal.SIGINT
    assert marked(mark) == {}
    done = drill(make_run, output, "--ranks", "2", "--kills", "1", "--steps", "12")
    assert done.code == 0, done.stdout + done.stderr


def _mark_of_children(pid: int) -> str | None:
    """The mark that a drill has given to its launcher, if it has started one."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    for child in children.read_text().split() if children.exists() else ():
        with suppress(OSError):  # a short-lived one, of an import
            for item in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
                if item.startswith(MARK.encode() + b"="):
                    return item.partition(b"=")[2].decode()
    return None


@pytest.mark.long
def test_twenty_five_kills_of_a_tiny_run_change_nothing(make_run, tmp_path):
    options = ("--ranks", "2", "--every", "3", "--kills", "25", "--target", "any", "--json")
    done = drill(make_run, tmp_path / "drill", *options)
    assert done.code == 0, done.stdout + done.stderr
    facts = json.loads(done.stdout)
    assert facts["kills"] == 25 and set(facts["phases"]) == {"start-up", "steps", "save"}
    left = [path.name for path in (tmp_path / "drill" / "tmp").iterdir()]
    assert [name for name in left if not name.startswith(CACHES)] == [], "besides the caches of compilers"
