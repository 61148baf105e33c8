"""Divergences from a teacher beside their formulas, by autograd in float64, with what else a loss has."""

import pytest
import torch

from pretrain.config.objective import DistillConfig
from pretrain.objective.distillation import Distillation
from pretrain.types import IGNORE_INDEX
from tests.unit.objective.test_loss import ALL_OPTIONS, case, chunked, plain

KINDS = [("forward_kl", 1.0), ("forward_kl", 2.5), ("reverse_kl", 1.0), ("reverse_kl", 0.7), ("mse", 1.0)]


def divergence(scores, teacher, kind, temperature):
    """Hinton et al. 2015, 2: the divergence of softened distributions, times the square of the temperature."""
    if kind == "mse":
        return torch.nn.functional.mse_loss(scores, teacher, reduction="none").mean(dim=1)
    q, p = (torch.distributions.Categorical(logits=one / temperature) for one in (scores, teacher))
    order = (p, q) if kind == "forward_kl" else (q, p)
    return temperature**2 * torch.distributions.kl_divergence(*order)


@pytest.mark.parametrize("options", [{}, ALL_OPTIONS], ids=["plain", "all options"])
@pytest.mark.parametrize(("kind", "temperature"), KINDS)
def test_loss_and_gradients_are_those_of_the_formula(kind, temperature, options):
    given = case(bias=True)
    teacher = torch.randn(33, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(5)) * 2
    settings = DistillConfig(teacher="-", kind=kind, temperature=temperature, weight=0.7)
    found = chunked(
        given, **options, distillation=Distillation(settings, lambda chunk: teacher[chunk]), chunk_logits=99
    )
    ours = torch.autograd.grad(found.loss_sum * 0.3, given.inputs)
    scores = torch.nn.functional.linear(given.hidden, given.weight[:37], given.bias[:37]).flatten(0, -2)
    if cap := options.get("soft_cap"):
        scores = cap * torch.tanh(scores / cap)
    learned = given.targets.flatten() != IGNORE_INDEX
    added = divergence(scores, teacher[:, :37], kind, temperature)[learned].sum() * 0.7
    expected = plain(given, **options)
    theirs = torch.autograd.grad((expected.loss_sum + added) * 0.3, given.inputs)
    assert found.shown_M.tolist() == pytest.approx([added.item()], rel=1e-11)
    torch.testing.assert_close(found.loss_sum, expected.loss_sum + added, rtol=1e-11, atol=0)
    torch.testing.assert_close(found.nll_sum, expected.nll_sum)
    for mine, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-9, atol=1e-12)


def test_a_temperature_of_scores_is_refused():
    with pytest.raises(ValueError, match="temperature is of distributions, and kind=mse compares scores; leave it out"):
        DistillConfig(teacher="-", kind="mse", temperature=2.0)
