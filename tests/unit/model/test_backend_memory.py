"""Memory that attention keeps for its backward pass: linear in length with `sdpa`, quadratic with the reference."""

import math

import pytest
import torch

from pretrain.model.backends.backend import DistanceBias, MaskSize
from pretrain.model.backends.eager import EagerAttention
from pretrain.model.backends.sdpa import SdpaAttention
from pretrain.types import AttentionMask
from tests.unit.model.masks import CPU, NEEDS


def linear_cases(length):
    """What must be linear in length: a mask, a bias, a probability of dropout."""
    documents = (torch.arange(length) // (length // 4)).expand(2, length).int()
    lengths = torch.tensor([length // 2, length], dtype=torch.int32)
    bias = DistanceBias(torch.zeros(4, 2 * length - 1, requires_grad=True))
    return {
        "dense causal": (AttentionMask(causal=True), None, 0.0),
        "documents": (AttentionMask(causal=True, documents_BT=documents), None, 0.0),
        "documents in bits": (
            AttentionMask(causal=True, documents_BT=torch.arange(length).expand(2, -1) % 7),
            None,
            0.0,
        ),
        "window": (AttentionMask(causal=True, window=50), None, 0.0),
        "window of both sides in documents": (AttentionMask(False, documents, window=50), None, 0.0),
        "padding": (AttentionMask(causal=False, key_lengths_B=lengths), None, 0.0),
        "prefix": (AttentionMask(causal=True, prefix_BS=torch.arange(length).expand(2, -1) < 9), None, 0.0),
        "dropout": (AttentionMask(causal=True), None, 0.1),
        "dropout in documents": (AttentionMask(causal=True, documents_BT=documents), None, 0.1),
        "learned bias": (AttentionMask(causal=False), bias, 0.0),
        "learned bias and dropout in documents": (AttentionMask(causal=True, documents_BT=documents), bias, 0.1),
    }


def saved_bytes(backend, length, case):
    """Bytes that one attention of 2 rows keeps for its backward pass."""
    mask, bias, dropout = linear_cases(length)[case]
    q, k, v = (torch.zeros(2, length, heads, 16, requires_grad=True) for heads in (4, 2, 2))
    prepared = backend.prepare(mask, MaskSize(2, length, length, CPU), bias)
    total = 0

    def count(tensor):
        nonlocal total
        total += tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        backend.attend(q, k, v, prepared, dropout=dropout)
    return total


def slope(backend, case):
    """Exponent of the growth of memory with length, over two doublings; the larger of the two."""
    small, middle, large = (saved_bytes(backend, length, case) for length in (256, 512, 1024))
    return max(math.log2(middle / small), math.log2(large / middle))


@pytest.mark.parametrize("case", linear_cases(256))
def test_memory_kept_for_the_backward_pass_is_linear_in_length(case):
    assert slope(SdpaAttention(NEEDS), case) <= 1.05


@pytest.mark.parametrize("case", ["dense causal", "dropout", "learned bias"])
def test_the_reference_keeps_memory_that_is_quadratic_in_length(case):
    assert slope(EagerAttention(NEEDS), case) >= 1.9
