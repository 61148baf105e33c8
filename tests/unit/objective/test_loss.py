"""Chunked cross-entropy against materialised logits, torch's own formula and autograd in float64."""

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from pretrain.objective import loss as loss_module
from pretrain.objective.loss import LossOutput, linear_cross_entropy
from pretrain.types import IGNORE_INDEX


class Case(NamedTuple):
    """Inputs of the loss; all but the targets want gradients."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    targets: Tensor
    vocab: int

    @property
    def inputs(self) -> list[Tensor]:
        """What gradients are taken of."""
        return [self.hidden, self.weight] if self.bias is None else [self.hidden, self.weight, self.bias]

    def to(self, dtype: torch.dtype) -> "Case":
        """Returns the same values in another precision."""
        hidden, weight = (x.detach().to(dtype).requires_grad_() for x in (self.hidden, self.weight))
        bias = None if self.bias is None else self.bias.detach().to(dtype).requires_grad_()
        return self._replace(hidden=hidden, weight=weight, bias=bias)


def case(
    dtype: torch.dtype = torch.float64,
    *,
    shape: tuple[int, ...] = (3, 11),
    vocab: int = 37,
    padded: int = 48,
    width: int = 8,
    bias: bool = False,
    ignored: float = 0.2,
    seed: int = 0,
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = (
        torch.randn(*size, width, generator=generator, dtype=torch.float64) for size in (shape, (padded,))
    )
    targets = torch.randint(vocab, shape, generator=generator)
    targets[torch.rand(shape, generator=generator) < ignored] = IGNORE_INDEX
    added = torch.randn(padded, generator=generator, dtype=torch.float64) if bias else None
    return Case(hidden, weight, added, targets, vocab).to(dtype)


def chunked(case: Case, **options: Any) -> LossOutput:
    return linear_cross_entropy(
        case.hidden, case.weight, case.targets, vocab_size=case.vocab, bias_V=case.bias, **options
    )


def plain(case: Case, label_smoothing: float = 0.0, z_loss: float = 0.0, soft_cap: float | None = None) -> LossOutput:
    bias = None if case.bias is None else case.bias[: case.vocab]
    logits = functional.linear(case.hidden, case.weight[: case.vocab], bias).flatten(0, -2)
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    targets = case.targets.flatten()
    sums = {"ignore_index": IGNORE_INDEX, "reduction": "sum"}
    squares = logits.logsumexp(-1).square()[targets != IGNORE_INDEX].sum()
    return LossOutput(
        functional.cross_entropy(logits, targets, label_smoothing=label_smoothing, **sums) + z_loss * squares,
        functional.cross_entropy(logits, targets, **sums).detach(),
        (logits.argmax(-1) == targets).sum(),
        functional.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="none").detach(),
    )


def values_of(sums: LossOutput, case: Case, factor: float = 0.3) -> list[Tensor]:
    """Returns both losses, and the gradients of `factor` times the one that is minimised."""
    gradients = torch.autograd.grad(sums.loss_sum * factor, case.inputs)
    return [sums.loss_sum.detach(), sums.nll_sum, *gradients]


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr(loss_module, "logits_of_chunk", lambda device: 4 * 48)


OPTIONS = st.fixed_dictionaries(
    {
        "label_smoothing": st.sampled_from([0.0, 0.1, 0.5, 1.0]),
        "z_loss": st.sampled_from([0.0, 1e-4, 0.1]),
        "soft_cap": st.sampled_from([None, 1.5, 30.0]),
    }
)
ALL_OPTIONS = {"label_smoothing": 0.1, "z_loss": 1e-2, "soft_cap": 5.0}


@st.composite
def cases(draw: st.DrawFn) -> Case:
    vocab = draw(st.integers(2, 60))
    return case(
        shape=draw(st.sampled_from([(1,), (17,), (2, 9), (5, 1), (0,), (2, 3, 4)])),
        vocab=vocab,
        padded=vocab + draw(st.sampled_from([0, 1, 71])),
        width=draw(st.integers(1, 9)),
        bias=draw(st.booleans()),
        ignored=draw(st.sampled_from([0.0, 0.4, 1.0])),
        seed=draw(st.integers(0, 1000)),
    )


@settings(max_examples=80)
@given(cases(), OPTIONS, st.integers(1, 20))
def test_losses_and_gradients_are_those_of_materialised_logits(case, options, tokens_a_chunk):
    found = chunked(case, **options, chunk_logits=tokens_a_chunk * len(case.weight))
    expected = plain(case, **options)
    assert found.num_correct == expected.num_correct
    torch.testing.assert_close(values_of(found, case), values_of(expected, case), rtol=1e-11, atol=1e-11)


@settings(max_examples=40)
@given(cases(), OPTIONS)
def test_fp32_is_within_1e_5_of_float64(case, options):
    exact = values_of(plain(case, **options), case)
    short = case.to(torch.float32)
    for value, expected in zip(values_of(chunked(short, **options), short), exact, strict=True):
        assert value.dtype == torch.float32
        largest = max([1.0, *expected.abs().flatten().tolist()])
        torch.testing.assert_close(value.double(), expected, rtol=0, atol=1e-5 * largest)


@settings(max_examples=40)
@given(cases(), OPTIONS)
def test_autocast_runs_the_products_in_bf16_and_the_softmax_in_fp32(case, options):
    case = case.to(torch.float32)
    exact = values_of(plain(case, **options), case)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = values_of(chunked(case, **options), case)
    for value, expected in zip(found, exact, strict=True):
        assert value.dtype == torch.float32
        # bf16 rounds by up to 2**-9, what goes into each product and what comes out; small cases average little of it
        # away. Materialised logits under autocast are as far off: 0.03 in the worst of 3,000 cases, 0.02 here.
        assert (value - expected).norm() <= 0.04 * max(1.0, float(expected.norm()))
    # Of the logits in bf16 the losses are exact to fp32.
    rounded = functional.linear(*(x if x is None else x.bfloat16() for x in (case.hidden, case.weight, case.bias)))
    logits = Case(rounded.float().detach().requires_grad_(), torch.eye(len(case.weight)), None, *case[3:])
    torch.testing.assert_close(found[:2], [x.detach() for x in plain(logits, **options)[:2]], rtol=1e-5, atol=1e-5)


def test_bf16_inputs_give_an_fp32_loss_and_bf16_gradients():
    inputs = case(torch.bfloat16, bias=True)
    exact = inputs.to(torch.float64)
    found = values_of(chunked(inputs, **ALL_OPTIONS), inputs)
    assert [value.dtype for value in found] == [torch.float32] * 2 + [torch.bfloat16] * 3
    for value, expected in zip(found, values_of(plain(exact, **ALL_OPTIONS), exact), strict=True):
        assert (value.double() - expected).norm() < 0.01 * expected.norm()


def test_fp16_gradients_that_only_the_loss_scale_brings_into_range_survive():
    inputs = case(torch.float16, shape=(200,), ignored=0.0)
    inputs = inputs._replace(hidden=(inputs.hidden.abs() * 2500).detach().requires_grad_(), targets=inputs.targets * 0)
    exact = inputs.to(torch.float64)
    found, expected = (values_of(f(c), c, 1e-4)[3].double() for f, c in ((chunked, inputs), (plain, exact)))
    assert expected.abs().max() * 1e4 > torch.finfo(torch.float16).max
    assert (found - expected).norm() < 0.01 * expected.norm()


@pytest.mark.parametrize("options", [{}, ALL_OPTIONS])
def test_padding_the_vocabulary_to_a_multiple_of_128_changes_no_loss_and_gets_no_gradient(options):
    narrow = case(vocab=100, padded=100, bias=True)
    wide = [torch.full((128, *x.shape[1:]), 1e3, dtype=x.dtype) for x in (narrow.weight, narrow.bias)]
    for padding, values in zip(wide, (narrow.weight, narrow.bias), strict=True):
        padding[:100] = values.detach()
    padded = narrow._replace(weight=wide[0].requires_grad_(), bias=wide[1].requires_grad_())
    found, expected = values_of(chunked(padded, **options), padded), values_of(chunked(narrow, **options), narrow)
    torch.testing.assert_close([*found[:3], *(x[:100] for x in found[3:])], expected, rtol=1e-12, atol=1e-12)
    assert all((gradient[100:] == 0).all() for gradient in found[3:])


@pytest.mark.parametrize("soft_cap", [None, 30.0])
def test_scores_too_large_for_exp_do_not_overflow(soft_cap):
    inputs = case(torch.float32)
    inputs = inputs._replace(hidden=(inputs.hidden * 1e3).detach().requires_grad_())
    found = values_of(chunked(inputs, soft_cap=soft_cap, z_loss=1e-4, label_smoothing=0.1), inputs)
    assert all(value.isfinite().all() for value in found)


def test_positions_without_a_target_add_nothing_whatever_they_hold():
    inputs = case(ignored=0.5)
    kept = inputs.targets != IGNORE_INDEX
    chosen = inputs._replace(hidden=inputs.hidden[kept].detach().requires_grad_(), targets=inputs.targets[kept])
    found, expected = chunked(inputs, **ALL_OPTIONS), chunked(chosen, **ALL_OPTIONS)
    assert found.num_correct == expected.num_correct
    found, expected = values_of(found, inputs), values_of(expected, chosen)
    assert (found[2][~kept] == 0).all()
    torch.testing.assert_close([*found[:2], found[2][kept], found[3]], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(3, 11), (0,)])
def test_no_targets_is_no_loss_and_gradients_of_zero(shape):
    # Zero and not None: an engine that reduces gradients over ranks waits for every parameter's.
    inputs = case(shape=shape, bias=True, ignored=1.0)
    sums = chunked(inputs, **ALL_OPTIONS)
    assert sums.num_correct == 0
    assert all((value == 0).all() for value in values_of(sums, inputs))


def test_of_equally_likely_tokens_the_first_is_the_answer():
    inputs = case(ignored=0.0)
    with torch.no_grad():
        inputs.weight.zero_()
    inputs.targets[0] = 0
    sums = chunked(inputs)
    assert sums.num_correct == (inputs.targets == 0).sum() < inputs.targets.numel()


def test_only_what_is_minimised_can_be_differentiated():
    sums = chunked(case(), **ALL_OPTIONS)
    assert [value.requires_grad for value in sums[:4]] == [True, False, False, False]
    assert sums.routing_LW is None
    assert [value.dtype for value in sums[:4]] == [torch.float64, torch.float64, torch.int64, torch.float64]
    assert all(value.shape == () for value in sums[:3])


@pytest.mark.parametrize("ignored", [0.0, 0.5, 1.0])
def test_the_loss_of_each_token_is_that_of_its_logits(ignored):
    inputs = case(shape=(2, 9), bias=True, ignored=ignored)
    found = chunked(inputs, **ALL_OPTIONS)
    torch.testing.assert_close(found.nll_P, plain(inputs, **ALL_OPTIONS).nll_P, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.nll_P.sum(), found.nll_sum, rtol=1e-12, atol=1e-12)


def test_a_frozen_weight_gets_no_gradient_and_the_hidden_states_theirs():
    inputs = case()
    frozen = inputs._replace(weight=inputs.weight.detach())
    (found,) = torch.autograd.grad(chunked(frozen).loss_sum, [inputs.hidden])
    (expected, _) = torch.autograd.grad(chunked(inputs).loss_sum, inputs.inputs)
    assert torch.equal(found, expected)


def test_without_gradients_the_losses_are_the_same():
    inputs = case(bias=True)
    with torch.no_grad():
        found = chunked(inputs, **ALL_OPTIONS)
    assert not found.loss_sum.requires_grad
    assert all(map(torch.equal, found[:4], chunked(inputs, **ALL_OPTIONS)[:4]))


@pytest.mark.parametrize("options", [{}, ALL_OPTIONS])
def test_the_compiled_loss_is_the_same_with_one_graph_for_each_length_of_chunks(options, monkeypatch):
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(
        loss_module, "_compiled_sum_chunk", lambda: torch.compile(loss_module.sum_chunk, backend=backend)
    )
    torch._dynamo.reset()
    for shape in ((3, 11), (2, 11), (13,), (3, 10)):  # the last chunk has 1, 2, 1 and 2 of 4 tokens
        inputs = case(torch.float32, shape=shape, bias=True)
        compiled, eager = chunked(inputs, compiled=True, **options), chunked(inputs, **options)
        assert compiled.num_correct == eager.num_correct
        torch.testing.assert_close(values_of(compiled, inputs), values_of(eager, inputs), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(compiled.nll_P, eager.nll_P, rtol=1e-6, atol=1e-6)
    assert len(graphs) <= 3  # of full chunks, of one token, of any other number


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_finds_what_the_cpu_finds_in_float64(dtype, compiled):
    inputs = case(dtype, shape=(3, 1000), vocab=1000, padded=1024, width=64)
    exact = inputs.to(torch.float64)
    there = Case(*(x if x is None else x.detach().cuda() for x in inputs[:4]), inputs.vocab)
    for x in there.inputs:
        x.requires_grad_()
    assert loss_module._adds_in_fp32(torch.device("cuda"), torch.bfloat16)
    close = 1e-5 if dtype == torch.float32 else 1e-2
    found = values_of(chunked(there, compiled=compiled, **ALL_OPTIONS), there)
    for value, expected in zip(found, values_of(plain(exact, **ALL_OPTIONS), exact), strict=True):
        assert (value.cpu().double() - expected).norm() < close * expected.norm()


def test_a_second_backward_pass_is_an_error_and_not_a_wrong_gradient():
    loss = chunked(case()).loss_sum
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, ALL_OPTIONS], ids=["plain", "smooth", "all"])
def test_two_targets_of_a_position_are_the_cross_entropy_of_their_distribution(options, compiled, monkeypatch):
    monkeypatch.setattr(
        loss_module, "_compiled_sum_chunk", lambda: torch.compile(loss_module.sum_chunk, backend="eager")
    )
    one = case(shape=(9,), bias=True)
    generator = torch.Generator().manual_seed(1)
    second = torch.randint(one.vocab, (9,), generator=generator)
    second[0] = one.targets[0].clamp(min=0)  # both are the same
    share = torch.rand(9, generator=generator, dtype=torch.float64) / 2
    mixed = torch.stack([second.double(), share], dim=1)
    assert (one.targets == IGNORE_INDEX).any()
    found = values_of(chunked(one, mixed_P2=mixed, compiled=compiled, **options), one)
    # The loss of each position alone, weighted.
    expected = [torch.zeros_like(value) for value in found]
    for place in (one.targets != IGNORE_INDEX).nonzero()[:, 0].tolist():
        only = torch.arange(9) == place
        for targets, weight in ((one.targets, 1 - share[place]), (second, share[place])):
            alone = one._replace(targets=torch.where(only, targets, IGNORE_INDEX))
            for total, value in zip(expected, values_of(plain(alone, **options), alone), strict=True):
                total += weight * value
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_a_small_loss_is_not_rounded_like_its_logits():
    generator = torch.Generator().manual_seed(0)
    # Around 100, where neighbours in fp32 lie 7.6e-6 apart.
    logits_PV = 100 + torch.randn(96, 37, generator=generator)
    targets_P = torch.randint(37, (96,), generator=generator)
    logits_PV.scatter_(1, targets_P[:, None], 110 + torch.rand(96, 1, generator=generator))
    found = linear_cross_entropy(logits_PV, torch.eye(37), targets_P, vocab_size=37)
    expected = functional.cross_entropy(logits_PV.double(), targets_P, reduction="none")
    assert found.nll_P is not None and expected.max() < 0.01
    # The denominator is a sum of fp32 values just above 1: a few units of 1.2e-7.
    torch.testing.assert_close(found.nll_P.double(), expected, rtol=0, atol=4e-7)
