"""Mixers with a state: chunks against one token at a time, and documents of a row against each alone."""

import random
from itertools import chain, product

import pytest
import torch

from pretrain.generation.incremental_decoder import IncrementalDecoder
from pretrain.model.parts import gated_delta, recurrence, state_space
from pretrain.model.parts.gated_delta import DeltaInput, gated_delta_rule
from pretrain.model.parts.short_convolution import ShortConvolution
from pretrain.model.parts.state_space import StateSpaceInput, state_space_rule
from pretrain.objective.loss import sum_token_loss
from pretrain.types import Batch
from tests.helpers.tables import alternating
from tests.unit.model.tiny import CPU, build, packed_batch, random_batch, single_documents, tiny_config

HYBRID = {"preset": "hybrid-tiny", "model": {"max_seq_len": 512}}
"""Three layers of the rule, and one of attention."""
SIZES = {
    "as the preset": {},
    "two values a key": {"delta": {"heads": 2, "value_heads": 4, "key_width": 6, "value_width": 10, "kernel": 3}},
    "strengths to 1": {"delta": {"kernel": 2, "negative_eigenvalues": False}, "position": "none"},
    "the rule alone": {"mixers": ["delta"], "layers": 2},
    "Mamba-2": {
        "mixers": ["mamba2", "attention"], "layers": 2,
        "mamba2": {"heads": 6, "head_width": 10, "state_width": 12, "groups": 2, "kernel": 3},
    },
    "Mamba-2 alone": {
        "mixers": ["mamba2"], "layers": 2,
        "mamba2": {"head_width": 16, "state_width": 5, "bias": True, "filter_bias": False},
    },
    "gated convolutions": {"mixers": ["convolution"], "layers": 2, "convolution": {"kernel": 4, "bias": True}},
    "latent attention": {
        "mixers": ["delta", "attention"], "kv_heads": 4, "layers": 2,
        "latent": {"kv_rank": 12, "rope_width": 4, "value_width": 8},
    },
}  # fmt: skip


def random_inputs(length, *, documents=None, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(2, length, *shape, generator=generator, dtype=torch.float64)

    q, k = (torch.nn.functional.normalize(draw(3, 5), dim=-1) for _ in range(2))
    log_decay, strength = -2 * draw(6).square(), 2 * draw(6).sigmoid()
    return DeltaInput(*(x.requires_grad_() for x in (q, k, draw(6, 7), log_decay, strength)), documents)


def step_by_step(inputs, state):
    """The recurrence of Yang et al. 2024, equation 10, one token at a time."""
    results = []
    each = state.shape[1] // inputs.q_BTGH.shape[2]
    for t in range(inputs.q_BTGH.shape[1]):
        q, k, v, log_decay, strength = (x[:, t] for x in inputs[:5])
        q, k = (x.repeat_interleave(each, dim=1) for x in (q, k))
        if t and inputs.documents_BT is not None:
            state = state * (inputs.documents_BT[:, t] == inputs.documents_BT[:, t - 1])[:, None, None, None]
        state = state * log_decay.exp()[..., None, None]
        written = strength[..., None] * (v - torch.einsum("bnkv,bnk->bnv", state, k))
        state = state + torch.einsum("bnk,bnv->bnkv", k, written)
        results.append(torch.einsum("bnkv,bnk->bnv", state, q))
    return torch.stack(results, dim=1), state


def cut(rows, length, parts, seed):
    """Numbers of documents of random lengths."""
    draws = random.Random(seed)
    starts = [[0, *sorted(draws.sample(range(1, length), parts - 1))] for _ in range(rows)]
    places = torch.arange(length)
    return torch.stack([torch.bucketize(places, torch.tensor(row), right=True) - 1 for row in starts]).int()


@pytest.mark.parametrize("length", [1, 5, 64, 150])
@pytest.mark.parametrize("parts", [1, 4])
def test_chunks_equal_one_token_at_a_time(length, parts):
    documents = cut(2, length, parts, seed=length) if 1 < parts <= length else None
    inputs = random_inputs(length, documents=documents)
    state = torch.randn(2, 6, 5, 7, dtype=torch.float64, requires_grad=True)
    before = None if documents is None else documents[:, :1]
    results = []
    for rule in (gated_delta_rule, step_by_step):
        result, last = rule(inputs, state, before) if rule is gated_delta_rule else rule(inputs, state)
        weights = torch.linspace(-1, 1, result.numel(), dtype=result.dtype).view_as(result)
        loss = (result * weights).sum() + last.square().sum()
        results.append([result, last, *torch.autograd.grad(loss, [*inputs[:5], state])])
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


def write_by_write(inputs, state):
    """The recurrence of Dao and Gu 2024, equation 16, one token at a time."""
    results = []
    heads = state.shape[1] // inputs.q_BTGH.shape[2]
    for t in range(inputs.q_BTGH.shape[1]):
        q, k = (x[:, t].repeat_interleave(heads, dim=1) for x in inputs[:2])
        if t and inputs.documents_BT is not None:
            state = state * (inputs.documents_BT[:, t] == inputs.documents_BT[:, t - 1])[:, None, None, None]
        state = state * inputs.log_decay_BTN[:, t].exp()[..., None, None]
        state = state + torch.einsum("bnh,bnv->bnhv", k, inputs.v_BTNV[:, t])
        results.append(torch.einsum("bnhv,bnh->bnv", state, q))
    return torch.stack(results, dim=1), state


@pytest.mark.parametrize("length", [1, 64, 150])
@pytest.mark.parametrize("parts", [1, 4])
def test_chunks_of_a_state_space_equal_one_token_at_a_time(length, parts):
    documents = cut(2, length, parts, seed=length) if 1 < parts <= length else None
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 5), (2, 5), (6, 7), (6,)]
    draws = [torch.randn(2, length, *shape, generator=generator, dtype=torch.float64) for shape in shapes]
    draws[3] = -2 * draws[3].square()
    inputs = StateSpaceInput(*(x.requires_grad_() for x in draws), documents)
    state = torch.randn(2, 6, 5, 7, dtype=torch.float64, requires_grad=True)
    before = None if documents is None else documents[:, :1]
    results = []
    for result, last in (state_space_rule(inputs, state, before), write_by_write(inputs, state)):
        weights = torch.linspace(-1, 1, result.numel(), dtype=result.dtype).view_as(result)
        loss = (result * weights).sum() + last.square().sum()
        results.append([result, last, *torch.autograd.grad(loss, [*inputs[:4], state])])
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("length", "before"), [(1, False), (2, False), (9, False), (9, True), (1, True)])
def test_a_convolution_has_the_gradients_of_its_sum_of_taps(length, before):
    channels, kernel = 3, 4
    convolution = ShortConvolution(channels, kernel, bias=True).double()
    torch.nn.init.normal_(convolution.weight)
    torch.nn.init.normal_(convolution.bias)
    documents = torch.arange(-3, length).expand(2, -1) // 3
    x = torch.randn(2, length + 3 * before, channels, dtype=torch.float64, requires_grad=True)
    padded = x if before else torch.nn.functional.pad(x, (0, 0, 3, 0))
    rows = [convolution.bias.expand(2, length, channels)]
    for place, weight in enumerate(convolution.weight.unbind(1)):
        same = documents[:, place : place + length] == documents[:, 3:]
        rows.append(padded[:, place : place + length] * weight * same[..., None])
    results = []
    for result in (convolution(x, documents, length), sum(rows)):
        loss = (result * torch.linspace(1, 2, result.numel(), dtype=result.dtype).view_as(result)).sum()
        results.append([result, *torch.autograd.grad(loss, [x, *convolution.parameters()])])
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


def test_decays_that_leave_nothing_are_no_overflow():
    inputs = random_inputs(130)._replace(log_decay_BTN=torch.full((2, 130, 6), -1e4, dtype=torch.float64))
    result, state = gated_delta_rule(inputs)
    gradients = torch.autograd.grad(result.sum(), inputs[:3])
    assert all(x.isfinite().all() for x in (result, state, *gradients))


def layouts(seed):
    """Two rows of documents of one token and more, across the borders of chunks and on them."""
    draws = random.Random(seed)
    length = draws.choice([20, 64, 90, 130])
    rows = []
    for _ in range(2):
        starts = draws.sample(range(1, length), draws.randint(1, min(8, length - 1)))
        if length > 64 and draws.random() < 0.3:
            starts.append(64)
        ends = [*sorted(set(starts)), length]
        rows.append([end - start for start, end in zip([0, *ends], ends, strict=False)])
    return rows


def backward(model, batches):
    """The hidden states of batches, and the gradients of all of them."""
    model.zero_grad()
    hidden = []
    for batch in batches:
        sum_token_loss(model, batch).loss_sum.backward()
        with torch.no_grad():
            hidden.append(model(batch, logits=False).hidden_BTD.flatten(0, 1))
    return torch.cat(hidden), {name: each.grad.clone() for name, each in model.named_parameters()}


def difference(model, rows, seed=0):
    """The greatest difference of packed rows from each document alone, in outputs and in gradients."""
    packed = packed_batch(rows, seed=seed)
    apart = list(chain.from_iterable(single_documents(packed, row, lengths) for row, lengths in enumerate(rows)))
    (hidden, gradients), (alone, gradients_alone) = backward(model, [packed]), backward(model, apart)
    worst = [(gradients[name] - each).abs().max() / (1 + each.abs().max()) for name, each in gradients_alone.items()]
    return float((hidden - alone).abs().max()), float(max(worst))


def compare(seed, **options):
    name = list(SIZES)[seed % len(SIZES)]
    model = build(tiny_config(**HYBRID | SIZES[name]), dtype=torch.float64, seed=seed, scale=2.0, **options)
    outputs, gradients = difference(model, layouts(seed), seed)
    assert outputs < 1e-12
    assert gradients < 1e-12


@pytest.mark.parametrize("seed", range(6))
def test_packed_documents_equal_each_alone(seed):
    compare(seed, checkpointing=("none", "full", "selective")[seed % 3])


@pytest.mark.long
@pytest.mark.parametrize("seed", range(6, 200))
def test_packed_documents_equal_each_alone_in_many_layouts(seed):
    compare(seed, checkpointing=("none", "full", "selective")[seed % 3])


@pytest.mark.parametrize(
    ("mixer", "checkpointing"),
    [
        *(pytest.param(*case, marks=pytest.mark.long) for case in product(("delta", "mamba2"), ("none", "selective"))),
        ("convolution", "selective"),
    ],
)
def test_compiled_blocks_break_no_graph_and_keep_documents_apart(mixer, checkpointing):
    config = tiny_config(**HYBRID, mixers=[mixer], layers=1)
    model = build(config, dtype=torch.float64, scale=2.0, checkpointing=checkpointing)
    rows = [[30, 50, 9], [64, 15, 10]]
    expected = backward(model, [packed_batch(rows)])
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    (block,) = model.decoder.blocks
    block.forward = torch.compile(block.forward, backend="aot_eager")
    found = backward(model, [packed_batch(rows)])
    assert torch._dynamo.utils.counters["graph_break"].total() == 0
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def late(documents_BS):
    """Documents whose first tokens count as the ones before them."""
    return None if documents_BS is None else torch.cat((documents_BS[:, :1], documents_BS[:, :-1]), dim=1)


def test_convolutions_that_leak_are_noticed(monkeypatch):
    model = build(tiny_config(**HYBRID, mixers=["convolution"]), dtype=torch.float64)
    rows = [[30, 41, 9], [64, 15, 1]]
    assert max(difference(model, rows)) < 1e-12
    convolve, prepare = ShortConvolution.forward, recurrence.prepare_documents
    monkeypatch.setattr(ShortConvolution, "forward", lambda self, taps, _, *rest: convolve(self, taps, None, *rest))
    assert min(difference(model, rows)) > 1e-6
    monkeypatch.setattr(ShortConvolution, "forward", convolve)
    monkeypatch.setattr("pretrain.model.stack.prepare_documents", lambda *each: late(prepare(*each)))
    assert min(difference(model, rows)) > 1e-6


RULES = {"delta": (gated_delta, "gated_delta_rule"), "mamba2": (state_space, "state_space_rule")}
"""Module and name of the rule of each mixer with a state."""


@pytest.mark.parametrize(
    ("mutation", "mixer"),
    alternating(["nothing starts anew", "the state alone", "the convolution alone", "a token late"], [*RULES]),
)
def test_documents_that_leak_are_noticed(monkeypatch, mutation, mixer):
    model = build(tiny_config(**HYBRID, mixers=[mixer]), dtype=torch.float64)
    rows = [[30, 41, 9], [64, 15, 1]]
    assert max(difference(model, rows)) < 1e-12
    if mutation in ("nothing starts anew", "the convolution alone"):
        module, name = RULES[mixer]
        rule = getattr(module, name)
        monkeypatch.setattr(
            module,
            name,
            lambda inputs, *before, **options: rule(inputs._replace(documents_BT=None), *before, **options),
        )
    if mutation in ("nothing starts anew", "the state alone"):
        convolve = ShortConvolution.forward
        monkeypatch.setattr(ShortConvolution, "forward", lambda self, taps, _, *rest: convolve(self, taps, None, *rest))
    if mutation == "a token late":
        prepare = recurrence.prepare_documents
        monkeypatch.setattr("pretrain.model.stack.prepare_documents", lambda *each: late(prepare(*each)))
    assert min(difference(model, rows)) > 1e-6


def test_padding_at_the_end_of_a_row_changes_nothing():
    model = build(tiny_config(**HYBRID), dtype=torch.float64)
    batch = random_batch(1, 70)
    alone = model(batch).logits_BTV
    longer = torch.nn.functional.pad(batch.tokens_BT, (0, 20))
    lengths = torch.tensor([70], dtype=torch.int32)
    documents = torch.nn.functional.pad(torch.zeros(1, 70, dtype=torch.int32), (0, 20), value=-1)
    for padded in (Batch(longer, longer, lengths_B=lengths), Batch(longer, longer, documents_BT=documents)):
        torch.testing.assert_close(model(padded).logits_BTV[:, :70], alone, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sizes", SIZES)
def test_the_cache_gives_the_scores_of_whole_rows(sizes):
    model = build(tiny_config(**HYBRID | SIZES[sizes]), dtype=torch.float64)
    tokens = random_batch(2, 150).tokens_BT
    whole = model(Batch(tokens, tokens)).logits_BTV
    cache = model.new_cache(150)
    with torch.no_grad():
        parts = [model(Batch(x, x), cache=cache).logits_BTV for x in tokens.split([1, 70, 2, 1, 76], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-10, atol=1e-10)
    assert cache.length == 150


@pytest.mark.parametrize("fixes_steps", [False, True])
def test_prompts_of_any_lengths_decode_as_each_alone(fixes_steps):
    model = build(tiny_config(**HYBRID), scale=2.0)
    prompts = [random_batch(1, length, seed=length).tokens_BT[0].tolist() for length in (1, 3, 70)]
    following = torch.tensor([[5, 9, 2], [7, 7, 1], [0, 3, 4], [8, 8, 8]])
    feed = IncrementalDecoder(model, prompts, 6, fixes_steps=fixes_steps)
    scores = [feed.start(), feed.step(following[0])]
    feed.select([2, 0, 0])  # as beams do
    scores += [feed.step(row).clone() for row in following[1:]]
    for row, parent in enumerate([2, 0, 0]):
        tokens = [*prompts[parent], int(following[0, parent]), *following[1:, row].tolist()]
        alone = model(Batch(*[torch.tensor([tokens])] * 2)).logits_BTV[0].detach()
        end = len(prompts[parent])
        torch.testing.assert_close(scores[0][parent], alone[end - 1], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(torch.stack(scores[2:])[:, row], alone[end + 1 :], rtol=1e-5, atol=1e-5)


def test_states_are_exact_under_autocast():
    model = build(tiny_config(**HYBRID, mixers=["delta"]), scale=1.0)
    batch = packed_batch([[100, 40]])
    seen = []
    rule = gated_delta.gated_delta_rule

    def look(inputs, *state, continues):
        result = rule(inputs, *state)
        seen.extend([*inputs[:5], *result])
        return result

    with pytest.MonkeyPatch.context() as patch, torch.autocast(CPU.type, dtype=torch.bfloat16):
        patch.setattr(gated_delta, "gated_delta_rule", look)
        hidden = model(batch, logits=False).hidden_BTD
    assert {x.dtype for x in seen} == {torch.float32}
    exact = model(batch, logits=False).hidden_BTD
    assert (hidden - exact).abs().max() < 0.1  # of normed values in 8 bits
