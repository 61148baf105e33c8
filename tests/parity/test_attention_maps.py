"""Recorded attention weights against `output_attentions` of transformers: decoder, encoder, and both with a source."""

import pytest
import torch
import transformers

from pretrain.attention_maps.maps import record_attention
from pretrain.types import Batch, StackRows
from tests.helpers.lent import lend

VOCAB = 61
# Both run in float64, but what is recorded is rounded to fp32, and rotary angles are of fp32, under scores of order 10.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}


def gpt2():
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=48, n_layer=3, n_head=6, n_positions=64, initializer_range=0.2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, attn_implementation="eager",
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def mistral():
    """Grouped queries, rotary positions and a window."""
    config = transformers.MistralConfig(
        vocab_size=VOCAB, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, sliding_window=5, initializer_range=0.2,
        attn_implementation="eager",
    )  # fmt: skip
    return transformers.MistralForCausalLM(config)


def bert():
    config = transformers.BertConfig(
        vocab_size=VOCAB, hidden_size=48, num_hidden_layers=3, num_attention_heads=6, intermediate_size=96,
        max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, initializer_range=0.5,
        attn_implementation="eager",
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


def t5():
    """A bias by distance and unscaled scores."""
    config = transformers.T5Config(
        vocab_size=VOCAB, d_model=48, d_kv=8, d_ff=96, num_layers=2, num_decoder_layers=3, num_heads=6,
        relative_attention_num_buckets=8, relative_attention_max_distance=20, dropout_rate=0.0,
        decoder_start_token_id=0, attn_implementation="eager",
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def random_ids(length, seed):
    return torch.randint(VOCAB, (1, length), generator=torch.Generator().manual_seed(seed))


def both(make, folder):
    torch.manual_seed(0)
    theirs, ours, _ = lend(make(), folder)
    return theirs.double(), ours.double()


def check(maps, stack, kind, their_weights):
    ours = [each.weights_NTS for each in maps if (each.stack, each.kind) == (stack, kind)]
    assert len(ours) == len(their_weights)
    for our_NTS, their_1NTS in zip(ours, their_weights, strict=True):
        torch.testing.assert_close(our_NTS, their_1NTS[0].float(), **TOLERANCE)
        assert our_NTS.max() > 0.4, "attention is nearly uniform: errors would not show"


@pytest.mark.parametrize(("make", "stack"), [(gpt2, "decoder"), (mistral, "decoder"), (bert, "encoder")])
def test_one_stack_attends_as_theirs(make, stack, tmp_path):
    theirs, ours = both(make, tmp_path / "theirs")
    tokens_BT = random_ids(14, seed=1)
    with torch.no_grad():
        expected = theirs(tokens_BT, output_attentions=True).attentions
    check(record_attention(ours, Batch(tokens_BT, tokens_BT)), stack, "self", expected)


def test_two_stacks_attend_as_theirs(tmp_path):
    theirs, ours = both(t5, tmp_path / "theirs")
    source_BS, tokens_BT = random_ids(14, seed=1), random_ids(9, seed=2)
    with torch.no_grad():
        expected = theirs(source_BS, decoder_input_ids=tokens_BT, output_attentions=True)
    maps = record_attention(ours, Batch(tokens_BT, tokens_BT, source=StackRows(source_BS)))
    check(maps, "encoder", "self", expected.encoder_attentions)
    check(maps, "decoder", "self", expected.decoder_attentions)
    check(maps, "decoder", "cross", expected.cross_attentions)
