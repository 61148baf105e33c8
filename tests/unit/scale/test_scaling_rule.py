"""The rule of a ladder: shapes, learning rate, batch and schedule of a size, and what does not divide."""

import pytest

from pretrain.config.load import load_config
from pretrain.config.optim import EmaConfig, OptimConfig
from pretrain.errors import ConfigError
from pretrain.plan.flops import count_flops
from pretrain.scale.scaling_rule import (
    LadderRule,
    has_transfer,
    parameters_of,
    scale_model,
    scale_run,
    size_of,
    width_step,
)

REFERENCE = """
run: {name: ref}
data: {path: data/none}
model:
  preset: llama-tiny
  vocab_size: 256
  decoder: {layers: 4, width: 128, heads: 8, kv_heads: 4, ff_width: 352}
batch: {global_tokens: 4096, seq_len: 64, micro: 16}
optim: {lr: 4e-3, schedule: {kind: cosine, warmup_tokens: 409600}}
train: {steps: 1000}
engine: {kind: single, zero_stage: 0, precision: fp32, device: cpu}
"""
PLACE = {"dir": "ladder/runs", "name": "ref-0"}


@pytest.fixture
def reference(tmp_path):
    (tmp_path / "ref.yaml").write_text(REFERENCE)
    return load_config(tmp_path / "ref.yaml")


def override(tmp_path, *items):
    (tmp_path / "ref.yaml").write_text(REFERENCE)
    return load_config(tmp_path / "ref.yaml", items)


def test_n_is_the_flops_a_token_over_six(reference):
    size = size_of(reference)
    assert size.tokens == 4096 * 1000
    assert size.parameters == count_flops(reference.model, 64).whole.total / 64 / 6
    assert size.flops == pytest.approx(count_flops(reference.model, 64).whole.total * 64 * 1000)


def test_heads_keep_their_width_and_their_groups(reference):
    assert width_step(reference) == 32
    for width, layers, heads in ((64, 2, 4), (128, 4, 8), (192, 6, 12)):
        stack = scale_model(reference, LadderRule(), width)["decoder"]
        assert (stack["width"], stack["layers"], stack["heads"], stack["kv_heads"]) == (
            width, layers, heads, heads // 2
        )  # fmt: skip
        assert stack["ff_width"] % 16 == 0
        assert stack["ff_width"] == pytest.approx(352 * width / 128, abs=8)
    flat = scale_model(reference, LadderRule(depth_by_width=0.0), 64)["decoder"]
    assert (flat["width"], flat["layers"], flat["embedding_width"]) == (64, 4, None)


def test_tables_keep_their_share_of_the_width(tmp_path):
    reference = override(tmp_path, "model.decoder.embedding_width=32")
    assert scale_model(reference, LadderRule(), 192)["decoder"]["embedding_width"] == 48


def test_a_run_of_the_reference_size_is_the_reference(reference):
    size = size_of(reference)
    run = scale_run(reference, LadderRule(), 128, size.flops, vocab_size=None, run=PLACE)
    assert run.model.decoder == reference.model.decoder
    assert (run.optim.lr, run.batch, run.train) == (reference.optim.lr, reference.batch, reference.train)
    assert run.optim.schedule.warmup_steps == 100
    assert (str(run.folder), run.eval.every_steps) == ("ladder/runs/ref-0", 1000)
    assert run.tracking.group == "ref"


def test_rate_batch_and_schedule_follow_the_exponents(reference):
    rule = LadderRule(lr_by_parameters=-0.5, lr_by_tokens=0.25, batch_by_tokens=0.5)
    base = size_of(reference)
    flops = base.flops / 20
    run = scale_run(reference, rule, 64, flops, vocab_size=None, run=PLACE)
    small = size_of(run)
    assert small.parameters == parameters_of(reference, rule, 64, None)
    assert small.flops == pytest.approx(flops, rel=0.01)
    more = flops / (6 * small.parameters) / base.tokens
    wanted = 4e-3 * (small.parameters / base.parameters) ** -0.5 * more**0.25
    assert run.optim.lr == pytest.approx(wanted, rel=1e-3)
    assert run.batch.rows == pytest.approx(64 * more**0.5, rel=1 / 16)
    assert run.batch.rows % run.batch.micro == 0
    assert run.optim.schedule.warmup_steps == pytest.approx(0.1 * run.train.steps, abs=1)


@pytest.mark.parametrize(("flops", "rows", "micro"), [(2.2e12, 52, 13), (5e12, 88, 11)])
def test_a_micro_batch_is_the_largest_that_divides_the_rows(reference, flops, rows, micro):
    run = scale_run(reference, LadderRule(), 64, flops, vocab_size=None, run=PLACE)
    assert (run.batch.rows, run.batch.micro) == (rows, micro)


def test_muon_has_both_rates_scaled(tmp_path):
    reference = override(tmp_path, "optim.kind=muon", "optim.muon.lr=0.02")
    flops = size_of(reference).flops / 20
    run = scale_run(reference, LadderRule(), 64, flops, vocab_size=None, run=PLACE)
    assert run.optim.muon.lr / 0.02 == pytest.approx(run.optim.lr / 4e-3, rel=1e-3)
    assert run.optim.lr != 4e-3


def test_horizon_and_short_rows_follow_the_tokens(tmp_path):
    reference = override(
        tmp_path,
        "optim.ema.horizon_steps=200",
        "batch.short_rows=[{until_tokens: 409600, seq_len: 32}]",
        "batch.short_windows=[{until_tokens: 409600, window: 32}]",
        "data={path: null, mixture: [{name: a, path: a, weight: 1}, {name: b, path: b, weight: 0}]}",
        "data.curriculum=[{tokens: 409600, weights: {b: 1}}]",
    )
    run = scale_run(reference, LadderRule(), 64, size_of(reference).flops / 20, vocab_size=None, run=PLACE)
    assert run.optim.ema.horizon_steps == pytest.approx(0.2 * run.train.steps, abs=1)
    optim = reference.optim.model_copy(update={"ema": EmaConfig(horizon_tokens=409600)})
    in_tokens = reference.model_copy(update={"optim": optim})
    run = scale_run(in_tokens, LadderRule(), 64, size_of(reference).flops / 20, vocab_size=None, run=PLACE)
    assert run.optim.ema.horizon_tokens == pytest.approx(0.1 * size_of(run).tokens, rel=0.02)
    assert run.batch.short_windows[0].until_tokens == run.batch.short_rows[0].until_tokens
    assert run.data.curriculum[0].tokens == run.batch.short_rows[0].until_tokens
    assert run.batch.short_rows[0].until_tokens == pytest.approx(0.1 * size_of(run).tokens, rel=0.02)


@pytest.mark.parametrize("steps", [32, 33, 35, 39])
def test_a_schedule_that_fits_fits_in_any_number_of_steps(tmp_path, steps):
    half = "optim.schedule={kind: wsd, warmup_tokens: null, warmup_steps: 20, cooldown_steps: 20}"
    reference = override(tmp_path, "train.steps=40", half)
    rule = LadderRule(batch_by_tokens=0)
    flops = size_of(reference).flops * steps / 40
    run = scale_run(reference, rule, 128, flops, vocab_size=None, run=PLACE)
    assert run.train.steps == steps
    assert steps - 1 <= run.optim.schedule.warmup_steps + run.optim.schedule.cooldown_steps <= steps


def test_a_growing_batch_is_refused(tmp_path):
    reference = override(tmp_path, "batch.schedule=[{tokens: 409600, global_tokens: 8192}]")
    with pytest.raises(ConfigError, match=r"batch.schedule: a ladder has one batch size a run"):
        scale_run(reference, LadderRule(), 64, size_of(reference).flops / 20, vocab_size=None, run=PLACE)


def test_a_config_without_transfer_has_none():
    assert not has_transfer(OptimConfig(lr=1e-3))


def test_a_width_without_whole_groups_of_heads_is_refused(reference):
    message = "width=80 is no multiple of 32, the width of a group of heads; use 64 or 96, or more heads"
    with pytest.raises(ConfigError, match=message):
        scale_model(reference, LadderRule(), 80)
    with pytest.raises(ConfigError, match=r"width=16 is no multiple of 32.*; use 32, or more heads"):
        scale_model(reference, LadderRule(), 16)


def test_a_recurrent_model_is_refused(tmp_path):
    text = REFERENCE[: REFERENCE.index("model:")] + (
        "model: {kind: recurrent, vocab_size: 256, decoder: {cell: lstm, layers: 1, width: 64}}\n"
        + REFERENCE[REFERENCE.index("batch:") :]
    )
    (tmp_path / "lstm.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"which model.kind=recurrent lacks; use a Transformer"):
        width_step(load_config(tmp_path / "lstm.yaml"))


def test_a_run_of_a_few_steps_is_refused(reference):
    flops = size_of(reference).flops / 1e5
    with pytest.raises(ConfigError, match=r"ref-0: \d+ steps of \d+ tokens are too few to learn from, at least 30"):
        scale_run(reference, LadderRule(batch_by_tokens=0.0), 128, flops, vocab_size=None, run=PLACE)


def test_layers_of_the_gated_delta_rule_have_no_rule():
    with pytest.raises(ConfigError, match=r"a ladder has no rule for the widths of mixers=delta; use attention in"):
        width_step(load_config("configs/run/hybrid_quickstart.yaml"))
