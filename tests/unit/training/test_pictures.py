"""Pictures of attention from a model in training: what is drawn, what is refused, and that nothing
changes."""

import io
import logging

import pytest
import torch
from PIL import Image

from pretrain.artifact.plain_codec import PlainCodec
from pretrain.config.tracking import AttentionConfig
from pretrain.errors import ConfigError
from pretrain.training import samples
from pretrain.training.samples import AttentionPictures, TextReader
from tests.helpers.tokenizers import train_char
from tests.unit.model.tiny import build, encoder_config, tiny_config, two_stacks_config

TOKENIZER = train_char(["abcdefghij klmnopqrstuvwxyz.\n"])
READER = TextReader(str, str, PlainCodec(TOKENIZER))
TEXT = "a cab."
DROPOUT = {"dropout": 0.5, "attention_dropout": 0.5}
DECODER, ENCODER = build(tiny_config(**DROPOUT)), build(encoder_config(**DROPOUT))
TWO_STACKS = build(two_stacks_config(model={"special_tokens": {"start": 0}}, **DROPOUT))


def drawing(model=DECODER, draws=True, reader=READER, **values) -> AttentionPictures:
    return AttentionPictures(AttentionConfig(**{"text": TEXT, **values}), 10, reader, model, draws=draws)


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "values"),
    [(DECODER, {}), (ENCODER, {}), (TWO_STACKS, {"target": "bad"}), (TWO_STACKS, {"target": "bad", "kind": "self"})],
    ids=["decoder", "encoder", "two stacks", "both stacks"],
)
def test_a_model_in_training_is_drawn_and_left_as_it_was(model, values):
    model.train()
    drawn, state = drawing(model, **values), torch.get_rng_state()
    backends = [stack.backend for stack in model.stacks]
    drawn.check()
    png = drawn.draw()
    assert png == drawn.draw(), "dropout would make another picture each time"
    assert torch.equal(torch.get_rng_state(), state)
    assert all(part.training for part in model.modules())
    assert [stack.backend for stack in model.stacks] == backends
    assert all(parameter.grad is None for parameter in model.parameters())
    picture = Image.open(io.BytesIO(png))
    assert picture.format == "PNG" and len(set(picture.convert("L").getdata())) > 50


def test_the_picture_is_that_of_the_weights_as_they_are():
    model = build(tiny_config())
    drawn = drawing(model, layers=[1], heads=[0])
    before = drawn.draw()
    with torch.no_grad():
        model.decoder.blocks[1].attention.qkv.weight.neg_().mul_(0.5)
    assert drawn.draw() != before


def test_a_rank_that_only_helps_runs_the_forward_and_draws_nothing():
    runs = []
    hook = DECODER.register_forward_hook(lambda *_: runs.append(1))
    try:
        assert drawing(draws=False).draw() is None
    finally:
        hook.remove()
    assert runs == [1]


def test_of_a_large_model_a_few_layers_and_heads_are_drawn():
    model = build(tiny_config(layers=6, heads=8, kv_heads=8))
    (section,) = drawing(model)._record()
    assert [[head.layer for head in row] for row in section.rows] == [[layer] * 4 for layer in (0, 1, 3, 5)]
    assert [head.head for head in section.rows[0]] == [0, 2, 4, 7]
    (section,) = drawing(model, layers=[5, 2, 2], heads=[7])._record()
    assert [[(head.layer, head.head) for head in row] for row in section.rows] == [[(2, 7)], [(5, 7)]]


def test_texts_are_normalised_as_the_data_were():
    reader = TextReader(str.lower, lambda text: text.replace("!", ""), READER.codec)
    (section,) = drawing(TWO_STACKS, reader=reader, text="A CAB", target="b!ad")._record()
    assert section.keys == ["a", "\u2423", "c", "a", "b"]
    assert section.queries[1:] == ["b", "a", "d"]


def test_it_is_drawn_after_every_so_many_evaluations():
    drawn = drawing(every_evals=3)
    assert [step for step in range(1, 100) if drawn.is_due(step)] == [30, 60, 90]
    assert not any(drawing(every_evals=0).is_due(step) for step in range(100))


@pytest.mark.parametrize(
    ("model", "values", "message"),
    [
        (DECODER, {"text": ""}, r"^tracking\.attention\.text: the prompt has no tokens"),
        (DECODER, {"text": "a" * 129}, r"^tracking\.attention\.text: the prompt has 129 tokens, model\.max_seq_len is"),
        (TWO_STACKS, {"target": "b" * 128}, r"^tracking\.attention\.target: the prompt has 129 tokens"),
        (
            DECODER,
            {"text": "a" * 120},
            r"^tracking\.attention: 120 tokens cannot be read in one picture of 2 x 4 maps, at most \d+ can; "
            "shorten the text, or draw fewer layers and heads$",
        ),
    ],
)
def test_what_cannot_be_drawn_is_refused_before_the_first_step(model, values, message):
    with pytest.raises(ConfigError, match=message):
        drawing(model, **values).check()


def test_weights_that_are_not_numbers_are_a_warning(caplog):
    model = build(tiny_config())
    drawn = drawing(model)
    with torch.no_grad():
        model.decoder.blocks[0].attention.qkv.weight.fill_(torch.nan)
    with caplog.at_level(logging.WARNING, logger="pretrain"):
        assert drawn.draw() is None
    assert caplog.messages == ["no picture of attention: its weights are not numbers"]


def test_a_picture_that_fails_is_a_warning(caplog, monkeypatch):
    def fail(*_: object) -> bytes:
        raise RuntimeError("no such font")

    monkeypatch.setattr(samples, "render_attention", fail)
    with caplog.at_level(logging.WARNING, logger="pretrain"):
        assert drawing().draw() is None
    assert caplog.messages == ["no picture of attention: RuntimeError: no such font"]
