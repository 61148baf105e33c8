"""Activation memory by formula, against what autograd keeps of the real model."""

import pytest
import torch

from pretrain.config.engine import EngineConfig
from pretrain.config.lengths import RowLengths
from pretrain.config.model import ModelConfig, RecurrentConfig
from pretrain.config.presets import expand_preset
from pretrain.families import SIZES
from pretrain.model import build_model, init_weights
from pretrain.plan.activations import activation_bytes
from pretrain.plan.task import TrainingTask
from pretrain.types import Batch
from tests.unit.plan.kept import kept_bytes, live_tensors

PRESETS = [name for name, size in SIZES.items() if name.endswith("-tiny") and "input" not in size.values]
OTHERS = [name for name in PRESETS if name != "t5-tiny"]
MODES = ["none", pytest.param("selective", marks=pytest.mark.long), "full"]
ROWS, LENGTH, SOURCE_LENGTH = 4, 64, 96


def model_of(preset, **over):
    return ModelConfig.model_validate(expand_preset({"preset": preset, "vocab_size": 256, **over}))


def planned_over_kept(config, *, kind="deepspeed", precision="fp32", mode="none", every=1):
    """The formula over the measurement, one micro-batch of a model on a CPU; `single` in bf16: under autocast."""
    engine = EngineConfig(
        kind=kind,
        gradients="fp32" if kind == "single" else "compute",
        zero_stage=0,
        precision=precision,
        device="cpu",
        activation_checkpointing=mode,
        activation_checkpointing_every=every,
    )
    source = SOURCE_LENGTH if config.encoder is not None and config.decoder is not None else None
    task = TrainingTask(config, RowLengths(LENGTH, LENGTH, source), generator_share=0.25)
    planned = activation_bytes(task, engine, ROWS, "cpu")
    return planned.kept / kept_bytes(config, engine, ROWS, LENGTH, source)


@pytest.mark.parametrize(
    "experts",
    [
        {"count": 8, "top_k": 2, "width": 96},
        {"count": 16, "top_k": 4, "width": 64, "shared": 1, "scores": "sigmoid", "balance": "bias"},
    ],
    ids=["softmax", "sigmoid"],
)
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_what_a_mixture_of_experts_keeps_is_known_within_a_tenth(experts, mode):
    config = model_of("llama-tiny", decoder={"experts": experts})
    assert planned_over_kept(config, mode=mode) == pytest.approx(1, abs=0.1)
    assert planned_over_kept(config, kind="single", precision="bf16", mode=mode) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("preset", ["llama-tiny", "gpt2-tiny", "deepseek_v3-tiny"])
@pytest.mark.parametrize("mode", ["none", "full"])
def test_what_modules_that_predict_further_tokens_keep_is_known_within_a_tenth(preset, mode):
    config = model_of(preset, multi_token=2)
    assert planned_over_kept(config, mode=mode) == pytest.approx(1, abs=0.1)
    further = config.model_copy(update={"multi_token": 0})
    kept = [
        kept_bytes(one, EngineConfig(kind="single", zero_stage=0, precision="fp32"), ROWS, LENGTH, None)
        for one in (config, further)
    ]
    assert kept[0] > 1.2 * kept[1]


@pytest.mark.parametrize("mode", ["none", "full"])
def test_what_a_generator_of_replaced_tokens_keeps_is_known_within_a_tenth(mode):
    keys = {"tied_embeddings": False, "head": {"kind": "replaced", "transform": True, "bias": True}}
    config = model_of("electra-tiny", encoder={"width": 128}, generator_heads=2, **keys)
    assert planned_over_kept(config, mode=mode) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("query_rank", [None, 32])
@pytest.mark.parametrize("mode", MODES)
def test_what_latent_attention_keeps_is_known_within_a_tenth(query_rank, mode):
    latent = {"query_rank": query_rank, "kv_rank": 24, "rope_width": 8, "value_width": 16}
    config = model_of("llama-tiny", decoder={"kv_heads": 4, "ff_width": 64, "latent": latent})
    assert planned_over_kept(config, mode=mode) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize(
    "keys",
    [{}, {"gate_limit": 7.0}, {"gate_shift": 1.0}, {"gate_limit": 7.0, "gate_shift": 1.0}, {"gated": False}],
    ids=str,
)
def test_what_a_bounded_gate_keeps_is_known_within_a_tenth(keys):
    config = model_of("llama-tiny", decoder={"activation": "quick_gelu", "ff_width": 512, **keys})
    assert planned_over_kept(config) == pytest.approx(1, abs=0.1)


@pytest.mark.long
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu", "relu", "relu2", "quick_gelu"])
def test_what_a_compiled_activation_keeps_is_known(gated, activation):
    """By the difference of two widths, in which all else cancels."""
    engine = EngineConfig(kind="deepspeed", zero_stage=0, precision="fp32", device="cpu", compile=True)
    found = []
    for width in (256, 512):
        torch._dynamo.reset()
        config = model_of("llama-tiny", decoder={"activation": activation, "gated": gated, "ff_width": width})
        planned = activation_bytes(TrainingTask(config, RowLengths(LENGTH, LENGTH, None)), engine, ROWS, "cpu")
        found.append((planned.kept, kept_bytes(config, engine, ROWS, LENGTH, None)))
    planned, kept = (large - small for small, large in zip(*found, strict=True))
    assert planned == pytest.approx(kept, rel=0.01)


@pytest.mark.parametrize("gated", [False, True])
def test_what_a_squared_activation_keeps_is_known_within_a_tenth(gated):
    config = model_of("llama-tiny", decoder={"activation": "relu2", "gated": gated, "ff_width": 512})
    assert planned_over_kept(config) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize(
    "keys",
    [
        {"value_residual": True}, {"value_embeddings": 2}, {"residual_scalars": True},
        {"norm_placement": "output", "qk_norm": "whole"}, {"layer_scale": 0.1, "drop_path": 0.5},
        {"layer_scale": 0.1, "norm_placement": "output"}, {"qk_norm": "layer"}, {"qk_norm": "heads"},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("mode", MODES)
def test_what_further_keys_of_a_stack_keep_is_known_within_a_tenth(keys, mode):
    config = model_of("llama-tiny", decoder={"layers": 4, "kv_heads": 4, "ff_width": 64, **keys})
    assert planned_over_kept(config, mode=mode) == pytest.approx(1, abs=0.1)
    assert planned_over_kept(config, kind="single", precision="bf16", mode=mode) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("mode", MODES[1:])
@pytest.mark.parametrize("preset", ["t5-tiny", *(pytest.param(name, marks=pytest.mark.long) for name in OTHERS)])
def test_what_a_family_keeps_is_known_where_blocks_are_computed_again(preset, mode):
    assert planned_over_kept(model_of(preset), mode=mode) == pytest.approx(1, abs=0.1)


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["deepspeed", "single"])
@pytest.mark.parametrize("preset", ["llama-tiny", "gpt2-tiny", "modernbert-tiny"])
def test_bf16_weights_and_autocast_keep_what_is_said_of_them(preset, kind, mode):
    assert planned_over_kept(model_of(preset), kind=kind, precision="bf16", mode=mode) == pytest.approx(1, abs=0.1)


def test_checkpointing_every_second_block_is_between_all_and_none():
    config = model_of("llama-tiny", decoder={"layers": 4})
    assert planned_over_kept(config, mode="full", every=2) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_offload_keeps_two_blocks_on_the_device_and_all_but_the_last_on_the_host(mode):
    config, layers = model_of("llama-tiny", decoder={"layers": 5}), 5
    update = {"activation_checkpointing": mode, "offload_activations": "cpu", "precision": "fp32", "device": "cpu"}
    engine = EngineConfig(kind="single", zero_stage=0).model_copy(update=update)
    model = build_model(config, engine, torch.device("cpu"))
    init_weights(model, config, seed=0)
    before = live_tensors()
    tokens = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
    output = model(Batch(tokens, tokens), logits=False)
    assert output.hidden_BTD.requires_grad
    copies = [one for number, one in live_tensors().items() if number not in before and one.dtype == torch.uint8]
    planned = activation_bytes(TrainingTask(config, RowLengths(LENGTH, LENGTH)), engine, ROWS, "cpu")
    assert planned.on_host == pytest.approx(sum(one.nbytes for one in copies), rel=0.1)
    plain = engine.model_copy(update={"offload_activations": "none"})
    whole = activation_bytes(TrainingTask(config, RowLengths(LENGTH, LENGTH)), plain, ROWS, "cpu")
    moved = planned.on_host // (layers - 1)
    assert planned.blocks == whole.blocks - (layers - 2) * moved
    assert planned.peak < whole.peak


def test_what_is_computed_again_is_of_one_block():
    """The bytes of a whole block are what a model of one more layer keeps more."""
    engine = EngineConfig(device="cpu", activation_checkpointing="full")
    deeper = [TrainingTask(model_of("llama-tiny", decoder={"layers": n}), RowLengths(LENGTH, LENGTH)) for n in (2, 3)]
    full = activation_bytes(deeper[0], engine, ROWS)
    whole = [activation_bytes(task, EngineConfig(), ROWS).kept for task in deeper]
    assert full.recomputed == whole[1] - whole[0]
    stack = deeper[0].model.decoder
    assert full.gradient == ROWS * LENGTH * 2 * stack.ff_width * engine.compute_bytes  # of gate and up
    assert full.peak == full.kept + full.recomputed + full.gradient


def test_the_head_of_a_masked_model_keeps_the_places_that_it_reads_only():
    config, lengths = model_of("bert-tiny"), RowLengths(LENGTH, LENGTH)
    everything, some = (
        activation_bytes(TrainingTask(config, lengths, share), EngineConfig(), ROWS) for share in (1, 0.25)
    )
    assert some.loss < everything.loss
    assert everything.blocks == some.blocks


@pytest.mark.parametrize(
    ("cell", "attention"), [("rnn", None), ("gru", "none"), ("gru", "luong"), ("lstm", None), ("lstm", "bahdanau")]
)
def test_what_recurrent_cells_keep_is_known_within_a_third(cell, attention):
    stack = {"cell": cell, "layers": 2, "width": 64}
    two = {} if attention is None else {"encoder": stack, "attention": attention}
    config = RecurrentConfig.model_validate({"kind": "recurrent", "decoder": stack, "vocab_size": 256, **two})
    engine = EngineConfig(kind="single", zero_stage=0, precision="fp32", device="cpu")
    source = None if attention is None else 48
    planned = activation_bytes(TrainingTask(config, RowLengths(32, 32, source)), engine, 8).kept
    assert planned / kept_bytes(config, engine, 8, 32, source) == pytest.approx(1, abs=0.34)
