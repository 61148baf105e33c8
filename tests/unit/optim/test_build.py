"""AdamW against the paper's update, and what the config turns into."""

import math

import pytest
import torch
from torch import nn

from pretrain.config.optim import OptimConfig
from pretrain.kinds.optimizers import OPTIMIZERS
from pretrain.optim.build import build_optimizer, moments_of
from pretrain.optim.groups import group_parameters

CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_record_has_a_builder_its_own_keys_and_the_state_that_its_builder_makes(kind):
    config = OptimConfig(kind=kind, lr=1e-3)
    assert type(config.own) is (OPTIMIZERS[kind].section or type(None))
    model = nn.Linear(2, 2)
    optimizer = build_optimizer(group_parameters(model), config, CPU)
    assert moments_of(optimizer) == OPTIMIZERS[kind].moments
    if OPTIMIZERS[kind].matrices is None:
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        assert optimizer.state[model.weight].keys() - {"step"} == set(OPTIMIZERS[kind].moments)


def test_groups_and_config_reach_torch():
    config = OptimConfig(lr=3e-4, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.3)
    optimizer = build_optimizer(group_parameters(nn.Linear(2, 2)), config, CPU)
    seen = [
        (group["name"], group["weight_decay"], group["lr"], group["betas"], group["eps"], group["fused"])
        for group in optimizer.param_groups
    ]
    assert seen == [("decay", 0.3, 3e-4, (0.8, 0.9), 1e-6, True), ("no_decay", 0.0, 3e-4, (0.8, 0.9), 1e-6, True)]


def test_three_steps_follow_the_paper_in_float64():
    """Algorithm 2 of Loshchilov and Hutter 2019, by hand: decay is on the matrix only, and outside the moments."""
    config = OptimConfig(lr=0.01, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
    model = nn.Linear(1, 1).double()
    state = {name: [p.item(), 0.0, 0.0] for name, p in model.named_parameters()}
    optimizer = build_optimizer(group_parameters(model), config, CPU)
    for step, gradient in enumerate([0.5, -1.0, 0.25], start=1):
        for name, parameter in model.named_parameters():
            parameter.grad = torch.full_like(parameter, gradient)
            value, first, second = state[name]
            first = 0.9 * first + 0.1 * gradient
            second = 0.95 * second + 0.05 * gradient**2
            decay = 0.1 if name == "weight" else 0.0
            value -= 0.01 * decay * value
            value -= 0.01 * (first / (1 - 0.9**step)) / (math.sqrt(second / (1 - 0.95**step)) + 1e-8)
            state[name] = [value, first, second]
        optimizer.step()
    for name, parameter in model.named_parameters():
        # Rounding of a handful of float64 operations, done in another order by the fused kernel.
        assert parameter.item() == pytest.approx(state[name][0], rel=1e-14)


def test_with_no_gradient_only_the_decaying_group_shrinks():
    model = nn.Linear(3, 3)
    nn.init.ones_(model.weight)
    nn.init.ones_(model.bias)
    optimizer = build_optimizer(group_parameters(model), OptimConfig(lr=0.5, weight_decay=0.5), CPU)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert torch.equal(model.weight, torch.full((3, 3), 0.75))
    assert torch.equal(model.bias, torch.ones(3))
