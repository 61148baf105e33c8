"""`pretrain average` after a real run, and what the other commands make of what it writes."""

import json

import pytest

from pretrain.utils.jsonl import read_rows
from tests.helpers.runs import tensors_of
from tests.unit.artifact.runs import write_run

SINGLE = ["engine.kind=single", "engine.zero_stage=0", "data.lanes=1", "train.steps=12", "checkpoint.every_steps=3"]
KEEP = ["checkpoint.keep=10", "eval.every_steps=12", "model.decoder.dropout=0.0", "tracking.log_every_steps=1"]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A run with four checkpoints of random weights."""
    return write_run(tmp_path_factory.mktemp("average") / "run", steps=[3, 6, 9, 12])


@pytest.fixture
def run(make_run, warm, tmp_path):
    """A run of 12 steps that kept four checkpoints."""
    done = warm("train", str(make_run.config()), *SINGLE, *KEEP, cwd=tmp_path)
    assert done.code == 0, done.stderr
    return make_run.folder()


@pytest.mark.long
def test_an_average_is_used_like_any_model(run, make_run, corpus, warm, tmp_path):
    done = warm("average", str(run.path), "--last", "3", "--output", "mean", "--json", cwd=tmp_path)
    assert (done.code, done.stderr) == (0, "")
    assert json.loads(done.stdout)["steps"] == [6, 9, 12]
    told = warm("average", str(run.path), "--last", "2", "--output", "two", cwd=tmp_path).stdout
    assert "step-00000009" in told
    assert told.endswith("two: the mean of these 2, sums in float64, rounded to fp32 once\n")

    text = warm("generate", "mean", "--prompt", "alpha beta", "--max-tokens", "5", "--temperature", "0", cwd=tmp_path)
    assert (text.code, text.stdout[:10]) == (0, "alpha beta")
    assert warm("export", "mean", "out", cwd=tmp_path).code == 0
    assert (tmp_path / "out" / "config.json").is_file()
    loss = warm("evaluate", "mean", "--data", str(corpus), "--seq-len", "32", "--json", cwd=tmp_path)
    assert json.loads(loss.stdout)["sources"]["data"]["loss"] < 3.5

    start = [f"init.from={tmp_path / 'mean'}", "run.name=next", "train.steps=1", "optim.lr=1e-12"]
    start.append("optim.schedule.warmup_steps=0")
    done = warm("train", str(make_run.config()), *SINGLE, *KEEP, *start, cwd=tmp_path)
    assert done.code == 0, done.stderr
    after = tensors_of(run.path.with_name("next") / "checkpoints" / "step-00000001")
    for name, mean in tensors_of(tmp_path / "mean").items():
        assert after[name] == pytest.approx(mean, abs=1e-9)


def test_the_loss_of_a_checkpoint_is_what_training_logged(run, warm, tmp_path):
    logged = [row["val_loss"] for row in read_rows(run.metrics) if "val_loss" in row]
    done = warm("evaluate", str(run.path), "--json", cwd=tmp_path)
    found = json.loads(done.stdout)["sources"]["data"]
    assert found["loss"] == pytest.approx(logged[-1], rel=1e-6)
    (rows,) = [row for row in read_rows(run.metrics) if row.get("step") == 12 and "val_tokens" in row]
    assert found["targets"] == rows["val_tokens"]
    assert found["bits_per_byte"] == pytest.approx(rows["val_bits_per_byte"], rel=1e-6)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["{run}", "--last", "9", "--output", "out"], 66, "has 4 checkpoints, --last 9 needs more"),
        (["{run}", "--output", "out"], 64, "a single checkpoint cannot be averaged; give --last N with a run"),
        (["{run}", "--last", "2", "--output", "{run}"], 64, "exists and is not an empty folder"),
        (["nothing", "--last", "2", "--output", "out"], 66, "has 0 checkpoints, --last 2 needs more; check the path"),
        (["{run}", "--last", "0", "--output", "out"], 64, "Invalid value for '--last'"),
        (["{run}", "--last", "2"], 64, "Missing option '--output'"),
    ],
)
def test_what_makes_no_sense_is_one_line(written, warm, tmp_path, arguments, code, message):
    done = warm("average", *(text.format(run=written) for text in arguments), cwd=tmp_path)
    assert (done.code, done.stdout, len(done.errors), done.stderr.count("\n")) == (code, "", 1, 1)
    assert message in done.errors[0]
    assert not (tmp_path / "out").exists()
