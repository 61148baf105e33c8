"""The engine that `auto` is, by ranks and by what only one of them can do."""

import pytest

from pretrain.config.engine import EngineConfig


@pytest.mark.parametrize(
    ("keys", "alone", "on_two"),
    [
        ({}, ("single", 0), ("deepspeed", 2)),
        ({"zero_stage": 0}, ("single", 0), ("ddp", 0)),
        ({"zero_stage": 3}, ("single", 0), ("deepspeed", 3)),
        ({"precision": "fp32"}, ("deepspeed", 2), ("deepspeed", 2)),
        ({"precision": "fp32", "zero_stage": 0}, ("deepspeed", 0), ("deepspeed", 0)),
        ({"precision": "fp16"}, ("deepspeed", 2), ("deepspeed", 2)),
        ({"gradients": "fp32"}, ("deepspeed", 2), ("deepspeed", 2)),
        ({"offload_optimizer": "cpu"}, ("deepspeed", 2), ("deepspeed", 2)),
        ({"zero_stage": 3, "offload_params": "cpu"}, ("deepspeed", 3), ("deepspeed", 3)),
        ({"zero_stage": 3, "zero_hpz": 2}, ("deepspeed", 3), ("deepspeed", 3)),
        ({"offload_activations": "cpu"}, ("single", 0), ("deepspeed", 2)),
        ({"kind": "deepspeed", "zero_stage": 0}, ("deepspeed", 0), ("deepspeed", 0)),
        ({"kind": "ddp", "precision": "fp32"}, ("ddp", 0), ("ddp", 0)),
    ],
    ids=str,
)
def test_auto_is_an_engine_by_ranks_and_keys(keys, alone, on_two):
    config = EngineConfig.model_validate(keys)
    for ranks, expected in ((1, alone), (2, on_two)):
        engine = config.on(ranks)
        assert (engine.kind, engine.zero_stage) == expected
        assert EngineConfig.model_validate(engine.model_dump()) == engine == engine.on(ranks)


def test_our_own_engine_has_masters_where_gradients_are_16_bits_and_fuses_where_it_compiles():
    on_gpu = EngineConfig().on(1)
    assert on_gpu.has_masters and on_gpu.fuses_update("cuda") and not on_gpu.fuses_update("cpu")
    exact = EngineConfig(kind="single", gradients="fp32")
    assert exact.autocasts and not exact.has_masters and not exact.fuses_update("cuda")
    assert not EngineConfig().on(2).has_masters
