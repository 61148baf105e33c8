"""The best checkpoint is marked and kept, whatever newer ones come; a mark is not believed without its checkpoint."""

import json
import math

import pytest

from pretrain.checkpoint.format import list_checkpoints, step_name, step_of
from pretrain.checkpoint.manager import CheckpointManager
from pretrain.checkpoint.retention import BEST, Best, BestKeeper, read_best
from pretrain.dist import World
from tests.unit.checkpoint.stand_in import StandIn, state_of


def manager(folder, metric="val_loss"):
    return CheckpointManager(folder, 2, World(0, 1, 0), {}, best=metric)


def run(checkpoints, values, metric="val_loss", first=1):
    """Evaluates and saves one step after another; None: the evaluation was given up."""
    for step, value in enumerate(values, start=first):
        checkpoints.note_evaluation(step, {} if value is None else {metric: value})
        checkpoints.save(StandIn(step), state_of(step))


def steps(folder):
    return [step_of(path) for path in list_checkpoints(folder)]


@pytest.mark.parametrize(
    ("metric", "values", "best", "left"),
    [
        ("val_loss", [3.0, 1.0, 2.0, 2.5, 2.0], 2, [2, 4, 5]),
        ("val_loss", [3.0, 2.0, 1.0, 0.5], 4, [3, 4]),
        ("val_loss", [1.0, 1.0, 1.0, 1.0], 1, [1, 3, 4]),
        ("val_accuracy", [0.1, 0.9, 0.5, 0.6], 2, [2, 3, 4]),
        ("val_loss", [math.nan, 2.0, None, 3.0, 4.0], 2, [2, 4, 5]),
    ],
)
def test_the_best_is_marked_and_kept(tmp_path, metric, values, best, left):
    run(manager(tmp_path, metric), values, metric)
    assert read_best(tmp_path) == Best(metric, values[best - 1], best)
    assert steps(tmp_path) == left


def test_nothing_is_marked_where_nothing_is_asked_or_known(tmp_path):
    run(manager(tmp_path / "asked"), [None, None, None])
    run(CheckpointManager(tmp_path / "not", 2, World(0, 1, 0), {}), [1.0, 2.0, 3.0])
    for name in ("asked", "not"):
        assert read_best(tmp_path / name) is None and not (tmp_path / name / BEST).exists()
        assert steps(tmp_path / name) == [2, 3]


def test_a_later_attempt_keeps_what_an_earlier_one_has_marked(tmp_path):
    run(manager(tmp_path), [1.0, 2.0, 3.0])
    run(manager(tmp_path), [2.5, 2.0], first=4)
    assert (steps(tmp_path), read_best(tmp_path).step) == ([1, 4, 5], 1)
    run(manager(tmp_path), [0.5, 0.6, 0.7], first=6)
    assert (steps(tmp_path), read_best(tmp_path).step) == ([6, 7, 8], 6)


def test_a_damaged_best_gives_way_to_the_next_good_one(tmp_path):
    run(manager(tmp_path), [1.0, 3.0, 2.0])
    (tmp_path / step_name(1) / "rank-00000.safetensors").write_bytes(b"")
    run(manager(tmp_path), [4.0], first=4)
    assert read_best(tmp_path).step == 4, "of steps 2 and 3 that attempt knows nothing"
    again = manager(tmp_path)
    again.note_evaluation(3, {"val_loss": 2.0})
    run(again, [5.0], first=5)
    assert (read_best(tmp_path).step, steps(tmp_path)) == (3, [3, 4, 5])


@pytest.mark.parametrize("content", ["", "{", "[]", '{"metric": "val_loss", "value": 1, "step": 9}', '{"step": 1}'])
def test_a_mark_that_is_damaged_or_whose_checkpoint_is_gone_says_nothing(tmp_path, content):
    run(manager(tmp_path), [2.0])
    (tmp_path / BEST).write_text(content)
    assert read_best(tmp_path) is None
    run(manager(tmp_path), [3.0], first=2)
    assert read_best(tmp_path).step == 2


def test_a_mark_of_another_metric_is_replaced(tmp_path):
    run(manager(tmp_path), [1.0])
    run(manager(tmp_path, "val_accuracy"), [0.1], "val_accuracy", first=2)
    assert json.loads((tmp_path / BEST).read_text()) == {"metric": "val_accuracy", "value": 0.1, "step": 2}


def test_a_mark_that_cannot_be_written_costs_nobody_the_checkpoint(tmp_path, caplog):
    (tmp_path / BEST).mkdir()
    run(manager(tmp_path), [1.0, 2.0, 3.0])
    assert steps(tmp_path) == [1, 2, 3]
    assert BEST in caplog.text


def test_what_is_valid_is_asked_of_no_more_than_needed(tmp_path):
    keeper, asked = BestKeeper(tmp_path, "val_loss"), []
    for step, value in ((1, 3.0), (2, 1.0), (3, 2.0)):
        keeper.note(step, {"val_loss": value})
    found = [tmp_path / step_name(step) for step in (1, 2, 3)]
    best = keeper.settle(found, lambda path: asked.append(step_of(path)) or step_of(path) != 2)
    assert (best, asked) == (found[2], [2, 3])
