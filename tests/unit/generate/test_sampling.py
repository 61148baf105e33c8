"""Drawing one token from its scores."""

import pytest
import torch

from pretrain.errors import ConfigError
from pretrain.generate import GREEDY, Sampling, sample

LOGITS = torch.tensor([0.5, 3.0, -1.0, 2.0, 2.5, 1.0]).log_softmax(dim=0)


def draws(sampling, count=20_000, seed=0):
    ids = sample(LOGITS.expand(count, -1), sampling, torch.Generator().manual_seed(seed))
    return torch.bincount(ids, minlength=6) / count


def test_greedy_takes_the_best_and_the_first_of_equals():
    logits = torch.tensor([[0.0, 2.0, 2.0], [1.0, 0.0, -torch.inf]])
    assert sample(logits, GREEDY, torch.Generator()).tolist() == [1, 0]


def test_a_seed_reproduces_and_another_does_not():
    assert torch.equal(draws(Sampling()), draws(Sampling()))
    assert not torch.equal(draws(Sampling()), draws(Sampling(), seed=1))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_are_those_of_the_softmax_at_the_temperature(temperature):
    expected = (LOGITS / temperature).softmax(dim=0)
    # Three standard errors of a frequency from 20,000 draws are at most 1.1%.
    torch.testing.assert_close(draws(Sampling(temperature)), expected, rtol=0, atol=0.011)


def test_top_k_draws_among_the_k_best():
    drawn = draws(Sampling(top_k=2))
    assert set(drawn.nonzero().flatten().tolist()) == {1, 4}
    torch.testing.assert_close(drawn[[1, 4]], LOGITS[[1, 4]].softmax(dim=0), rtol=0, atol=0.011)


def test_top_k_beyond_the_vocabulary_is_no_cut():
    assert torch.equal(draws(Sampling(top_k=99)), draws(Sampling()))


def test_top_p_draws_among_the_fewest_that_reach_p():
    ordered = LOGITS.softmax(dim=0).sort(descending=True).values.cumsum(dim=0)
    for p in (ordered[0] - 0.01, ordered[0] + 0.01, ordered[2] + 0.01):
        kept = int((ordered < p).sum()) + 1
        assert int((draws(Sampling(top_p=float(p))) > 0).sum()) == kept


def test_a_tiny_top_p_is_greedy():
    assert draws(Sampling(top_p=1e-9))[1] == 1


def test_a_score_of_minus_infinity_is_never_drawn():
    logits = torch.zeros(1000, 4)
    logits[:, 2] = -torch.inf
    assert 2 not in sample(logits, Sampling(temperature=5.0), torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -1.0}, "temperature=-1.0 must be a number from 0 on; use 0 for greedy"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": float("inf")}, "temperature=inf"),
        ({"top_k": -1}, "top_k=-1 must not be negative"),
        ({"top_p": 0.0}, "top_p=0.0 must be above 0 and at most 1"),
        ({"top_p": 1.5}, "top_p=1.5 must be above 0 and at most 1"),
    ],
)
def test_values_out_of_range_are_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        Sampling(**values)
