"""Attention backends against the formula, for every mask they serve."""

import itertools

import pytest
import torch

from pretrain.errors import ConfigError
from pretrain.model import backends
from pretrain.model.backends import BACKENDS, build_backend
from pretrain.model.backends.sdpa import SdpaAttention, document_lengths
from pretrain.types import AttentionMask
from tests.unit.model.tiny import CPU

RUNS = torch.tensor([[0, 0, 0, 1, 2, 2, 2, 2], [0, 0, 0, 0, 0, 0, 0, 0], [0, 1, 1, 1, 1, 2, 3, 3]], dtype=torch.int32)
INTERLEAVED = RUNS.flip(1)
MASKS = {
    "dense causal": (AttentionMask(causal=True), 8, 8),
    "bidirectional": (AttentionMask(causal=False), 8, 8),
    "packed causal": (AttentionMask(causal=True, documents_BT=RUNS), 8, 8),
    "packed bidirectional": (AttentionMask(causal=False, documents_BT=RUNS), 8, 8),
    "documents in any order": (AttentionMask(causal=True, documents_BT=INTERLEAVED), 8, 8),
    "one step of decoding": (AttentionMask(causal=True, query_offset=7), 1, 8),
    "a chunk of decoding": (AttentionMask(causal=True, query_offset=5), 3, 8),
    "keys of another sequence": (AttentionMask(causal=False, documents_BT=RUNS[:, :3], key_documents_BS=RUNS), 3, 8),
}


def inputs(queries, keys, *, kv_heads=2, dtype=torch.float64):
    """Random queries, keys, values, and a gradient of the output: 3 rows, 4 query heads of width 16."""
    generator = torch.Generator().manual_seed(1)
    shapes = ((queries, 4), (keys, kv_heads), (keys, kv_heads), (queries, 4))
    return [torch.randn(3, length, heads, 16, generator=generator, dtype=dtype) for length, heads in shapes]


def attend(name, mask, q, k, v):
    backend = build_backend(name, CPU)
    prepared = backend.prepare(mask, rows=3, queries=q.shape[1], keys=k.shape[1], device=CPU)
    return backend.attend(q, k, v, prepared, dropout=0.0)


def formula(mask, q, k, v):
    """Loops over every pair, and asks the declaration whether it is allowed."""
    key_documents = mask.documents_BT if mask.key_documents_BS is None else mask.key_documents_BS
    mixed = torch.zeros_like(q)
    for b, t, n in itertools.product(range(3), range(q.shape[1]), range(4)):
        seen = [s for s in range(k.shape[1]) if not mask.causal or s <= t + mask.query_offset]
        if mask.documents_BT is not None:
            seen = [s for s in seen if key_documents[b, s] == mask.documents_BT[b, t]]
        head = n // (4 // k.shape[2])
        mixed[b, t, n] = (k[b, seen, head] @ q[b, t, n] / 4).softmax(dim=0) @ v[b, seen, head]
    return mixed


@pytest.mark.parametrize("name", MASKS)
def test_eager_is_the_formula(name):
    mask, queries, keys = MASKS[name]
    q, k, v, _ = inputs(queries, keys)
    torch.testing.assert_close(attend("eager", mask, q, k, v), formula(mask, q, k, v), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", sorted(set(BACKENDS) - {"eager"}))
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
def test_backends_agree_with_the_float64_reference_forward_and_backward(name, mask, kv_heads, dtype, tolerance):
    declared, queries, keys = MASKS[mask]
    drawn = inputs(queries, keys, kv_heads=kv_heads, dtype=dtype)
    results = []
    for backend, used in ((name, drawn), ("eager", [x.double() for x in drawn])):
        q, k, v = (x.clone().requires_grad_() for x in used[:3])
        mixed = attend(backend, declared, q, k, v)
        results.append((mixed, *torch.autograd.grad(mixed, (q, k, v), used[3])))
    for found, expected in zip(*results, strict=True):
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", sorted(BACKENDS))
def test_grouped_query_attention_equals_its_expansion(name):
    q, k, v, _ = inputs(8, 8)
    mask = AttentionMask(causal=True)
    full = attend(name, mask, q, *(x[:, :, [0, 0, 1, 1]] for x in (k, v)))
    torch.testing.assert_close(attend(name, mask, q, k, v), full, rtol=1e-12, atol=1e-12)


def test_sdpa_materialises_no_mask_where_the_kernel_or_the_documents_do():
    def prepared(name):
        mask, queries, keys = MASKS[name]
        return SdpaAttention(CPU).prepare(mask, rows=3, queries=queries, keys=keys, device=CPU)

    assert prepared("dense causal").is_causal
    assert prepared("packed causal").lengths == (3, 1, 4, 8, 1, 4, 1, 2)
    assert prepared("packed bidirectional").lengths == (3, 1, 4, 8, 1, 4, 1, 2)
    without_a_mask = set(MASKS) - {"documents in any order", "a chunk of decoding", "keys of another sequence"}
    assert all(prepared(name).allowed is None for name in without_a_mask)


def test_rows_of_one_document_each_are_one_call():
    mask = AttentionMask(causal=True, documents_BT=torch.zeros(3, 8, dtype=torch.int32))
    prepared = SdpaAttention(CPU).prepare(mask, rows=3, queries=8, keys=8, device=CPU)
    assert prepared.lengths is None
    assert prepared.allowed is None
    assert prepared.is_causal


def test_document_lengths_are_none_where_documents_are_not_runs():
    assert document_lengths(RUNS) == (3, 1, 4, 8, 1, 4, 1, 2)
    assert document_lengths(INTERLEAVED) is None


def test_an_unknown_backend_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match=r"unknown engine\.attention 'spda'; use sdpa"):
        build_backend("spda", CPU)
    with pytest.raises(ConfigError, match="use auto or eager or sdpa"):
        build_backend("zzz", CPU)


def test_a_backend_says_why_it_cannot_serve_a_device(monkeypatch):
    def gpu_only(device):
        raise ConfigError(f"attention backend gpu_only has no kernel for {device.type}", fix="use sdpa")

    monkeypatch.setitem(backends.BACKENDS, "gpu_only", gpu_only)
    with pytest.raises(ConfigError, match="gpu_only has no kernel for cpu; use sdpa"):
        build_backend("gpu_only", CPU)
