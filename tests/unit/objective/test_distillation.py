"""Divergences from a teacher beside their formulas, by autograd in float64, with what else a loss has."""

import pytest
import torch

from pretrain.config.objective import DistillConfig
from pretrain.evaluation.distill import DistillOptions, take_top
from pretrain.objective.distillation import Distillation, TopTokens
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


def events(scores, ids, temperature):
    """Log-probabilities of some ids, and of any other, [P, G + 1]."""
    log_q = (scores / temperature).log_softmax(dim=1)
    others = 1 - log_q.gather(1, ids).exp().sum(dim=1, keepdim=True)
    return torch.cat((log_q.gather(1, ids), others.log()), dim=1)


@pytest.mark.parametrize(("kind", "temperature"), KINDS)
def test_stored_scores_are_compared_as_their_ids_and_one_event_for_all_others(kind, temperature):
    given = case(bias=True)
    teacher = torch.randn(33, 37, dtype=torch.float64, generator=torch.Generator().manual_seed(5)) * 2
    ids, scores, rest = take_top(teacher, DistillOptions(top_k=6, temperature=temperature))
    top = TopTokens(ids, scores, rest)
    settings = DistillConfig(teacher="-", stored=True, kind=kind, temperature=temperature, weight=0.7)
    distillation = Distillation(settings, lambda chunk: TopTokens(*(one[chunk] for one in top)))
    found = chunked(given, distillation=distillation, chunk_logits=99)
    ours = torch.autograd.grad(found.loss_sum, given.inputs)
    logits = torch.nn.functional.linear(given.hidden, given.weight[:37], given.bias[:37]).flatten(0, -2)
    if kind == "mse":
        expected = (logits.gather(1, ids) - teacher.gather(1, ids)).square().mean(dim=1)
    else:
        q, p = (events(one, ids, temperature) for one in (logits, teacher))
        first, second = (p, q) if kind == "forward_kl" else (q, p)
        expected = temperature**2 * (first.exp() * (first - second)).sum(dim=1)
    added = 0.7 * expected[given.targets.flatten() != IGNORE_INDEX].sum()
    theirs = torch.autograd.grad(plain(given).loss_sum + added, given.inputs)
    assert found.shown_M.tolist() == pytest.approx([added.item()], rel=1e-9)
    for mine, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-8, atol=1e-10)


def test_a_temperature_of_scores_is_refused():
    with pytest.raises(ValueError, match="temperature is of distributions, and kind=mse compares scores; leave it out"):
        DistillConfig(teacher="-", kind="mse", temperature=2.0)
