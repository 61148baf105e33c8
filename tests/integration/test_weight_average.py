"""A run with a moving average of its weights: against one of its checkpoints, resumed elsewhere, and used by name."""

import json
import math

import pytest
import torch

from pretrain.artifact.model_path import open_source
from pretrain.checkpoint.format import list_checkpoints, load_manifest
from pretrain.config.load import load_config
from pretrain.types import EMA
from tests.helpers.ranks import run_in_ranks
from tests.helpers.runs import assert_same_run
from tests.helpers.topologies import contents, newest, overrides_of, run_dir, write_run

HORIZON = 6
AVERAGE = (f"optim.ema.horizon_steps={HORIZON}", "optim.schedule.warmup_steps=1", "optim.lr=0.01")
PAIRS = [
    ([1, "single", 0, "fp32"], [2, "deepspeed", 3, "fp32"]),
    ([2, "deepspeed", 2, "bf16"], [1, "deepspeed", 1, "fp32"]),
    ([2, "ddp", 0, "fp32"], [1, "single", 0, "fp32"]),
    ([2, "deepspeed", 0, "bf16"], [1, "deepspeed", 3, "fp32"]),
    ([2, "deepspeed", 1, "fp32"], [1, "deepspeed", 2, "bf16"]),
    ([2, "deepspeed", 3, "fp32"], [1, "deepspeed", 0, "fp32"]),
    ([2, "ddp", 0, "bf16"], [1, "single", 0, "bf16"]),
    ([1, "auto", 2, "bf16"], [2, "deepspeed", 3, "bf16"]),
]
"""Layouts of a run, and those that its last checkpoint is loaded in."""
ALONE = ("engine.kind=single", "engine.zero_stage=0", "model.decoder.dropout=0")


def average_of(run):
    """The average that follows the weights of the checkpoints of every step, in float64; the first one is given."""
    averages = {}
    for step, path in enumerate(list_checkpoints(run.checkpoints)):
        found = contents(path)
        weights = {name: value.double() for (name, kind), value in found.items() if kind == "weight"}
        if not averages:
            averages = {name: found[name, EMA].double() for name in weights}
            continue
        decay = min(math.exp(-1 / HORIZON), (1 + step) / (10 + step))
        averages = {name: decay * averages[name] + (1 - decay) * weights[name] for name in weights}
    return averages


def run_jobs(jobs):
    """Runs (layout, job) by their number of ranks."""
    for size in (1, 2):
        mine = [job for layout, job in jobs if layout[0] == size]
        found = run_in_ranks("tests.helpers.topologies:run_jobs", size, {"jobs": mine})
        assert all(code in (0, 75) for rank in found for code, _ in rank), found


@pytest.mark.parametrize("pairs", [PAIRS[:2], pytest.param(PAIRS, marks=pytest.mark.long)], ids=["two", "all"])
def test_it_follows_the_weights_in_every_layout_and_loads_in_another_bit_for_bit(tmp_path, corpus, pairs):
    configs = [write_run(tmp_path / str(number), corpus) for number in range(len(pairs))]
    trained, loaded = [], []
    for config, (layout, other) in zip(configs, pairs, strict=True):
        common = {"config": str(config)}
        course = [*AVERAGE, "checkpoint.every_steps=1", "train.stop_after=4"]
        trained.append((layout, {**common, "overrides": [*overrides_of(layout, 6), *course]}))
        there = {"overrides": [*overrides_of(other, 6), *course], "only_load": True}
        loaded.append((other, {**common, **there, "saved": str(config.parent / "again")}))
    run_jobs(trained)
    run_jobs(loaded)
    for config, (layout, other) in zip(configs, pairs, strict=True):
        run = run_dir(config)
        saved = contents(newest(run))
        for name, average in average_of(run).items():
            torch.testing.assert_close(saved[name, EMA].double(), average, rtol=1e-5, atol=1e-7, msg=f"{layout} {name}")
            assert not torch.equal(saved[name, EMA], saved[name, "weight"])
        again = contents(list_checkpoints(config.parent / "again")[0])
        assert again.keys() == saved.keys()
        assert all(torch.equal(again[key], saved[key]) for key in saved), (layout, other)


@pytest.mark.long
@pytest.mark.parametrize(
    "engine", [{"zero_stage": 2}, {"zero_stage": 3}, {"kind": "ddp", "zero_stage": 0, "precision": "bf16"}], ids=str
)
def test_a_resumed_run_and_one_that_evaluates_have_the_same_average_to_the_bit(make_run, engine):
    engine = {"kind": "deepspeed", "precision": "fp32"} | engine
    course = (*AVERAGE, f"engine={json.dumps(engine)}", "train.steps=6")
    make_run.train("golden", *course)
    make_run.train("ours", *course, "eval.every_steps=2", "train.stop_after=4")
    make_run.train("ours", *course, "eval.every_steps=1")
    assert_same_run(make_run, "ours", "golden", 6)


def test_it_may_begin_and_end_at_a_resumption(make_run, warm, tmp_path):
    make_run.train("runs", *ALONE, "train.steps=9", "train.stop_after=3", ranks=1)
    run = make_run.folder()
    for command in ("evaluate", "inspect"):
        done = warm(command, str(run.path / EMA), cwd=tmp_path)
        assert done.code == 66
        why = "it has no average of the weights; train with optim.ema, or leave /ema out"
        assert f"step-00000003: {why}" in done.errors[0]

    # The first step after a long one of the horizon leaves the average where it begins, all but 9 parts of 13.
    output = make_run.train("runs", *ALONE, *AVERAGE, "train.steps=9", "train.stop_after=4", ranks=1)
    assert f"optim.ema: the average of the weights begins at those of {run.checkpoints / 'step-00000003'}" in output
    before, after = (contents(path) for path in list_checkpoints(run.checkpoints))
    for name, kind in before:
        if kind == "weight":
            expected = torch.lerp(before[name, kind], after[name, kind], 1 - 4 / 13)
            torch.testing.assert_close(after[name, EMA], expected)
    done = warm("inspect", str(run.path / EMA), "--verify", "--stats", "--json", cwd=tmp_path)
    facts = json.loads(done.stdout)
    assert facts["kind"] == "average of the weights" and facts["path"].endswith("step-00000004/ema")
    norms = {tensor["name"]: tensor["norm"] for tensor in facts["tensors"]}
    assert norms == {name: pytest.approx(after[name, EMA].norm().item()) for name in norms}

    make_run.train("runs", *ALONE, "train.steps=9", ranks=1)
    assert EMA not in load_manifest(newest(run)).moments


@pytest.mark.long
def test_it_is_measured_named_and_started_from_as_a_model(make_run, warm, tmp_path):
    evaluated = ("eval.every_steps=5", "checkpoint.every_steps=5", "checkpoint.best=val_ema_loss", "checkpoint.keep=9")
    make_run.train("runs", *ALONE, *AVERAGE, *evaluated, "train.steps=10", ranks=1)
    run = make_run.folder()
    rows = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    measured = {row["step"]: row["val_ema_loss"] for row in rows if "val_ema_loss" in row}
    assert measured.keys() == {5, 10}
    for step, place in (
        (5, "checkpoints/step-00000005/ema"),
        (10, "ema"),
        (min(measured, key=measured.get), "best/ema"),
    ):
        done = warm("evaluate", str(run.path / place), "--json", cwd=tmp_path)
        assert done.code == 0, done.stderr
        assert json.loads(done.stdout)["sources"]["data"]["loss"] == pytest.approx(measured[step], rel=1e-6)
    kept = [json.loads(line)["checkpoint"] for line in run.evaluations.read_text().splitlines()]
    assert kept[:2] == ["step-00000005/ema", "step-00000010/ema"]

    average, weights = open_source(run.path / EMA), open_source(run.path)
    exported = warm("export", str(run.path / EMA), "hf", cwd=tmp_path)
    assert exported.code == 0, exported.stderr
    assert "step-00000010/ema" in (tmp_path / "hf" / "README.md").read_text()
    release = open_source(tmp_path / "hf")
    for name in (name for name in average.shapes if ".blocks." in name):  # an export leaves padding of tables out
        assert torch.equal(release.read(name), average.read(name))
        assert not torch.equal(weights.read(name), average.read(name))

    start = (
        *ALONE,
        f"init.from={run.path / EMA}",
        "train.steps=3",
        "optim.lr=1e-30",
        "optim.weight_decay=0",
        AVERAGE[1],
    )
    make_run.train("next", *start, "optim.ema.horizon_tokens=100000", "train.stop_after=2", ranks=1)
    make_run.train("next", *start, "optim.ema.horizon_tokens=100000", ranks=1)  # the same command, of a complete run
    begun = make_run.folder("next")
    assert load_config(begun.config).init.from_ == str(run.checkpoints / "step-00000010" / EMA)
    for path in (begun.path, begun.path / EMA):
        assert all(torch.equal(open_source(path).read(name), average.read(name)) for name in average.shapes)
