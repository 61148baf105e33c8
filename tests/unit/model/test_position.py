"""Learned, sinusoidal, rotary and relative positions."""

import math

import pytest
import torch
from transformers import GPTNeoXConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.t5.modeling_t5 import T5Attention

from pretrain.config.model import RotaryScaling, StackConfig
from pretrain.model.parts.position import (
    LearnedPosition,
    RelativePosition,
    RotaryPosition,
    RowPlace,
    SinusoidalPosition,
    distance_buckets,
    sinusoids,
)
from pretrain.model.parts.rotary import document_lengths, rotary_frequencies, rotary_magnitude, rotate


def stack(head_width, **axes):
    return StackConfig(layers=2, width=32, heads=2, head_width=head_width, ff_width=8, **axes)


def rotation(positions, head_width=16, theta=10000.0):
    module = RotaryPosition(stack(head_width, rope_theta=theta), 512)
    x = torch.zeros(1, positions.shape[-1], 1)
    return module(x, positions[None], RowPlace()).rotation


def test_scores_of_rotated_vectors_depend_on_the_distance_only():
    q, k = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64)
    for distance in (0, 1, 17):
        starts = torch.tensor([0, 5, 100, 400])
        turned_q = rotate(q.expand(1, 4, 1, 16), rotation(starts + distance))
        turned_k = rotate(k.expand(1, 4, 1, 16), rotation(starts))
        scores = (turned_q * turned_k).sum(dim=-1)
        # The tables are fp32: 6e-8 relative each.
        torch.testing.assert_close(scores, scores[:, :1].expand_as(scores), rtol=0, atol=5e-6)


def test_rotation_turns_pairs_half_a_head_apart_by_position_times_frequency():
    x = torch.randn(1, 3, 2, 8, dtype=torch.float64)
    positions = torch.tensor([0, 3, 250])
    turned = rotate(x, rotation(positions, head_width=8))
    pairs, turned_pairs = (torch.complex(y[..., :4], y[..., 4:]) for y in (x, turned))
    angles = positions[:, None].double() * 10000.0 ** (-torch.arange(4, dtype=torch.float64) / 4)
    expected = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
    torch.testing.assert_close(turned_pairs, expected, rtol=0, atol=1e-6)
    assert torch.equal(turned[:, 0], x[:, 0])


def test_the_gradient_of_a_rotation_is_exact():
    x = torch.randn(1, 3, 2, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda y: rotate(y, rotation(torch.tensor([1, 2, 9]), head_width=8)), (x,))


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_a_rotation_without_gradients_is_the_same_in_plain_operations(fraction):
    x = torch.randn(2, 3, 2, 8)
    turned = RotaryPosition(stack(8, rope_fraction=fraction), 16)(torch.zeros(2, 3, 1), None, RowPlace(5)).rotation
    expected = rotate(x.requires_grad_(), turned)
    with torch.no_grad(), torch.profiler.profile() as profile:
        assert torch.equal(rotate(x, turned), expected)
    assert not any("Rotate" in event.key for event in profile.key_averages())


def test_a_fraction_of_a_head_rotates_as_gpt_neox_rotates_it():
    config = GPTNeoXConfig(hidden_size=128, num_attention_heads=4, rotary_pct=0.25, rotary_emb_base=500)
    positions = torch.tensor([[0, 3, 250]])
    q, k = torch.randn(2, 1, 4, 3, 32, generator=torch.Generator().manual_seed(0))
    theirs = apply_rotary_pos_emb(q, k, *GPTNeoXRotaryEmbedding(config)(q, positions))
    module = RotaryPosition(stack(32, rope_theta=500.0, rope_fraction=0.25), 512)
    rotation = module(torch.zeros(1, 3, 1), positions, RowPlace()).rotation
    for x, expected in zip((q, k), theirs, strict=True):
        turned = rotate(x.transpose(1, 2), rotation).transpose(1, 2)
        torch.testing.assert_close(turned, expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(turned[..., 8:], x[..., 8:])


def test_the_gradient_of_a_rotated_fraction_is_exact():
    x = torch.randn(1, 3, 2, 8, dtype=torch.float64, requires_grad=True)
    turned = RotaryPosition(stack(8, rope_fraction=0.5), 16)(torch.zeros(1, 3, 1), None, RowPlace(5)).rotation
    assert torch.autograd.gradcheck(lambda y: rotate(y, turned), (x,))


def test_tables_stay_fp32_when_the_module_is_cast_to_bf16():
    module = RotaryPosition(stack(8), 16).to(torch.bfloat16)
    angles = module(torch.zeros(1, 4, 1), None, RowPlace()).rotation
    assert angles.cos.dtype == angles.sin.dtype == torch.float32
    assert rotate(torch.ones(1, 4, 1, 8, dtype=torch.bfloat16), angles).dtype == torch.bfloat16


def test_given_positions_and_an_offset_read_the_same_rows():
    learned = LearnedPosition(8, 4)
    torch.nn.init.normal_(learned.weight)
    x = torch.zeros(2, 3, 4)
    positions = torch.tensor([[5, 6, 7]]).expand(2, 3)
    assert torch.equal(learned(x, positions, RowPlace()).x_BTD, learned(x, None, RowPlace(5)).x_BTD)
    sinusoidal = SinusoidalPosition(8, 4, "interleaved")
    assert torch.equal(sinusoidal(x, positions, RowPlace()).x_BTD, sinusoidal(x, None, RowPlace(5)).x_BTD)
    rotary = RotaryPosition(stack(4, rope_theta=100.0), 8)
    assert torch.equal(rotary(x, positions, RowPlace()).rotation.cos[0], rotary(x, None, RowPlace(5)).rotation.cos)


def test_a_rotary_table_that_grew_holds_the_same_angles():
    grown, whole = RotaryPosition(stack(8), 512), RotaryPosition(stack(8), 512)
    grown(torch.zeros(1, 3, 1), None, RowPlace())
    x = torch.zeros(1, 100, 1)
    assert torch.equal(grown(x, None, RowPlace(200)).rotation.sin, whole(x, None, RowPlace(200)).rotation.sin)


def test_layers_with_a_window_turn_by_their_own_period():
    module = RotaryPosition(stack(8, rope_theta=1000.0, rope_local_theta=10.0, window=4), 16)
    placed = module(torch.zeros(1, 5, 1), None, RowPlace())
    plain = RotaryPosition(stack(8, rope_theta=10.0), 16)(torch.zeros(1, 5, 1), None, RowPlace())
    assert torch.equal(placed.local_rotation.cos, plain.rotation.cos)
    assert not torch.equal(placed.rotation.cos, plain.rotation.cos)


def test_llama3_scaling_gives_the_frequencies_of_transformers():
    parameters = {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    theirs, _ = ROPE_INIT_FUNCTIONS["llama3"](
        LlamaConfig(hidden_size=256, num_attention_heads=4, head_dim=64, rope_parameters=parameters),
        torch.device("cpu"),
    )
    ours = rotary_frequencies(64, 500000.0, RotaryScaling(kind="llama3", factor=32.0, original_max_seq_len=8192))
    torch.testing.assert_close(ours.float(), theirs, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("theta", "length", "given"),
    [
        (10000.0, 4096, {"factor": 4.0}),
        (1000000.0, 32768, {"factor": 40.0, "beta_fast": 20.0, "beta_slow": 2.0}),
        (10000.0, 64, {"factor": 2.0, "attention_factor": 1.7}),
        (10000.0, 2, {"factor": 2.0, "beta_fast": 9.0}),  # every frequency is divided
    ],
)
def test_yarn_scaling_gives_the_frequencies_and_the_magnitude_of_transformers(theta, length, given):
    parameters = {"rope_type": "yarn", "rope_theta": theta, "original_max_position_embeddings": length} | given
    config = LlamaConfig(hidden_size=256, num_attention_heads=4, head_dim=64, rope_parameters=parameters)
    theirs, magnitude = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    scaling = RotaryScaling(kind="yarn", original_max_seq_len=length, **given)
    torch.testing.assert_close(rotary_frequencies(64, theta, scaling).float(), theirs, rtol=1e-6, atol=0)
    assert rotary_magnitude(scaling) == magnitude


def test_linear_scaling_divides_every_frequency():
    scaled = rotary_frequencies(16, 10000.0, RotaryScaling(kind="linear", factor=4.0))
    assert torch.equal(scaled, rotary_frequencies(16, 10000.0, None) / 4)


def test_the_sinusoidal_table_is_the_formula_of_the_paper():
    table = sinusoids(50, 16, "interleaved")
    for position in (0, 1, 7, 49):
        for i in range(8):
            angle = position / 10000 ** (2 * i / 16)
            assert table[position, 2 * i].item() == pytest.approx(math.sin(angle), abs=1e-7)
            assert table[position, 2 * i + 1].item() == pytest.approx(math.cos(angle), abs=1e-7)


def test_the_halves_of_a_sinusoidal_table_are_its_even_and_odd_columns():
    table = sinusoids(50, 16, "interleaved")
    assert torch.equal(sinusoids(50, 16, "halves"), torch.cat((table[:, 0::2], table[:, 1::2]), dim=1))


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize(("buckets", "furthest"), [(32, 128), (8, 20)])
def test_distances_fall_into_the_buckets_of_transformers(bidirectional, buckets, furthest):
    distances = torch.arange(-300, 301)
    ours = distance_buckets(distances, bidirectional=bidirectional, num_buckets=buckets, max_distance=furthest)
    theirs = T5Attention._relative_position_bucket(
        distances, bidirectional=bidirectional, num_buckets=buckets, max_distance=furthest
    )
    assert torch.equal(ours, theirs)


def test_a_relative_bias_continues_with_a_cache():
    module = RelativePosition(stack(16, position="relative", relative_buckets=8, relative_max_distance=20), causal=True)
    torch.nn.init.normal_(module.weight)
    whole = module(torch.zeros(1, 9, 1), None, RowPlace()).biases[0].values_NR
    last = module(torch.zeros(1, 2, 1), None, RowPlace(7)).biases[0].values_NR
    # Query 7 and 8 of 9 keys: distances -8 ... 1.
    assert last.shape == (2, 10)
    assert torch.equal(last, whole[:, :10])


def test_a_document_has_the_length_that_it_has_alone():
    # Padding before a row has positions of 0; in decoding a document began before the row.
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 0, 0, 1, 2, 3], [7, 8, 9, 10, 11, 12]])
    expected = [[3, 3, 3, 2, 2, 1], [1, 1, 4, 4, 4, 4], [13] * 6]
    assert document_lengths(positions).tolist() == expected
