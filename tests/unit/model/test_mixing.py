"""Mixed values and streams, n-grams, stochastic depth: exact, cached, recomputed, compiled."""

import math
from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.nn import functional

from pretrain.config.engine import PLAIN_ENGINE
from pretrain.generation.constraints import Constraints
from pretrain.generation.sampling import generate
from pretrain.model import KVCache, build_model, kv_cache
from pretrain.model.build import initial_weight
from pretrain.optim.groups import group_parameters
from pretrain.types import Batch
from tests.unit.generation.models import random_prompts, read_greedily
from tests.unit.generation.test_decode import scores_of
from tests.unit.model.test_transformer import gradients
from tests.unit.model.tiny import CPU, build, packed_batch, random_batch, tiny_config, two_stacks_config

KEYS = {
    "first layer": {"value_residual": True},
    "embeddings": {"value_embeddings": 2},
    "residual scalars": {"residual_scalars": True},
    "layer scale": {"layer_scale": 0.3},
    "n-grams": {"model": {"ngram_embeddings": 3, "ngram_rows": 37}},
}
KEYS["all"] = {key: value for keys in KEYS.values() for key, value in keys.items()} | {"layers": 5}


def config_of(keys, **stack):
    return tiny_config(**({"layers": 4} | KEYS[keys] | stack))


def plain_ngrams(tables_VD, config, tokens_BT):
    """The vectors of n-grams in the fewest lines; integers of Python do not wrap around."""
    vectors_BTD = torch.zeros(*tokens_BT.shape, tables_VD.shape[1], dtype=tables_VD.dtype)
    for row, tokens in enumerate(tokens_BT.tolist()):
        for place in range(len(tokens)):
            hashed = tokens[place] + 1
            for number in range(config.ngram_embeddings):
                before = tokens[place - number - 1] + 1 if place > number else 0
                hashed = hashed * 6364136223846793005 + before
                upper = (hashed * 6364136223846793005 + 2**63) % 2**64 - 2**63 >> 32
                chosen = number * config.ngram_rows + upper % config.ngram_rows
                vectors_BTD[row, place] += tables_VD[chosen]
    return vectors_BTD


def plain_logits(model, config, tokens_BT):
    """The model without positions in the fewest lines: dense attention, values mixed as the papers do."""
    stack, weights = config.decoder, dict(model.named_parameters())
    heads, groups, width = stack.heads, stack.num_kv_heads, stack.per_head_width
    rows, length = tokens_BT.shape
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
    x = embedded = weights["embedding.weight"][tokens_BT]
    if config.ngram_embeddings:
        x = embedded = embedded + plain_ngrams(weights["ngram_embedding.weight"], config, tokens_BT)
    first = None
    for number in range(stack.layers):
        own = {name.split(f"blocks.{number}.")[1]: w for name, w in weights.items() if f".blocks.{number}." in name}
        if stack.residual_scalars and number:
            x = own["residual_mix"][0] * x + own["residual_mix"][1] * embedded
        normed = functional.rms_norm(x, x.shape[-1:], own["attention_norm.weight"], stack.norm_eps)
        q, k, v = (normed @ own["attention.qkv.weight"].T).split([heads * width, groups * width, groups * width], -1)
        parts = [v]
        if stack.value_residual and number:
            parts.append(first)
        for table in range(stack.value_embeddings):
            if number in (table, stack.layers - stack.value_embeddings + table):
                parts.append(weights[f"decoder.value_embedding.{table}.weight"][tokens_BT])
        first = v if first is None else first
        if len(parts) > 1:
            v = sum(factor * part for factor, part in zip(own["attention.value_mix"], parts, strict=True))
        q = q.view(rows, length, heads, width).transpose(1, 2)
        k, v = (
            y.view(rows, length, groups, width).transpose(1, 2).repeat_interleave(heads // groups, 1) for y in (k, v)
        )
        scores = (q @ k.transpose(-1, -2) / math.sqrt(width)).masked_fill(hidden, -torch.inf)
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2) @ own["attention.output.weight"].T
        x = x + own.get("attention_scale", 1) * mixed
        normed = functional.rms_norm(x, x.shape[-1:], own["feedforward_norm.weight"], stack.norm_eps)
        gate, up = (normed @ own["feedforward.gate_up.weight"].T).chunk(2, -1)
        x = x + own.get("feedforward_scale", 1) * ((functional.silu(gate) * up) @ own["feedforward.down.weight"].T)
    x = functional.rms_norm(x, x.shape[-1:], weights["decoder.norm.weight"], stack.norm_eps)
    return x @ weights["head.weight"].T


def unequal(model):
    """Gives the factors values of their own, so that no two can be confused."""
    with torch.no_grad():
        for number, (name, parameter) in enumerate(model.named_parameters()):
            if name.endswith(("_mix", "_scale")):
                parameter.copy_(torch.linspace(0.3, 1.1, len(parameter)) + 0.01 * number)
    return model


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("keys", KEYS)
def test_scores_and_gradients_are_those_of_the_plain_model(keys, backend):
    config = config_of(keys, position="none")
    model = unequal(build(config, attention=backend, dtype=torch.float64, scale=3.0))
    batch = random_batch(2, 11)
    found = model(batch).logits_BTV[..., :61]
    expected = plain_logits(model, config, batch.tokens_BT)[..., :61]
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    names, parameters = zip(*model.named_parameters(), strict=True)
    weight = torch.randn(found.shape, dtype=found.dtype, generator=torch.Generator().manual_seed(1))
    pairs = (torch.autograd.grad((logits * weight).sum(), parameters) for logits in (found, expected))
    for name, ours, theirs in zip(names, *pairs, strict=True):
        assert theirs.any(), name
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-9, msg=name)


@pytest.mark.parametrize("keys", KEYS)
def test_factors_of_values_start_equal_and_tables_as_large_as_values(keys):
    config = config_of(keys, width=256)
    model = build(config, scale=1.0)
    for name, parameter in model.named_parameters():
        if name.endswith("value_mix"):
            assert torch.equal(parameter, torch.full_like(parameter, 1 / len(parameter)))
        if name.endswith("residual_mix"):
            assert parameter.tolist() == [1, 0]
        if name.endswith("_scale"):
            assert torch.equal(parameter, torch.full((256,), 0.3))
    if config.decoder.value_embeddings:
        table = initial_weight("decoder.value_embedding.0.weight", torch.Size((400, 400)), config, 0)
        assert table.std().item() == pytest.approx(0.02 * 16, rel=0.01)
    decaying = group_parameters(model)[0].names
    undecayed = ("_mix", "_scale", "_embedding")
    assert not [name for name in decaying if any(part in name for part in undecayed)]


def test_ngrams_end_with_their_document():
    model = build(config_of("n-grams"))
    packed = packed_batch([[9, 6], [15]])
    embed = partial(model.ngram_embedding, cache=None)
    second = embed(packed.tokens_BT, packed.positions_BT)[:1, 9:]
    assert torch.equal(second, embed(packed.tokens_BT[:1, 9:], None))
    assert not torch.equal(second, embed(packed.tokens_BT, None)[:1, 9:])


@pytest.mark.parametrize("sizes", [[12], [5, 1, 1, 5], [1] * 12])
@pytest.mark.parametrize("keys", KEYS)
def test_a_cache_keeps_values_as_they_were_mixed(keys, sizes):
    model = unequal(build(config_of(keys)))
    tokens = random_batch(2, 12).tokens_BT
    cache = KVCache(model.num_layers, capacity=12)
    with torch.no_grad():
        parts = [model(Batch(part, part), cache=cache).logits_BTV for part in tokens.split(sizes, dim=1)]
        whole = model(Batch(tokens, tokens)).logits_BTV
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-5, atol=1e-5)


def test_steps_of_fixed_shapes_keep_them_too(monkeypatch):
    monkeypatch.setattr(kv_cache, "FEWEST_KEYS", 4)
    model = unequal(build(config_of("all"), dtype=torch.float64)).eval()
    plain, fixed = (
        scores_of(model, random_prompts(), 12, fixes_steps=fixed, keep=[3, 0, 2]) for fixed in (False, True)
    )
    # fp64 up to rounding, scores are returned in fp32: the kernel sums over hidden keys too, in other blocks.
    torch.testing.assert_close(fixed, plain, rtol=1e-6, atol=1e-6)


def test_padded_prompts_are_continued_as_alone():
    model, prompts = unequal(build(config_of("all"))).eval(), random_prompts()
    expected = [read_greedily(model, prompt, 12) for prompt in prompts]
    assert [found.tokens for found in generate(model, prompts, Constraints(max_new_tokens=12))] == expected


@pytest.mark.parametrize("options", [{"checkpointing": "full"}, {"checkpointing": "selective"}, {"offload": "cpu"},
                                     {"checkpointing": "full", "every": 2, "offload": "cpu"}], ids=str)  # fmt: skip
@pytest.mark.parametrize("noise", [{"dropout": 0.1}, {"drop_path": 0.5}], ids=str)
def test_what_is_recomputed_or_offloaded_changes_no_bit(options, noise):
    config, batch = config_of("all", **noise), packed_batch([[9, 6], [15]])
    torch.manual_seed(5)
    loss, grads = gradients(unequal(build(config)), batch)
    torch.manual_seed(5)
    again, others = gradients(unequal(build(config, **options)), batch)
    assert torch.equal(loss, again)
    assert all(torch.equal(grad, others[name]) for name, grad in grads.items())


@pytest.mark.long
@pytest.mark.parametrize(
    ("keys", "graphs"),
    [
        *((keys, 2) for keys in ("first layer", "embeddings", "residual scalars")),
        *((keys, 1) for keys in ("layer scale", "n-grams")),
        ("all", 3),
    ],
)
def test_compiled_blocks_have_a_graph_for_each_kind_of_block_at_any_depth(keys, graphs, monkeypatch):
    counter = CompileCounter()
    compiled = torch.compile
    torch._dynamo.reset()
    with monkeypatch.context() as patched:
        patched.setattr(torch, "compile", lambda function: compiled(function, backend=counter, fullgraph=True))
        engine = PLAIN_ENGINE.model_copy(update={"compile": True, "attention": "sdpa"})
        model = build_model(config_of(keys, layers=9), engine, CPU)
    model.load_state_dict(build(config_of(keys, layers=9)).state_dict())
    # In float64: nine layers round gradients in fp32 by more than a bound that would tell them apart.
    loss, grads = gradients(model.double(), random_batch(2, 16))
    assert counter.frame_count == graphs
    plain, others = gradients(build(config_of(keys, layers=9)).double(), random_batch(2, 16))
    torch.testing.assert_close(loss, plain)
    torch.testing.assert_close(grads, others)


def test_both_stacks_of_an_encoder_decoder_have_them():
    config = two_stacks_config(**KEYS["all"] | {"layers": 4})
    names = [name for name, _ in build(config).named_parameters()]
    for stack in ("encoder", "decoder"):
        assert f"{stack}.value_embedding.1.weight" in names
        assert f"{stack}.blocks.3.attention.value_mix" in names
        assert f"{stack}.blocks.3.residual_mix" in names
        assert f"{stack}.blocks.0.feedforward_scale" in names
    assert names.count("ngram_embedding.weight") == 1
    assert "decoder.blocks.3.cross_scale" in names and "encoder.blocks.3.cross_scale" not in names


def test_a_row_skips_sub_layers_more_often_the_deeper_they_are():
    model = build(config_of("layer scale", drop_path=0.3)).train()
    assert [block.drop_path for block in model.decoder.blocks] == pytest.approx([0, 0.1, 0.2, 0.3])
    block, stream = model.decoder.blocks[3], torch.zeros(4000, 2, 3)
    torch.manual_seed(1)
    found = block._add(stream, block.attention_norm, torch.ones_like(stream), None)
    assert torch.equal(found, found[:, :1, :1].expand_as(found)), "a row is kept or skipped as a whole"
    torch.testing.assert_close(found.unique(), torch.tensor([0, 1 / 0.7]))
    # Deterministic by the seed; three standard deviations of the share would be 0.022.
    assert (found[:, 0, 0] == 0).float().mean().item() == pytest.approx(0.3, abs=0.022)
    model.eval()
    assert torch.equal(block._add(stream, block.attention_norm, torch.ones_like(stream), None), torch.ones_like(stream))


def test_without_noise_stochastic_depth_changes_nothing():
    batch = random_batch(2, 11)
    logits = [build(config_of("all", **keys)).eval()(batch).logits_BTV for keys in ({}, {"drop_path": 0.5})]
    assert torch.equal(*logits)
