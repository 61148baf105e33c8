"""Attention backends against the formula, for every mask and bias."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain.errors import ConfigError
from pretrain.model import backends
from pretrain.model.backends import build_backend
from pretrain.model.backends.backend import AttentionNeeds
from pretrain.types import AttentionMask
from tests.helpers.tables import pairwise
from tests.unit.model.masks import MASKS, NEEDS, attend, formula, inputs, meaningful

ON_CPU = ["auto", "eager", "sdpa"]


def check_against_eager(name, mask, drawn, *, biased, tolerance):
    """Compares output and gradients with those of eager in float64, where they mean something."""
    weight = meaningful(mask, drawn[0].shape[1], drawn[1].shape[1])
    results = []
    for backend, used in ((name, drawn), ("eager", [x.double() for x in drawn])):
        leaves = [x.clone().requires_grad_() for x in (*used[:3], *([used[4]] if biased else []))]
        mixed = attend(backend, mask, *leaves, scale=0.5) * weight.to(used[0].dtype)
        # What sees nothing at all hangs on nothing.
        loss = (mixed * used[3]).sum() + sum(leaf.sum() * 0 for leaf in leaves)
        results.append((mixed, *torch.autograd.grad(loss, leaves)))
    for found, expected in zip(*results, strict=True):
        assert found.dtype == drawn[0].dtype
        torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_eager_is_the_formula(name, biased):
    mask, queries, keys = MASKS[name]
    q, k, v, _, values = inputs(queries, keys)
    values = values if biased else None
    found, scaled = attend("eager", mask, q, k, v, values), attend("eager", mask, q, k, v, values, scale=1.0)
    torch.testing.assert_close(found, formula(mask, q, k, v, values), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(scaled, formula(mask, q, k, v, values, 1.0), rtol=1e-12, atol=1e-12)


# fp32 rounds at 6e-8; a gradient of a key sums some ten products of four factors of up to 3.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-5}


# Calls by documents, and by a mask.
@pairwise(mask=list(MASKS), biased=[False, True], kv_heads=[1, 2, 4], dtype=list(TOLERANCES), call_pairs=[0, 5000])
def test_sdpa_agrees_with_the_float64_reference_forward_and_backward(
    mask, biased, kv_heads, dtype, call_pairs, monkeypatch
):
    monkeypatch.setattr(backends.sdpa, "CALL_PAIRS", call_pairs)
    declared, queries, keys = MASKS[mask]
    drawn = inputs(queries, keys, kv_heads=kv_heads, dtype=dtype)
    check_against_eager("sdpa", declared, drawn, biased=biased, tolerance=TOLERANCES[dtype])


def random_documents(draw, rows, length):
    """Document numbers of rows: runs of rising numbers, from -1 or 0 on, backwards in a fifth of the draws."""
    steps = draw(st.lists(st.lists(st.integers(0, 1), min_size=length, max_size=length), min_size=rows, max_size=rows))
    documents = torch.tensor(steps, dtype=torch.int32).cumsum(1) - draw(st.integers(0, 1))
    return documents.flip(1) if draw(st.integers(0, 4)) == 0 else documents


@st.composite
def random_masks(draw):
    """A mask of self-attention, of attention to a source, or of decoding, with its number of rows, queries and keys."""
    kind = draw(st.sampled_from(["self", "source", "decoding"]))
    rows, queries = draw(st.integers(1, 3)), draw(st.integers(1, 12))
    offset = draw(st.integers(1, 6)) if kind == "decoding" else 0
    keys = draw(st.integers(1, 12)) if kind == "source" else queries + offset
    mask = {"causal": kind != "source" and draw(st.booleans()), "query_offset": offset}
    if draw(st.booleans()):
        mask["documents_BT"] = random_documents(draw, rows, queries)
        if kind != "self":
            mask["key_documents_BS"] = random_documents(draw, rows, keys)
    if draw(st.booleans()):
        lengths = st.lists(st.integers(1, keys), min_size=rows, max_size=rows)
        mask["key_lengths_B"] = torch.tensor(draw(lengths), dtype=torch.int32)
    if kind != "source" and draw(st.booleans()):
        mask["window"] = draw(st.integers(1, 8))
    if mask["causal"] and draw(st.booleans()):
        mask["prefix_BS"] = torch.arange(keys) < torch.tensor([[draw(st.integers(0, keys))] for _ in range(rows)])
    return AttentionMask(**mask), rows, queries, keys


@pytest.mark.parametrize("examples", [80, pytest.param(250, marks=pytest.mark.long)])
def test_sdpa_agrees_with_the_reference_for_any_mask_and_block(examples):
    @settings(max_examples=examples)
    @given(
        drawn=random_masks(),
        block=st.sampled_from([1, 2, 5, 128]),
        call_pairs=st.sampled_from([0, 20, 5000]),
        biased=st.booleans(),
    )
    def check(drawn, block, call_pairs, biased):
        mask, rows, queries, keys = drawn
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(backends.sdpa, "BLOCK", block)
            patch.setattr(backends.sdpa, "CALL_PAIRS", call_pairs)
            check_against_eager("sdpa", mask, inputs(queries, keys, rows=rows), biased=biased, tolerance=1e-11)

    check()


CAPPED = replace(NEEDS, score_cap=0.7)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("biased", [False, True])
def test_capped_scores_are_those_of_the_formula_forward_and_backward(mask, biased):
    declared, queries, keys = MASKS[mask]
    q, k, v, gradient, values = inputs(queries, keys)
    gradient = gradient * meaningful(declared, queries, keys)
    results = []
    for name in ("auto", "sdpa", "eager"):
        leaves = [x.clone().requires_grad_() for x in (q, k, v, *([values] if biased else []))]
        mixed = attend(build_backend(name, CAPPED), declared, *leaves, scale=0.5)
        loss = (mixed * gradient).sum() + sum(leaf.sum() * 0 for leaf in leaves)
        results.append((mixed, *torch.autograd.grad(loss, leaves)))
    for found in results[:2]:
        torch.testing.assert_close(found, results[2], rtol=1e-12, atol=1e-12)
    if declared == AttentionMask(causal=False) and not biased:
        scores = torch.einsum("btnh,bsnh->bnts", q, k.repeat_interleave(2, dim=2)) / 2
        weights = (0.7 * (scores / 0.7).tanh()).softmax(dim=-1)
        expected = torch.einsum("bnts,bsnh->btnh", weights, v.repeat_interleave(2, dim=2))
        torch.testing.assert_close(results[2][0], expected, rtol=1e-12, atol=1e-12)


def test_varlen_has_no_cap_of_scores():
    needs = AttentionNeeds(torch.device("meta"), torch.bfloat16, 16, score_cap=0.7)
    with pytest.raises(ConfigError, match="attention backend varlen has no cap of scores"):
        build_backend("varlen", needs)


@pytest.mark.parametrize("name", ON_CPU)
def test_grouped_query_attention_equals_its_expansion(name):
    q, k, v, *_ = inputs(8, 8)
    mask = AttentionMask(causal=True)
    full = attend(name, mask, q, *(x[:, :, [0, 0, 1, 1]] for x in (k, v)))
    torch.testing.assert_close(attend(name, mask, q, k, v), full, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("name", ON_CPU)
def test_a_query_that_sees_nothing_gets_and_gives_zero(name, window):
    documents = torch.tensor([[0, 0, 7, 1, 1, 1, 1, 1]] * 3, dtype=torch.int32)
    mask = AttentionMask(False, documents, key_documents_BS=documents.clamp(max=1), window=window)
    q, k, v = (x.requires_grad_() for x in inputs(8, 8)[:3])
    mixed = attend(name, mask, q, k, v)
    assert mixed[:, 2].eq(0).all()
    gradients = torch.autograd.grad(mixed.sum(), (q, k, v))
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert gradients[0][:, 2].eq(0).all()


@pytest.mark.parametrize("name", ON_CPU)
def test_dropped_weights_are_a_share_and_the_rest_is_scaled_up(name):
    torch.manual_seed(0)
    q, k = torch.randn(2, 200, 4, 16), torch.randn(2, 200, 2, 16)
    ones = torch.ones(2, 200, 2, 16)
    kept = attend(name, AttentionMask(causal=False), q, k, ones, dropout=0.25)
    # Each output is a sum of 200 weights, of which a quarter is lost; 1,600 such sums differ from 1 by 5% each.
    assert kept.mean() == pytest.approx(1.0, abs=0.01)
    assert 0.02 < kept.std() < 0.2


def test_an_unknown_backend_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match=r"unknown engine\.attention 'spda'; use sdpa"):
        build_backend("spda", NEEDS)
    with pytest.raises(ConfigError, match="use auto or eager or flex or sdpa or varlen"):
        build_backend("zzz", NEEDS)


def test_a_backend_says_why_it_cannot_serve_a_device(monkeypatch):
    def gpu_only(needs):
        raise ConfigError(f"attention backend gpu_only has no kernel for {needs.device.type}", fix="use sdpa")

    monkeypatch.setitem(backends.BACKENDS, "gpu_only", gpu_only)
    with pytest.raises(ConfigError, match="gpu_only has no kernel for cpu; use sdpa"):
        build_backend("gpu_only", NEEDS)
