"""Attention sinks: each backend against a softmax over the keys and one more, forward and backward."""

import itertools
import warnings

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from pretrain.errors import ConfigError
from pretrain.model.backends import build_backend, flex, varlen
from pretrain.model.backends.backend import AttentionNeeds, MaskSize
from pretrain.model.backends.flex import FlexAttention
from pretrain.model.backends.sinks import LseKernel, attend_with_sinks, sdpa_kernel_of
from pretrain.model.backends.varlen import VarlenAttention
from pretrain.types import AttentionMask
from tests.helpers.tables import pairwise
from tests.unit.model.masks import MASKS, NEEDS, ON_META, attend, inputs, meaningful, sees
from tests.unit.model.test_backend_varlen import SERVED

SINKS = torch.tensor([0.3, -2.0, 2.0, 5.0], dtype=torch.float64)
CUDA, META = torch.device("cuda"), torch.device("meta")


def run(name, mask, drawn):
    """Result and gradients of a backend, where they mean something."""
    weight = meaningful(mask, drawn[0].shape[1], drawn[1].shape[1]).to(drawn[0].dtype)
    leaves = [x.clone().requires_grad_() for x in (*drawn[:3], SINKS.to(drawn[0].dtype))]
    mixed = attend(name, mask, *leaves[:3], scale=0.5, sinks_N=leaves[3]) * weight
    # What sees nothing at all hangs on nothing.
    loss = (mixed * drawn[3]).sum() + sum(leaf.sum() * 0 for leaf in leaves)
    return (mixed, *torch.autograd.grad(loss, leaves))


@pytest.mark.parametrize("name", MASKS)
def test_eager_is_a_softmax_over_the_keys_and_the_sink(name):
    mask, queries, keys = MASKS[name]
    q, k, v, *_ = inputs(queries, keys)
    expected = torch.zeros_like(q)
    for b, t, n in itertools.product(range(3), range(queries), range(4)):
        seen = [s for s in range(keys) if sees(mask, b, t, s)]
        scores = torch.cat((k[b, seen, n // 2] @ q[b, t, n] * 0.5, SINKS[n : n + 1]))
        expected[b, t, n] = scores.softmax(dim=0)[:-1] @ v[b, seen, n // 2]
    found = attend("eager", mask, q, k, v, scale=0.5, sinks_N=SINKS)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


# fp32 rounds at 6e-8; a gradient of a key sums some ten products of four factors of up to 3.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-5}


@pairwise(mask=list(MASKS), kv_heads=[1, 2, 4], dtype=list(TOLERANCES))
def test_sdpa_agrees_with_the_reference_forward_and_backward(mask, kv_heads, dtype):
    tolerance = TOLERANCES[dtype]
    declared, queries, keys = MASKS[mask]
    drawn = inputs(queries, keys, kv_heads=kv_heads, dtype=dtype)
    expected = run("eager", declared, [x.double() for x in drawn])
    for found, reference in zip(run("sdpa", declared, drawn), expected, strict=True):
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), reference, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["eager", "sdpa"])
def test_a_sink_without_weight_is_none(name):
    mask, queries, keys = MASKS["window in documents"]
    q, k, v, *_ = inputs(queries, keys)
    found = attend(name, mask, q, k, v, sinks_N=torch.full((4,), -1e4, dtype=torch.float64))
    torch.testing.assert_close(found, attend(name, mask, q, k, v), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["packed causal", "window in documents", "packed and padded sources"])
def test_flex_scales_by_its_log_sum_exp(name, monkeypatch):
    plain = {"flex_attention": flex_attention, "create_block_mask": create_block_mask}
    monkeypatch.setattr(flex, "_compiled", plain.get)
    torch._dynamo.reset()
    warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
    mask, queries, keys = MASKS[name]
    q, k, v, *_ = inputs(queries, keys, dtype=torch.float32)
    sinks = SINKS.float().requires_grad_()
    found = attend(FlexAttention(ON_META), mask, q, k, v, scale=0.5, sinks_N=sinks)
    reference = SINKS.float().requires_grad_()
    expected = attend("eager", mask, q, k, v, scale=0.5, sinks_N=reference)
    # fp32, summed in another order. On a CPU torch refuses gradients of queries, keys and values.
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    pair = (torch.autograd.grad(out.square().sum(), one)[0] for out, one in ((found, sinks), (expected, reference)))
    torch.testing.assert_close(*pair, rtol=1e-5, atol=1e-5)


def written_out(prepared, scale):
    """A kernel of concatenated segments by its formulas, forward and backward."""

    def segments():
        starts = (itertools.pairwise(x.tolist()) for x in (prepared.query_starts, prepared.key_starts))
        left, right = prepared.window
        for (q_start, q_end), (k_start, k_end) in zip(*starts, strict=True):
            for t in range(q_start, q_end):
                level = k_end - (q_end - t)
                first = k_start if left < 0 else max(k_start, level - left)
                last = k_end - 1 if right < 0 else min(k_end - 1, level + right)
                yield t, slice(first, max(first, last + 1))

    def scores_of(q, k, t, keys):
        return torch.einsum("nh,snh->ns", q[t], k[keys].repeat_interleave(q.shape[1] // k.shape[1], dim=1)) * scale

    def forward(q, k, v):
        mixed, lse = torch.zeros_like(q), q.new_zeros(q.shape[:2])
        for t, keys in segments():
            scores = scores_of(q, k, t, keys)
            values = v[keys].repeat_interleave(q.shape[1] // v.shape[1], dim=1)
            lse[t] = scores.logsumexp(dim=1)
            mixed[t] = torch.einsum("ns,snh->nh", scores.softmax(dim=1), values)
        return mixed, lse, (lse.new_zeros(2),)

    def backward(grad, q, k, v, mixed, lse, state):
        grads = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        group = q.shape[1] // k.shape[1]
        products = (grad * mixed).sum(-1)
        for t, keys in segments():
            wide_k, wide_v = (x[keys].repeat_interleave(group, dim=1) for x in (k, v))
            weights = (scores_of(q, k, t, keys) - lse[t][:, None]).exp()
            of_scores = weights * (torch.einsum("nh,snh->ns", grad[t], wide_v) - products[t][:, None]) * scale
            grads[0][t] = torch.einsum("ns,snh->nh", of_scores, wide_k)
            for total, part in zip(grads[1:], (of_scores, weights), strict=True):
                other = (q if part is of_scores else grad)[t]
                total[keys] += torch.einsum("ns,nh->snh", part, other).unflatten(1, (-1, group)).sum(2)
        return grads

    return LseKernel(forward, backward)


@pytest.mark.parametrize("name", SERVED)
def test_varlen_agrees_with_the_reference_forward_and_backward(name):
    backend = VarlenAttention(ON_META)
    backend.dtype, backend.lse_kernel = torch.float64, written_out
    mask, queries, keys = MASKS[name]
    drawn = inputs(queries, keys)
    for found, expected in zip(run(backend, mask, drawn), run("eager", mask, drawn), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_torchs_kernel_of_segments_is_called_as_it_is_declared():
    mask, queries, keys = MASKS["window in documents"]
    backend = VarlenAttention(ON_META)
    size = MaskSize(3, queries, keys, torch.device("cpu"))
    prepared = backend.prepare(mask, size)
    q, k, v, *_ = (x.to(META, torch.bfloat16).requires_grad_() for x in inputs(queries, keys))
    sinks = SINKS.to(META).requires_grad_()
    mixed = backend.attend(q, k, v, prepared, sinks_N=sinks)
    grads = torch.autograd.grad(mixed.sum(), (q, k, v, sinks))
    assert [mixed.shape, *(grad.shape for grad in grads)] == [q.shape, q.shape, k.shape, v.shape, sinks.shape]


@pytest.mark.parametrize("masked", [False, True])
def test_the_kernel_of_a_gpu_is_called_as_it_is_declared(masked):
    q, k, v = (torch.empty(2, 4, 40, 16, device=META, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    allowed = torch.empty(2, 1, 40, 40, dtype=torch.bool, device=META) if masked else None
    sinks = torch.empty(4, 1, device=META, requires_grad=True)
    kernel = sdpa_kernel_of(CUDA, allowed, is_causal=not masked, scale=None)
    mixed = attend_with_sinks(q, k, v, sinks, kernel)
    grads = torch.autograd.grad(mixed.sum(), (q, k, v, sinks))
    assert [mixed.shape, *(grad.shape for grad in grads)] == [q.shape, q.shape, k.shape, v.shape, sinks.shape]


@pytest.mark.parametrize("mask", ["dense causal", "window"])
def test_autocast_gives_bf16_and_gradients_in_fp32(mask):
    declared, queries, keys = MASKS[mask]
    leaves = [x.requires_grad_() for x in (*inputs(queries, keys, dtype=torch.float32)[:3], SINKS.float())]
    with torch.autocast("cpu", torch.bfloat16):
        mixed = attend("sdpa", declared, *leaves[:3], sinks_N=leaves[3])
    assert mixed.dtype == torch.bfloat16
    assert all(grad.dtype == torch.float32 for grad in torch.autograd.grad(mixed.sum(), leaves))


def test_a_compiled_block_has_the_same_gradients():
    torch._dynamo.reset()
    drawn = inputs(8, 8)
    mask = AttentionMask(causal=True)
    backend = build_backend("sdpa", NEEDS)
    prepared = backend.prepare(mask, MaskSize(3, 8, 8, torch.device("cpu")))

    def block(q, k, v, sinks):
        return backend.attend(q * 2, k, v, prepared, sinks_N=sinks) + 1

    found = []
    for function in (block, torch.compile(block, backend="aot_eager", fullgraph=True)):
        leaves = [x.clone().requires_grad_() for x in (*drawn[:3], SINKS)]
        found.append(torch.autograd.grad((function(*leaves) * drawn[3]).sum(), leaves))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["auto", "sdpa"])
@pytest.mark.parametrize(
    ("needs", "message"),
    [
        ({"dropout": True}, "sdpa has no dropout of attention weights beside attention sinks; leave one of them out"),
        ({"bias": True}, "sdpa adds no bias beside attention sinks; leave one of them out"),
    ],
)  # fmt: skip
def test_what_does_not_go_with_sinks_is_refused(name, needs, message):
    with pytest.raises(ConfigError, match=message):
        build_backend(name, AttentionNeeds(torch.device("cpu"), sinks=True, **needs))


def test_varlen_needs_torchs_own_kernel(monkeypatch):
    monkeypatch.setattr(varlen, "_load_kernel", lambda: varlen._call_flash_attn)
    with pytest.raises(ConfigError, match=r"varlen has no attention sinks with this kernel; install torch"):
        build_backend("varlen", AttentionNeeds(CUDA, torch.bfloat16, sinks=True))
