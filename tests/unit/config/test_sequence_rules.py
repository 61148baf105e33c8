"""Which models and engines can share rows or experts over ranks, and how a batch divides then."""

import pytest

from pretrain.config.base import refuse
from pretrain.config.data import BatchConfig, plan_batch
from pretrain.config.engine import EngineConfig, ParallelConfig, expert_conflicts, sequence_conflicts, tensor_conflicts
from pretrain.config.load import load_config
from pretrain.config.model import AnyModelConfig, parse_model
from pretrain.config.presets import expand_preset
from pretrain.errors import ConfigError


def model(preset: str = "llama-tiny", **values: object) -> AnyModelConfig:
    return parse_model(expand_preset({"preset": preset, "vocab_size": 100, **values}))


def hybrid(mixer: str) -> AnyModelConfig:
    return model("hybrid-tiny", decoder={"mixers": [mixer]})


RECURRENT = parse_model({"kind": "recurrent", "vocab_size": 100, "decoder": {"cell": "lstm", "layers": 1, "width": 8}})
MIXTURE = model("olmoe-tiny")
LABELS = {"kind": "labels", "mean": True, "labels": ["a", "b"]}
CLASSIFIER = model("llama-tiny", head=LABELS | {"mean": False}, tied_embeddings=False)
DYNAMIC = {"kind": "dynamic", "factor": 2.0}


@pytest.mark.parametrize(
    ("ranks", "engine", "of", "message"),
    [
        (
            2,
            {"kind": "single"},
            model(),
            r"rows over ranks, and engine\.kind=single is one process; use deepspeed or ddp$",
        ),
        (3, {}, model(), r"sequence=3 must divide model\.decoder\.heads=4: .* whole heads; use one of 1, 2, 4$"),
        (
            2,
            {},
            RECURRENT,
            r"a recurrent model computes each column from the one before it; use parallel\.sequence=1$",
        ),
        (2, {}, model("vit-tiny", vocab_size=None), r"of text, and those of model\.input are images; use .*=1$"),
        (
            2,
            {},
            model("bert-tiny", head=LABELS, tied_embeddings=False),
            r"whole document, of which model\.head\.mean is",
        ),
        (
            2,
            {},
            model("llama-tiny", decoder={"drop_path": 0.1}),
            r"would draw model\.decoder\.drop_path for each part of a row apart; use parallel\.sequence=1, or leave it",
        ),
        (
            2,
            {},
            model("llama-tiny", decoder={"rope_scaling": DYNAMIC}),
            r"needs whole rows for model\.decoder\.rope_scaling\.kind=dynamic; use parallel\.sequence=1$",
        ),
        (
            2,
            {},
            model("llama-tiny", ngram_embeddings=2),
            r"tokens before its part, which model\.ngram_embeddings=2 reads; use .*=1$",
        ),
        (2, {}, CLASSIFIER, r"whole document, of whose last token model\.head\.kind=labels are; use .*=1$"),
        (2, {}, model(multi_token=1), r"the tokens after its part, which model\.multi_token=1 reads; use .*=1, or "),
        (2, {"fp8": "rowwise"}, model(), r"was not tried with engine\.fp8=rowwise; use engine\.fp8=off$"),
        (3, {}, hybrid("delta"), r"must divide model\.decoder\.delta\.heads=4: a rank has whole heads; use one of 1"),
        (4, {}, hybrid("mamba2"), r"divide model\.decoder\.mamba2\.heads=2: a rank has whole heads; use one of 1, 2$"),
        (3, {}, hybrid("convolution"), r"must divide model\.decoder\.width=64: a rank has whole heads; use one of"),
    ],
    ids=[
        "single",
        "heads",
        "recurrent",
        "images",
        "mean",
        "drop path",
        "rope",
        "n-grams",
        "last token",
        "further tokens",
        "fp8",
        "heads of delta",
        "heads of Mamba-2",
        "channels",
    ],
)
def test_what_cannot_share_rows_is_refused_with_the_reason(ranks, engine, of, message):
    with pytest.raises(ValueError, match=message):
        refuse(sequence_conflicts(ranks, EngineConfig.model_validate(engine), of))


@pytest.mark.parametrize(
    "recipe",
    [
        "quickstart", "llama_1b", "bert_quickstart", "t5_quickstart", "experts_quickstart", "hybrid_quickstart",
    ],
)  # fmt: skip
def test_models_of_text_can_share_rows(recipe):
    assert load_config(f"configs/run/{recipe}.yaml", ["parallel.sequence=2"]).parallel.sequence == 2
    with pytest.raises(ConfigError, match=r"parallel\.sequence=7 must divide model\.(en|de)coder\.heads"):
        load_config(f"configs/run/{recipe}.yaml", ["parallel.sequence=7"])


def test_ranks_that_share_rows_are_one_share_of_the_batch():
    batch = BatchConfig(global_tokens=4096, seq_len=256, micro=2)
    alone, shared = plan_batch(batch, 4), plan_batch(batch, 8, 2)
    assert (shared.rows_per_rank, shared.accumulation) == (alone.rows_per_rank, alone.accumulation) == (4, 2)
    with pytest.raises(ConfigError, match=r"x ranks 32 / parallel.sequence 2 = 8192; use 8192$"):
        plan_batch(batch, 32, 2)
    with pytest.raises(
        ConfigError, match=r"parallel.sequence=2 must divide the number of ranks, 3; start 2 or 4 ranks$"
    ):
        plan_batch(batch, 3, 2)


@pytest.mark.parametrize(
    ("ranks", "engine", "of", "message"),
    [
        (2, {}, model(), r"experts=2 cuts experts over ranks, and this model has none; use .*=1$"),
        (2, {}, RECURRENT, r"and this model has none; use parallel\.experts=1$"),
        (3, {}, MIXTURE, r"experts=3 must divide model\.decoder\.experts\.count=8; use one of 1, 2, 4, 8$"),
        (2, {"kind": "ddp"}, MIXTURE, r"needs engine\.kind=deepspeed, which reduces .* not ddp; change it, or use"),
        (2, {"zero_stage": 0}, MIXTURE, r"by a norm without experts at zero_stage=0 in bf16; use .*=1, 2 or 3, or"),
        (2, {"zero_stage": 3, "zero_hpz": 2}, MIXTURE, r"and engine\.zero_hpz=2 shard .*; use engine\.zero_hpz=1"),
        (2, {"precision": "fp16"}, MIXTURE, r"was not tried with engine\.precision=fp16; use engine\.precision=bf16$"),
    ],
    ids=["dense", "recurrent", "count", "ddp", "norm", "nodes", "fp16"],
)
def test_what_cannot_share_experts_is_refused_with_the_reason(ranks, engine, of, message):
    with pytest.raises(ValueError, match=message):
        refuse(expert_conflicts(ranks, EngineConfig.model_validate(engine), of))


def test_a_mixture_can_share_experts_and_rows_at_once_on_ranks_that_both_divide():
    both = ["parallel={sequence: 2, experts: 4}"]
    found = load_config("configs/run/experts_quickstart.yaml", both).parallel
    assert (found.sequence, found.experts) == (2, 4)
    with pytest.raises(ConfigError, match=r"parallel\.experts=3 must divide model\.decoder\.experts\.count=8"):
        load_config("configs/run/experts_quickstart.yaml", ["parallel.experts=3"])
    refuse(expert_conflicts(2, EngineConfig(zero_stage=0, precision="fp32"), MIXTURE))
    batch = BatchConfig(global_tokens=6144, seq_len=256, micro=2)
    assert plan_batch(batch, 4, 1, 4) == plan_batch(batch, 4)
    with pytest.raises(ConfigError, match=r"parallel.experts=4 must divide the number of ranks, 6; start 4 or 8"):
        plan_batch(batch, 6, 2, 4)


def test_groups_of_ranks_that_do_not_divide_the_ranks_are_refused_before_the_start():
    groups = ["engine.zero_stage=3", "engine.zero_hpz=4", "batch.micro=2"]
    config = load_config("configs/run/quickstart.yaml", groups)
    with pytest.raises(ConfigError, match=r"engine\.zero_hpz=4 must divide the number of ranks, 6; start 4 or 8 ranks"):
        config.plan_ranks(6)
    assert config.plan_ranks(4) == plan_batch(config.batch, 4)


def decoder(**values: object) -> AnyModelConfig:
    return model("llama-tiny", decoder={"heads": 4, "kv_heads": 2, **values})


@pytest.mark.parametrize(
    ("parallel", "engine", "of", "message"),
    [
        ({}, {"kind": "ddp"}, decoder(), r"tensor=2 needs engine\.kind=deepspeed, which reduces .* not ddp; change it"),
        ({}, {}, RECURRENT, r"cuts attention by heads, and a recurrent model has none; use parallel\.tensor=1$"),
        ({}, {}, model("vit-tiny", vocab_size=None), r"of text, and those of model\.input are images; use .*=1$"),
        ({}, {"zero_stage": 0}, decoder(), r"by a norm without the matrices at zero_stage=0 in bf16; use .*=1, 2 or 3"),
        (
            {},
            {"zero_stage": 3, "zero_hpz": 2},
            decoder(),
            r"and engine\.zero_hpz=2 shard matrices over different ranks",
        ),
        (
            {},
            {"precision": "fp16"},
            decoder(),
            r"was not tried with engine\.precision=fp16; use engine\.precision=bf16$",
        ),
        ({}, {"fp8": "rowwise"}, decoder(), r"was not tried with engine\.fp8=rowwise; use engine\.fp8=off$"),
        ({}, {}, model("bert-tiny", head=LABELS, tied_embeddings=False), r"whole document, of which model\.head\.mean"),
        (
            {"tensor": 3},
            {},
            decoder(heads=6, kv_heads=3, width=96, ff_width=192),
            r"tensor=3 must divide model\.vocab_multiple=128: .* use a multiple of 3 for it$",
        ),
        ({"tensor": 3}, {}, decoder(), r"must divide model\.decoder\.heads=4: ranks have .* use one of 1, 2$"),
        ({}, {}, decoder(kv_heads=1), r"must divide model\.decoder\.kv_heads=1: ranks have .*; use 1$"),
        ({"tensor": 4}, {}, decoder(), r"must divide model\.decoder\.kv_heads=2: ranks have .* use one of 1, 2$"),
        ({}, {}, CLASSIFIER, r"whole document, of whose last token model\.head\.kind=labels are; use .*=1$"),
        (
            {},
            {},
            model("bert-tiny", head={"kind": "choices"}, tied_embeddings=False),
            r"was not tried with model\.head\.kind=choices; use parallel\.tensor=1$",
        ),
        ({}, {}, model("llama-tiny", ngram_embeddings=2), r"which model\.ngram_embeddings=2 reads; use .*=1$"),
        ({}, {}, decoder(rope_scaling=DYNAMIC), r"decoder\.rope_scaling, whose frequencies go by the length of a"),
        ({}, {}, MIXTURE, r"does not go with model\.decoder\.experts, whose experts are cut by parallel\.experts; use"),
        ({}, {}, model("deepseek_v3-tiny"), r"does not go with model\.decoder\.\w+, "),
        ({"tensor": 3}, {}, hybrid("delta"), r"must divide model\.decoder\.delta\.heads=4: ranks have as much of each"),
        ({}, {}, hybrid("mamba2"), r"must divide model\.decoder\.mamba2\.groups=1: ranks have .* heads; use 1$"),
        ({"sequence": 4}, {}, hybrid("delta"), r"sequence=4 must divide model\.decoder\.delta\.heads=4: a rank has"),
        ({}, {}, decoder(qk_norm="whole"), r"qk_norm=whole, a norm with weights of all heads, of which a rank has"),
        ({}, {}, decoder(qk_norm="heads"), r"qk_norm=heads, a norm with weights of all heads, of which a rank has"),
        (
            {},
            {},
            decoder(drop_path=0.1),
            r"drop_path, which would be drawn for each part of a row apart; use .* or leave",
        ),
        (
            {"sequence": 4},
            {},
            decoder(),
            r"tensor=2 x parallel\.sequence=4 must divide model\.decoder\.heads=4: a rank",
        ),
    ],
)
def test_what_cannot_share_matrices_is_refused_with_the_reason(parallel, engine, of, message):
    with pytest.raises(ValueError, match=message):
        refuse(
            tensor_conflicts(
                ParallelConfig.model_validate({"tensor": 2, **parallel}), EngineConfig.model_validate(engine), of
            )
        )


def test_optimizers_of_whole_matrices_and_adapters_are_refused_with_shared_matrices():
    shared = "parallel.tensor=2"
    assert load_config("configs/run/llama_1b.yaml", [shared, "optim.kind=adamw"]).parallel.row_ranks == 2
    with pytest.raises(ConfigError, match=r"no rank with the whole matrices that optim\.kind=muon steps; use"):
        load_config("configs/run/quickstart.yaml", [shared])
    with pytest.raises(ConfigError, match=r"tensor=2 cuts linear layers, which finetune\.kind=lora adapts whole; use"):
        load_config("configs/run/llama_1b.yaml", [shared, "finetune.kind=lora", "init.from=runs/base"])
    batch = BatchConfig(global_tokens=4096, seq_len=256, micro=2)
    assert plan_batch(batch, 16, 2, 1, 2) == plan_batch(batch, 16, 4)
    with pytest.raises(
        ConfigError, match=r"sequence=2 x parallel.tensor=4 must divide the number of ranks, 4; start 8"
    ):
        plan_batch(batch, 4, 2, 1, 4)
