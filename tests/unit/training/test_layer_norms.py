"""Norms by layer, against a copy of the weights and torch's own gradients."""

from functools import partial

import pytest
import torch

from pretrain.dist import World
from pretrain.engine.engine import Update
from pretrain.engine.replicated import ReplicatedState
from pretrain.training.layer_norms import LayerNorms, adamw_update, layer_of

CPU = torch.device("cpu")


def test_layers_are_blocks_and_what_stands_beside_them():
    names = ["embedding.weight", "decoder.blocks.3.attention.qkv.weight", "decoder.norm.weight", "head.transform.bias"]
    assert [layer_of(name, 2) for name in names] == ["embedding", "decoder_03", "decoder", "head"]


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_the_update_of_adamw_is_found_in_what_it_leaves_behind(decay):
    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(5, 7, generator=generator, dtype=torch.float64))
    optimizer = torch.optim.AdamW([weight], lr=0.1, weight_decay=decay, betas=(0.8, 0.95), eps=1e-4)
    for _ in range(3):
        before = weight.detach().clone()
        weight.grad = torch.randn(5, 7, generator=generator, dtype=torch.float64)
        optimizer.step()
        state, group = optimizer.state[weight], optimizer.param_groups[0]
        change, factor = adamw_update(state, weight.detach(), group, slice(4, 30))
        expected = (before - weight.detach()).view(-1)[4:30]
        torch.testing.assert_close(change * factor, expected, rtol=1e-10, atol=1e-12)


def build(kind=torch.optim.AdamW):
    generator = torch.Generator().manual_seed(0)
    sizes = {"embedding.weight": (4, 3), "decoder.blocks.0.up": (3, 3), "decoder.blocks.1.up": (3, 2), "unused": (2,)}
    weights = {name: torch.nn.Parameter(torch.randn(size, generator=generator)) for name, size in sizes.items()}
    optimizer = kind(list(weights.values()), lr=0.1)
    state = ReplicatedState(list(weights.items()), optimizer, World(0, 1, 0))
    for name, weight in weights.items():
        weight.grad = None if name == "unused" else torch.randn(weight.shape, generator=generator)
    return weights, optimizer, LayerNorms(list(weights), optimizer, state, is_cut=False)


def test_each_layer_has_its_part_of_the_gradient_before_clipping():
    weights, optimizer, norms = build()
    expected = {name: float(weight.grad.norm()) for name, weight in weights.items() if weight.grad is not None}
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    norms.arm()
    whole = float(torch.nn.utils.clip_grad_norm_(weights.values(), 0.01))
    optimizer.step()
    found = norms.take(Update(whole, False), CPU)
    layers = ["embedding", "decoder_0", "decoder_1", "unused"]
    assert list(found) == [f"{kind}/{layer}" for kind in ("grad_norm", "update_norm") for layer in layers]
    for (name, weight), layer in zip(weights.items(), layers, strict=True):
        assert found[f"grad_norm/{layer}"] == pytest.approx(expected.get(name, 0.0), rel=1e-5)
        moved = float((weight.detach() - before[name]).norm())
        assert found[f"update_norm/{layer}"] == pytest.approx(
            moved, rel=1e-4
        )  # the difference is rounded, the update not


def test_nothing_is_told_of_steps_that_were_skipped_or_not_asked_about():
    _, optimizer, norms = build()
    optimizer.step()
    assert norms.take(Update(1.0, False), CPU) == {}
    norms.arm()
    assert norms.take(Update(float("nan"), True), CPU) == {}
    assert norms.take(Update(1.0, False), CPU) == {}


def test_nothing_is_told_of_a_first_step_that_the_kernel_of_the_optimizer_has_skipped():
    weights, optimizer, norms = build(partial(torch.optim.AdamW, fused=True))
    before = [weight.detach().clone() for weight in weights.values()]
    norms.arm()
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert norms.take(Update(float("inf"), True), CPU) == {}
    assert all(torch.equal(weight.detach(), one) for weight, one in zip(weights.values(), before, strict=True))
