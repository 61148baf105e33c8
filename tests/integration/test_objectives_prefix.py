"""Prefix language modelling and mixtures with it, as a user runs them, with every packing."""

import json
import math
import shutil
from pathlib import Path

import pytest

from pretrain.artifact.model_path import open_source
from pretrain.tracking.audit import read_audit
from tests.helpers.cli import Warm

CONFIG = """
seed: 7
run: {name: run}
data: {path: data, lanes: 2, block_samples: 16}
model: {preset: llama-tiny, max_seq_len: 64, decoder: {width: 32, heads: 4, kv_heads: 2, ff_width: 48}}
objective: OBJECTIVE
batch: {global_tokens: 512, seq_len: 64, micro: 2}
optim: {lr: 1e-2, schedule: {warmup_steps: 5}}
train: {steps: 30}
eval: {every_steps: 30}
engine: {kind: single, zero_stage: 0, precision: fp32, device: cpu}
tracking: {log_every_steps: 10, wandb: off}
"""
PREFIX = "{kind: prefix}"
MIXTURE = "{mixture: [{kind: prefix, weight: 1}, {kind: causal, weight: 3}]}"


@pytest.fixture
def folder(tmp_path, corpus) -> Path:
    """A working folder with shards."""
    shutil.copytree(corpus, tmp_path / "data")
    return tmp_path


def train(warm: Warm, folder: Path, objective: str, *overrides: str) -> Path:
    (folder / "a.yaml").write_text(CONFIG.replace("OBJECTIVE", objective))
    result = warm("train", "a.yaml", *overrides, cwd=folder)
    assert result.code == 0, result.stderr
    return folder / "runs/run"


@pytest.mark.long
@pytest.mark.parametrize(
    "packing", ["concat", *(pytest.param(name, marks=pytest.mark.long) for name in ("bins", "padded"))]
)
@pytest.mark.parametrize(
    "objective", [PREFIX, pytest.param(MIXTURE, marks=pytest.mark.long)], ids=["prefix", "mixture"]
)
def test_a_decoder_learns_with_every_packing(warm, folder, objective, packing):
    run = train(warm, folder, objective, f"data.packing={packing}")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses[-1] < losses[0] - 0.2
    (validated,) = (row for row in rows if "val_loss" in row)
    assert validated["val_loss"] < losses[0]
    assert 0 < validated["val_accuracy"] < 1
    assert math.isfinite(validated["val_perplexity"])
    assert "val_bits_per_byte" not in validated, "not all of the text is predicted"
    tokens = [row.tokens for row in read_audit(run / "audit.jsonl")]
    # A prefix has no loss: of a row about half. Rows that are not full have fewer still.
    mean = sum(tokens) / len(tokens) / 512
    assert 0.3 < mean < (0.7 if objective is PREFIX else 0.97)
    assert open_source(run).generation.sees_prompt_whole == (objective is PREFIX), (
        "its prompts are read as it learned to"
    )
    read = [row["tokens_per_s"] * row["step_time_s"] for row in rows if "tokens_per_s" in row]
    assert all(mean * 512 < tokens <= 512.001 for tokens in read), "positions without a loss are read too"


def test_another_micro_batch_splits_the_same_documents_at_the_same_places(warm, folder):
    audits = []
    for micro in (1, 8):
        run = train(warm, folder, MIXTURE, f"batch.micro={micro}", f"run.name=micro-{micro}", "train.stop_after=5")
        audits.append(read_audit(run.parent / f"micro-{micro}" / "audit.jsonl"))
    for one, other in zip(*audits, strict=True):
        assert (one.digest, one.tokens) == (other.digest, other.tokens)
        # fp32 sums in another order.
        assert float.fromhex(one.loss) == pytest.approx(float.fromhex(other.loss), rel=1e-5)
