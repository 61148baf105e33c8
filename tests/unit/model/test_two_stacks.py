"""Encoder-decoders, padded rows, prefixes, and what surrounds the stacks."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.utils._pytree import tree_map_only

from pretrain.config.engine import EngineConfig
from pretrain.config.model import HeadConfig, ModelConfig
from pretrain.model import KVCache, build_model
from pretrain.objective.loss import sum_token_loss
from pretrain.types import Batch
from tests.helpers.tables import alternating
from tests.unit.model.tiny import (
    build,
    encoder_config,
    packed_batch,
    packed_pairs,
    random_batch,
    random_pairs,
    single_documents,
    tiny_config,
    two_stacks_config,
)

SHAPES = {
    "rotary": {},
    "2017": {"preset": "gpt2-tiny", "position": "sinusoidal", "norm_placement": "post", "activation": "relu"},
    "relative": {"position": "relative", "relative_buckets": 8, "relative_max_distance": 10, "scaled_attention": False},
    "windows and norms of heads": {"window": 3, "global_every": 2, "rope_local_theta": 100.0, "qk_norm": True},
    "learned, bias of the projections only": {"position": "learned", "qkv_bias": True, "input_norm": True},
}
EXACT = {"rtol": 1e-10, "atol": 1e-10}


def two_stacks(shape, **options):
    return build(two_stacks_config(**SHAPES[shape]), dtype=torch.float64, scale=3.0, **options)


def logits_of(model, batch):
    with torch.no_grad():
        return model(batch).logits_BTV[..., : model.vocab_size]


def gradients(model, batch):
    model.zero_grad()
    sum_token_loss(model, batch).loss_sum.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def test_parameter_names_of_a_decoder_that_reads_an_encoder():
    names = {name for name, _ in build(two_stacks_config(qk_norm=True, qkv_bias=True)).named_parameters()}
    decoder = {name.removeprefix("decoder.blocks.1.") for name in names if name.startswith("decoder.blocks.1.")}
    assert decoder == {
        "attention_norm.weight", "attention.qkv.weight", "attention.qkv.bias", "attention.query_norm.weight",
        "attention.key_norm.weight", "attention.output.weight", "cross_norm.weight", "cross.query.weight",
        "cross.query.bias", "cross.key_value.weight", "cross.key_value.bias", "cross.output.weight",
        "feedforward_norm.weight", "feedforward.gate_up.weight", "feedforward.down.weight",
    }  # fmt: skip
    assert not any("cross" in name for name in names if name.startswith("encoder."))
    assert {name for name in names if "blocks" not in name} == {
        "embedding.weight", "encoder.norm.weight", "decoder.norm.weight", "head.weight",
    }  # fmt: skip


@pytest.mark.parametrize(("shape", "attention"), alternating(SHAPES, ["eager", "sdpa"]))
def test_padding_and_packing_leave_pairs_as_they_are_alone(shape, attention):
    model = two_stacks(shape, attention=attention)
    sources, targets = [9, 1, 14], [4, 11, 7]
    padded, alone = random_pairs(sources, targets)
    packed = packed_pairs(alone)
    expected = [logits_of(model, pair) for pair in alone]
    found = logits_of(model, padded)
    for row, length in enumerate(targets):
        torch.testing.assert_close(found[row, :length], expected[row][0], **EXACT)
    torch.testing.assert_close(logits_of(model, packed), torch.cat(expected, dim=1), **EXACT)
    sums = [sum(parts) for parts in zip(*(gradients(model, pair).values() for pair in alone), strict=True)]
    for batch in (padded, packed):
        for total, (name, grad) in zip(sums, gradients(model, batch).items(), strict=True):
            assert (grad - total).norm() <= 1e-9 * total.norm(), name


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("side", ["source", "target"])
def test_a_side_without_document_numbers_is_one_document_a_row(side, attention):
    """Rows of equal lengths have no padding, and no numbers; the padding of the other side stays unseen."""
    model = two_stacks("rotary", attention=attention)
    sources, targets = ([9, 4, 12], [7, 7, 7]) if side == "target" else ([9, 9, 9], [4, 2, 7])
    padded, alone = random_pairs(sources, targets)

    def numbered(lengths, width):
        return (torch.arange(width)[None] >= torch.tensor(lengths)[:, None]).int()

    source = replace(padded.source, lengths_B=None)
    batch = replace(padded, lengths_B=None, source=source)
    if side == "target":
        batch = replace(batch, source=replace(source, documents_BT=-numbered(sources, 12)))
    else:
        batch = replace(batch, documents_BT=-numbered(targets, 7))
    found = logits_of(model, batch)
    for row, length in enumerate(targets):
        torch.testing.assert_close(found[row, :length], logits_of(model, alone[row])[0], **EXACT)


@pytest.mark.parametrize("shape", SHAPES)
def test_step_by_step_with_caches_gives_the_logits_of_the_whole_row(shape):
    model = two_stacks(shape)
    padded, _ = random_pairs([9, 3, 14], [10, 10, 10])
    batch = replace(padded, lengths_B=None)
    whole = logits_of(model, batch)
    cache, parts = KVCache(model.num_layers, capacity=10), []
    for start, end in ((0, 1), (1, 2), (2, 6), (6, 7), (7, 10)):
        step = Batch(batch.tokens_BT[:, start:end], batch.targets_BT, source=batch.source)
        with torch.no_grad():
            parts.append(model(step, cache=cache).logits_BTV[..., :61])
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, **EXACT)


def test_selected_rows_of_a_cache_go_on_as_those_rows():
    model = two_stacks("relative")
    batch, _ = random_pairs([9, 3, 14], [5, 5, 5])
    rows = torch.tensor([2, 0, 0])
    cache = KVCache(model.num_layers, capacity=8)
    model(batch, cache=cache)
    cache.select(rows)
    source = replace(batch.source, tokens_BT=batch.source.tokens_BT[rows], lengths_B=batch.source.lengths_B[rows])
    step = Batch(torch.tensor([[4], [5], [6]]), torch.zeros(3, 1), source=source)
    with torch.no_grad():
        found = model(step, cache=cache).logits_BTV[..., :61]
    longer = torch.cat((batch.tokens_BT[rows], step.tokens_BT), dim=1)
    whole = logits_of(model, replace(batch, tokens_BT=longer, lengths_B=None, source=source))
    torch.testing.assert_close(found, whole[:, -1:], **EXACT)


def test_prompts_padded_at_their_beginning_continue_as_they_would_alone():
    model = build(tiny_config(window=6), dtype=torch.float64)
    prompts = [torch.arange(3, 3 + length) for length in (5, 9, 2)]
    pads = torch.tensor([9 - len(prompt) for prompt in prompts])
    tokens = torch.stack([torch.cat((torch.zeros(9 - len(p), dtype=torch.int64), p)) for p in prompts])
    positions = (torch.arange(9) - pads[:, None]).clamp(min=0)
    documents = torch.where(torch.arange(9) < pads[:, None], -1, 0).int()
    cache = KVCache(model.num_layers, capacity=11)
    model(Batch(tokens, tokens, positions_BT=positions, documents_BT=documents), cache=cache)
    for step in range(2):
        token = torch.full((3, 1), 20 + step)
        batch = Batch(
            token, token, positions_BT=9 + step - pads[:, None], documents_BT=torch.zeros(3, 1, dtype=torch.int32)
        )
        with torch.no_grad():
            found = model(batch, cache=cache).logits_BTV[:, 0, :61]
        for row, prompt in enumerate(prompts):
            alone = torch.cat((prompt, torch.arange(20, 21 + step)))[None]
            torch.testing.assert_close(found[row], logits_of(model, Batch(alone, alone))[0, -1], **EXACT)


def test_targets_see_their_source_and_not_their_future():
    model, embedded = two_stacks("rotary"), []
    batch, _ = random_pairs([6, 6], [8, 8])
    model.embedding.register_forward_hook(
        lambda *args: embedded.append(args[-1].detach().requires_grad_()) or embedded[-1]
    )
    model(batch, logits=False).hidden_BTD[:, 3].sum().backward()
    source, target = (tensor.grad.abs().sum(dim=(0, 2)) for tensor in embedded)
    assert (source > 0).all()
    assert (target[:4] > 0).all()
    assert (target[4:] == 0).all()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_an_encoder_does_not_see_padding(attention):
    model = build(encoder_config(token_types=2, input_norm=True), attention=attention, dtype=torch.float64)
    batch, lengths = random_batch(3, 12), [12, 1, 7]
    types = (torch.arange(12) > 3).long().expand(3, 12)
    padded = replace(batch, lengths_B=torch.tensor(lengths, dtype=torch.int32), token_types_BT=types)
    found = logits_of(model, padded)
    for row, length in enumerate(lengths):
        alone = Batch(batch.tokens_BT[row : row + 1, :length], batch.targets_BT, token_types_BT=types[:1, :length])
        torch.testing.assert_close(found[row : row + 1, :length], logits_of(model, alone), **EXACT)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_all_of_a_document_sees_its_prefix(attention):
    model = build(tiny_config(), attention=attention, dtype=torch.float64)
    batch = packed_batch([[7, 5]])
    prefix = torch.tensor([[True] * 4 + [False] * 3 + [True] * 2 + [False] * 3])
    embedded = []
    model.embedding.register_forward_hook(
        lambda *args: embedded.append(args[-1].detach().requires_grad_()) or embedded[-1]
    )
    model(replace(batch, prefix_BT=prefix), logits=False).hidden_BTD[0, [0, 7]].sum().backward()
    reach = embedded[0].grad[0].abs().sum(dim=1) > 0
    assert reach.tolist() == prefix[0].tolist()
    plain = single_documents(batch, 0, [7, 5])
    found = logits_of(model, replace(batch, prefix_BT=torch.zeros_like(prefix)))
    torch.testing.assert_close(found, torch.cat([logits_of(model, one) for one in plain], dim=1), **EXACT)


def test_a_head_with_a_transform_reads_it_before_the_scores():
    stack = tiny_config("gpt2-tiny").decoder
    config = ModelConfig(
        encoder=stack, vocab_size=61, max_seq_len=128, head=HeadConfig(transform=True, bias=True), pooler=True
    )
    model = build(config, dtype=torch.float64)
    torch.nn.init.normal_(model.head.bias)
    batch = random_batch(2, 9)
    with torch.no_grad():
        hidden, logits, *_ = model(batch)
        head = model.head
        transformed = head.norm(torch.nn.functional.gelu(head.transform(hidden), approximate="tanh"))
        expected = (transformed @ head.weight.t() + head.bias)[..., :61]
        pooled = model.pooler(hidden)
    torch.testing.assert_close(logits[..., :61], expected, **EXACT)
    torch.testing.assert_close(pooled, (hidden[:, 0] @ model.pooler.weight.t() + model.pooler.bias).tanh(), **EXACT)
    loss = sum_token_loss(model, batch).loss_sum
    expected_loss = torch.nn.functional.cross_entropy(
        expected.flatten(0, 1), batch.targets_BT.flatten(), reduction="sum"
    )
    torch.testing.assert_close(loss, expected_loss, **EXACT)


def test_a_scaled_head_and_scaled_embeddings_multiply_by_the_width():
    batch = random_batch(1, 5)
    plain = build(tiny_config(position="none"), dtype=torch.float64)
    scaled = build(
        tiny_config(position="none", model={"head": {"scaled": True}, "scaled_embeddings": True}), dtype=torch.float64
    )
    with torch.no_grad():
        scaled.embedding.weight.div_(8.0)
    torch.testing.assert_close(logits_of(scaled, batch) * 8.0, logits_of(plain, batch), **EXACT)


def test_a_model_without_a_head_ends_with_hidden_states():
    config = encoder_config().model_copy(update={"head": HeadConfig(kind="none")})
    model = build(config)
    assert model(random_batch(1, 4)).logits_BTV is None
    assert not any(name.startswith("head") for name, _ in model.named_parameters())


def one_stack_of_documents():
    return tiny_config(), packed_batch([[3, 5], [8], [1, 7]])


def pairs(is_packed):
    padded, alone = random_pairs([4, 2, 5], [3, 6, 2])
    return two_stacks_config(), packed_pairs(alone) if is_packed else padded


def packed_targets_of_whole_sources():
    config, batch = pairs(is_packed=True)
    return config, replace(batch, source=replace(batch.source, documents_BT=None, positions_BT=None))


@pytest.mark.parametrize(
    "make",
    [one_stack_of_documents, partial(pairs, is_packed=True), partial(pairs, is_packed=False),
     packed_targets_of_whole_sources],
    ids=["documents", "packed pairs", "padded pairs", "one packed side"],
)  # fmt: skip
def test_documents_and_lengths_are_never_read_from_the_device(make):
    """A read waits for all that the device has queued; from the meta device it is an error."""
    config, batch = make()
    meta = torch.device("meta")
    engine = EngineConfig(kind="single", attention="varlen", compile=False)
    model = build_model(config, engine, meta)
    kernels = []

    def kernel(q, k, v, prepared, scale):
        kernels.append((prepared.max_queries, prepared.max_keys))
        return torch.empty_like(q)

    for stack in model.stacks:
        for backend in filter(None, (stack.backend, getattr(stack, "cross_backend", None))):
            backend.kernel = kernel
        # As the hooks of ZeRO stage 3 do: other tensors, without what was attached to those of the batch.
        stack.register_forward_pre_hook(lambda _, given: tree_map_only(torch.Tensor, torch.Tensor.detach, given))
    model(batch.to(meta))
    assert kernels
    with pytest.raises(NotImplementedError, match="meta"):
        model(replace(batch.to(meta), on_host=None, source=batch.source and replace(batch.source, on_host=None)))


def test_a_batch_that_is_where_it_should_be_is_not_copied():
    _, batch = pairs(is_packed=True)
    there = batch.to(torch.device("cpu"))
    assert there.tokens_BT is batch.tokens_BT and there.on_host is None
    assert batch.to(torch.device("meta")).on_host is batch


@pytest.mark.parametrize("shape", ["rotary", "relative"])
def test_the_window_of_a_batch_is_one_of_all_layers_of_both_stacks(shape):
    batch, _ = random_pairs([9, 3, 14], [10, 7, 12])
    windowed = build(two_stacks_config(**SHAPES[shape], window=4), dtype=torch.float64, scale=3.0)
    model = two_stacks(shape)
    expected, found = gradients(windowed, batch), gradients(model, replace(batch, window=4))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert not torch.equal(logits_of(model, batch), logits_of(windowed, batch))


def test_the_window_of_a_batch_leaves_shorter_ones_of_layers_as_they_are():
    model = two_stacks("windows and norms of heads")
    narrow = build(
        two_stacks_config(**SHAPES["windows and norms of heads"] | {"window": 2}), dtype=torch.float64, scale=3.0
    )
    batch, _ = random_pairs([9, 3, 14], [10, 7, 12])
    everywhere = logits_of(model, replace(batch, window=2))
    assert torch.equal(logits_of(narrow, replace(batch, window=2)), everywhere)
    assert torch.equal(logits_of(narrow, replace(batch, window=100)), logits_of(narrow, batch))
    assert not torch.equal(logits_of(narrow, batch), everywhere), "one of the layers has no window of its own"
