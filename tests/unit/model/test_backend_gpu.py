"""Attention backends on a GPU, in bf16, against the reference in float64: every mask that each of them claims."""

import math
from dataclasses import replace

import pytest
import torch

from pretrain.errors import ConfigError
from pretrain.model.backends import build_backend
from pretrain.model.backends.backend import AttentionNeeds, DistanceBias, MaskSize
from pretrain.types import AttentionMask
from tests.unit.model.masks import MASKS, inputs, meaningful

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CUDA = torch.device("cuda")
STRETCH = 32
"""Times that the small masks are drawn larger, so that tiles of a kernel meet documents that end within them."""

COMPILED = [
    "dense causal",
    "packed causal",
    "window of both sides in documents",
    "padded",
    "prefix and window",
    "packed and padded sources",
    "a chunk of decoding",
]
"""Masks for what compiles a kernel for each: those that show every part of it."""

# bf16 rounds at 2^-9 of a value; inputs, weights and sums are rounded, so a tensor is off by about a hundredth.
BF16_TOLERANCE = 0.02


def stretched(name):
    """A mask of the list on the GPU with every position repeated, its queries and keys; windows stay odd."""
    mask, queries, keys = MASKS[name]

    def repeat(tensor):
        return None if tensor is None else tensor.repeat_interleave(STRETCH, dim=1).to(CUDA)

    larger = replace(
        mask,
        documents_BT=repeat(mask.documents_BT),
        key_documents_BS=repeat(mask.key_documents_BS),
        key_lengths_B=None if mask.key_lengths_B is None else (mask.key_lengths_B * STRETCH - 3).to(CUDA),
        window=None if mask.window is None else mask.window * STRETCH - 5,
        prefix_BS=repeat(mask.prefix_BS),
        query_offset=mask.query_offset * STRETCH,
    )
    return larger, queries * STRETCH, keys * STRETCH


def run(name, mask, drawn, *, biased, dtype):
    """Output and gradients of a backend, or None where it says that it cannot."""
    needs = AttentionNeeds(CUDA, dtype, head_width=16, bias=biased)
    leaves = [x.to(CUDA, dtype).requires_grad_() for x in drawn[:3]]
    values = drawn[4].to(CUDA, torch.promote_types(dtype, torch.float32)).requires_grad_()
    bias = DistanceBias(values) if biased else None
    try:
        backend = build_backend(name, needs)
        size = MaskSize(3, drawn[0].shape[1], drawn[1].shape[1], CUDA)
        prepared = backend.prepare(mask, size, bias)
    except ConfigError:
        return None
    weight = meaningful(mask, size["queries"], size["keys"]).to(CUDA, dtype)
    mixed = backend.attend(*leaves, prepared) * weight
    leaves = [*leaves, values] if biased else leaves
    loss = (mixed * drawn[3].to(CUDA, dtype)).float().sum() + sum(leaf.sum() * 0 for leaf in leaves)
    return mixed, *torch.autograd.grad(loss, leaves)


def check(name, case, *, biased, dtype=torch.bfloat16, tolerance=BF16_TOLERANCE):
    mask, queries, keys = stretched(case)
    drawn = [x.to(dtype).double() for x in inputs(queries, keys)]
    found = run(name, mask, drawn, biased=biased, dtype=dtype)
    if found is None:
        pytest.skip(f"{name} does not claim this mask")
    expected = run("eager", mask, drawn, biased=biased, dtype=torch.float64)
    for tensor, reference in zip(found, expected, strict=True):
        assert tensor.isfinite().all()
        assert (tensor.double() - reference).norm() <= tolerance * reference.norm() + 1e-6


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("case", MASKS)
@pytest.mark.parametrize("name", ["eager", "sdpa", "varlen"])
def test_a_backend_agrees_with_the_reference_forward_and_backward(name, case, biased):
    check(name, case, biased=biased)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("case", COMPILED)
@pytest.mark.parametrize("name", ["flex", "auto"])
def test_a_compiled_kernel_agrees_with_the_reference_forward_and_backward(name, case, biased):
    torch._dynamo.reset()
    check(name, case, biased=biased)


def test_flex_agrees_in_fp32():
    torch._dynamo.reset()
    # Products of fp32 may be done in TF32, of 10 bits.
    check("flex", "window in documents", biased=True, dtype=torch.float32, tolerance=5e-3)


@pytest.mark.parametrize("name", ["sdpa", "flex", "varlen"])
def test_a_query_that_sees_nothing_gets_and_gives_zero(name):
    torch._dynamo.reset()
    documents = torch.tensor([[0] * 100 + [7] * 50 + [8] * 106] * 3, dtype=torch.int32, device=CUDA)
    mask = AttentionMask(False, documents, key_documents_BS=documents.masked_fill(documents == 7, 8))
    drawn = inputs(256, 256)
    mixed, *gradients = run(name, mask, drawn, biased=False, dtype=torch.bfloat16)
    assert mixed[:, 100:150].eq(0).all()
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert gradients[0][:, 100:150].eq(0).all()


@pytest.mark.parametrize("biased", [False, True])
def test_the_backward_pass_drops_the_same_weights(biased):
    backend = build_backend("sdpa", AttentionNeeds(CUDA, torch.float32, head_width=16, bias=biased, dropout=True))
    q, k, v, upper, values = (x.float().to(CUDA) for x in inputs(300, 300))
    bias = DistanceBias(values.requires_grad_()) if biased else None
    mask = AttentionMask(causal=True)
    prepared = backend.prepare(mask, MaskSize(3, 300, 300, CUDA), bias)
    mixed = backend.attend(q, k, v.requires_grad_(), prepared, dropout=0.3)
    gradient = torch.autograd.grad(mixed, v, upper, retain_graph=True)[0]
    # The output is linear in the values: <upper, W v> = <W' upper, v> if W is the same in both passes. fp32, and sums
    # of some 60,000 products.
    assert (gradient * v).sum().item() == pytest.approx((upper * mixed).sum().item(), rel=1e-3, abs=1e-1)


CASES_OF_MEMORY = {
    "sdpa causal": ("sdpa", False, False, 0.0),
    "sdpa dropout": ("sdpa", False, False, 0.1),
    "sdpa bias": ("sdpa", False, True, 0.0),
    "sdpa bias and dropout": ("sdpa", False, True, 0.1),
    "sdpa fp32": ("sdpa", False, False, 0.0, torch.float32),
    "sdpa fp32 grouped": ("sdpa", False, False, 0.0, torch.float32, 2),
    "sdpa bias grouped": ("sdpa", False, True, 0.0, torch.bfloat16, 2),
    "varlen documents": ("varlen", True, False, 0.0),
    "flex documents": ("flex", True, False, 0.0),
    "flex documents and bias": ("flex", True, True, 0.0),
}


def peak_bytes(name, documents, biased, dropout, dtype=torch.bfloat16, kv_heads=8, *, length):
    """Most bytes that one attention holds, forward and backward."""
    needs = AttentionNeeds(CUDA, dtype, head_width=64, bias=biased, dropout=dropout > 0)
    backend = build_backend(name, needs)
    heads = (8, kv_heads, kv_heads)
    q, k, v = (torch.randn(1, length, n, 64, device=CUDA, dtype=dtype, requires_grad=True) for n in heads)
    values = torch.randn(8, 2 * length - 1, device=CUDA, requires_grad=True)
    numbers = (torch.arange(length, device=CUDA) // (length // 4))[None].int() if documents else None

    def step():
        mask, bias = AttentionMask(causal=True, documents_BT=numbers), DistanceBias(values) if biased else None
        prepared = backend.prepare(mask, MaskSize(1, length, length, CUDA), bias)
        backend.attend(q, k, v, prepared, dropout=dropout).sum().backward()

    step()  # What compiling needs is not counted.
    torch.cuda.reset_peak_memory_stats()
    step()
    return torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("case", CASES_OF_MEMORY)
def test_peak_memory_is_linear_in_length(case):
    torch._dynamo.reset()
    small, large = (peak_bytes(*CASES_OF_MEMORY[case], length=length) for length in (4096, 16384))
    # Four times the length, at most four times the memory and a tenth.
    assert math.log(large / small, 4) <= 1.1


@pytest.mark.parametrize("name", ["sdpa", "flex", "varlen"])
def test_a_compiled_block_agrees_with_the_plain_one(name):
    torch._dynamo.reset()
    backend = build_backend(name, AttentionNeeds(CUDA, torch.bfloat16, head_width=16))
    project = torch.nn.Linear(64, 192, device=CUDA, dtype=torch.bfloat16)

    def block(x, prepared):
        q, k, v = project(x).unflatten(-1, (12, 16)).split((4, 4, 4), dim=2)
        return backend.attend(q, k, v, prepared).flatten(2)

    compiled = torch.compile(block)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        documents = (torch.rand(2, 256, generator=generator) < 0.05).cumsum(1).int().to(CUDA)
        mask = AttentionMask(causal=True, documents_BT=documents)
        prepared = backend.prepare(mask, MaskSize(2, 256, 256, CUDA))
        x = torch.randn(2, 256, 64, generator=generator).to(CUDA, torch.bfloat16)
        found, expected = (
            (mixed, torch.autograd.grad(mixed.float().square().sum(), project.weight)[0])
            for mixed in (compiled(x, prepared), block(x, prepared))
        )
        for tensor, reference in zip(found, expected, strict=True):
            assert (tensor - reference).norm() <= BF16_TOLERANCE * reference.norm()
