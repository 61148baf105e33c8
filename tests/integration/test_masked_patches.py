"""A masked autoencoder through everything: stop, ranks, engines, evaluation, release, and the classifier after it."""

import json
from pathlib import Path

import pytest

from pretrain.tracking.audit import read_audit
from tests.helpers.cli import run_warm
from tests.helpers.images import prepare_colors
from tests.helpers.runs import RunMaker, assert_same_run

CONFIG = """
seed: 7
run: {{dir: {runs}, name: run}}
data: {{path: {data}, lanes: 3, block_samples: 8, images: {{crop: random_resized, flip: 0.5}}}}
model: {{preset: vit_mae-tiny, encoder: {{dropout: 0.1}}}}
objective: {{kind: masked_patches}}
batch: {{global_tokens: 408, seq_len: 17, micro: 4}}
optim: {{lr: 3e-3, schedule: {{kind: cosine, warmup_steps: 5}}}}
train: {{steps: 20}}
eval: {{every_steps: 10}}
engine: {{kind: single, precision: fp32, device: cpu}}
checkpoint: {{every_steps: 10}}
tracking: {{log_every_steps: 10, wandb: off}}
"""
TUNED = ("model={decoder: null, head: {kind: labels, mean: true}}", "objective.kind=images", "train.steps=10")
EXACT = ("model.encoder.dropout=0", "train.steps=6")


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> RunMaker:
    """An uninterrupted run on one rank, and a maker of others beside it."""
    folder = tmp_path_factory.mktemp("masked-patches")
    data, _ = prepare_colors(folder, each=30)
    maker = RunMaker(folder, data, CONFIG)
    maker.train("golden", ranks=1)
    return maker


def losses_of(runs: RunMaker, name: str) -> list[float]:
    return [float.fromhex(row.loss) for row in read_audit(runs.folder(name).audit)]


@pytest.mark.long
def test_a_stopped_run_continues_bit_for_bit(runs):
    runs.train("stopped", "train.stop_after=13", ranks=1)
    runs.train("stopped", "data.workers=3", ranks=1)
    assert_same_run(runs, "stopped", "golden", 20)


@pytest.mark.long
def test_every_engine_on_two_ranks_trains_like_one_process(runs):
    runs.train("exact", *EXACT, ranks=1)
    expected = read_audit(runs.folder("exact").audit)
    for kind, stage in (("deepspeed", 0), ("deepspeed", 1), ("deepspeed", 2), ("deepspeed", 3), ("ddp", 0)):
        name = f"{kind}-{stage}"
        runs.train(name, *EXACT, f"engine.kind={kind}", f"engine.zero_stage={stage}", ranks=2)
        found = read_audit(runs.folder(name).audit)
        assert [(row.digest, row.pixels) for row in found] == [(row.digest, row.pixels) for row in expected], name
        assert losses_of(runs, name) == pytest.approx(losses_of(runs, "exact"), rel=1e-4), name


@pytest.mark.long
def test_it_is_measured_by_its_loss_alone(runs):
    run = runs.folder("golden").path
    result = run_warm("evaluate", str(run), "--device", "cpu", "--json", cwd=run.parent)
    assert result.code == 0, result.stderr
    (facts,) = json.loads(result.stdout)["sources"].values()
    assert 0 < facts["loss"] < 1 and "accuracy" not in facts and "perplexity" not in facts
    lines = (run / "metrics.jsonl").read_text().splitlines()
    row = [row for row in map(json.loads, lines) if "val_loss" in row][-1]
    assert row["val_loss"] == pytest.approx(facts["loss"]) and "val_accuracy" not in row


@pytest.mark.long
def test_a_classifier_begins_with_its_encoder_from_a_run_and_from_a_release(runs, tmp_path: Path):
    run = runs.folder("golden").path
    for words in (("export", str(run), "released"), ("import", "released", "imported")):
        result = run_warm(*words, cwd=tmp_path)
        assert result.code == 0, result.stderr
    for name, start in (("tuned", run), ("tuned-release", tmp_path / "imported")):
        runs.train(name, *TUNED, f"init.from={start}", ranks=1)
    first, *_, last = losses_of(runs, "tuned")
    assert losses_of(runs, "tuned-release") == losses_of(runs, "tuned") and last < 0.7 * first
