"""Initial weights as a function of (seed, name)."""

import pytest
import torch

from pretrain.model.init import init_weights, initial_weight
from tests.unit.model.tiny import build, tiny_config


def test_weights_do_not_depend_on_the_order_in_which_they_are_drawn():
    config = tiny_config("gpt2-tiny")
    model = build(config, seed=7, scale=1.0)
    torch.manual_seed(99)
    for name, parameter in reversed(list(model.named_parameters())):
        assert torch.equal(parameter, initial_weight(name, parameter.shape, config, 7)), name


def test_seeds_and_names_give_different_weights():
    config, shape = tiny_config(), torch.Size((64, 64))
    first = initial_weight("a.weight", shape, config, 1)
    assert torch.equal(first, initial_weight("a.weight", shape, config, 1))
    assert not torch.equal(first, initial_weight("a.weight", shape, config, 2))
    assert not torch.equal(first, initial_weight("b.weight", shape, config, 1))


def test_a_weight_never_changes_between_releases():
    drawn = initial_weight("embedding.weight", torch.Size((3, 8)), tiny_config(), 1234)
    # Not to the last bit: torch's normal draws differ by a rounding between CPU types.
    assert drawn[0, :3].tolist() == pytest.approx([0.051432766, -0.003130943, 0.001589551], abs=1e-8)


@pytest.mark.parametrize(
    ("name", "std"),
    [
        ("embedding.weight", 0.02),
        ("decoder.blocks.0.attention.qkv.weight", 0.02),
        ("decoder.blocks.0.attention.output.weight", 0.01),
        ("decoder.blocks.1.feedforward.down.weight", 0.01),
    ],
)
def test_residual_projections_start_smaller_by_the_root_of_twice_the_depth(name, std):
    weight = initial_weight(name, torch.Size((400, 400)), tiny_config(), 0)
    # The standard error of a deviation from 160,000 draws is 0.2%.
    assert weight.std().item() == pytest.approx(std, rel=0.01)
    assert abs(weight.mean().item()) < 0.01 * std * 2


def test_unscaled_initialisation_is_one_deviation_for_all():
    config = tiny_config(model={"init_scaled": False, "init_std": 0.1})
    weight = initial_weight("decoder.blocks.0.attention.output.weight", torch.Size((400, 400)), config, 0)
    assert weight.std().item() == pytest.approx(0.1, rel=0.01)


def test_biases_start_at_zero_and_norms_at_one():
    config = tiny_config("gpt2-tiny")
    model = build(config)
    init_weights(model, config, 0)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif parameter.ndim == 1:
            assert (parameter == 1).all(), name
