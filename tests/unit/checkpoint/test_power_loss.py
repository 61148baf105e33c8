"""A power failure at any moment of saves: every state that the disk may be left in loads a whole checkpoint."""

import shutil
from pathlib import Path

import pytest

from pretrain.errors import CheckpointError
from pretrain.utils.io import write_file
from tests.helpers.power import Moment, Recorder, write_state
from tests.unit.checkpoint.stand_in import StandIn, load_newest, manager, save, state_of


def durable_steps(moments: list[Moment]) -> list[int | None]:
    """Returns, for each moment, the newest step whose rename was followed by an fsync of the folder above it."""
    found: list[int | None] = []
    newest, renamed = None, None
    for moment in moments:
        found.append(newest)
        name, _, path = moment.before.partition(" ")
        if name == "rename" and path.startswith("step-"):
            renamed = int(path[-8:])
        elif name == "fsync_dir" and path == "checkpoints" and renamed is not None:
            newest, renamed = renamed, None
    return found


def loaded(folder: Path) -> int | None:
    """The step that is loaded; None also where names of damaged checkpoints refuse a start from nothing."""
    try:
        return load_newest(folder / "checkpoints")
    except CheckpointError as error:
        assert "none can be used" in str(error)
        return None


def check_states(moments: list[Moment], steps: list[int], scratch: Path) -> int:
    """Loads from every state; returns how many there were."""
    known: dict[str, int | None] = {}
    for moment, durable in zip(moments, durable_steps(moments), strict=True):
        for state in moment.states():
            key = repr(sorted(state.items()))
            if key not in known:
                folder = write_state(scratch, state)
                known[key] = loaded(folder)  # `load_newest` sees a mixture of two steps, and fails
                shutil.rmtree(folder)
            assert known[key] in (None, *steps), moment.before
            if durable is not None:
                assert known[key] is not None and known[key] >= durable, (moment.before, durable)
    return len(known)


def record(folder: Path, *steps: int) -> list[Moment]:
    """Saves steps to `checkpoints` in a new folder, and returns what the disk went through."""
    folder.mkdir()
    with Recorder(folder) as recorder:
        checkpoints = manager(folder / "checkpoints")
        for step in steps:
            checkpoints.save(StandIn(step), state_of(step))
    return recorder.moments


def test_a_power_failure_at_any_moment_leaves_a_durable_checkpoint_or_a_newer_one(tmp_path):
    moments = record(tmp_path / "run", 1, 2, 3)
    assert durable_steps(moments)[-1] == 3
    assert check_states(moments, [1, 2, 3], tmp_path / "state") > 50


def test_what_a_save_has_returned_from_is_durable(tmp_path):
    for step in (1, 2, 3):  # only the third removes an older one, and makes names durable by that too
        assert durable_steps(record(tmp_path / f"run-{step}", *range(1, step + 1)))[-1] == step


def test_a_power_failure_while_a_restarted_run_sweeps_and_saves(tmp_path):
    folder = tmp_path / "run"
    save(folder / "checkpoints", 1, 2)
    shutil.copytree(folder / "checkpoints/step-00000002", folder / "checkpoints/.tmp-step-00000003-dead")
    shutil.copytree(folder / "checkpoints/step-00000001", folder / "checkpoints/.trash-step-00000000")
    with Recorder(folder) as recorder:
        save(folder / "checkpoints", 3)
    for moment in recorder.moments:
        for state in moment.states():
            assert {f"checkpoints/step-0000000{step}/manifest.json" for step in (2, 3)} & state.keys(), moment.before
    assert check_states(recorder.moments, [2, 3], tmp_path / "state") > 20


@pytest.mark.long
def test_a_power_failure_in_a_longer_run(tmp_path):
    moments = record(tmp_path / "run", *range(1, 13))
    assert check_states(moments, list(range(1, 13)), tmp_path / "state") > 200


def test_a_power_failure_while_a_file_is_replaced_leaves_the_old_one_or_the_new_one(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    write_file(folder / "run.json", b"the old record")
    with Recorder(folder) as recorder:
        write_file(folder / "run.json", b"the new one, which is longer")
    found = [state["run.json"] for moment in recorder.moments for state in moment.states()]
    assert set(found) == {b"the old record", b"the new one, which is longer"}
    last = [state["run.json"] for state in recorder.moments[-1].states()]
    assert last == [b"the new one, which is longer"]


def test_what_is_not_synced_may_be_lost_or_torn_and_names_come_in_any_order(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    with Recorder(folder) as recorder:
        (folder / "one").write_bytes(b"12")
        (folder / "two").write_bytes(b"34")
    states = list(recorder.moments[-1].states())
    assert {} in states
    assert {"two": b"34"} in states and {"one": b"1", "two": b""} in states and {"one": b"\0\0"} in states
