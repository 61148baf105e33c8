"""A run that goes back: what is recorded and set aside, whatever operation of the disk fails on the
way."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pretrain.data.order import SkipRanges
from pretrain.errors import CheckpointError, ConfigError, DiskError
from pretrain.run.folder import RunDir
from pretrain.training.rollback import agree_on_skips, read_skips, roll_back
from pretrain.utils.io import set_fault_hook
from tests.unit.checkpoint.stand_in import save, state_of


def finished_run(folder: Path, *steps: int) -> RunDir:
    """A run of two rows a batch with checkpoints of `steps`, whose position is thrice the step."""
    run = RunDir(folder)
    run.path.mkdir()
    run.config.write_text("batch: {global_tokens: 8, seq_len: 4, micro: 1}\n")
    run.record.write_text(json.dumps({"id": "1", "name": "run", "created": "now", "attempts": [{"number": 1}]}))
    run.checkpoints.mkdir()
    if steps:
        save(run.checkpoints, *steps, keep=3)
    return run


def names(run: RunDir) -> set[str]:
    return {path.name for path in run.checkpoints.iterdir()}


def test_newer_checkpoints_are_set_aside_and_the_range_begins_where_the_older_one_stands(tmp_path):
    run = finished_run(tmp_path / "run", 2, 4, 6)
    rollback, batches = roll_back(run.path, 2, tokens=17)
    assert batches == 3, "17 tokens are two batches of 8 and a bit"
    assert (rollback.to, rollback.first, rollback.end, rollback.automatic) == (2, 6, 12, False)
    assert rollback.set_aside == ("step-00000004", "step-00000006")
    assert names(run) == {"step-00000002", "step-00000004.rolled-back", "step-00000006.rolled-back"}
    record = run.read_record()
    assert record["skips"] == [[6, 12]]
    assert [entry["to"] for entry in record["rollbacks"]] == [2]
    assert record["attempts"] == [{"number": 1}]


def test_skipped_tokens_are_whole_batches_of_the_sizes_that_come_then(tmp_path):
    run = finished_run(tmp_path / "run", 2, 4)
    schedule = "schedule: [{tokens: 20, global_tokens: 16}]"
    run.config.write_text(f"batch: {{global_tokens: 8, seq_len: 4, micro: 1, {schedule}}}\n")
    rollback, batches = roll_back(run.path, 2, tokens=9)
    assert (batches, rollback.end - rollback.first) == (2, 2 + 4), "the third step is the last one of two rows"


@pytest.mark.parametrize(
    ("steps", "there", "fix"),
    [((2, 4), "2, 4", "give one of these as --to"), ((), "none", "start the run again: it begins at step 0")],
)
def test_a_step_without_a_checkpoint_is_refused_with_those_that_there_are(tmp_path, steps, there, fix):
    run = finished_run(tmp_path / "run", *steps)
    with pytest.raises(CheckpointError, match=f"no committed checkpoint of step 3; there is {there}; {fix}"):
        roll_back(run.path, 3)


def test_whatever_operation_fails_nothing_is_lost_and_the_same_command_finishes(tmp_path):
    finished = {"step-00000002", "step-00000004.rolled-back", "step-00000006.rolled-back"}
    failed, number = True, 0
    while failed:
        run, seen = finished_run(tmp_path / f"run-{number}", 2, 4, 6), []

        def fail(operation: str, path: Path, seen=seen, number=number) -> None:
            if "lease" not in path.parts:
                seen.append((operation, path))
                if len(seen) == number + 1:
                    raise OSError(28, "No space left on device")

        set_fault_hook(fail)
        try:
            roll_back(run.path, 2, samples=4)
            failed = False
        except DiskError:
            assert "step-00000002" in names(run)
        finally:
            set_fault_hook(None)
        if "skips" not in run.read_record():
            roll_back(run.path, 2, samples=4)
        assert names(run) == finished
        assert run.read_record()["skips"] == [[6, 10]]
        number += 1
    assert number > 6, "two folders renamed, a file written: each of several operations"


def test_nothing_is_set_aside_for_a_checkpoint_that_is_damaged(tmp_path):
    run = finished_run(tmp_path / "run", 2, 4, 6)
    file = run.checkpoints / "step-00000002" / "rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-9] ^= 4
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"step-00000002: damaged: rank-00000.*CRC32.*; go back to another one"):
        roll_back(run.path, 2, samples=4)
    assert names(run) == {"step-00000002", "step-00000004", "step-00000006"}
    assert "rollbacks" not in run.read_record()


def test_a_start_takes_the_ranges_of_run_json_and_of_its_checkpoint(tmp_path):
    run = finished_run(tmp_path / "run", 2, 4, 6)
    record = run.read_record() | {"skips": [[6, 12]]}
    assert agree_on_skips(run, record, state_of(2), is_main=True) == SkipRanges(((6, 12),))
    assert "skips" not in run.read_record(), "nothing new, nothing written"
    state = replace(state_of(2), skips=((1, 3),))
    assert agree_on_skips(run, record, state, is_main=False) == SkipRanges(((1, 3), (6, 12)))
    assert "skips" not in run.read_record()
    agree_on_skips(run, record, state, is_main=True)
    assert run.read_record()["skips"] == [[1, 3], [6, 12]]


@pytest.mark.parametrize("skips", [[[6, 6]], [[1, 2, 3]], [["a", 3]], 5, [5], {"a": 1}])
def test_ranges_that_are_none_are_refused(tmp_path, skips):
    with pytest.raises(ConfigError, match=r"run\.json: skips: .*; restore the file"):
        read_skips(RunDir(tmp_path), {"skips": skips})
