"""`flex`: the functions that torch compiles into a kernel, run uncompiled on a CPU, and what the backend refuses."""

import warnings
from dataclasses import replace

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention

from pretrain.errors import ConfigError
from pretrain.model.backends import build_backend, flex
from pretrain.model.backends.backend import AttentionNeeds, DistanceBias, MaskSize, dense_mask
from pretrain.model.backends.flex import FlexAttention, build_mask_mod
from pretrain.types import AttentionMask
from tests.helpers.tables import alternating
from tests.unit.model.masks import CPU, MASKS, NEEDS, ON_META, attend, inputs


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_mod_says_what_the_mask_says(name):
    mask, queries, keys = MASKS[name]
    mask_mod = build_mask_mod(mask, CPU)
    expected = dense_mask(mask, queries=range(queries), keys=range(keys), device=CPU)
    expected = torch.ones(3, 1, queries, keys, dtype=torch.bool) if expected is None else expected
    if mask_mod is None:
        assert expected.all()
    else:
        found = create_mask(mask_mod, 3, 1, queries, keys, device="cpu")
        assert torch.equal(found, expected.expand(3, 1, queries, keys))


@pytest.fixture
def uncompiled(monkeypatch):
    """A backend that calls FlexAttention without compiling it: scores of all pairs, but on any device."""
    plain = {"flex_attention": flex_attention, "create_block_mask": create_block_mask}
    monkeypatch.setattr(flex, "_compiled", plain.get)
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        yield FlexAttention(ON_META)


@pytest.mark.parametrize(
    ("name", "biased"),
    alternating(["packed causal", "padded", "prefix and window", "packed and padded sources"], [False, True]),
)
def test_flex_attends_like_the_reference(name, biased, uncompiled):
    mask, queries, keys = MASKS[name]
    q, k, v, _, values = inputs(queries, keys, dtype=torch.float32)
    values = values if biased else None
    found = attend(uncompiled, mask, q, k, v, values, scale=0.5)
    expected = attend("eager", mask, q, k, v, values, scale=0.5)
    # fp32, summed in another order.
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_learned_bias_gets_its_gradient_through_the_score_mod(uncompiled):
    mask, queries, keys = MASKS["packed causal"]
    q, k, v, upper, values = inputs(queries, keys, dtype=torch.float32)
    values.requires_grad_()
    # On a CPU torch refuses gradients of queries, keys and values, but not of what a score_mod reads.
    found, expected = (
        torch.autograd.grad(attend(backend, mask, q, k, v, values), values, upper)[0]
        for backend in (uncompiled, "eager")
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_queries_keys_and_values_come_to_the_kernel_in_one_dtype(uncompiled):
    q, k, v, *_ = inputs(8, 8, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = attend(uncompiled, AttentionMask(causal=True), q, k, v.bfloat16())
    assert mixed.dtype == torch.bfloat16


def test_flex_refuses_what_it_cannot_serve_when_it_is_built(monkeypatch):
    def refuses(match, **needs):
        with pytest.raises(ConfigError, match=match):
            build_backend("flex", AttentionNeeds(torch.device("cuda"), **needs))

    with pytest.raises(ConfigError, match=r"flex has no backward pass on cpu; use engine\.attention=sdpa"):
        build_backend("flex", NEEDS)
    refuses("flex has no dropout of attention weights; set attention_dropout: 0.0", dropout=True)
    refuses("flex has no kernel for float64; use engine.attention=sdpa", dtype=torch.float64)
    refuses("flex needs a head width of at least 16, not 8; use engine.attention=sdpa", head_width=8)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(flex.importlib.util, "find_spec", lambda name: None)
    refuses("flex needs the package triton; install it, or use engine.attention=sdpa")


def test_flex_refuses_a_learned_bias_under_deterministic_algorithms():
    backend = build_backend("flex", AttentionNeeds(torch.device("cuda"), bias=True))
    bias = DistanceBias(torch.zeros(4, 15, requires_grad=True))
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(ConfigError, match=r"flex sums the gradient of a bias in any order; set engine\.determ"):
            backend.prepare(AttentionMask(causal=True), MaskSize(1, 8, 8, CPU), bias)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("biased", [False, True])
def test_flex_caps_scores_before_it_adds_the_bias(uncompiled, biased):
    capped = {name: build_backend(name, replace(ON_META, score_cap=0.7)) for name in ("flex", "eager")}
    mask, queries, keys = MASKS["window"]
    q, k, v, _, values = inputs(queries, keys, dtype=torch.float32)
    values = values if biased else None
    found, expected = (attend(backend, mask, q, k, v, values, scale=0.5) for backend in capped.values())
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
