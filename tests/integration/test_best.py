"""A run marks its best checkpoint and keeps it, while training past it makes the model worse."""

import json
import shutil

import pytest

from pretrain.checkpoint.format import list_checkpoints, step_of
from pretrain.checkpoint.retention import BEST, read_best

ALONE = (
    "engine.kind=single", "engine.zero_stage=0", "train.steps=30", "model.decoder.dropout=0", "eval.every_steps=5",
    "checkpoint.every_steps=5", "checkpoint.best=val_loss", "eval.max_tokens=300",
)  # fmt: skip


def validations(run) -> dict[int, float]:
    rows = map(json.loads, run.metrics.read_text().splitlines())
    return {row["step"]: row["val_loss"] for row in rows if row.get("val_loss") is not None}


@pytest.mark.long
def test_the_best_checkpoint_is_kept_and_named_and_a_resumed_run_knows_it(make_run, warm, tmp_path):
    config, run = make_run.config(), make_run.folder()
    done = warm("train", str(config), *ALONE, "train.stop_after=10", cwd=tmp_path)
    assert done.code in (0, 75), done.stderr
    losses = validations(run)
    best = min(losses, key=losses.__getitem__)
    assert (read_best(run.checkpoints).step, read_best(run.checkpoints).value) == (best, losses[best])

    (run.checkpoints / BEST).unlink()  # as if it had been killed before: metrics.jsonl knows
    done = warm("train", str(config), *ALONE, "optim.lr=5.0", cwd=tmp_path)
    assert done.code == 0, done.stderr
    assert all(loss > losses[best] for step, loss in validations(run).items() if step > 10), "so high a rate does harm"
    assert read_best(run.checkpoints).step == best
    assert {step_of(path) for path in list_checkpoints(run.checkpoints)} == {best, 25, 30}

    shown = json.loads(warm("inspect", str(run.path), "--json", cwd=tmp_path).stdout)
    assert shown["best"] == {"checkpoint": f"step-{best:08d}", "val_loss": losses[best]}
    shutil.rmtree(run.checkpoints / f"step-{best:08d}")
    assert "best" not in json.loads(warm("inspect", str(run.path), "--json", cwd=tmp_path).stdout)


def test_a_metric_that_nothing_tells_is_refused(make_run, warm, tmp_path):
    done = warm("train", str(make_run.config()), *ALONE, "checkpoint.best=val_los", cwd=tmp_path)
    assert (done.code, len(done.errors)) == (64, 1)
    assert "checkpoint.best=val_los is no validation metric; use one of: val_loss," in done.errors[0]


def test_a_metric_without_a_validation_split_is_refused_before_a_run_begins(make_run, warm, tmp_path):
    (tmp_path / "a.txt").write_text("a text of some words, " * 2000)
    prepared = warm("prepare", "--input", "a.txt", "--output", "unsplit", "--split", "hash:0", cwd=tmp_path)
    assert prepared.code == 0, prepared.stderr
    done = warm("train", str(make_run.config()), *ALONE, "data.path=unsplit", cwd=tmp_path)
    assert (done.code, len(done.errors)) == (64, 1)
    assert done.errors[0].startswith("checkpoint.best=val_loss: the data have no validation split that tells it")
    assert done.errors[0].endswith("; prepare another folder with --split tail:0.05, or leave it out")
    assert not make_run.folder().path.exists()
