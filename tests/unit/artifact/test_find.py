"""What RUN/best names: the checkpoint of the mark, verified as any, and nothing where there is no mark."""

import pytest

from pretrain.artifact import model_path
from pretrain.artifact.model_path import find_checkpoint, open_newest
from pretrain.checkpoint.format import step_name
from pretrain.checkpoint.manager import CheckpointManager
from pretrain.dist import World
from pretrain.errors import CheckpointError
from tests.unit.checkpoint.stand_in import StandIn, state_of


def write_checkpoints(folder, best):
    checkpoints = CheckpointManager(folder / "checkpoints", 2, World(0, 1, 0), {}, best=best)
    for step, loss in ((1, 2.0), (2, 1.0), (3, 3.0)):
        checkpoints.note_evaluation(step, {"val_loss": loss})
        checkpoints.save(StandIn(step), state_of(step))
    return folder


def test_best_is_the_checkpoint_of_the_mark_and_a_run_is_its_newest(tmp_path):
    run = write_checkpoints(tmp_path, "val_loss")
    assert find_checkpoint(run / "best") == run / "checkpoints" / step_name(2)
    assert find_checkpoint(run) == run / "checkpoints" / step_name(3)


def test_a_damaged_best_is_refused_not_replaced(tmp_path):
    run = write_checkpoints(tmp_path, "val_loss")
    (run / "checkpoints" / step_name(2) / "rank-00000.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"step-00000002: damaged: .*; use another checkpoint"):
        find_checkpoint(run / "best")


def test_a_run_without_a_mark_has_no_best(tmp_path):
    with pytest.raises(
        CheckpointError, match=r"best: this run marks no best checkpoint; set checkpoint.best to .*, or use "
    ):
        find_checkpoint(write_checkpoints(tmp_path, None) / "best")


@pytest.mark.parametrize("when", ["before it is verified", "before it is opened"])
def test_a_newest_that_its_run_removes_is_followed_by_the_next_newest_not_by_the_best(tmp_path, monkeypatch, when):
    run = write_checkpoints(tmp_path, "val_loss")
    checkpoints = CheckpointManager(run / "checkpoints", 2, World(0, 1, 0), {}, best="val_loss")
    verify, verified = model_path.check_file, []

    def verify_beside_the_run(path, record):
        verified.append(path.parent.name)
        problem = verify(path, record) if when == "before it is opened" else None
        for step in (4, 5) if len(verified) == 1 else ():  # removes 3, and not 2, which is the best
            checkpoints.save(StandIn(step), state_of(step))
        return problem if when == "before it is opened" else verify(path, record)

    monkeypatch.setattr(model_path, "check_file", verify_beside_the_run)
    assert open_newest(run).path == run / "checkpoints" / step_name(5)
    assert verified == [step_name(3), step_name(5)]


def test_a_folder_of_that_name_is_itself(tmp_path):
    run = write_checkpoints(tmp_path / "best", "val_loss")
    assert find_checkpoint(run) == run / "checkpoints" / step_name(3)
