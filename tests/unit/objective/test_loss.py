"""Chunked cross-entropy against materialised logits."""

import pytest
import torch
from torch.nn import functional

from pretrain.objective import loss as loss_module
from pretrain.objective.loss import linear_cross_entropy
from pretrain.types import IGNORE_INDEX


def case(dtype=torch.float64, *, vocab=37, padded=48, rows=3, length=11, width=8):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, length, width, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(padded, width, generator=generator, dtype=dtype).requires_grad_()
    targets = torch.randint(vocab, (rows, length), generator=generator)
    targets[1, 3:9] = IGNORE_INDEX
    return hidden, weight, targets, vocab


def plain(hidden, weight, targets, vocab):
    logits = functional.linear(hidden, weight[:vocab]).flatten(0, 1)
    return functional.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")


def run(function, hidden, weight, targets, vocab, factor=1.0):
    loss = function(hidden, weight, targets, vocab)
    return loss.detach(), *torch.autograd.grad(loss * factor, (hidden, weight))


def chunked(hidden, weight, targets, vocab):
    return linear_cross_entropy(hidden, weight, targets, vocab_size=vocab)


@pytest.mark.parametrize("tokens_a_chunk", [1, 4, 33, 1000])
@pytest.mark.parametrize("padded", [37, 48])
def test_loss_and_gradients_are_those_of_materialised_logits(monkeypatch, tokens_a_chunk, padded):
    monkeypatch.setattr(loss_module, "CHUNK_LOGITS", tokens_a_chunk * padded)
    expected, found = run(plain, *case(padded=padded), 0.3), run(chunked, *case(padded=padded), 0.3)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("tokens_a_chunk", [4, 1000])
def test_a_bias_of_the_head_is_added_and_gets_its_gradient(monkeypatch, tokens_a_chunk):
    hidden, weight, targets, vocab = case()
    monkeypatch.setattr(loss_module, "CHUNK_LOGITS", tokens_a_chunk * len(weight))
    bias = torch.randn(len(weight), generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()
    found = linear_cross_entropy(hidden, weight, targets, vocab_size=vocab, bias_V=bias)
    logits = functional.linear(hidden, weight[:vocab], bias[:vocab]).flatten(0, 1)
    expected = functional.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
    inputs = (hidden, weight, bias)
    found_grads, expected_grads = torch.autograd.grad(found, inputs), torch.autograd.grad(expected, inputs)
    torch.testing.assert_close((found, *found_grads), (expected, *expected_grads), rtol=1e-12, atol=1e-12)


def test_fp32_is_as_close_to_float64_as_materialised_logits_are():
    found = run(chunked, *case(torch.float32))
    hidden, weight, targets, vocab = case(torch.float32)
    exact = run(plain, hidden.double(), weight.double(), targets, vocab)
    for value, expected in zip(found, exact, strict=True):
        assert value.dtype == torch.float32
        torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-5)


def test_bf16_inputs_give_an_fp32_loss():
    hidden, weight, targets, vocab = case(torch.bfloat16)
    found = run(chunked, hidden, weight, targets, vocab)
    exact = run(plain, hidden.double(), weight.double(), targets, vocab)
    assert [value.dtype for value in found] == [torch.float32, torch.bfloat16, torch.bfloat16]
    for value, expected in zip(found, exact, strict=True):
        assert (value.double() - expected).norm() < 0.01 * expected.norm()


def test_autocast_runs_the_products_in_its_dtype():
    arguments = case(torch.float32)
    exact = run(plain, *arguments)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = run(chunked, *arguments)
    assert [value.dtype for value in found] == [torch.float32] * 3
    assert not torch.equal(found[1], run(chunked, *arguments)[1])
    for value, expected in zip(found, exact, strict=True):
        assert (value - expected).norm() < 0.01 * expected.norm()


def test_padded_rows_of_the_weight_take_no_part():
    hidden, weight, targets, vocab = case()
    loss, _, grad_weight = run(chunked, hidden, weight, targets, vocab)
    with torch.no_grad():
        weight[vocab:] = 1e3
    assert torch.equal(run(chunked, hidden, weight, targets, vocab)[0], loss)
    assert (grad_weight[vocab:] == 0).all()


def test_scores_too_large_for_exp_do_not_overflow():
    hidden, weight, targets, vocab = case(torch.float32)
    found = run(chunked, (hidden * 1e3).detach().requires_grad_(), weight, targets, vocab)
    assert all(value.isfinite().all() for value in found)


def test_no_targets_is_no_loss_and_no_gradient():
    hidden, weight, targets, vocab = case()
    values = run(chunked, hidden, weight, torch.full_like(targets, IGNORE_INDEX), vocab)
    assert all((value == 0).all() for value in values)


def test_a_frozen_weight_gets_no_gradient():
    hidden, weight, targets, vocab = case()
    expected = run(chunked, hidden, weight, targets, vocab)[1]
    (found,) = torch.autograd.grad(chunked(hidden, weight.detach(), targets, vocab), (hidden,))
    assert torch.equal(found, expected)


def test_without_gradients_the_loss_is_the_same_and_nothing_is_kept():
    hidden, weight, targets, vocab = case()
    with torch.no_grad():
        loss = chunked(hidden, weight, targets, vocab)
    assert not loss.requires_grad
    assert torch.equal(loss, chunked(hidden, weight, targets, vocab).detach())


def test_a_second_backward_pass_is_an_error_and_not_a_wrong_gradient():
    loss = chunked(*case())
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_full_logits_are_never_held(monkeypatch):
    monkeypatch.setattr(loss_module, "CHUNK_LOGITS", 2 * 48)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        chunked(*case())
    # The gradients of the hidden states (33 x 8) and of the weight (48 x 8); the logits would be 33 x 48.
    assert sorted(kept) == [33 * 8, 48 * 8]
