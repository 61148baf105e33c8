"""Which models and engines can share rows over ranks, and how a batch divides then."""

import pytest

from pretrain.config.data import BatchConfig, plan_batch
from pretrain.config.engine import EngineConfig
from pretrain.config.load import load_config
from pretrain.config.model import AnyModelConfig, parse_model
from pretrain.config.presets import expand_preset
from pretrain.config.run import check_sequence
from pretrain.errors import ConfigError


def model(preset: str = "llama-tiny", **values: object) -> AnyModelConfig:
    return parse_model(expand_preset({"preset": preset, "vocab_size": 100, **values}))


RECURRENT = parse_model({"kind": "recurrent", "vocab_size": 100, "decoder": {"cell": "lstm", "layers": 1, "width": 8}})
LABELS = {"kind": "labels", "mean": True, "labels": ["a", "b"]}


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
        (2, {"fp8": "rowwise"}, model(), r"was not tried with engine\.fp8=rowwise; use engine\.fp8=off$"),
    ],
    ids=["single", "heads", "recurrent", "images", "mean", "drop path", "fp8"],
)
def test_what_cannot_share_rows_is_refused_with_the_reason(ranks, engine, of, message):
    with pytest.raises(ValueError, match=message):
        check_sequence(ranks, EngineConfig.model_validate(engine), of)


@pytest.mark.parametrize("recipe", ["quickstart", "llama_1b", "bert_quickstart", "t5_quickstart", "experts_quickstart"])
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
