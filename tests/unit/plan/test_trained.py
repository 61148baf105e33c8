"""What is counted as trained, against models that are frozen and adapted in earnest; FLOPs against torch's counter."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from pretrain.artifact.lora import add_adapters, freeze, train_beside
from pretrain.artifact.source import is_adapter
from pretrain.config.engine import PLAIN_ENGINE, EngineConfig
from pretrain.config.finetune import FinetuneConfig, matches
from pretrain.config.lengths import RowLengths
from pretrain.config.model import ModelConfig, StackConfig, parse_model
from pretrain.config.optim import EmaConfig, OptimConfig
from pretrain.config.presets import expand_preset
from pretrain.errors import ConfigError
from pretrain.model import build_model, init_weights
from pretrain.optim.build import state_size
from pretrain.optim.groups import group_parameters
from pretrain.plan.activations import activation_bytes
from pretrain.plan.flops import count_flops
from pretrain.plan.memory import state_bytes
from pretrain.plan.params import parameter_shapes
from pretrain.plan.task import TrainingTask
from pretrain.plan.trained import TrainableSubset, count_values, plan_trained
from pretrain.types import Batch, StackRows
from tests.helpers.tables import alternating, pairwise
from tests.unit.plan.kept import kept_bytes
from tests.unit.plan.test_params import models

FULL = FinetuneConfig()
PRESETS = ["llama-tiny", "bert-tiny", "transformer-tiny", "t5-tiny"]
FROZEN = [
    ["embedding.*"],
    ["embedding.*", "*.blocks.0.*"],
    ["*.weight"],
    ["*.bias", "*norm*"],
    ["*.attention.*"],
    ["*.blocks.1.feedforward.*", "*.cross.*", "*.position.*"],
    ["embedding.*", "encoder.*", "*.position.*", "*.blocks.0.*"],
    ["embedding.*", "decoder.*", "head.*"],
]
LORA = [
    {"rank": 3},
    {"rank": 5, "targets": ["*.attention.*"]},
    {"rank": 2, "targets": ["*.blocks.1.feedforward.*"], "also": ["head.weight"]},
    {"rank": 2, "targets": ["*.qkv"], "also": ["embedding.weight", "*.blocks.0.feedforward_norm.*"]},
]


def model_of(preset: str, **changes) -> ModelConfig:
    """A model of two blocks a stack with a head of its own."""
    values = {"preset": preset, "vocab_size": 100, "max_seq_len": 32, "tied_embeddings": False, **changes}
    return ModelConfig.model_validate(expand_preset(values))


def arranged(config, patterns=(), finetune=FULL, device="meta"):
    """The real model, frozen or adapted as a run does it."""
    eager = PLAIN_ENGINE.model_copy(update={"attention": "eager"})
    model = build_model(config, eager, torch.device(device))
    if device == "cpu":
        init_weights(model, config, seed=0)
    if finetune.kind == "lora":
        add_adapters(model, finetune)
        train_beside(model, {name for name in parameter_shapes(config) if is_new(config, name)}, finetune.also)
    else:
        freeze(model, patterns)
    return model


def is_new(config, name):
    return config.head.kind == "labels" and name.startswith("head.")


def try_freeze(config, patterns):
    """What is trained, or None where the patterns do not fit the model, as the run finds too."""
    try:
        return plan_trained(config, patterns, FULL)
    except ConfigError:
        with pytest.raises(ConfigError):
            arranged(config, patterns)
        return None


@given(models())
@settings(max_examples=50)
def test_names_and_shapes_are_those_of_the_built_model(config):
    built = build_model(config, PLAIN_ENGINE, torch.device("meta"))
    assert parameter_shapes(config) == {name: tuple(weight.shape) for name, weight in built.named_parameters()}


@pytest.mark.parametrize("attention", ["bahdanau", "luong", "none"])
@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_recurrent_models_have_the_same_names(attention, cell):
    stack = {"cell": cell, "layers": 2, "width": 8}
    values = {"kind": "recurrent", "encoder": {**stack, "bidirectional": True}, "decoder": stack, "vocab_size": 10}
    config = parse_model(values | {"attention": attention})
    built = build_model(config, PLAIN_ENGINE, torch.device("meta"))
    assert parameter_shapes(config) == {name: tuple(weight.shape) for name, weight in built.named_parameters()}


@pytest.mark.parametrize("patterns", FROZEN, ids=lambda patterns: ",".join(patterns))
@pytest.mark.parametrize("preset", PRESETS)
def test_frozen_values_are_those_that_the_run_freezes(preset, patterns):
    config = model_of(preset)
    trained = try_freeze(config, patterns)
    if trained is None:
        return
    named = dict(arranged(config, patterns).named_parameters())
    assert trained.names == {name for name, weight in named.items() if weight.requires_grad}
    values = count_values(config, trained)
    assert values.trained == sum(weight.numel() for weight in named.values() if weight.requires_grad)
    assert values.weights == values.saved == sum(weight.numel() for weight in named.values())


@pytest.mark.parametrize("changes", LORA, ids=str)
@pytest.mark.parametrize("preset", [*PRESETS, "labels"])
def test_adapters_are_those_that_the_run_adds(preset, changes):
    head = {"head": {"kind": "labels", "labels": ["a", "b"], "transform": True}}
    config = model_of("bert-tiny", **head) if preset == "labels" else model_of(preset)
    finetune = FinetuneConfig(kind="lora", **changes)
    trained = plan_trained(config, [], finetune)
    named = dict(arranged(config, finetune=finetune).named_parameters())
    assert trained.adapter_values == sum(weight.numel() for name, weight in named.items() if is_adapter(name))
    values = count_values(config, trained)
    assert values.trained == values.saved == sum(weight.numel() for weight in named.values() if weight.requires_grad)
    assert values.weights == sum(weight.numel() for weight in named.values())


def test_all_of_a_model_is_trained_where_nothing_is_frozen():
    assert plan_trained(model_of("llama-tiny"), [], FULL) is None
    config = model_of("llama-tiny")
    total, values = sum(map(math.prod, parameter_shapes(config).values())), count_values(config, None)
    assert (values.weights, values.trained, values.saved) == (total, total, total)


@pairwise(
    preset=PRESETS,
    kind=["adamw", "lion", "muon", "soap"],
    finetune={"full": FULL, "lora": FinetuneConfig(kind="lora")},
)
def test_optimizer_state_is_that_of_the_optimizer_of_the_built_model(preset, kind, finetune):
    config = model_of(preset)
    values = count_values(config, plan_trained(config, [], finetune))
    groups = group_parameters(arranged(config, finetune=finetune))
    size = state_size(groups, OptimConfig(kind=kind, lr=1e-3))
    assert state_bytes(kind, values) == 4 * size.elements
    averaged = OptimConfig(kind=kind, lr=1e-3, ema=EmaConfig(horizon_steps=10))
    with_average = state_size(group_parameters(arranged(config, finetune=finetune)), averaged)
    assert with_average.elements - size.elements == values.trained


@pytest.mark.parametrize(
    ("patterns", "finetune", "match"),
    [
        (["decoder.block.*"], {}, "init.freeze: 'decoder.block.*' matches no parameter; .*embedding.weight"),
        (["*"], {}, "leaves nothing to train"),
        ([], {"kind": "lora", "targets": ["*.mlp"]}, "finetune.targets: .*decoder.blocks.0.attention.qkv"),
        ([], {"kind": "lora", "also": ["lm_head"]}, "finetune.also: 'lm_head'"),
    ],
)
def test_patterns_that_name_nothing_are_refused_before_the_queue(patterns, finetune, match):
    with pytest.raises(ConfigError, match=match):
        plan_trained(model_of("llama-tiny"), patterns, FinetuneConfig(**finetune))


@pytest.mark.parametrize(
    ("also", "working"),
    [
        (["embedding.weight", "head.weight"], "embedding.weight"),
        (["*.norm.weight", "head.*"], r"\*.norm.weight, embedding.weight"),
    ],
)
def test_the_head_of_a_tied_model_is_answered_with_the_list_that_works(also, working):
    config = model_of("llama-tiny", tied_embeddings=True)
    with pytest.raises(ConfigError, match=rf"'head.*' matches no parameter; .*: finetune.also=\[{working}\]$"):
        plan_trained(config, [], FinetuneConfig(kind="lora", also=also))


def counted(config, model, length=12, source_length=9):
    """FLOPs of forward and backward by torch, at eager attention, of 2 rows; and of the forward pass alone."""
    tokens = torch.randint(0, 100, (2, length), generator=torch.Generator().manual_seed(0))
    source = StackRows(tokens[:, :source_length]) if config.encoder is not None and config.decoder is not None else None
    counter = FlopCounterMode(display=False)
    with counter:
        output = model(Batch(tokens, tokens, source=source))
        forward = counter.get_total_flops()
        output.logits_BTV[..., : config.vocab_size].sum().backward()
    return counter.get_total_flops(), forward


def check_flops(config, trained: TrainableSubset, model):
    whole, forward = counted(config, model)
    found = count_flops(config, 12, source_len=9 if config.shape == "encoder+decoder" else None, trained=trained)
    assert (2 * found.whole.total, 2 * found.forward.total) == (whole, forward)


@pytest.mark.parametrize(("preset", "patterns"), alternating(PRESETS, FROZEN))
def test_frozen_weights_have_as_many_flops_as_torch_counts(preset, patterns):
    config = model_of(preset)
    trained = try_freeze(config, patterns)
    if trained is not None:
        check_flops(config, trained, arranged(config, patterns, device="cpu"))


VALUES = {"layers": 4, "value_residual": True, "value_embeddings": 1, "residual_scalars": True, "layer_scale": 0.1}


@pytest.mark.parametrize(
    "left",
    [
        "*residual_mix",
        "*value_mix",
        "*.value_embedding.*",
        "*.blocks.0.attention.qkv.weight",
        "head.*",
        "*.blocks.1.attention_scale",
        "*.blocks.1.feedforward_scale",
    ],
)
def test_mixed_values_pass_on_gradients_as_torch_counts_them(left):
    config = model_of("llama-tiny", decoder=VALUES)
    patterns = [name for name in parameter_shapes(config) if not matches(name, [left])]
    check_flops(config, plan_trained(config, patterns, FULL), arranged(config, patterns, device="cpu"))


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_value_embeddings_are_no_hidden_matrices(kind):
    config = model_of("llama-tiny", decoder=VALUES)
    size = state_size(group_parameters(arranged(config)), OptimConfig(kind=kind, lr=1e-3))
    assert state_bytes(kind, count_values(config, None)) == 4 * size.elements


@pytest.mark.parametrize(("preset", "changes"), alternating(PRESETS, LORA))
def test_adapters_have_as_many_flops_as_torch_counts(preset, changes):
    config, finetune = model_of(preset), FinetuneConfig(kind="lora", **changes)
    check_flops(config, plan_trained(config, [], finetune), arranged(config, finetune=finetune, device="cpu"))


def test_frozen_blocks_cost_4n_above_what_is_trained_and_2n_below():
    """By hand: the embedding and a block of two below are frozen, and in the other only the last matrix is trained."""
    stack = StackConfig(layers=2, width=32, heads=4, ff_width=48, gated=False)
    config = ModelConfig(decoder=stack, vocab_size=128, max_seq_len=16)
    trained = plan_trained(config, ["embedding.*", "*.blocks.0.*", "*.qkv.*", "*.output.*", "*.up.*", "*norm*"], FULL)
    assert sorted(trained.names) == ["decoder.blocks.1.feedforward.down.weight", "head.weight"]
    found = count_flops(config, 16, trained=trained)
    block, down, head = 4 * 32 * 32 + 2 * 32 * 48, 32 * 48, 32 * 128
    # No gradient goes below the last matrix, which has its own; the head has both.
    assert found.whole.projections == 16 * (2 * 2 * block + 2 * down)
    assert found.whole.head == 16 * 6 * head
    assert found.whole.attention == found.forward.attention == 2 * 4 * 32 * 16 * 16
    assert found.frozen_blocks == {"decoder": 1}
    last = plan_trained(config, ["*.blocks.*"], FULL)  # every block passes a gradient on to the embedding
    assert count_flops(config, 16, trained=last).whole.projections == 16 * 4 * 2 * block


@given(models(), st.integers(1, 20), st.integers(1, 20))
@settings(max_examples=40)
def test_a_model_of_which_all_is_named_has_the_flops_of_a_whole_one(config, length, source):
    trained = TrainableSubset(frozenset(parameter_shapes(config)), frozenset(), FULL, 0, saves_all=True)
    source_len = source if config.shape == "encoder+decoder" else None
    found = count_flops(config, length, source_len=source_len, trained=trained)
    assert found == count_flops(config, length, source_len=source_len)
    assert 3 * found.forward.total == found.whole.total
    assert not any(found.frozen_blocks.values())


@pytest.mark.parametrize("patterns", [["embedding.*"], ["embedding.*", "*.blocks.[01].*"], ["*.blocks.*"]], ids=str)
def test_what_is_kept_with_frozen_weights_is_at_most_what_is_planned(patterns, monkeypatch):
    stack = StackConfig(layers=4, width=64, heads=4, ff_width=128)
    config = ModelConfig(decoder=stack, vocab_size=256, max_seq_len=64)
    monkeypatch.setattr("tests.unit.plan.kept.build_model", lambda *given: frozen(build_model(*given), patterns))
    check_kept(config, plan_trained(config, patterns, FULL))


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_what_is_kept_with_adapters_is_at_most_what_is_planned(dropout, monkeypatch):
    stack = StackConfig(layers=4, width=64, heads=4, ff_width=128)
    config = ModelConfig(decoder=stack, vocab_size=256, max_seq_len=64)
    finetune = FinetuneConfig(kind="lora", rank=4, dropout=dropout)
    monkeypatch.setattr("tests.unit.plan.kept.build_model", lambda *given: adapted(build_model(*given), finetune))
    monkeypatch.setattr("tests.unit.plan.kept.init_weights", lambda *_, **__: None)
    check_kept(config, plan_trained(config, [], finetune))


def frozen(model, patterns):
    freeze(model, patterns)
    return model


def adapted(model, finetune):
    add_adapters(model, finetune)
    return model


def check_kept(config, trained):
    """Between what is kept and what is planned lies what frozen matrices would have kept to have a gradient."""
    engine = EngineConfig(kind="single", precision="fp32", device="cpu")
    lengths = RowLengths(64, 64)
    planned = activation_bytes(TrainingTask(config, lengths, trained=trained), engine, 4, "cpu").kept
    kept = kept_bytes(config, engine, 4, 64, None)
    assert 0.7 * planned < kept <= planned
