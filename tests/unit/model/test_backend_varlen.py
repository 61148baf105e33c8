"""`varlen`: how rows are laid end to end, against a kernel written out; and what the backend refuses."""

import itertools

import pytest
import torch

from pretrain.errors import ConfigError
from pretrain.model.backends import build_backend, varlen
from pretrain.model.backends.backend import AttentionNeeds, MaskSize
from pretrain.model.backends.varlen import VarlenAttention, VarlenMask, plan_varlen
from pretrain.types import AttentionMask
from tests.unit.model.masks import CPU, INTERLEAVED, MASKS, NEEDS, ON_META, attend, formula, inputs, meaningful

CUDA = torch.device("cuda")
NOT_SERVED = {
    "documents in bits": "varlen needs the tokens of a document side by side; use engine.attention=sdpa",
    "prefix": "varlen knows no prefix; use engine.attention=sdpa",
    "prefix in documents": "varlen knows no prefix",
    "prefix and padding": "varlen knows no prefix",
    "prefix and window": "varlen knows no prefix",
    "one step over padded keys": "varlen needs the last of 1 queries at the last of their 3 keys",
}
SERVED = sorted(set(MASKS) - set(NOT_SERVED))


def written_out(q, k, v, prepared, scale):
    """What the kernel does, by its documentation: segment by segment, aligned at the ends of queries and keys."""
    mixed = torch.zeros_like(q)
    spans = zip(*(itertools.pairwise(x.tolist()) for x in (prepared.query_starts, prepared.key_starts)), strict=True)
    for (q_start, q_end), (k_start, k_end) in spans:
        assert q_end - q_start <= prepared.max_queries and k_end - k_start <= prepared.max_keys
        left, right = prepared.window
        for t in range(q_start, q_end):
            level = k_end - (q_end - t)
            first = k_start if left < 0 else max(k_start, level - left)
            last = k_end - 1 if right < 0 else min(k_end - 1, level + right)
            segment = (slice(first, max(first, last + 1)),)
            for head in range(q.shape[1]):
                group = head // (q.shape[1] // k.shape[1])
                scores = k[segment][:, group] @ q[t, head] * (0.25 if scale is None else scale)
                mixed[t, head] = scores.softmax(dim=0) @ v[segment][:, group]
    return mixed


@pytest.fixture
def backend():
    """A backend with that kernel, in float64."""
    backend = VarlenAttention(ON_META)
    backend.kernel, backend.dtype = written_out, torch.float64
    return backend


@pytest.mark.parametrize("name", SERVED)
def test_segments_mean_what_the_mask_means(name, backend):
    mask, queries, keys = MASKS[name]
    q, k, v, *_ = inputs(queries, keys)
    weight = meaningful(mask, queries, keys)
    found, expected = attend(backend, mask, q, k, v), formula(mask, q, k, v)
    torch.testing.assert_close(found * weight, expected * weight, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", NOT_SERVED)
def test_a_mask_that_the_kernel_has_no_word_for_is_refused_with_the_reason(name, backend):
    mask, queries, keys = MASKS[name]
    with pytest.raises(ConfigError, match=NOT_SERVED[name]):
        backend.prepare(mask, MaskSize(3, queries, keys, CPU))


def test_sources_in_another_order_than_their_targets_are_refused():
    documents = torch.tensor([[0, 0, 1, 1]])
    mask = AttentionMask(causal=False, documents_BT=documents, key_documents_BS=documents.flip(1))
    with pytest.raises(ConfigError, match="varlen needs the sources in the order of their targets"):
        plan_varlen(mask, MaskSize(1, 4, 4, CPU))


def test_rows_of_documents_are_segments_end_to_end():
    mask, queries, keys = MASKS["packed causal"]
    spans = plan_varlen(mask, MaskSize(3, queries, keys, CPU))
    assert spans.queries == spans.keys == (3, 1, 4, 8, 1, 4, 1, 2)


def test_padding_faces_nothing_and_is_kept():
    mask, queries, keys = MASKS["padded causal"]
    spans = plan_varlen(mask, MaskSize(3, queries, keys, CPU))
    assert list(zip(*spans, strict=True)) == [(8, 8), (3, 3), (5, 0), (0, 5), (5, 5), (3, 0), (0, 3)]
    source, queries, keys = MASKS["a padded source"]
    spans = plan_varlen(source, MaskSize(3, queries, keys, CPU))
    assert list(zip(*spans, strict=True)) == [(5, 8), (5, 3), (0, 5), (5, 5), (0, 3)]


@pytest.mark.parametrize("name", SERVED)
def test_no_query_and_no_key_is_left_out(name):
    mask, queries, keys = MASKS[name]
    spans = plan_varlen(mask, MaskSize(3, queries, keys, CPU))
    assert (sum(spans.queries), sum(spans.keys)) == (3 * queries, 3 * keys)
    assert len(spans.queries) == len(spans.keys)


def test_varlen_refuses_what_it_cannot_serve_when_it_is_built():
    def refuses(match, **needs):
        with pytest.raises(ConfigError, match=match):
            build_backend("varlen", AttentionNeeds(CUDA, **{"dtype": torch.bfloat16, **needs}))

    with pytest.raises(ConfigError, match=r"varlen has no kernel for cpu; use engine\.attention=sdpa"):
        build_backend("varlen", NEEDS)
    refuses("varlen has no kernel for float32; use bf16, or engine.attention=sdpa", dtype=torch.float32)
    refuses("varlen adds no bias; use engine.attention=flex or sdpa", bias=True)
    refuses("varlen has no dropout of attention weights; set attention_dropout: 0.0", dropout=True)
    refuses("varlen needs a head width that is a multiple of 8 up to 256, not 20", head_width=20)


def test_varlen_says_what_an_older_torch_lacks(monkeypatch):
    import torch.nn.attention.varlen as module

    def older(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None):
        raise AssertionError

    monkeypatch.setattr(module, "varlen_attn", older)
    monkeypatch.setattr(varlen, "_has_flash_attn", lambda: False)
    with pytest.raises(ConfigError, match="has no varlen_attn with scale, window_size; install a newer"):
        VarlenAttention(ON_META)


@pytest.mark.parametrize("name", ["dense causal", "packed causal"])
def test_a_torch_without_grouped_heads_gets_keys_and_values_repeated(monkeypatch, name):
    """As 2.11 has it."""
    import torch.nn.attention.varlen as module

    def older(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):
        assert query.shape[1] == key.shape[1] == value.shape[1]
        return written_out(query, key, value, VarlenMask(cu_seq_q, cu_seq_k, max_q, max_k, window_size), scale)

    monkeypatch.setattr(module, "varlen_attn", older)
    backend = VarlenAttention(ON_META)
    backend.dtype = torch.float64
    mask, queries, keys = MASKS[name]
    q, k, v, *_ = inputs(queries, keys)
    assert q.shape[2] > k.shape[2]
    found, expected = attend(backend, mask, q, k, v), formula(mask, q, k, v)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_documents_are_checked_when_a_mask_is_prepared(backend):
    with pytest.raises(ConfigError, match="side by side"):
        backend.prepare(AttentionMask(True, documents_BT=INTERLEAVED), MaskSize(3, 8, 8, CPU))
