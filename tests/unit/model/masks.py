"""Masks for tests of attention backends, and what each of them means, pair by pair."""

import itertools

import torch

from pretrain.model.backends import build_backend
from pretrain.model.backends.backend import AttentionNeeds, DistanceBias, MaskSize, pads_queries
from pretrain.types import AttentionMask

CPU = torch.device("cpu")
NEEDS = AttentionNeeds(CPU, torch.float64, head_width=16)
ON_META = AttentionNeeds(torch.device("meta"), torch.bfloat16, head_width=16)
"""Of a model that is built on the meta device, and may run anywhere."""

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


def inputs(queries, keys, *, rows=3, kv_heads=2, dtype=torch.float64):
    """Random queries, keys, values, a gradient of the output, and a bias: 4 query heads of width 16."""
    generator = torch.Generator().manual_seed(1)
    shapes = ((queries, 4), (keys, kv_heads), (keys, kv_heads), (queries, 4))
    drawn = [torch.randn(rows, length, heads, 16, generator=generator, dtype=dtype) for length, heads in shapes]
    return [*drawn, torch.randn(4, queries + keys - 1, generator=generator, dtype=dtype)]


def attend(backend, mask, q, k, v, values=None, **options):
    """Prepares a mask and attends with a backend, or the backend of a name."""
    backend = build_backend(backend, NEEDS) if isinstance(backend, str) else backend
    size = MaskSize(q.shape[0], q.shape[1], k.shape[1], q.device)
    prepared = backend.prepare(mask, size, None if values is None else DistanceBias(values))
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
    for b, t, n in itertools.product(range(q.shape[0]), range(q.shape[1]), range(4)):
        seen = [s for s in range(k.shape[1]) if sees(mask, b, t, s)]
        head = n // (4 // k.shape[2])
        scores = k[b, seen, head] @ q[b, t, n] * scale
        if values is not None:
            scores = scores + values[n, [s - t + q.shape[1] - 1 for s in seen]]
        mixed[b, t, n] = scores.softmax(dim=0) @ v[b, seen, head]
    return mixed


def meaningful(mask, queries, keys):
    """1 for queries whose output means something, float64 [B, T, 1, 1]; 0 for those that are padding themselves."""
    size = MaskSize(3, queries, keys, torch.device("cpu"))
    if mask.key_lengths_B is None or not pads_queries(mask, size):
        return torch.ones(1, queries, 1, 1, dtype=torch.float64)
    lengths_B = mask.key_lengths_B
    return (torch.arange(queries, device=lengths_B.device) < lengths_B[:, None])[:, :, None, None].double()
