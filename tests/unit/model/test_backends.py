"""Attention backends against the formula, for every mask they serve."""

import itertools

import pytest
import torch

from pretrain.errors import ConfigError
from pretrain.model import backends
from pretrain.model.backends import build_backend
from pretrain.model.backends.backend import AttentionNeeds, DistanceBias
from pretrain.types import AttentionMask

CPU = torch.device("cpu")
NEEDS = AttentionNeeds(CPU, torch.float64, head_width=16)
ON_CPU = ["eager", "sdpa"]

RUNS = torch.tensor([[0, 0, 0, 1, 2, 2, 2, 2], [0, 0, 0, 0, 0, 0, 0, 0], [0, 1, 1, 1, 1, 2, 3, 3]], dtype=torch.int32)
SHORT_RUNS = torch.tensor([[0, 1, 1, 2, 2], [0, 0, 0, 0, 0], [1, 1, 2, 2, 4]], dtype=torch.int32)
PADDED = torch.tensor(
    [[-1, -1, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0], [-1, 0, 0, 0, 0, 0, 0, 0]], dtype=torch.int32
)
INTERLEAVED = torch.tensor([[0, 1, 0, 1, 2, 2, 0, 1]] * 3, dtype=torch.int32)
LENGTHS = torch.tensor([8, 3, 5], dtype=torch.int32)
PREFIX = torch.arange(8) < torch.tensor([[3], [0], [6]])
MASKS = {
    "dense causal": (AttentionMask(causal=True), 8, 8),
    "bidirectional": (AttentionMask(causal=False), 8, 8),
    "packed causal": (AttentionMask(causal=True, documents_BT=RUNS), 8, 8),
    "packed bidirectional": (AttentionMask(causal=False, documents_BT=RUNS), 8, 8),
    "documents in bits": (AttentionMask(causal=True, documents_BT=INTERLEAVED), 8, 8),
    "documents in falling order": (AttentionMask(causal=True, documents_BT=RUNS.flip(1)), 8, 8),
    "padded": (AttentionMask(causal=False, key_lengths_B=LENGTHS), 8, 8),
    "padded causal": (AttentionMask(causal=True, key_lengths_B=LENGTHS), 8, 8),
    "packed and padded": (AttentionMask(causal=True, documents_BT=RUNS, key_lengths_B=LENGTHS), 8, 8),
    "window": (AttentionMask(causal=True, window=3), 8, 8),
    "window of both sides": (AttentionMask(causal=False, window=2), 8, 8),
    "window that hides nothing": (AttentionMask(causal=True, window=8), 8, 8),
    "window in documents": (AttentionMask(causal=True, documents_BT=RUNS, window=2), 8, 8),
    "window of both sides in documents": (AttentionMask(causal=False, documents_BT=RUNS, window=2), 8, 8),
    "window and padding": (AttentionMask(causal=False, key_lengths_B=LENGTHS, window=3), 8, 8),
    "prefix": (AttentionMask(causal=True, prefix_BS=PREFIX), 8, 8),
    "prefix in documents": (AttentionMask(causal=True, documents_BT=RUNS, prefix_BS=PREFIX), 8, 8),
    "prefix and padding": (AttentionMask(causal=True, key_lengths_B=LENGTHS, prefix_BS=PREFIX), 8, 8),
    "prefix and window": (AttentionMask(causal=True, prefix_BS=PREFIX, window=3), 8, 8),
    "one step of decoding": (AttentionMask(causal=True, query_offset=7), 1, 8),
    "a chunk of decoding": (AttentionMask(causal=True, query_offset=5), 3, 8),
    "one step with a window": (AttentionMask(causal=True, window=3, query_offset=7), 1, 8),
    "a chunk with a window": (AttentionMask(causal=True, window=3, query_offset=5), 3, 8),
    "prompts padded before": (AttentionMask(causal=True, documents_BT=PADDED, key_documents_BS=PADDED), 8, 8),
    "one step after padding": (
        AttentionMask(causal=True, documents_BT=PADDED[:, 7:], key_documents_BS=PADDED, query_offset=7),
        1,
        8,
    ),
    "one step over padded keys": (AttentionMask(causal=True, key_lengths_B=LENGTHS, query_offset=7), 1, 8),
    "a shorter source": (AttentionMask(causal=False), 8, 5),
    "a padded source": (AttentionMask(causal=False, key_lengths_B=LENGTHS), 5, 8),
    "one step over a padded source": (AttentionMask(causal=False, key_lengths_B=LENGTHS), 1, 8),
    "packed sources": (AttentionMask(causal=False, documents_BT=SHORT_RUNS, key_documents_BS=RUNS), 5, 8),
    "packed and padded sources": (
        AttentionMask(causal=False, documents_BT=SHORT_RUNS, key_documents_BS=RUNS, key_lengths_B=LENGTHS),
        5,
        8,
    ),
}


def inputs(queries, keys, *, kv_heads=2, dtype=torch.float64):
    """Random queries, keys, values, a gradient of the output, and a bias: 3 rows, 4 query heads of width 16."""
    generator = torch.Generator().manual_seed(1)
    shapes = ((queries, 4), (keys, kv_heads), (keys, kv_heads), (queries, 4))
    drawn = [torch.randn(3, length, heads, 16, generator=generator, dtype=dtype) for length, heads in shapes]
    return [*drawn, torch.randn(4, queries + keys - 1, generator=generator, dtype=dtype)]


def attend(name, mask, q, k, v, values=None, **options):
    backend = build_backend(name, NEEDS)
    size = {"rows": q.shape[0], "queries": q.shape[1], "keys": k.shape[1], "device": CPU}
    prepared = backend.prepare(mask, **size, bias=None if values is None else DistanceBias(values))
    return backend.attend(q, k, v, prepared, **options)


def sees(mask, row, t, s):
    """Asks the declaration about one pair."""
    key_documents = mask.documents_BT if mask.key_documents_BS is None else mask.key_documents_BS
    distance = t + mask.query_offset - s
    return (
        (not mask.causal or distance >= 0 or (mask.prefix_BS is not None and bool(mask.prefix_BS[row, s])))
        and (mask.window is None or abs(distance) < mask.window)
        and (mask.documents_BT is None or bool(mask.documents_BT[row, t] == key_documents[row, s]))
        and (mask.key_lengths_B is None or s < int(mask.key_lengths_B[row]))
    )


def formula(mask, q, k, v, values=None, scale=0.25):
    """Loops over every pair; what sees nothing gets 0."""
    mixed = torch.zeros_like(q)
    for b, t, n in itertools.product(range(3), range(q.shape[1]), range(4)):
        seen = [s for s in range(k.shape[1]) if sees(mask, b, t, s)]
        head = n // (4 // k.shape[2])
        scores = k[b, seen, head] @ q[b, t, n] * scale
        if values is not None:
            scores = scores + values[n, [s - t + q.shape[1] - 1 for s in seen]]
        mixed[b, t, n] = scores.softmax(dim=0) @ v[b, seen, head]
    return mixed


def meaningful(mask, queries):
    """1 for queries whose output means something, [B, T, 1, 1]: under `causal`, padding is padding as a query too."""
    own = mask.causal and mask.key_lengths_B is not None and mask.documents_BT is None and queries == 8
    if not own:
        return torch.ones(3, queries, 1, 1, dtype=torch.float64)
    return (torch.arange(queries) < mask.key_lengths_B[:, None])[:, :, None, None].double()


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_eager_is_the_formula(name, biased):
    mask, queries, keys = MASKS[name]
    q, k, v, _, values = inputs(queries, keys)
    values = values if biased else None
    found, scaled = attend("eager", mask, q, k, v, values), attend("eager", mask, q, k, v, values, scale=1.0)
    torch.testing.assert_close(found, formula(mask, q, k, v, values), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(scaled, formula(mask, q, k, v, values, 1.0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", sorted(set(ON_CPU) - {"eager"}))
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
def test_backends_agree_with_the_float64_reference_forward_and_backward(name, mask, biased, kv_heads, dtype, tolerance):
    declared, queries, keys = MASKS[mask]
    drawn = inputs(queries, keys, kv_heads=kv_heads, dtype=dtype)
    weight = meaningful(declared, queries)
    results = []
    for backend, used in ((name, drawn), ("eager", [x.double() for x in drawn])):
        leaves = [x.clone().requires_grad_() for x in (*used[:3], *([used[4]] if biased else []))]
        mixed = attend(backend, declared, *leaves, scale=0.5)
        gradients = torch.autograd.grad(mixed, leaves, used[3] * weight.to(mixed.dtype))
        results.append((mixed * weight.to(mixed.dtype), *gradients))
    for found, expected in zip(*results, strict=True):
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ON_CPU)
def test_grouped_query_attention_equals_its_expansion(name):
    q, k, v, *_ = inputs(8, 8)
    mask = AttentionMask(causal=True)
    full = attend(name, mask, q, *(x[:, :, [0, 0, 1, 1]] for x in (k, v)))
    torch.testing.assert_close(attend(name, mask, q, k, v), full, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ON_CPU)
def test_a_query_that_sees_nothing_gets_and_gives_zero(name):
    documents = torch.tensor([[0, 0, 7, 1, 1, 1, 1, 1]] * 3, dtype=torch.int32)
    mask = AttentionMask(causal=False, documents_BT=documents, key_documents_BS=documents.clamp(max=1))
    q, k, v = (x.requires_grad_() for x in inputs(8, 8)[:3])
    mixed = attend(name, mask, q, k, v)
    assert mixed[:, 2].eq(0).all()
    gradients = torch.autograd.grad(mixed.sum(), (q, k, v))
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert gradients[0][:, 2].eq(0).all()


def test_an_unknown_backend_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match=r"unknown engine\.attention 'spda'; use sdpa"):
        build_backend("spda", NEEDS)
    with pytest.raises(ConfigError, match="use auto or eager or sdpa"):
        build_backend("zzz", NEEDS)


def test_a_backend_says_why_it_cannot_serve_a_device(monkeypatch):
    def gpu_only(needs):
        raise ConfigError(f"attention backend gpu_only has no kernel for {needs.device.type}", fix="use sdpa")

    monkeypatch.setitem(backends.BACKENDS, "gpu_only", gpu_only)
    with pytest.raises(ConfigError, match="gpu_only has no kernel for cpu; use sdpa"):
        build_backend("gpu_only", NEEDS)
