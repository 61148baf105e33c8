"""Filling masks."""

import pytest
import torch

from pretrain.config.model import ModelConfig
from pretrain.config.presets import expand_preset
from pretrain.errors import ConfigError
from pretrain.generation.command import fill_masks
from pretrain.types import Batch
from tests.unit.generation.codecs import MASK, PAD, byte_codec
from tests.unit.generation.models import tiny_model
from tests.unit.model.tiny import build

CODEC = byte_codec()


def encoder(preset="bert-tiny", **model):
    values = expand_preset({"preset": preset, "vocab_size": CODEC.vocab_size, **model})
    return build(ModelConfig.model_validate(values), scale=2.0)


@pytest.mark.parametrize("spelling", ["[MASK]", MASK])
@pytest.mark.parametrize("preset", ["bert-tiny", "modernbert-tiny"])
def test_candidates_are_the_likeliest_tokens_at_each_mask(preset, spelling):
    model = encoder(preset).eval()
    filled = fill_masks(model, CODEC, f"the {spelling} sat on {spelling}.", 4)
    ids = CODEC.encode(f"the {MASK} sat on {MASK}.")
    places = [place for place, number in enumerate(ids) if number == CODEC.mask_id]
    with torch.no_grad():
        probabilities = model(Batch(torch.tensor([ids]), torch.tensor([ids]))).logits_BTV[0].softmax(dim=-1)
    assert len(filled.masks) == len(places) == 2
    for place, candidates in zip(places, filled.masks, strict=True):
        best = probabilities[place].topk(4)
        assert [found.id for found in candidates] == best.indices.tolist()
        assert [found.probability for found in candidates] == pytest.approx(best.values.tolist(), rel=1e-5)
        assert [found.token for found in candidates] == CODEC.tokens(best.indices.tolist())
        ids[place] = candidates[0].id
    assert filled.text == CODEC.decode(ids)


def test_masks_do_not_see_how_others_are_filled():
    model = encoder()
    both = fill_masks(model, CODEC, "[MASK] and [MASK]").masks
    again = fill_masks(model, CODEC, "[MASK] and [MASK]", 1).masks
    assert [row[:1] for row in both] == again
    assert len(both[0]) == 5


def test_dropout_is_off_and_the_mode_is_restored():
    model = encoder()
    assert model.training
    assert fill_masks(model, CODEC, "a [MASK]") == fill_masks(model, CODEC, "a [MASK]")
    assert model.training


def test_more_candidates_than_tokens_are_all_tokens():
    filled = fill_masks(encoder(), CODEC, "[MASK]", 100_000)
    assert sorted(found.id for found in filled.masks[0]) == list(range(CODEC.vocab_size))
    assert sum(found.probability for found in filled.masks[0]) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(
    ("text", "top_k", "message"),
    [
        ("no gap", 5, r"^line 2: the text has no mask; put \[MASK\] where"),
        ("[MASK]", 0, "^line 2: top_k=0 must be at least 1"),
        ("[MASK] " + "cat " * 600, 5, r"^line 2: the prompt has \d+ tokens, model\.max_seq_len is"),
    ],
)
def test_texts_that_cannot_be_filled_are_refused(text, top_k, message):
    with pytest.raises(ConfigError, match=message):
        fill_masks(encoder(), CODEC, text, top_k, where="line 2")


def test_models_and_tokenizers_that_fill_no_masks_are_refused():
    for preset in ("llama-tiny", "t5-tiny"):
        with pytest.raises(ConfigError, match="a model with a decoder fills no masks"):
            fill_masks(tiny_model(preset), CODEC, "[MASK]")
    bare = encoder(head={"kind": "none"}, tied_embeddings=False)
    with pytest.raises(ConfigError, match="a model without a language model's head fills no masks"):
        fill_masks(bare, CODEC, "[MASK]")
    codec = byte_codec()
    codec.mask_id = None
    with pytest.raises(ConfigError, match="the tokenizer has no mask token"):
        fill_masks(encoder(), codec, "[MASK]")


@pytest.mark.parametrize(
    ("text", "filled"),
    [
        ("the [MASK] sat.", "the <pad> sat."),
        ("[MASK]cat, [MASK]", "<pad> cat, <pad>"),
        ("[MASK][MASK]. A", "<pad> <pad>. A"),
    ],
)
def test_a_special_token_that_fills_a_mask_is_shown_by_its_name(text, filled):
    model = encoder()
    pad = CODEC.tokens(list(range(CODEC.vocab_size))).index(PAD)
    with torch.no_grad():
        dict(model.named_parameters())["head.bias"][pad] = 1e4
    assert fill_masks(model, CODEC, text, 1).text == filled
