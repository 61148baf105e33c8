"""A disk that is full, read-only or closed, for real: a small file system of its own, filled and remounted by a run.

`extend` brings a module into the run that does it, by the hook of `pretrain.utils.io`, at the save of a chosen step.
"""

import subprocess
from pathlib import Path

import pytest

from pretrain.checkpoint.format import list_checkpoints, step_of
from pretrain.errors import EXIT_DISK
from pretrain.tracking.audit import read_audit
from pretrain.utils.jsonl import read_rows
from tests.helpers.cli import run_light
from tests.helpers.runs import RunMaker

STEPS = 80
ALONE = ("engine={kind: single, zero_stage: 0}", f"train.steps={STEPS}", "tracking.log_every_steps=40")

FILL = """
import os, pathlib, threading
from pretrain.run.heartbeat import Progress
from pretrain.utils.io import set_fault_hook

ballast, is_full = pathlib.Path(os.environ["DISK"]) / "ballast", threading.Event()
enter_phase = Progress.enter

def fill():
    try:
        with ballast.open("ab", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
    except OSError as error:
        assert error.errno == 28, error

def hook(operation, path):
    if ".tmp-step-00000020-" in str(path) and operation == "open":
        fill()
        is_full.set()
    if f".tmp-step-000000{os.environ['ROOM_AT']}-" in str(path) and operation == "mkdir":
        ballast.unlink(missing_ok=True)

def enter(progress, phase, step=None):
    enter_phase(progress, phase, step)
    if step == 22:  # a save is written beside the steps, which may be faster: their rows meet a full disk
        is_full.wait()

set_fault_hook(hook)
Progress.enter = enter
"""

REMOUNT = """
import os, subprocess
from pretrain.utils.io import set_fault_hook

def remount(how):
    subprocess.run(["mount", "-o", f"remount,{how}", os.environ["DISK"]], check=True)

def hook(operation, path):
    if ".tmp-step-00000020-" in str(path) and operation == "open":
        remount("ro")
    if ".tmp-step-00000040-" in str(path) and operation == "mkdir":
        remount("rw")

set_fault_hook(hook)
"""


def mounted(path: Path, size: str) -> Path:
    """Mounts a small file system in memory at `path`, or skips the test."""
    path.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"a file system cannot be mounted here: {done.stderr.strip()}")
    return path


@pytest.fixture
def disk(tmp_path):
    """A file system of 4 MiB."""
    path = mounted(tmp_path / "disk", "4m")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def start(disk: Path, corpus: Path, tmp_path: Path, module: str, **environment: str) -> tuple[RunMaker, dict]:
    """A maker of runs on the disk, and the options of one that has the module."""
    (tmp_path / "spoil_disk.py").write_text(module)
    options = {"ranks": 1, "PYTHONPATH": str(tmp_path), "DISK": str(disk), **environment}
    return RunMaker(disk, corpus), options


@pytest.mark.long
def test_training_goes_on_while_the_disk_is_full_and_saves_again_when_there_is_room(disk, corpus, tmp_path):
    maker, options = start(disk, corpus, tmp_path, FILL, ROOM_AT="40")
    output = maker.train("full", *ALONE, "extend=[spoil_disk]", **options)
    assert "checkpoint of step 20 not saved: rank 0: " in output
    assert "rank-00000.safetensors: cannot write: No space left on device (" in output
    assert " bytes needed, " in output
    assert "training continues, the next save is in 20 steps at the latest" in output
    assert "rows of the ledger wait in memory until it can be written" in output
    assert "Traceback" not in output and "Logging error" not in output
    run = maker.folder("full")
    assert [step_of(path) for path in list_checkpoints(run.checkpoints)] == [60, STEPS]
    assert [row.step for row in read_audit(run.audit)] == list(range(1, STEPS + 1))
    assert [row["step"] for row in read_rows(run.metrics) if "loss" in row] == [40, STEPS]
    assert not list(run.checkpoints.glob(".*"))


@pytest.mark.long
def test_a_disk_that_stays_full_ends_the_run_after_three_saves_with_the_exit_code_of_disks(disk, corpus, tmp_path):
    maker, options = start(disk, corpus, tmp_path, FILL, ROOM_AT="99")
    output = maker.train("full", *ALONE, "extend=[spoil_disk]", expect=EXIT_DISK, **options)
    assert output.count("training continues, the next save is in 20 steps") == 2
    assert "checkpoint of step 60 not saved: rank 0: " in output
    assert not list_checkpoints(maker.folder("full").checkpoints)
    # No room for the end of the attempt: its table must not leave the disk out.
    assert "disk full" in run_light("launch", "status", str(maker.folder("full").path), cwd=tmp_path).stdout
    (disk / "ballast").unlink()
    again = maker.train("full", *ALONE, "train.stop_after=20", ranks=1)
    assert f"starting {maker.folder('full').path}" in again
    assert [row.step for row in read_audit(maker.folder("full").audit)] == list(range(1, 21))


@pytest.mark.long
def test_a_disk_that_is_full_at_the_end_is_named_with_what_is_lost_and_the_same_command_continues(
    disk, corpus, tmp_path
):
    maker, options = start(disk, corpus, tmp_path, FILL, ROOM_AT="99")
    ended = (*ALONE, "train.stop_after=20", "checkpoint.every_steps=10")
    output = maker.train("full", *ended, "extend=[spoil_disk]", expect=EXIT_DISK, **options)
    assert "the end of this start is not in run.json: " in output
    (error,) = (line for line in output.splitlines() if line.startswith("error: "))
    assert "checkpoint of step 20 not saved: rank 0: " in error
    assert error.endswith(" 0 free); free space, and the same command continues the run")
    (disk / "ballast").unlink()
    again = maker.train("full", *ended, ranks=1)
    assert f"resuming {maker.folder('full').path} at step 10 of 20" in again
    assert [row.step for row in read_audit(maker.folder("full").audit)] == list(range(1, 21))


@pytest.mark.long
def test_a_disk_that_turns_read_only_for_a_while_costs_a_save_and_no_more(tmp_path, corpus):
    disk = mounted(tmp_path / "runs" / "run" / "checkpoints", "4m")
    try:
        maker, options = start(disk, corpus, tmp_path, REMOUNT)
        maker = RunMaker(tmp_path, corpus)
        output = maker.train("runs", *ALONE, "extend=[spoil_disk]", **options)
        assert "checkpoint of step 20 not saved: rank 0: " in output
        assert "Read-only file system" in output
        assert [step_of(path) for path in list_checkpoints(disk)] == [60, STEPS]
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_a_run_whose_checkpoints_cannot_fit_is_refused_before_its_first_step(disk, corpus, tmp_path, warm):
    maker = RunMaker(disk, corpus)
    config = maker.config("wide")
    result = warm("train", str(config), *ALONE, "checkpoint.keep=100", cwd=tmp_path)
    assert result.code == EXIT_DISK, result.stderr
    (error,) = result.errors
    assert "101 checkpoints of " in error
    assert " free; free space, lower checkpoint.keep, or set run.dir to a larger file system" in error
    assert not maker.folder("wide").audit.exists()


@pytest.mark.long
def test_a_folder_that_may_not_be_written_to_is_told_before_the_first_step(tmp_path, corpus, warm):
    disk = mounted(tmp_path / "runs" / "run" / "checkpoints", "4m")
    try:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        config = RunMaker(tmp_path, corpus).config("runs")
        result = warm("train", str(config), *ALONE, cwd=tmp_path)
        assert result.code == EXIT_DISK, result.stderr
        (error,) = result.errors
        assert "Read-only file system; mount it for writing, or use another folder" in error
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)
