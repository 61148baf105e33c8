"""A run folder, watched from outside, and the moments of kills that are read from it."""

import json

import pytest

from pretrain.drill.attempt import STEPS_SPREAD, _moments
from pretrain.drill.drill_folder import Pace
from pretrain.drill.watch import Kill, Watch
from pretrain.run.folder import RunDir

PACE = Pace(total_s=1.0, start_s=3600.0, step_s=0.0, save_s=0.0)


def write_row(run: RunDir, step: int, attempt: int) -> None:
    """Appends a row to the ledger."""
    with run.audit.open("a") as file:
        file.write(json.dumps({"step": step, "attempt": attempt}) + "\n")


def begin(run: RunDir, *from_steps: int) -> None:
    """Writes the record of so many attempts."""
    attempts = [{"from_step": step} for step in from_steps]
    run.record.write_text(
        json.dumps({"id": "x", "name": "x", "created": "2026-01-01T00:00:00+00:00", "attempts": attempts})
    )


def commit(run: RunDir, step: int) -> None:
    """Makes a checkpoint that is there."""
    folder = run.checkpoints / f"step-{step:08d}"
    folder.mkdir(parents=True)
    (folder / "manifest.json").touch()


@pytest.fixture
def run(tmp_path):
    """A run that was killed at step 5, whose checkpoint of step 4 is committed, and one of step 5 half written."""
    run = RunDir(tmp_path)
    for step in range(1, 6):
        write_row(run, step, 1)
    begin(run, 0)
    commit(run, 4)
    (run.checkpoints / ".tmp-step-00000005-aa").mkdir()
    return run


def test_what_an_earlier_attempt_has_left_is_not_of_this_one(run):
    watch = Watch(run)
    assert (watch.saved, watch.step(), watch.has_begun_to_save(), watch.resumed_from()) == (4, 0, False, None)
    begin(run, 0, 4)
    write_row(run, 5, 2)
    (run.checkpoints / ".tmp-step-00000008-bb").mkdir()
    assert (watch.step(), watch.has_begun_to_save(), watch.resumed_from()) == (5, True, 4)
    assert watch.first_step_s is not None


def test_a_torn_row_is_not_read_and_an_empty_folder_has_nothing(run, tmp_path):
    watch = Watch(run)
    begin(run, 0, 4)
    write_row(run, 5, 2)
    with run.audit.open("a") as file:
        file.write('{"step": 6, "att')
    assert watch.step() == 5
    watch = Watch(RunDir(tmp_path / "empty"))
    assert (watch.saved, watch.step()) == (0, 0)


def test_how_long_a_save_takes_is_measured(run):
    watch = Watch(run)
    watch.measure()
    assert watch.longest_save_s == 0
    temporary = run.checkpoints / ".tmp-step-00000008-bb"
    temporary.mkdir()
    watch.measure()
    temporary.rmdir()
    watch.measure()
    assert watch.longest_save_s > 0


@pytest.mark.parametrize(("moment", "target"), [(0.0, 5), (0.5, 4 + 1 + STEPS_SPREAD), (0.999, 4 + 2 * STEPS_SPREAD)])
def test_a_kill_in_steps_comes_at_its_step_of_this_attempt(run, moment, target):
    reached, waited = _moments(Kill(0, "steps", moment, 0.5, "rank", 0.0), Watch(run), PACE, every_steps=2)
    begin(run, 0, 4)
    for step in range(5, target):
        write_row(run, step, 2)
        assert not reached()
    write_row(run, target, 2)
    assert reached() and waited()


def test_a_kill_in_a_save_waits_for_one_and_a_kill_in_start_up_for_no_step(run):
    begun, waited = _moments(Kill(0, "save", 0.5, 0.5, "rank", 0.0), Watch(run), PACE, every_steps=2)
    (started,) = _moments(Kill(0, "start-up", 0.5, 0.5, "rank", 0.0), Watch(run), PACE, every_steps=2)
    assert not begun() and not started()
    commit(run, 6)
    assert begun() and waited() and not started()
    begin(run, 0, 4)
    write_row(run, 5, 2)
    assert started()
