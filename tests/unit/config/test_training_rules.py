"""What does not fit together is refused when the config loads, with the reason."""

import pytest
from pydantic import ValidationError

from pretrain.config.base import refuse
from pretrain.config.data import BatchConfig, ShortWindowsConfig
from pretrain.config.engine import EngineConfig
from pretrain.config.load import load_config
from pretrain.config.model import ModelConfig, RecurrentConfig
from pretrain.config.optim import OptimConfig
from pretrain.config.presets import expand_preset
from pretrain.config.run import training_conflicts
from pretrain.errors import ConfigError
from pretrain.kinds.optimizers import OPTIMIZERS, AdafactorConfig, MuonConfig, Optimizer

BATCH = BatchConfig(global_tokens=100, seq_len=10, micro=1)


def model(preset: str = "llama-tiny", **values: object) -> ModelConfig:
    return ModelConfig.model_validate(expand_preset({"preset": preset, "vocab_size": 100, **values}))


@pytest.mark.parametrize("kind", ["adafactor", "muon", "soap"])
def test_optimizers_of_whole_matrices_are_not_offloaded(kind):
    engine = EngineConfig(offload_optimizer="cpu")
    message = f"optim.kind={kind} steps whole matrices, .*engine.offload_optimizer=none or optim.kind=adamw"
    with pytest.raises(ValueError, match=message):
        refuse(training_conflicts(OptimConfig(kind=kind, lr=1e-3), engine, model(), BATCH))


@pytest.mark.parametrize("values", [{"init": "t5"}, {"decoder": {"scaled_attention": False}}])
def test_fp16_is_refused_for_models_of_the_t5_style(values):
    with pytest.raises(ValueError, match=r"engine.precision=fp16 overflows in a T5-style model .*; use .*=bf16"):
        refuse(training_conflicts(OptimConfig(lr=1e-3), EngineConfig(precision="fp16"), model(**values), BATCH))


def test_one_expert_whose_weight_is_always_1_is_not_trained():
    """A model that has it can be read and used."""
    experts = model("mixtral-tiny", decoder={"experts": {"count": 4, "top_k": 1}})
    message = "top_k=1 with normalize=true .*, which makes every weight 1 and leaves the router without a gradient; "
    with pytest.raises(ValueError, match=f"{message}set normalize=false"):
        refuse(training_conflicts(OptimConfig(lr=1e-3), EngineConfig(), experts, BATCH))


def test_heads_and_windows_of_a_recurrent_model_are_refused():
    optim = OptimConfig(kind="muon", lr=1e-3, muon=MuonConfig(split_heads=True))
    recurrent = RecurrentConfig.model_validate({"kind": "recurrent", "decoder": {"layers": 1, "width": 8}})
    with pytest.raises(
        ValueError, match=r"split_heads=true steps attention heads .*, which model.kind=recurrent lacks"
    ):
        refuse(training_conflicts(optim, EngineConfig(), recurrent, BATCH))
    short = BATCH.model_copy(update={"short_windows": [ShortWindowsConfig(until_tokens=100, window=2)]})
    with pytest.raises(ValueError, match=r"batch.short_windows limits attention .*, which model.kind=recurrent lacks"):
        refuse(training_conflicts(OptimConfig(lr=1e-3), EngineConfig(), recurrent, short))


def test_decay_that_is_0_cannot_be_cautious():
    with pytest.raises(ValueError, match="cautious_decay=true has no decay to choose from: weight_decay=0"):
        OptimConfig(lr=1e-3, weight_decay=0, cautious_decay=True)
    OptimConfig(kind="muon", lr=1e-3, weight_decay=0, cautious_decay=True, muon=MuonConfig(weight_decay=0.1))


def test_what_fits_is_taken():
    refuse(
        training_conflicts(
            OptimConfig(lr=1e-3), EngineConfig(precision="fp16", offload_optimizer="cpu"), model(), BATCH
        )
    )
    refuse(training_conflicts(OptimConfig(kind="muon", lr=1e-3), EngineConfig(), model(init="t5"), BATCH))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"gradients": "fp32", "zero_stage": 1},
            "gradients=fp32 needs precision=bf16 and .*, not bf16 at",
        ),
        ({"gradients": "fp32", "zero_stage": 2, "precision": "fp16"}, "2 or 3, not fp16 at zero_stage=2;"),
        ({"precision": "fp16", "kind": "ddp"}, "precision=fp16 needs kind=deepspeed, which scales the loss, not ddp"),
        (
            {"precision": "fp16", "device": "cpu"},
            "precision=fp16 needs a GPU: DeepSpeed has no fp16 on device=cpu; use",
        ),
        ({"precision": "fp16", "zero_stage": 0}, "precision=fp16 is wrong at zero_stage=0: .*use zero_stage=1, 2 or 3"),
        ({"offload_optimizer": "cpu", "zero_stage": 0}, "offload_optimizer=cpu requires sharded optimizer state; use"),
        ({"offload_optimizer": "cpu", "kind": "ddp"}, "use kind=deepspeed and zero_stage=1, 2 or 3"),
        (
            {"offload_params": "cpu", "zero_stage": 2},
            "offload_params=cpu requires sharded weights; .*zero_stage=3",
        ),
        ({"offload_params": "cpu", "kind": "single"}, "offload_params=cpu requires sharded weights"),
        (
            {"compile": False, "compile_mode": "max-autotune-no-cudagraphs"},
            "compile_mode=max.* compile=false; leave",
        ),
        ({"compile": False, "compile_scope": "stack"}, "compile_scope=stack is of compiled blocks, and compile=false"),
        (
            {"compile_scope": "stack", "zero_stage": 3},
            "no place between blocks to gather weights at zero_stage=3; use .*=block",
        ),
        ({"compile_scope": "stack", "offload_activations": "cpu"}, "no place between blocks for offload_activations"),
        ({"zero_hpz": 8, "zero_stage": 2}, "zero_hpz=8 needs sharded weights on the device; use zero_stage=3 and"),
        ({"zero_hpz": 8, "zero_stage": 3, "offload_params": "cpu"}, "offload_params=none, or zero_hpz=1"),
        (
            {"feedforward_tiles": 4, "activation_checkpointing": "selective"},
            "feedforward_tiles=4: activation_checkpointing=selective keeps the products that they",
        ),
        (
            {"feedforward_tiles": 4, "compile": True},
            "feedforward_tiles=4: compile=true fuses them; change that, or use 1",
        ),
        ({"fp8": "rowwise", "precision": "fp32"}, "fp8=rowwise needs precision=bf16, .* not fp32; change it, or use"),
        (
            {"fp8": "rowwise", "zero_stage": 3},
            "fp8=rowwise would keep every gathered weight .*; use activation_checkpointing=full of",
        ),
    ],
)
def test_engines_that_cannot_are_refused(values, message):
    with pytest.raises(ValidationError, match=message):
        EngineConfig(**values)


def test_keys_of_an_optimizer_that_is_not_chosen_are_refused():
    with pytest.raises(ValidationError, match="the keys under muon are read under kind=muon only, not adamw; remove"):
        OptimConfig(lr=1e-3, muon=MuonConfig(lr=0.1))
    with pytest.raises(ValidationError, match="the keys under adafactor are read under kind=adafactor only, not muon"):
        OptimConfig(kind="muon", lr=1e-3, adafactor=AdafactorConfig(decay_rate=0.5))


def test_all_names_of_a_short_registry_are_listed():
    with pytest.raises(
        ValidationError, match="unknown name 'adam'; use adafactor or adamw or lion or muon or soap, or"
    ):
        OptimConfig(kind="adam", lr=1e-3)


def test_a_rate_of_another_optimizer_is_called_high():
    assert OptimConfig(lr=5e-3).high_rate() is None
    assert OptimConfig(kind="muon", lr=8e-3).high_rate() is None
    adamw, lion = OptimConfig(lr=8e-3), OptimConfig(kind="lion", lr=3e-3)
    assert adamw.high_rate() == "optim.lr=0.008 is high for optim.kind=adamw, whose usual rate is 0.001"
    assert lion.high_rate() == "optim.lr=0.003 is high for optim.kind=lion, whose usual rate is 0.0003"


def test_an_optimizer_that_was_added_is_judged_by_its_record(monkeypatch):
    monkeypatch.setitem(OPTIMIZERS, "lamb", Optimizer(build="lab:build_lamb", is_cautious=True))
    refuse(training_conflicts(OptimConfig(kind="lamb", lr=1.0, cautious_decay=True), EngineConfig(), model(), BATCH))
    optim = OptimConfig(kind="lamb", lr=1.0, transfer={"kind": "mup", "base_width": 8})
    with pytest.raises(ValueError, match=r"no rule for optim.kind=lamb; use adamw or lion or muon, or leave it out"):
        refuse(training_conflicts(optim, EngineConfig(), model(), BATCH))
    with pytest.raises(ValidationError, match="cautious_decay needs kind=adamw or lamb or lion or muon or soap, not"):
        OptimConfig(kind="adafactor", lr=1.0, cautious_decay=True)


FP8 = ["engine.precision=bf16", "engine.fp8=tensorwise"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["parallel.tensor=2", "optim={kind: adamw, muon: null, lr: 1e-3}", "tracking.attention.text=abc"],
            "parallel.tensor=2 leaves no rank with all heads for tracking.attention; leave its text out",
        ),
        (["optim.kind=muon", "engine.offload_optimizer=cpu"], "optim.kind=muon steps whole matrices"),
        (["engine.precision=fp16", "model.init=t5"], "engine.precision=fp16 overflows in a T5-style model"),
        (
            [*FP8, "model.decoder.ff_width=700"],
            "model.decoder: ff_width=700 must be a multiple of 16 for engine.fp8; chan",
        ),
        (
            [*FP8, "model.decoder={heads: 3, kv_heads: 1, head_width: 12}"],
            "decoder: heads x head_width=36 must be a multiple of 16 for engine.fp8; change it, or use engine.fp8=off",
        ),
        (
            [*FP8, "batch.seq_len=24", "batch.global_tokens=24000", "batch.micro=1"],
            "batch.micro=1 rows of 24 tokens are 24, must be a multiple of 16 for engine.fp8; use another batch.micro",
        ),
        (
            [*FP8, "data.packing=padded", "batch.micro=1"],
            "batch.micro=1 rows of 8 tokens are 8, must be a multiple of 16",
        ),
        (
            [*FP8, "finetune.kind=lora", "init.from=start"],
            "finetune.kind=lora adapts .*, which FP8 replaces; use engine.fp8=off",
        ),
    ],
)
def test_a_recipe_meets_the_rules_when_it_is_loaded(overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_config("configs/run/quickstart.yaml", overrides)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("engine={fp8: tensorwise, precision: bf16}", "engine.fp8 rounds linear layers, and experts are grouped ones"),
        ("finetune={kind: lora}", "finetune.kind=lora adapts matrices, and those of experts are one parameter"),
        ("optim={transfer: {kind: mup, base_width: 64}}", "has no rule for model.decoder.experts"),
    ],
)
def test_what_works_on_single_matrices_is_refused_for_experts(override, message):
    overrides = ["model.decoder.experts={count: 4, top_k: 2}", "init.from=models/x", "run.name=x", override]
    with pytest.raises(ConfigError, match=message):
        load_config("configs/run/quickstart.yaml", overrides)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["objective.kind=prefix"], "token after each one, which a prefix .* before it: objective.kind=prefix; use mo"),
        (["model.decoder.value_residual=true"], "multi_token=1 does not go with decoder.value_residual=true, of which"),
        (["model.head.kind=none"], "multi_token=1 predicts further tokens .* a decoder alone and head.kind=lm; use mu"),
        (["model.preset=bert-tiny", "model.decoder=null"], "predicts further tokens of a text: it needs a decoder alo"),
        (["finetune.kind=lora", "init.from=models/x"], "without the modules of model.multi_token; use model.multi_to"),
        (["optim.transfer={kind: mup, base_width: 64}"], "has no rule for model.multi_token=1"),
        ([*FP8], "engine.fp8 was not tried with model.multi_token; use engine.fp8=off"),
        (["model={kind: recurrent, decoder: {cell: lstm}}"], "multi_token"),
        (
            ["model.multi_token=0", "objective.multi_token_weight=0.1"],
            "multi_token_weight=0.1 needs model.multi_token=1",
        ),
        (["objective.multi_token_weight=0"], "greater than 0"),
    ],
)
def test_what_does_not_predict_further_tokens_is_refused_by_its_key(overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_config("configs/run/llama_1b.yaml", ["model.multi_token=1", *overrides])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["engine={fp8: tensorwise, precision: bf16}"], "engine.fp8 was not tried with mixers=delta; use engine.fp8="),
        (["objective.kind=prefix"], "kind=prefix reads a prefix from both sides, and layers of mixers=delta from left"),
        (
            ["optim.transfer={kind: mup, base_width: 64}"],
            "optim.transfer.kind=mup has no rule for mixers=delta; change that, or leave transfer out",
        ),
        (["model.multi_token=1"], "multi_token=1 was not tried with mixers=delta; use multi_t"),
        (["model.init=xavier"], "init=xavier was not tried with mixers=delta; use init=normal"),
        (["tracking.attention.text=abc"], "tracking.attention: layers of mixers=delta have no weights to draw; remove"),
        (
            ["model.encoder={layers: 1, width: 128, heads: 4, ff_width: 8, mixers: [delta]}"],
            "encoder.mixers=delta reads from left to right, and an encoder both sides; use attention",
        ),
        (
            ["model.encoder={layers: 1, width: 128, heads: 4, ff_width: 8}"],
            "decoder.mixers=delta is for a decoder alone, and this model has an encoder; use attention",
        ),
    ],
)
def test_what_the_gated_delta_rule_lacks_is_refused_by_its_key(overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_config("configs/run/hybrid_quickstart.yaml", overrides)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.generator_heads=0"], "does not go with objective.kind=replaced: .* set it to a third or a quarter"),
        (["objective.kind=masked"], "generator_heads=1 does not go with objective.kind=masked: .*; leave it out"),
        (["finetune.kind=lora", "init.from=models/x"], "finetune.kind was not tried with model.generator_heads=1"),
        (["optim.transfer={kind: mup, base_width: 64}"], "optim.transfer was not tried with model.generator_heads"),
        (["engine.fp8=tensorwise", "engine.precision=bf16"], "engine.fp8 was not tried with model.generator_heads"),
        (["parallel.sequence=2"], "parallel.sequence was not tried with model.generator_heads"),
        (["parallel.tensor=2"], "parallel.tensor=2 was not tried with model.head.kind=replaced"),
        (["checkpoint.best=val_perplexity"], "a classifier has no perplexity"),
        (["objective.replaced.weight=0"], "greater than 0"),
        (["objective.label_smoothing=0.1"], "label_smoothing is of predicted tokens"),
    ],
)
def test_what_has_no_place_beside_a_generator_is_refused_by_its_key(overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_config("configs/run/electra_quickstart.yaml", overrides)
