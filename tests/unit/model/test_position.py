"""Learned and rotary positions."""

import torch

from pretrain.model.position import LearnedPosition, RotaryPosition, rotate


def rotation(positions, head_width=16, theta=10000.0):
    module = RotaryPosition(512, head_width, theta)
    x = torch.zeros(1, positions.shape[-1], 1)
    return module(x, positions[None], 0)[1]


def test_scores_of_rotated_vectors_depend_on_the_distance_only():
    q, k = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64)
    for distance in (0, 1, 17):
        starts = torch.tensor([0, 5, 100, 400])
        turned_q = rotate(q.expand(1, 4, 1, 16), rotation(starts + distance))
        turned_k = rotate(k.expand(1, 4, 1, 16), rotation(starts))
        scores = (turned_q * turned_k).sum(dim=-1)
        # The tables are fp32: 6e-8 relative each.
        torch.testing.assert_close(scores, scores[:, :1].expand_as(scores), rtol=0, atol=5e-6)


def test_rotation_turns_pairs_half_a_head_apart_by_position_times_frequency():
    x = torch.randn(1, 3, 2, 8, dtype=torch.float64)
    positions = torch.tensor([0, 3, 250])
    turned = rotate(x, rotation(positions, head_width=8))
    pairs, turned_pairs = (torch.complex(y[..., :4], y[..., 4:]) for y in (x, turned))
    angles = positions[:, None].double() * 10000.0 ** (-torch.arange(4, dtype=torch.float64) / 4)
    expected = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
    torch.testing.assert_close(turned_pairs, expected, rtol=0, atol=1e-6)
    assert torch.equal(turned[:, 0], x[:, 0])


def test_the_gradient_of_a_rotation_is_exact():
    x = torch.randn(1, 3, 2, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda y: rotate(y, rotation(torch.tensor([1, 2, 9]), head_width=8)), (x,))


def test_tables_stay_fp32_when_the_module_is_cast_to_bf16():
    module = RotaryPosition(16, 8, 10000.0).to(torch.bfloat16)
    angles = module(torch.zeros(1, 4, 1), None, 0)[1]
    assert angles.cos.dtype == angles.sin.dtype == torch.float32
    assert rotate(torch.ones(1, 4, 1, 8, dtype=torch.bfloat16), angles).dtype == torch.bfloat16


def test_given_positions_and_an_offset_read_the_same_rows():
    learned = LearnedPosition(8, 4)
    torch.nn.init.normal_(learned.weight)
    x = torch.zeros(2, 3, 4)
    positions = torch.tensor([[5, 6, 7]]).expand(2, 3)
    assert torch.equal(learned(x, positions, 0)[0], learned(x, None, 5)[0])
    rotary = RotaryPosition(8, 4, 100.0)
    assert torch.equal(rotary(x, positions, 0)[1].cos[0], rotary(x, None, 5)[1].cos)
