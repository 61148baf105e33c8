"""Recorded attention weights: what they are for each kind of model, and that recording changes nothing."""

import math

import pytest
import torch

from pretrain.attention_maps.maps import (
    AttentionMap,
    choose_heads,
    parse_numbers,
    record_attention,
    spread,
    summarize_head,
)
from pretrain.config.model import RecurrentConfig
from pretrain.errors import ConfigError
from tests.unit.model.tiny import build, encoder_config, random_batch, random_pairs, tiny_config, two_stacks_config

DECODER = build(tiny_config())
TWO_STACKS = build(two_stacks_config(position="relative", scaled_attention=False))


def pair(source_length=9, target_length=6):
    return random_pairs([source_length], [target_length])[1][0]


def recurrent(**values):
    stack = {"layers": 2, "width": 12}
    config = {"kind": "recurrent", "encoder": stack, "decoder": stack, "vocab_size": 512, **values}
    return build(RecurrentConfig.model_validate(config))


def decoder_maps(length=10):
    return record_attention(DECODER, random_batch(1, length))


@pytest.mark.parametrize(
    "model",
    [DECODER, build(tiny_config("gpt2-tiny", window=3, global_every=2)), build(encoder_config(qk_norm=True))],
    ids=["grouped queries", "windows", "encoder"],
)
def test_rows_sum_to_one_and_forbidden_pairs_have_no_weight(model):
    maps = record_attention(model, random_batch(1, 10))
    assert [each.layer for each in maps] == list(range(model.num_layers))
    for each in maps:
        assert each.weights_NTS.shape == (4, 10, 10)
        # Sums of ten fp32 numbers.
        torch.testing.assert_close(each.weights_NTS.sum(dim=-1), torch.ones(4, 10), rtol=0, atol=1e-6)
        assert (each.weights_NTS[:, ~each.allowed_TS] == 0).all()
        assert (each.weights_NTS[:, each.allowed_TS] > 0).all()


@pytest.mark.parametrize(
    "kind", [{"attention": "luong", "score": "dot"}, {"attention": "luong", "input_feeding": True}]
)
def test_a_recurrent_decoder_has_one_map_of_what_its_states_align_with(kind):
    model = recurrent(**kind)
    batch = pair()
    hidden_BTD = model(batch).hidden_BTD
    (found,) = record_attention(model, batch)
    assert (found.stack, found.kind, found.layer) == ("decoder", "cross", 0)
    assert found.weights_NTS.shape == (1, 6, 9) and found.allowed_TS.all()
    torch.testing.assert_close(found.weights_NTS.sum(dim=-1), torch.ones(1, 6), rtol=0, atol=1e-6)
    # The weighted outputs of the encoder, read out beside the decoder's states, are the model's output.
    memory_BSD = model._encode(batch.source).outputs_BSD
    states_BTD = states_of(model, batch, hidden_BTD)
    torch.testing.assert_close(
        model.decoder._read_out(states_BTD, found.weights_NTS @ memory_BSD), hidden_BTD, rtol=0, atol=1e-5
    )
    assert "align" not in vars(model.decoder), "the recording outlives the forward"
    with pytest.raises(ConfigError, match=r"--kind decoder: the model has no such attention; use cross$"):
        choose_heads([found], "decoder", None, None)


def states_of(model, batch, hidden_BTD):
    """States of the decoder's cells, [1, T, D]; with input feeding from the outputs that they read."""
    encoded = model._encode(batch.source)
    x_BTD = model.embedding(batch.tokens_BT)
    if model.decoder.feeds_back:
        fed_BTD = torch.cat((torch.zeros_like(hidden_BTD[:, :1]), hidden_BTD[:, :-1]), dim=1)
        x_BTD = torch.cat((x_BTD, fed_BTD), dim=-1)
    return model.decoder.rnn(x_BTD, encoded.state)[0]


def test_a_recurrent_model_without_attention_has_nothing_to_draw():
    with pytest.raises(ConfigError, match=r"without attention has no weights to draw; give one with model\.attention"):
        record_attention(recurrent(attention="none"), pair())


def test_a_causal_map_sees_the_past_and_itself():
    for each in decoder_maps():
        assert each.stack == "decoder" and each.kind == "self"
        assert torch.equal(each.allowed_TS, torch.ones(10, 10, dtype=torch.bool).tril())


def test_a_window_forbids_what_is_far_in_the_layers_that_have_one():
    model = build(tiny_config("gpt2-tiny", window=3, global_every=2))
    everything, near = record_attention(model, random_batch(1, 10))
    assert int(everything.allowed_TS[-1].sum()) == 10
    assert int(near.allowed_TS[-1].sum()) == 3


def test_an_encoder_sees_everything():
    maps = record_attention(build(encoder_config()), random_batch(1, 7))
    assert {each.stack for each in maps} == {"encoder"}
    assert all(each.allowed_TS.all() for each in maps)


def test_two_stacks_have_three_kinds_of_maps_in_the_order_of_the_forward():
    maps = record_attention(TWO_STACKS, pair())
    found = [(each.stack, each.kind, each.layer) for each in maps]
    decoder = [("decoder", kind, layer) for layer in range(2) for kind in ("self", "cross")]
    assert found == [("encoder", "self", 0), ("encoder", "self", 1), *decoder]


def test_a_cross_map_is_target_by_source():
    shapes = {each.kind: tuple(each.weights_NTS.shape) for each in record_attention(TWO_STACKS, pair(9, 6))[2:]}
    assert shapes == {"self": (4, 6, 6), "cross": (4, 6, 9)}


@pytest.mark.parametrize(("model", "batch"), [(DECODER, random_batch(1, 10)), (TWO_STACKS, pair())])
def test_recording_leaves_the_model_as_it_was(model, batch):
    with torch.no_grad():
        before = model(batch).logits_BTV
    backends = [stack.backend for stack in model.stacks]
    model.train()
    record_attention(model, batch)
    assert model.training
    model.eval()
    assert [stack.backend for stack in model.stacks] == backends
    assert all(block.attention.backend is stack.backend for stack in model.stacks for block in stack.blocks)
    with torch.no_grad():
        assert torch.equal(model(batch).logits_BTV, before)


def test_the_model_is_left_as_it_was_when_the_forward_fails():
    backend = DECODER.decoder.backend
    with pytest.raises(AssertionError, match="positions"):
        record_attention(DECODER, random_batch(1, DECODER.max_seq_len + 1))
    assert DECODER.decoder.backend is backend


def test_what_is_recorded_is_what_the_model_computes_with():
    """The same model on other kernels gives the same hidden states as the forward that was recorded."""
    maps, heard = [], []
    batch = random_batch(1, 10)
    hook = DECODER.decoder.blocks[1].attention.register_forward_hook(
        lambda module, x, y: heard.append((x[0], y.result_BTD))
    )
    try:
        maps = record_attention(DECODER, batch)
    finally:
        hook.remove()
    (x_BTD, y_BTD), attention = heard[0], DECODER.decoder.blocks[1].attention
    with torch.no_grad():
        v_BSKH = attention.qkv(x_BTD).unflatten(-1, (-1, attention.head_width))[:, :, -2:]
        mixed = torch.einsum("nts,snh->tnh", maps[1].weights_NTS, v_BSKH[0].repeat_interleave(2, dim=1))
        # Two orders of fp32 sums, of values up to about 100.
        torch.testing.assert_close(attention.output(mixed.flatten(1)[None]), y_BTD, rtol=1e-4, atol=1e-3)


def test_heads_are_chosen_by_kind_layer_and_head():
    maps = record_attention(TWO_STACKS, pair())
    names = {
        kind: [(row[0].stack, row[0].kind, row[0].layer) for row in choose_heads(maps, kind, None, None)]
        for kind in (None, "self", "encoder", "decoder")
    }
    assert names[None] == [("decoder", "cross", 0), ("decoder", "cross", 1)]
    assert names["encoder"] == [("encoder", "self", 0), ("encoder", "self", 1)]
    assert names["decoder"] == [("decoder", "self", 0), ("decoder", "self", 1)]
    assert names["self"] == names["encoder"] + names["decoder"]
    ((first, second),) = choose_heads(maps, "cross", [1], parse_numbers("3, 0", "head"))
    assert (first.layer, first.head, second.head) == (1, 0, 3)
    assert torch.equal(second.weights_TS, maps[-1].weights_NTS[3])


def test_one_stack_shows_its_self_attention():
    assert [row[0].kind for row in choose_heads(decoder_maps(), None, None, None)] == ["self", "self"]


@pytest.mark.parametrize(
    ("kind", "layers", "heads", "message"),
    [
        ("cross", "all", "all", "--kind cross: the model has no such attention; use self or decoder"),
        ("encoder", "all", "all", "--kind encoder: the model has no such attention; use self or decoder"),
        ("sideways", "all", "all", "--kind sideways: the model has no such attention; use self or decoder"),
        (None, "2", "all", "--layer 2: there are 2; use 0 to 1"),
        (None, "0,1", "0,4", "--head 4: there are 4; use 0 to 3"),
        (None, "one", "all", "--layer 'one' is neither `all` nor numbers; use --layer 0 or --layer 0,1"),
        (None, "all", "-1", "--head '-1' is neither `all` nor numbers; use --head 0 or --head 0,1"),
        (None, "", "all", "--layer '' is neither"),
    ],
)
def test_what_the_model_does_not_have_is_refused(kind, layers, heads, message):
    with pytest.raises(ConfigError) as error:
        choose_heads(decoder_maps(), kind, parse_numbers(layers, "layer"), parse_numbers(heads, "head"))
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("count", "most", "expected"),
    [(3, 4, [0, 1, 2]), (4, 4, [0, 1, 2, 3]), (12, 4, [0, 3, 7, 11]), (5, 2, [0, 4]), (7, 1, [0])],
)
def test_few_of_many_are_spread_evenly_from_the_first_to_the_last(count, most, expected):
    assert spread(count, most) == expected


def test_of_many_heads_so_many_are_drawn_as_are_wanted_and_named_ones_all():
    maps = decoder_maps()
    assert [[head.head for head in row] for row in choose_heads(maps, None, None, None, 2)] == [[0, 3], [0, 3]]
    assert [[head.head for head in row] for row in choose_heads(maps, None, [1], [0, 1, 2], 2)] == [[0, 1, 2]]


def test_summary_of_even_and_of_sharp_attention():
    even, sharp = torch.full((8, 8), 1 / 8), torch.zeros(8, 8)
    sharp[:, 5] = 1
    weights_NTS = torch.stack((even, sharp))
    maps = [AttentionMap("encoder", "self", 0, weights_NTS, torch.ones(8, 8, dtype=torch.bool))]
    ((first, second),) = choose_heads(maps, None, None, None)
    tokens = list("abcdefgh")
    assert summarize_head(first, tokens)["entropy_bits"] == math.log2(8)
    assert summarize_head(second, tokens) == {
        "stack": "encoder",
        "kind": "self",
        "layer": 0,
        "head": 1,
        "entropy_bits": 0.0,
        "strongest_key": {"index": 5, "token": "f", "mean_weight": 1.0},
    }


def test_layers_without_weights_are_refused():
    model = build(tiny_config(preset="hybrid-tiny"))
    with pytest.raises(ConfigError, match="layers of mixers=delta have no weights to draw; give a model"):
        record_attention(model, random_batch(1, 8))
