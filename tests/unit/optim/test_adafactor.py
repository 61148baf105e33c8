"""Adafactor against the paper's update, on each matrix of a fused weight, at any size of gradient."""

import math

import pytest
import torch
from torch import nn

from pretrain.config.optim import OptimConfig
from pretrain.kinds.optimizers.adafactor import AdafactorConfig
from tests.unit.optim.test_muon import placed


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.key_value = nn.Linear(5, 6)


def paper_step(
    weight: torch.Tensor, gradient: torch.Tensor, state: dict[str, torch.Tensor], number: int, rate: float
) -> torch.Tensor:
    """Algorithms 4 and 5 of Shazeer and Stern 2018 in float64, without their epsilon 1."""
    weight, gradient = weight.double(), gradient.double()
    beta2 = 1 - number**-0.8
    square = gradient**2
    if weight.ndim == 2:
        state["row"] = beta2 * state.get("row", 0) + (1 - beta2) * square.mean(1)
        state["column"] = beta2 * state.get("column", 0) + (1 - beta2) * square.mean(0)
        variance = torch.outer(state["row"], state["column"]) / state["row"].mean()
    else:
        state["all"] = beta2 * state.get("all", 0) + (1 - beta2) * square
        variance = state["all"]
    update = gradient / variance.sqrt()
    update = update / max(1.0, float(update.square().mean().sqrt()))
    return weight - rate * max(1e-3, float(weight.square().mean().sqrt())) * update


# The smallest is that of a big model's gradients, where torch's default epsilon would be all there is.
@pytest.mark.parametrize("size", [1.0, 1e-4, 1e-8])
def test_three_steps_follow_the_paper_matrix_by_matrix(size):
    torch.manual_seed(0)
    model = Fused()
    optimizer = placed(model, OptimConfig(kind="adafactor", lr=1e-2, weight_decay=0.0))
    fused, bias = model.key_value.weight, model.key_value.bias
    expected = [half.detach().double() for one in (fused, bias) for half in one.chunk(2)]
    states: list[dict[str, torch.Tensor]] = [{}, {}, {}, {}]
    for number in (1, 2, 3):
        fused.grad, bias.grad = torch.randn(6, 5) * size, torch.randn(6) * size
        # Those of one half are larger, so that the root mean square of both is that of none.
        bias.grad[:3] *= 100
        gradients = [half for one in (fused, bias) for half in one.grad.chunk(2)]
        expected = [
            paper_step(weight, gradient, state, number, 1e-2)
            for weight, gradient, state in zip(expected, gradients, states, strict=True)
        ]
        optimizer.step()
    # fp32 against float64 over three steps.
    torch.testing.assert_close(fused.double(), torch.cat(expected[:2]), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(bias.double(), torch.cat(expected[2:]), rtol=1e-5, atol=1e-7)


def test_its_keys_reach_torch():
    config = OptimConfig(
        kind="adafactor",
        lr=1e-2,
        weight_decay=0.5,
        adafactor=AdafactorConfig(decay_rate=0.5, clip_threshold=2.0, min_scale=0.1),
    )
    torch.manual_seed(0)
    model = Fused()
    apart = [nn.Parameter(half.detach().clone()) for half in model.key_value.weight.chunk(2)]
    optimizer = placed(model, config)
    reference = torch.optim.Adafactor(apart, lr=1e-2, beta2_decay=-0.5, eps=(1e-18, 0.1), d=2.0, weight_decay=0.5)
    for _ in range(3):
        model.key_value.weight.grad = torch.randn(6, 5)
        for parameter, gradient in zip(apart, model.key_value.weight.grad.chunk(2), strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
        reference.step()
    assert torch.equal(model.key_value.weight, torch.cat(apart))


def test_a_row_that_is_never_read_stays_finite_and_where_it_was():
    model = nn.Embedding(3, 4)
    optimizer = placed(model, OptimConfig(kind="adafactor", lr=1e-2))
    before = model.weight.detach().clone()
    model.weight.grad = torch.zeros(3, 4)
    model.weight.grad[0] = 1e-3
    optimizer.step()
    assert torch.equal(model.weight[1:], before[1:])
    assert not torch.equal(model.weight[0], before[0])


def test_its_state_is_a_row_and_a_column():
    model = Fused()
    optimizer = placed(model, OptimConfig(kind="adafactor", lr=1e-2))
    sizes = {kind: tensor.numel() for f in optimizer.fragments() for kind, tensor in f.tensors.items()}
    assert sizes == {"row_var.0": 3, "col_var.0": 5, "row_var.1": 3, "col_var.1": 5, "variance": 3}
    assert all(math.isclose(float(tensor.sum()), 0.0) for f in optimizer.fragments() for tensor in f.tensors.values())
