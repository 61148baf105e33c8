"""Bucket sizes and the ZeRO table."""

from dataclasses import asdict

import pytest
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from hypothesis import given
from hypothesis import strategies as st

from pretrain.config.load import load_config
from pretrain.kinds.optimizers import OPTIMIZERS, Optimizer
from pretrain.plan.cluster import Cluster
from pretrain.plan.gpus import find_gpu
from pretrain.plan.memory import (
    bytes_per_parameter,
    loss_logits,
    memory_limit,
    plan_buckets,
    rank_memory,
    state_bytes,
)
from pretrain.plan.task import ParallelLayout, task_of
from pretrain.plan.trained import Values


# From 20 x 2^20 parameters on; below, the floor counts.
@given(st.integers(20 * 2**20, 10**12), st.integers(0, 3))
def test_buckets_are_at_most_a_twentieth_of_a_big_model_and_bounded(num_parameters, zero_stage):
    buckets = plan_buckets(num_parameters, zero_stage)
    for size in (buckets.reduce_bucket_size, buckets.allgather_bucket_size, buckets.stage3_prefetch_bucket_size):
        assert size <= min(num_parameters / 20, 5e7)


@given(st.integers(1, 10**12), st.integers(0, 3))
def test_buckets_have_a_floor_and_alignment(num_parameters, zero_stage):
    buckets = plan_buckets(num_parameters, zero_stage)
    assert buckets.reduce_bucket_size >= 2**20
    assert buckets.allgather_bucket_size % 256 == 0


def test_a_model_of_124m():
    assert asdict(plan_buckets(124_000_000, 3)) == {
        "reduce_bucket_size": 6_199_808,
        "allgather_bucket_size": 6_199_808,
        "stage3_prefetch_bucket_size": 6_199_808,
        "stage3_param_persistence_threshold": 12_400,
    }


def test_nothing_of_stage_3_below_it():
    buckets = plan_buckets(124_000_000, 2)
    assert (buckets.stage3_prefetch_bucket_size, buckets.stage3_param_persistence_threshold) == (0, 0)


def test_deepspeed_takes_the_field_names():
    sizes = asdict(plan_buckets(124_000_000, 3))
    config = DeepSpeedZeroConfig(stage=3, **sizes)
    assert (config.reduce_bucket_size, config.prefetch_bucket_size) == (6_199_808, 6_199_808)
    assert (config.allgather_bucket_size, config.param_persistence_threshold) == (6_199_808, 12_400)


@pytest.mark.parametrize(
    ("precision", "totals"),
    [("bf16", [16.0, 4 + 12 / 8, 2 + 14 / 8, 2.0]), ("fp32", [16.0, 8 + 12 / 8, 4 + 16 / 8, 20 / 8])],
)
def test_bytes_on_each_of_8_ranks_by_stage(precision, totals):
    assert [bytes_per_parameter(stage, precision, 8).total for stage in range(4)] == totals


@given(st.integers(0, 3), st.sampled_from(["fp32", "bf16"]))
def test_one_rank_saves_nothing_and_in_fp32_pays_for_a_copy_of_its_weights(stage, precision):
    assert bytes_per_parameter(stage, precision, 1).total == (20.0 if stage and precision == "fp32" else 16.0)


def test_other_optimizers_keep_less_than_adamw(monkeypatch):
    monkeypatch.setitem(OPTIMIZERS, "of a user", Optimizer(build="lab:build"))
    values = Values(weights=10, trained=8, hidden=6, saved=10)
    sizes = {kind: state_bytes(kind, values) for kind in ("adamw", "muon", "adafactor", "of a user")}
    assert sizes == {"adamw": 64, "muon": 40, "adafactor": 0, "of a user": 64}
    assert bytes_per_parameter(1, "bf16", 8, 40 / 8).total == 4 + 9 / 8


def test_what_is_offloaded_is_not_on_the_device():
    assert bytes_per_parameter(2, "fp16", 8, offload_optimizer=True).total == 2 + 2 / 8
    assert bytes_per_parameter(3, "bf16", 8, offload_optimizer=True, offload_params=True).total == 2 / 8


@pytest.mark.parametrize(("gpu", "micro", "at_once"), [("h200", 512, 512), ("h200", 768, 5.2), ("a10", 64, 64)])
def test_all_logits_are_held_at_once_where_they_fit(gpu, micro, at_once):
    values = ["model=null", "model.preset=gpt2-124m", "model.vocab_size=50304", "engine.activation_checkpointing=full"]
    values += [f"batch={{seq_len: 1024, micro: {micro}, global_tokens: {1024 * micro}}}", "engine.precision=bf16"]
    config = load_config("configs/run/llama_1b.yaml", [*values, "engine.loss_chunk=whole"])
    cluster, task = Cluster(1, 1, find_gpu(gpu)), task_of(config)
    layout = ParallelLayout(config.engine, micro, 1)
    assert loss_logits(task, layout, cluster) / (1024 * 50304) == pytest.approx(at_once, abs=0.05)
    assert rank_memory(task, layout, cluster).total <= memory_limit(cluster)
