"""State that every rank holds whole: its gradient is clipped or dropped by us, and all ranks save even shares of it."""

import math

import pytest
import torch

from pretrain.dist import World
from pretrain.engine.replicated import ReplicatedState, clip_or_drop

LENGTHS = {"one": (2, 50), "two": (101,), "small": (1,)}


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_each_rank_saves_an_even_share_of_each_parameter_and_its_moments(size):
    masters = [(name, torch.nn.Parameter(torch.randn(shape))) for name, shape in LENGTHS.items()]
    optimizer = torch.optim.AdamW([master for _, master in masters])
    states = [ReplicatedState(masters, optimizer, World(rank, size, rank)) for rank in range(size)]
    shares = [list(state.owned_fragments()) for state in states]
    for name, master in masters:
        pieces = sorted((f for share in shares for f in share if f.name == name), key=lambda f: f.offset)
        even = master.numel() / size
        assert all(abs(piece.length - even) < 1 for piece in pieces)
        for kind in ("weight", "exp_avg", "exp_avg_sq"):
            assert all(piece.tensors[kind].numel() == piece.length for piece in pieces)
        whole = torch.cat([piece.tensors["weight"] for piece in pieces])
        assert torch.equal(whole, master.detach().view(-1))


def with_gradients(*gradients):
    """Parameters of one element with these gradients; None: without."""
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = None if gradient is None else torch.tensor([float(gradient)])
    return parameters


def gradients_of(parameters):
    return [None if parameter.grad is None else float(parameter.grad) for parameter in parameters]


@pytest.mark.parametrize(
    ("clip", "after"),
    [(0.0, [3.0, 4.0]), (10.0, [3.0, 4.0]), (5.1, [3.0, 4.0]), (1.0, [0.6, 0.8]), (0.5, [0.3, 0.4])],
)
def test_a_gradient_is_clipped_to_a_global_norm_that_is_told_as_it_was(clip, after):
    parameters = with_gradients(3, None, 4)
    update = clip_or_drop(parameters, clip)
    assert (update.grad_norm, update.skipped) == (5.0, False)
    first, absent, last = gradients_of(parameters)
    assert absent is None
    assert [first, last] == pytest.approx(after, rel=1e-5)  # torch adds 1e-6 to the norm that it divides by


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_one_element_that_is_not_finite_drops_every_gradient(bad, clip):
    parameters = with_gradients(3, bad, 4)
    update = clip_or_drop(parameters, clip)
    assert update.skipped
    assert not math.isfinite(update.grad_norm)
    assert gradients_of(parameters) == [None, None, None]


def test_a_good_gradient_is_dropped_on_demand_and_its_norm_told():
    parameters = with_gradients(3, 4)
    update = clip_or_drop(parameters, 1.0, drop=True)
    assert (update.grad_norm, update.skipped) == (5.0, True)
    assert gradients_of(parameters) == [None, None]


def test_no_gradient_at_all_is_a_norm_of_zero():
    parameters = with_gradients(None, None)
    update = clip_or_drop(parameters, 1.0)
    assert (update.grad_norm, update.skipped) == (0.0, False)


@pytest.mark.parametrize("mark", [{"ds_tensor": torch.ones(1)}, {"to_local": None}, {"allreduce": False}], ids=str)
def test_a_gradient_that_other_ranks_have_no_or_another_part_of_is_not_clipped_by_this_rank_s_norm(mark):
    parameters = with_gradients(3, 4)
    vars(parameters[1]).update(mark)
    with pytest.raises(AssertionError, match="a norm over several process groups"):
        clip_or_drop(parameters, 1.0)
    assert gradients_of(parameters) == [3.0, 4.0]
    parameters[1].__dict__ = {"allreduce": True}
    assert clip_or_drop(parameters, 1.0).grad_norm == 5.0
