"""Counts of the parts of a model against a probe of the real one: every tiny preset."""

from math import prod
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from pretrain.config.engine import PLAIN_ENGINE, EngineConfig
from pretrain.config.lengths import RowLengths
from pretrain.config.model import parse_model
from pretrain.config.presets import PRESETS, expand_preset
from pretrain.model import build_model, init_weights
from pretrain.model.tensor_parallel import share_tensors
from pretrain.plan.activations import activation_bytes
from pretrain.plan.flops import count_flops
from pretrain.plan.params import names_of_matrices, parameter_shapes
from pretrain.plan.task import TrainingTask, known_model
from tests.unit.plan.kept import kept_bytes, probe_batch

TINY = sorted(name for name in PRESETS if name.endswith("-tiny"))
ROWS = 4


def model_of(preset):
    """The model of a preset, and the lengths of its rows and of its source."""
    values = expand_preset({"preset": preset})
    is_of_images = values.get("input") is not None
    if not is_of_images or values["head"]["kind"] == "lm":
        values = expand_preset({"preset": preset, "vocab_size": 256})
    config = known_model(parse_model(values))
    length = 64
    if is_of_images and config.head.kind != "lm":
        length = config.input.positions
    if config.shape != "encoder+decoder":
        return config, length, None
    if not is_of_images:
        return config, length, 96
    return config, length, 5 if config.head.kind == "pixels" else config.input.positions


def _count_grouped(x, weight, offsets, **named):
    return 2 * prod(x) * weight[1]


def _count_grouped_back(grad, x, weight, offsets, **named):
    return 4 * prod(x) * weight[1]


def _count_solved(system, sides, *, upper, left=True, unitriangular=False, out_shape=None):
    return 2 * prod(sides) * system[-1]


GROUPED = {
    torch.ops.aten.linalg_solve_triangular: _count_solved,
    torch.ops.pretrain.grouped_linear: _count_grouped,
    torch.ops.pretrain.grouped_linear_backward: _count_grouped_back,
}
"""FLOPs of products of experts and of triangular systems, unknown to torch, by the shapes of their tensors."""


@pytest.mark.parametrize("preset", TINY)
def test_a_preset_has_the_parameters_that_its_parts_count(preset):
    config, _, _ = model_of(preset)
    built = build_model(config, PLAIN_ENGINE, torch.device("meta"))
    assert parameter_shapes(config) == {name: tuple(each.shape) for name, each in built.named_parameters()}


@pytest.mark.parametrize("preset", ["llama-tiny", "gpt2-tiny", "t5-tiny", "bert-tiny", "gemma-tiny"])
@pytest.mark.parametrize("value_embeddings", [0, 1])
def test_the_matrices_that_ranks_share_are_those_that_parts_count(preset, value_embeddings):
    values = {"preset": preset, "vocab_size": 256}
    names = expand_preset(values)
    update = {name: {"value_embeddings": value_embeddings} for name in ("encoder", "decoder") if names.get(name)}
    config = parse_model(expand_preset(values | update))
    model = build_model(config, PLAIN_ENGINE, torch.device("meta"))
    group = SimpleNamespace(rank=lambda: 0, size=lambda: 2)
    world = SimpleNamespace(tensor=2, parts_group=lambda timeout_s: group)
    built = dict(model.named_parameters())
    parts = share_tensors(model, world, 60)
    assert parts.keys() & built.keys() == names_of_matrices(config)
    cut = {name for name, each in model.named_parameters() if each.shape != built[name].shape}
    assert cut == names_of_matrices(config)


@pytest.mark.parametrize("preset", TINY)
def test_a_preset_has_the_flops_that_its_parts_count(preset):
    config, length, source = model_of(preset)
    # Eager attention: torch sees nothing inside the CPU's flash kernel; and every key, without a window's end.
    shortest = min([length, *(window for stack in stacks(config) for window in stack.windows if window)])
    length = length if config.input is not None else shortest
    model = build_model(config, PLAIN_ENGINE.model_copy(update={"attention": "eager"}), torch.device("cpu"))
    init_weights(model, config, seed=0)
    batch, _ = probe_batch(config, 2, length, source)
    with FlopCounterMode(display=False, custom_mapping=GROUPED) as counter:
        output = model(batch)
        scored = [output.logits_BTV, *(model.head(hidden_BTD) for hidden_BTD in output.ahead)]
        sum(scores[..., : config.num_scores].sum() for scores in scored).backward()
    counted = count_flops(config, length, source_len=source)
    # Values of latent attention are lengthened to the width of a head by zeros, which is no useful work.
    latent = [stack for stack in stacks(config) if stack.latent is not None]
    zeros = sum(stack.heads * (stack.per_head_width - stack.latent.value_width) for stack in latent)
    blocks = sum(stack.layers for stack in latent) + (config.multi_token if latent else 0)
    assert counter.get_total_flops() == 2 * (counted.whole.total + 6 * zeros * blocks * length * length)


def stacks(config):
    return [stack for stack in (config.encoder, config.decoder) if stack is not None]


@pytest.mark.parametrize("preset", TINY)
def test_autograd_keeps_of_a_preset_what_its_parts_count(preset):
    config, length, source = model_of(preset)
    engine = EngineConfig(kind="deepspeed", zero_stage=0, precision="fp32", device="cpu")
    share = {"labels": 1 / length, "pixels": 1 - (source or 0) / length}.get(config.head.kind, 1.0)
    task = TrainingTask(config, RowLengths(length, length, source), share)
    counted = activation_bytes(task, engine, ROWS, "cpu").kept
    # Small tensors beside the parts: ids of positions, biases by distance, indices of the loss; of images the pixels.
    rel = 0.01 if config.input is None else 0.03
    assert counted == pytest.approx(kept_bytes(config, engine, ROWS, length, source), rel=rel)
