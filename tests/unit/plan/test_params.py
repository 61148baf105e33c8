"""Counts against the model that is really built."""

import re
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain.config.engine import PLAIN_ENGINE
from pretrain.config.model import HeadConfig, ModelConfig, StackConfig
from pretrain.model import build_model
from pretrain.optim.groups import group_parameters, split_hidden
from pretrain.plan.params import count_active, count_parameters, count_parts, parameter_shapes
from pretrain.plan.trained import count_values

PARTS = {
    r"(ngram_)?embedding\.weight|\w+\.(token_type|value_embedding\.\d+)\.weight|\w+\.expand\.\w+": "embedding",
    r"multi_token\.inputs\.\d+\.projection\.weight": "embedding",
    r"\w+\.position\.weight": "position",
    r"\w+\.blocks\.\d+\.(attention\.(qkv|output)|cross\.(query|key_value|output))\.\w+": "attention",
    r"\w+\.blocks\.\d+\.(attention\.value_mix|attention\.sinks|residual_mix)": "attention",
    r"\w+\.blocks\.\d+\.(attention|cross|feedforward)_scale": "attention",
    r"\w+\.blocks\.\d+\.feedforward\.\w+\.\w+": "feedforward",
    r"(encoder|decoder|multi_token)\.(\w+\.)*\w*norm\.\w+|multi_token\.norms\.\d+\.\w+": "norm",
    r"head\..+": "head",
    r"pooler\..+": "pooler",
    r"generator\..+": "generator",
}


def part_of(name):
    """The one part whose pattern is the parameter's name."""
    parts = [part for pattern, part in PARTS.items() if re.fullmatch(pattern, name)]
    assert len(parts) == 1, name
    return parts[0]


@st.composite
def stacks(draw, width, narrow=False):
    heads = draw(st.sampled_from([2, 4]))
    layers = draw(st.integers(1, 3))
    norm = draw(st.sampled_from(["rms", "layer"]))
    position = draw(st.sampled_from(["learned", "sinusoidal", "rotary", "relative", "none"]))
    qk_norm = draw(st.sampled_from([False, True, "whole", "layer", "heads"]))
    return StackConfig(
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=draw(st.sampled_from([None, 1, heads])),
        head_width=draw(st.sampled_from([None, 6])),
        ff_width=draw(st.integers(1, 40)),
        gated=draw(st.booleans()),
        norm=norm,
        norm_placement=(placement := draw(st.sampled_from(["pre", "post", "output", "sandwich"]))),
        norm_bias=draw(st.sampled_from([None, False, True])) if norm == "layer" else None,
        norm_offset=norm == "rms" and qk_norm not in ("layer", "heads") and draw(st.booleans()),
        parallel=draw(st.sampled_from([False, True, "one_norm"])) if placement == "pre" else False,
        input_norm=draw(st.sampled_from([False, True, "both"] if placement == "pre" else [False, True])),
        bias=draw(st.booleans()),
        qkv_bias=draw(st.sampled_from([None, False, True])),
        output_bias=draw(st.sampled_from([None, False, True])),
        qk_norm=qk_norm,
        attention_sinks=position != "relative" and draw(st.booleans()),
        embedding_width=width // 2 if narrow and position != "sinusoidal" else None,
        position=position,
        position_offset=draw(st.sampled_from([0, 2, "pad"])) if position == "learned" else 0,
        relative_buckets=draw(st.sampled_from([4, 32])),
        window=draw(st.sampled_from([None, 5])),
        token_types=draw(st.integers(0, 3)),
        residual_scalars=layers > 1 and draw(st.booleans()),
        value_residual=layers > 1 and draw(st.booleans()),
        value_embeddings=draw(st.integers(0, layers // 2)),
        layer_scale=draw(st.sampled_from([None, 0.1])),
    )


@st.composite
def models(draw):
    width = draw(st.sampled_from([8, 16]))
    shape = draw(st.sampled_from([["encoder"], ["decoder"], ["encoder", "decoder"]]))
    tied = draw(st.booleans())
    of_encoders = ["labels", "spans", "choices", "replaced"] if shape == ["encoder"] else []
    of_one = ["vectors"] if len(shape) == 1 else []
    kind = draw(st.sampled_from(["lm"] if tied else ["lm", "none", *of_one, *of_encoders]))
    narrow = len(shape) == 1 and draw(st.booleans())
    drawn = {name: draw(stacks(width, narrow)) for name in shape}
    return ModelConfig(
        **drawn,
        head=HeadConfig(
            kind=kind,
            transform=(tied and narrow) or draw(st.booleans()),
            bias=draw(st.booleans()),
            labels=["a", "b", "c"][: draw(st.integers(1, 3))] if kind == "labels" else [],
            learned_temperature=kind == "vectors" and draw(st.booleans()),
        ),
        vocab_size=draw(st.integers(1, 300)),
        vocab_multiple=draw(st.sampled_from([1, 128])),
        max_seq_len=draw(st.integers(1, 64)),
        tied_embeddings=tied,
        ngram_embeddings=draw(st.integers(0, 2)),
        ngram_rows=draw(st.integers(1, 50)),
        multi_token=draw(st.integers(0, 2)) if predicts_further(shape, kind, drawn.get("decoder")) else 0,
        generator_heads=draw(st.sampled_from([0, 2])) if kind == "replaced" else 0,
        pooler=shape == ["encoder"] and kind not in ("spans", "replaced", "vectors") and draw(st.booleans()),
    )


def predicts_further(shape, kind, stack):
    """Whether a model may have modules that predict further tokens."""
    tables = stack and (stack.embedding_width, stack.value_embeddings, stack.value_residual, stack.residual_scalars)
    return shape == ["decoder"] and kind == "lm" and not any(tables)


@pytest.mark.parametrize("examples", [60, pytest.param(150, marks=pytest.mark.long)])
def test_every_part_has_as_many_parameters_as_the_built_model(examples):
    @given(models())
    @settings(max_examples=examples)
    def check(config):
        model = build_model(config, PLAIN_ENGINE, torch.device("meta"))
        built: Counter[str] = Counter()
        for name, parameter in model.named_parameters():
            built[part_of(name)] += parameter.numel()
        counted = count_parts(config)
        assert {part: count for part, count in counted.items() if count} == dict(built)
        assert count_parameters(config) == sum(parameter.numel() for parameter in model.parameters())

    check()


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("shared", [0, 2])
def test_all_and_active_parameters_of_a_mixture(gated, shared):
    experts = {"count": 5, "top_k": 2, "width": 6, "shared": shared}
    stack = StackConfig(layers=3, width=8, heads=2, ff_width=20, gated=gated, experts=experts)
    config = ModelConfig(decoder=stack, vocab_size=50)
    model = build_model(config, PLAIN_ENGINE, torch.device("meta"))
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert parameter_shapes(config) == shapes
    one = (3 if gated else 2) * 8 * 6
    assert count_parameters(config) - count_active(config) == 3 * (5 - 2) * one
    assert count_parts(config)["feedforward"] == 3 * ((5 + shared) * one + 5 * 8)
    hidden = [split_hidden(group)[0] for group in group_parameters(model)]
    numbers = sum(parameter.numel() for group in hidden for parameter in group.parameters)
    assert count_values(config, None).hidden == numbers  # what Muon steps: not the router


def test_all_parameters_of_a_dense_model_are_active():
    config = ModelConfig(decoder=StackConfig(layers=1, width=8, heads=2, ff_width=20), vocab_size=50)
    assert count_active(config) == count_parameters(config)
