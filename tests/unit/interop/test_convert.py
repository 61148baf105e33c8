"""The arithmetic of one weight: values move, and never change."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from pretrain.families.family import Weight
from pretrain.interop.tensors import from_theirs, their_shapes, to_theirs


def numbered(*shape):
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)


def test_parts_are_stacked_in_their_order():
    weight = Weight("qkv", (("q", 4), ("k", 2), ("v", 2)))
    q, k, v = numbered(4, 3), 100 + numbered(2, 3), 200 + numbered(2, 3)
    ours = from_theirs(weight, [q, k, v], (8, 3))
    assert torch.equal(ours, torch.cat([q, k, v]))
    assert [(name, tensor.tolist()) for name, tensor in to_theirs(weight, ours)] == [
        ("q", q.tolist()), ("k", k.tolist()), ("v", v.tolist()),
    ]  # fmt: skip


def test_a_matrix_stored_as_in_by_out_is_transposed():
    weight = Weight("up", (("c_fc", 5),), transposed=True)
    theirs = numbered(3, 5)
    ours = from_theirs(weight, [theirs], (5, 3))
    assert torch.equal(ours, theirs.t())
    assert torch.equal(to_theirs(weight, ours)[0][1], theirs)
    assert their_shapes(weight, (5, 3)) == {"c_fc": (3, 5)}


def test_the_vocabulary_is_padded_with_zeros_and_cut_again():
    weight = Weight("embedding", (("wte", 5),), vocab=True)
    theirs = 1 + numbered(5, 2)
    ours = from_theirs(weight, [theirs], (8, 2))
    assert torch.equal(ours[:5], theirs)
    assert not ours[5:].any()
    assert torch.equal(to_theirs(weight, ours)[0][1], theirs)


def test_a_row_becomes_a_vector():
    weight = Weight("head.bias", (("final_logits_bias", 5),), vocab=True, row=True)
    theirs = 1 + numbered(1, 5)
    ours = from_theirs(weight, [theirs], (8,))
    assert ours.tolist() == [1, 2, 3, 4, 5, 0, 0, 0]
    assert torch.equal(to_theirs(weight, ours)[0][1], theirs)
    assert their_shapes(weight, (5,)) == {"final_logits_bias": (1, 5)}


def test_what_is_made_is_no_view_of_what_was_read():
    theirs = numbered(2, 2)
    ours = from_theirs(Weight("a", (("b", 2),)), [theirs], (2, 2))
    ours.zero_()
    assert theirs[1, 1] == 3


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.integers(1, 4),
    st.booleans(),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_there_and_back_is_bit_identical(rows, width, transposed, dtype):
    weight = Weight("ours", tuple((f"part{i}", n) for i, n in enumerate(rows)), transposed=transposed)
    ours = torch.randn(sum(rows), width).to(dtype)
    theirs = to_theirs(weight, ours)
    assert {name: tuple(tensor.shape) for name, tensor in theirs} == their_shapes(weight, tuple(ours.shape))
    again = from_theirs(weight, [tensor for _, tensor in theirs], tuple(ours.shape))
    assert again.dtype == dtype
    assert torch.equal(again, ours)
