"""The dictionary for DeepSpeed, as data: a base, and what each property of a run changes in it.

That DeepSpeed accepts every key is in tests/integration/test_deepspeed_private.py.
"""

import json
from typing import Any

import pytest

from pretrain.config.data import BatchPlan
from pretrain.config.engine import EngineConfig
from pretrain.engine.build import deepspeed_config
from pretrain.engine.deepspeed_engine import clips_itself
from tests.unit.engine.toy import COMBINATIONS, PLAN, engine_config

CLIP, PARAMETERS = 0.7, 40_000_000

# ZeRO 1 in bf16 on a CPU, nothing offloaded. Buckets: a twentieth of 40M parameters, down to a multiple of 256.
BASE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 0.7,
    "bf16.enabled": True,
    "bf16.check_grad_overflow": True,
    "fp16.enabled": False,
    "fp16.loss_scale": 0,
    "fp16.initial_scale_power": 16,
    "fp16.loss_scale_window": 1000,
    "fp16.hysteresis": 2,
    "fp16.min_loss_scale": 1,
    "zero_optimization.stage": 1,
    "zero_optimization.reduce_bucket_size": 1_999_872,
    "zero_optimization.allgather_bucket_size": 1_999_872,
    "zero_optimization.contiguous_gradients": True,
    "zero_optimization.overlap_comm": False,
    "zero_optimization.use_multi_rank_bucket_allreduce": False,
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "steps_per_print": 2147483648,
    "timers.throughput.enabled": False,
}
OPTIMIZER, PARAMS = "zero_optimization.offload_optimizer", "zero_optimization.offload_param"
# (properties of a run, what they change). A row holds where the run has all of its properties.
CHANGES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"stage": 0}, {"zero_optimization.stage": 0}),
    ({"stage": 2}, {"zero_optimization.stage": 2}),
    ({"stage": 3}, {"zero_optimization.stage": 3}),
    ({"stage": 3, "device": "cuda"}, {"zero_optimization.overlap_comm": True}),
    ({"stage": 3}, {"zero_optimization.stage3_prefetch_bucket_size": 1_999_872}),
    ({"stage": 3}, {"zero_optimization.stage3_param_persistence_threshold": 4_000}),
    ({"precision": "fp32"}, {"bf16.enabled": False}),
    ({"precision": "fp16"}, {"bf16.enabled": False, "fp16.enabled": True}),
    ({"stage": 0, "precision": "fp32"}, {"gradient_clipping": 0.0}),
    ({"offload": "optimizer"}, {f"{OPTIMIZER}.device": "cpu", f"{OPTIMIZER}.pin_memory": False}),
    ({"offload": "params"}, {f"{PARAMS}.device": "cpu", f"{PARAMS}.pin_memory": False}),
    ({"offload": "both"}, {f"{OPTIMIZER}.device": "cpu", f"{OPTIMIZER}.pin_memory": False}),
    ({"offload": "both"}, {f"{PARAMS}.device": "cpu", f"{PARAMS}.pin_memory": False}),
    ({"offload": "optimizer", "device": "cuda"}, {f"{OPTIMIZER}.pin_memory": True}),
    ({"offload": "params", "device": "cuda"}, {f"{PARAMS}.pin_memory": True}),
    ({"offload": "both", "device": "cuda"}, {f"{OPTIMIZER}.pin_memory": True, f"{PARAMS}.pin_memory": True}),
]


def leaves(section: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of a dictionary of dictionaries, by dotted key."""
    found = {}
    for key, value in section.items():
        found |= leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


@pytest.mark.parametrize(("device", "stage", "precision", "offload"), COMBINATIONS)
def test_each_property_of_a_run_changes_what_the_table_says_and_nothing_else(device, stage, precision, offload):
    run = {"device": device, "stage": stage, "precision": precision, "offload": offload}
    expected = dict(BASE)
    for properties, change in CHANGES:
        if properties.items() <= run.items():
            expected |= change
    if stage in (0, 3):
        del expected["zero_optimization.use_multi_rank_bucket_allreduce"]
    config = deepspeed_config(engine_config(stage, precision, offload), device, CLIP, PLAN, PARAMETERS)
    assert leaves(config) == expected
    assert leaves(json.loads(json.dumps(config))) == expected  # accelerate writes it to a file and reads it again


@pytest.mark.parametrize(
    ("num_parameters", "bucket", "persistent"),
    [
        (0, 1_048_576, 0),
        (30_000, 1_048_576, 3),
        (125_000_000, 6_249_984, 12_500),
        (70_000_000_000, 49_999_872, 100_000),
    ],
)
def test_buckets_follow_the_model_between_a_least_and_a_largest_size(num_parameters, bucket, persistent):
    section = deepspeed_config(engine_config(3, "bf16", "none"), "cuda", CLIP, PLAN, num_parameters)[
        "zero_optimization"
    ]
    sizes = {"reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size"}
    assert {section[key] for key in sizes} == {bucket}
    assert section["stage3_param_persistence_threshold"] == persistent


@pytest.mark.parametrize(("ranks", "reduces"), [(1, True), (64, True), (1024, False)])
def test_gradients_are_reduced_to_their_owners_where_shares_are_large_enough(ranks, reduces):
    plan = BatchPlan(rows=8 * ranks, rows_per_rank=8, micro=2, accumulation=4)
    section = deepspeed_config(engine_config(2, "bf16"), "cuda", CLIP, plan, PARAMETERS)["zero_optimization"]
    assert section["use_multi_rank_bucket_allreduce"] != reduces


def test_a_copy_of_the_weights_on_each_node_is_asked_for_where_it_is_set():
    config = engine_config(3, "bf16")
    sections = [
        deepspeed_config(config.model_copy(update={"zero_hpz": ranks}), "cuda", CLIP, PLAN, PARAMETERS)
        for ranks in (1, 8)
    ]
    found = [section["zero_optimization"].get("zero_hpz_partition_size") for section in sections]
    assert found == [None, 8]


def test_no_clipping_is_zero_for_deepspeed_too():
    for stage in range(4):
        assert deepspeed_config(engine_config(stage, "bf16"), "cpu", 0.0, PLAN, 1)["gradient_clipping"] == 0


def test_we_clip_where_the_optimizer_is_a_bare_one_of_torch():
    cases = [(stage, precision) for _, stage, precision, _ in COMBINATIONS]
    clipped = {case for case in cases if clips_itself(engine_config(*case))}
    assert clipped == {(0, "fp32")}


@pytest.mark.parametrize(
    "other",
    [{"compile": True}, {"attention": "math"}, {"deterministic": True}, {"activation_checkpointing": "full"}],
    ids=lambda other: next(iter(other)),
)
def test_what_is_not_deepspeed_s_changes_nothing(other):
    configs = [EngineConfig(zero_stage=2, precision="bf16", **more) for more in ({}, other)]
    one, two = (deepspeed_config(config, "cuda", CLIP, PLAN, PARAMETERS) for config in configs)
    assert one == two


@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_are_summed_and_sent_in_fp32_on_request(stage):
    config = engine_config(stage, "bf16")
    plain, exact = (
        leaves(deepspeed_config(one, "cuda", CLIP, PLAN, PARAMETERS))
        for one in (config, config.model_copy(update={"gradients": "fp32"}))
    )
    assert exact.items() - plain.items() == {
        ("data_types.grad_accum_dtype", "fp32"),
        ("communication_data_type", "fp32"),
    }


@pytest.mark.parametrize(("stage", "mode"), [(3, "selective"), (3, "full"), (3, "none"), (2, "selective")])
def test_no_bias_is_added_in_place_to_a_product_that_is_kept(stage, mode):
    config = engine_config(stage, "fp32").model_copy(update={"activation_checkpointing": mode, "compile": False})
    section = deepspeed_config(config, "cpu", CLIP, PLAN, PARAMETERS)["zero_optimization"]
    assert section.get("memory_efficient_linear", True) is not (stage == 3 and mode == "selective")
