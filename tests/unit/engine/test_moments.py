"""Optimizer state before there was a first step, as live views, with its step count."""

import pytest
import torch

from pretrain.engine.replicated import create_moments_of, set_optimizer_step, state_fragments
from pretrain.optim.matrices import Span, WeightPiece


def stepped(master, gradient, prepare=False):
    optimizer = torch.optim.AdamW([master], lr=0.1, fused=True)
    if prepare:
        create_moments_of(optimizer, master)
    for _ in range(3):
        master.grad = gradient.clone()
        optimizer.step()
    return optimizer.state[master]


@pytest.mark.parametrize("shape", [(3, 5), (7,), ()])
def test_state_made_before_the_first_step_is_what_adamw_makes_itself(shape):
    masters = [torch.nn.Parameter(torch.ones(shape)) for _ in range(2)]
    own, ours = (stepped(m, torch.full(shape, 0.5), prepare) for m, prepare in zip(masters, (False, True), strict=True))
    assert torch.equal(*masters)
    assert own.keys() == ours.keys()
    for key, tensor in own.items():
        assert (tensor.dtype, tensor.shape, tensor.device) == (ours[key].dtype, ours[key].shape, ours[key].device)
        assert torch.equal(tensor, ours[key])


def test_state_that_is_there_is_left_alone():
    master = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW([master])
    master.grad = torch.ones(4)
    optimizer.step()
    before = {key: tensor.clone() for key, tensor in optimizer.state[master].items()}
    create_moments_of(optimizer, master)
    assert before["exp_avg"].all()
    assert all(torch.equal(tensor, before[key]) for key, tensor in optimizer.state[master].items())


def test_fragments_are_live_views_of_a_part_of_the_master_and_of_its_moments():
    master = torch.nn.Parameter(torch.arange(12.0))
    optimizer = torch.optim.AdamW([master])
    spans = [Span("a", 0, 3, 2, 4), Span("b", 0, 0, 6, 5)]
    pieces = [WeightPiece(span, shape, master) for span, shape in zip(spans, ((2, 4), (5,)), strict=True)]
    first, second = state_fragments(optimizer, pieces)
    assert (first.name, first.offset, first.shape, first.length) == ("a", 3, (2, 4), 4)
    assert (second.name, second.offset, second.shape, second.length) == ("b", 0, (5,), 5)
    assert torch.equal(first.tensors["weight"], torch.tensor([2.0, 3.0, 4.0, 5.0]))
    for value, kind in enumerate(("weight", "exp_avg", "exp_avg_sq"), start=20):
        second.tensors[kind].fill_(value)
    state = optimizer.state[master]
    for value, whole in enumerate((master.data, state["exp_avg"], state["exp_avg_sq"]), start=20):
        assert whole.eq(value).tolist() == [False] * 6 + [True] * 5 + [False]


def test_the_step_count_is_set_on_all_state_and_the_next_step_counts_on():
    masters = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = torch.optim.AdamW(masters)
    for master in masters:
        create_moments_of(optimizer, master)
        master.grad = torch.ones(3)
    set_optimizer_step(optimizer, 41)
    optimizer.step()
    assert [float(state["step"]) for state in optimizer.state.values()] == [42.0, 42.0]


def test_a_tensor_without_a_count_of_its_own_is_left_alone():
    """Under ZeRO, the state of whole matrices is elsewhere; reading that of their tensor has made an empty one."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))])
    assert optimizer.state[optimizer.param_groups[0]["params"][0]] == {}
    set_optimizer_step(optimizer, 41)
    assert [*optimizer.state.values()] == [{}]
