"""Counts against the model that is really built."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain.config.model import ModelConfig, StackConfig
from pretrain.model import build_model
from pretrain.plan.params import count_parameters, count_parts

PARTS = {
    "qkv": "attention",
    "output": "attention",
    "gate_up": "feedforward",
    "up": "feedforward",
    "down": "feedforward",
}


@st.composite
def models(draw):
    heads = draw(st.sampled_from([2, 4]))
    stack = StackConfig(
        layers=draw(st.integers(1, 3)),
        width=draw(st.sampled_from([8, 16])),
        heads=heads,
        kv_heads=draw(st.sampled_from([None, 1, heads])),
        head_width=draw(st.sampled_from([None, 6])),
        ff_width=draw(st.integers(1, 40)),
        gated=draw(st.booleans()),
        norm=draw(st.sampled_from(["rms", "layer"])),
        norm_placement=draw(st.sampled_from(["pre", "post"])),
        bias=draw(st.booleans()),
        position=draw(st.sampled_from(["learned", "rotary", "none"])),
    )
    return ModelConfig(
        **{draw(st.sampled_from(["encoder", "decoder"])): stack},
        vocab_size=draw(st.integers(1, 300)),
        max_seq_len=draw(st.integers(1, 64)),
        tied_embeddings=draw(st.booleans()),
    )


@given(models())
@settings(max_examples=60, deadline=None)
def test_every_part_has_as_many_parameters_as_the_built_model(config):
    model = build_model(
        config, attention="auto", activation_checkpointing="none", compile=False, device=torch.device("meta")
    )
    built: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        words = name.split(".")
        part = PARTS.get(words[-2]) or (words[0] if words[0] in ("embedding", "head") else None)
        built[part or ("position" if "position" in words else "norm")] += parameter.numel()
    counted = count_parts(config)
    for part in ("embedding", "position", "attention", "feedforward", "norm", "head"):
        assert getattr(counted, part) == built[part], part
    assert count_parameters(config) == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("config", "published"),
    [
        # GPT-2 small: 124,439,808 (Hugging Face `gpt2`), vocabulary not padded.
        (
            ModelConfig(
                decoder=StackConfig(
                    layers=12, width=768, heads=12, ff_width=3072, activation="gelu_tanh", gated=False,
                    norm="layer", bias=True, position="learned",
                ),
                vocab_size=50257, vocab_multiple=1, max_seq_len=1024, tied_embeddings=True,
            ),
            124_439_808,
        ),
        # LLaMA 7B: 6,738,415,616 (Touvron et al. 2023).
        (
            ModelConfig(decoder=StackConfig(layers=32, width=4096, heads=32, ff_width=11008), vocab_size=32000),
            6_738_415_616,
        ),
    ],
)  # fmt: skip
def test_released_models_have_their_published_size(config, published):
    assert count_parameters(config) == published
