"""Drawing one token from its scores."""

from itertools import pairwise

import pytest
import torch

from pretrain.errors import ConfigError
from pretrain.generation.sampling import GREEDY, RowSeeds, Sampling, sample

LOGITS = torch.tensor([0.5, 3.0, -1.0, 2.0, 2.5, 1.0]).log_softmax(dim=0)


def uniforms(count, seed=0):
    return torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).tolist()


def draws(sampling, count=20_000, seed=0):
    ids = sample(LOGITS.expand(count, -1), sampling, uniforms(count, seed))
    return torch.bincount(ids, minlength=6) / count


def test_greedy_takes_the_best_and_the_first_of_equals():
    logits = torch.tensor([[0.0, 2.0, 2.0], [1.0, 0.0, -torch.inf]])
    assert sample(logits, GREEDY, [0.0, 0.0]).tolist() == [1, 0]


def test_the_number_chooses_among_the_tokens_from_the_best_down():
    ordered = LOGITS.softmax(dim=0).sort(descending=True)
    bounds = [0.0, *ordered.values.double().cumsum(dim=0).tolist()]
    # Just inside both ends of each token's share of [0, 1).
    numbers = [number for low, high in pairwise(bounds) for number in (low + 1e-6, high - 1e-6)]
    ids = sample(LOGITS.expand(len(numbers), -1), Sampling(), numbers)
    assert ids.tolist() == [token for token in ordered.indices.tolist() for _ in range(2)]


def test_of_equal_scores_the_first_comes_first_and_zeros_are_equal_whatever_their_sign():
    scores = torch.randint(-3, 4, (1, 40), generator=torch.Generator().manual_seed(0)) / 2.0
    scores[0, ::3] = -0.0
    scores[0, 1:4] = torch.tensor([1e-45, -1e-45, 0.0])
    order = scores.sort(dim=-1, descending=True, stable=True).indices[0]
    # The largest number draws the last token that is kept.
    ranked = [int(sample(scores, Sampling(top_k=count), [1 - 2**-53])) for count in range(1, 41)]
    assert ranked == order.tolist()


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(top_k=3), Sampling(top_p=0.7)])
def test_the_ends_of_the_range_draw_the_best_and_the_last_that_is_kept(sampling):
    last = int((draws(sampling) > 0).sum()) - 1
    ids = sample(LOGITS.expand(2, -1), sampling, [0.0, 1 - 2**-53])
    assert ids.tolist() == LOGITS.sort(descending=True).indices[[0, last]].tolist()


def test_a_number_draws_the_same_token_whatever_the_other_rows_are():
    numbers = uniforms(50)
    logits = torch.randn(50, 300, generator=torch.Generator().manual_seed(1))
    together = sample(logits, Sampling(top_p=0.9), numbers).tolist()
    assert together == [int(sample(logits[i : i + 1], Sampling(top_p=0.9), numbers[i : i + 1])) for i in range(50)]


def test_the_seed_of_a_row_depends_on_the_seed_the_prompt_and_its_repetitions_only():
    seeds, others = RowSeeds(1), RowSeeds(1)
    first, second, other = seeds([1, 2]), seeds([1, 2]), seeds([3])
    assert len({first, second, other, RowSeeds(2)([1, 2]), RowSeeds(1)([12]), RowSeeds(1)([])}) == 6
    assert [others([3]), others([1, 2]), others([1, 2])] == [other, first, second]
    # Pinned: texts of a seed are promised to stay.
    assert first == 2310113379906141673


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


def test_the_coldest_temperature_is_greedy():
    logits = torch.tensor([[-9.0, 1.0, 2.0], [-9.0, -1.0, -2.0]])
    assert sample(logits, Sampling(temperature=1e-40), [0.5, 0.5]).tolist() == [2, 1]


def test_a_tiny_top_p_is_greedy():
    assert draws(Sampling(top_p=1e-9))[1] == 1


def test_a_score_of_minus_infinity_is_never_drawn():
    logits = torch.zeros(1000, 4)
    logits[:, 2] = -torch.inf
    assert 2 not in sample(logits, Sampling(temperature=5.0), [*uniforms(999), 1 - 2**-53])


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
