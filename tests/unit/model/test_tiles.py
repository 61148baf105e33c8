"""Feed-forward layers in tiles: the same results and gradients, and what autograd keeps and needs at most."""

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker

from pretrain.config.engine import EngineConfig
from pretrain.config.lengths import RowLengths
from pretrain.config.model import ModelConfig
from pretrain.config.objective import ObjectiveConfig
from pretrain.config.presets import expand_preset
from pretrain.model import build_model, init_weights
from pretrain.model.parts.experts import MixtureOfExperts
from pretrain.objective import build_loss
from pretrain.plan.activations import activation_bytes
from pretrain.plan.roofline import routed_bytes
from pretrain.plan.task import TrainingTask
from pretrain.types import Batch
from tests.helpers.tables import pairwise

CPU = torch.device("cpu")
EXPERTS = {"count": 4, "top_k": 2, "width": 96}
STACKS = {
    "gated": {},
    "plain": {"gated": False, "activation": "gelu", "bias": True},
    "experts": {"experts": EXPERTS | {"shared": 1}},
    "output norm": {"norm_placement": "output"},
}


def model_of(tiles, mode="none", dtype=torch.float32, length=64, **stack):
    values = {"preset": "llama-tiny", "vocab_size": 61, "max_seq_len": length, "decoder": stack}
    config = ModelConfig.model_validate(expand_preset(values))
    engine = EngineConfig(
        kind="single", zero_stage=0, precision="fp32", device="cpu", compile=False, activation_checkpointing=mode,
        feedforward_tiles=tiles,
    )  # fmt: skip
    model = build_model(config, engine, CPU)
    init_weights(model, config, seed=0)
    return config, engine, model.to(dtype)


def batch_of(length, rows=3):
    tokens = torch.randint(0, 61, (rows, length), generator=torch.Generator().manual_seed(0))
    return Batch(tokens, tokens.roll(-1, dims=1))


def results(model, length=50):
    """The loss, what experts count, and all gradients."""
    found = build_loss(ObjectiveConfig())(model, batch_of(length))
    routing = [] if found.routing_LW is None else [found.routing_LW]
    loss = found.loss_sum + sum(one.square().sum() for one in routing)
    return [found.loss_sum, *routing, *torch.autograd.grad(loss, list(model.parameters()))]


# Tiles and length: parts of unequal size; of one token.
@pairwise(stack=list(STACKS), mode=["none", "full"], tiling=[(2, 50), (7, 50), (100, 5)])
def test_tiles_change_no_result_and_no_gradient(stack, mode, tiling):
    tiles, length = tiling
    expected, tiled = (
        results(model_of(count, mode, torch.float64, **STACKS[stack])[2], length) for count in (1, tiles)
    )
    for found, whole in zip(tiled, expected, strict=True):
        torch.testing.assert_close(found, whole, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_sums_over_tiles_in_the_dtype_of_the_weights(dtype):
    expected = results(model_of(1, dtype=torch.float64)[2])
    whole, tiled = (results(model_of(tiles, dtype=dtype)[2]) for tiles in (1, 4))
    for reference, one, four in zip(expected, whole, tiled, strict=True):
        # Three sums of two numbers more, each rounded to half of the last bit, on gradients that are rounded already.
        rounding = 2 * torch.finfo(dtype).eps * reference.norm()
        assert (four - reference).norm() <= (one - reference).norm() + rounding


def test_evaluation_passes_tiles_too():
    plain, tiled = (model_of(tiles)[2].eval() for tiles in (1, 4))
    with torch.no_grad():
        pair = [model(batch_of(64)).logits_BTV[..., :61] for model in (tiled, plain)]
    torch.testing.assert_close(*pair, rtol=1e-5, atol=1e-5)


def measured(tiles, mode, length, **stack):
    """Bytes besides weights and gradients: kept after the forward pass of one row, at most, and both as planned."""
    config, engine, model = model_of(tiles, mode, length=length, **stack)
    batch = batch_of(length, rows=1)
    loss = build_loss(ObjectiveConfig())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    tracker = MemTracker()
    tracker.track_external(model)

    def total(kind):
        return tracker.get_tracker_snapshot(kind)[CPU]["Total"]

    with tracker:
        before = total("current")
        found = loss(model, batch)
        kept = total("current") - before
        found.loss_sum.backward()
    planned = activation_bytes(TrainingTask(config, RowLengths(length, length)), engine, 1, "cpu")
    return kept, total("peak") - before, planned


@pytest.mark.parametrize(
    ("mode", "experts"),
    [
        ("none", None),
        pytest.param("none", EXPERTS, marks=pytest.mark.long),
        pytest.param("full", None, marks=pytest.mark.long),
        ("full", EXPERTS),
    ],
)
def test_what_tiles_keep_and_need_falls_as_planned(mode, experts):
    stack = {"ff_width": 768, "experts": experts and experts | {"width": 256}}
    kept, peak, planned = measured(1, mode, 1024, **stack)
    tiled_kept, tiled_peak, tiled = measured(16, mode, 1024, **stack)
    assert tiled_kept == pytest.approx(tiled.kept, rel=0.02)
    assert tiled_peak == pytest.approx(tiled.peak, rel=0.1)
    assert planned.peak - tiled.peak == pytest.approx(peak - tiled_peak, rel=0.15)
    assert tiled_peak < peak / 2
    if mode == "none":
        assert tiled_kept < kept / 2


def test_the_peak_of_tiles_grows_with_the_row_and_not_with_its_square():
    peaks = [measured(8, "full", length, ff_width=768)[1] for length in (1024, 2048)]
    assert peaks[1] == pytest.approx(2 * peaks[0], rel=0.05)


@pytest.mark.parametrize("tiles", [1, 4])
@pytest.mark.parametrize("mode", ["none", "full"])
def test_experts_over_ranks_exchange_what_is_planned(mode, tiles):
    """Rows of a rank of two, in every pass, with the counts of rows before them."""
    config, engine, model = model_of(tiles, mode, **STACKS["experts"])
    passed = []

    class Exchange(torch.autograd.Function):
        @staticmethod
        def forward(ctx, rows_RD):
            passed.append(rows_RD.nbytes)
            return rows_RD.clone()

        @staticmethod
        def backward(ctx, grad_RD):
            passed.append(grad_RD.nbytes)
            return grad_RD

    def send(rows_RD, sizes_E, run):
        passed.append(sizes_E.nbytes)
        return Exchange.apply(run(Exchange.apply(rows_RD), sizes_E.cumsum(0, dtype=torch.int32)))

    for layer in model.modules():
        if isinstance(layer, MixtureOfExperts):
            layer.send = send
    results(model, length=48)
    task = TrainingTask(config, RowLengths(48, 48), experts=2)
    assert routed_bytes(task, engine, micro=3) == sum(passed)
