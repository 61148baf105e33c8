"""FP8 against bf16 by the plan: torchao's published speedups, small products, and GPUs and engines without it."""

from dataclasses import replace

import pytest

from pretrain.config.load import load_config
from pretrain.plan.cluster import Cluster
from pretrain.plan.estimate import PlanOptions, plan_facts
from pretrain.plan.fp8 import cast_seconds, fp8_products, time_product
from pretrain.plan.fp8_choice import choose_fp8
from pretrain.plan.gpus import GPUS
from pretrain.plan.roofline import predict_rate
from pretrain.plan.search import search
from pretrain.plan.task import ParallelLayout, task_of

NODE = Cluster(1, 8, GPUS["h100"])
PAIR = Cluster(1, 2, GPUS["h100"])
LLAMA = [
    "model.preset=llama3-8b",
    "model.vocab_size=128256",
    "batch={seq_len: 8192, global_tokens: 65536, micro: 1}",
    "engine={precision: bf16, zero_stage: 2, activation_checkpointing: selective}",
]


def facts_of(*overrides, cluster=NODE):
    config = load_config("configs/run/quickstart.yaml", ["engine.precision=bf16", *overrides])
    return plan_facts(config, cluster, PlanOptions())


@pytest.mark.parametrize(("shape", "published"), [((1024, 2048, 1024), 0.80), ((4096, 8192, 16384), 1.39)])
def test_the_two_shapes_of_torchaos_readme_come_out(shape, published):
    """On an H100, forward and backward, tensorwise: within 5%."""
    bf16_s, fp8_s = time_product(*shape, "tensorwise", NODE, min(shape[1:]))
    assert bf16_s / fp8_s == pytest.approx(published, rel=0.05)


@pytest.mark.parametrize(("recipe", "published"), [("tensorwise", 1.25), ("rowwise", 1.10)])
def test_the_published_speedup_of_llama3_8b_comes_out(recipe, published):
    """On eight H100 at T=8192, one row a GPU, selective recomputation: within 5%."""
    config = load_config("configs/run/quickstart.yaml", LLAMA)
    times = [
        predict_rate(task_of(config), ParallelLayout(engine, 1, 1), NODE).step_s
        for engine in (config.engine, config.engine.model_copy(update={"fp8": recipe}))
    ]
    assert times[0] / times[1] == pytest.approx(published, rel=0.05)


def test_a_cast_takes_its_bytes_and_never_less_than_its_kernels():
    assert cast_seconds(16, 16, 16, "tensorwise", 1e12) == pytest.approx(10 * 2e-6)
    assert cast_seconds(16, 16, 16, "rowwise", 1e12) == pytest.approx(7 * 2e-6)
    assert cast_seconds(2**13, 2**13, 2**13, "rowwise", 1e12) == pytest.approx(2**26 * (8 + 10 + 8) / 1e12)


def test_products_are_those_of_the_blocks_with_the_tokens_that_they_meet():
    config = load_config("configs/run/multi30k.yaml", ["model.vocab_size=1024", "batch.source_len=64"])
    task = task_of(config)
    found = {(one.name, one.m, one.k, one.n): one.count for one in fp8_products(task, 2, "rowwise", NODE)}
    stack = task.model.decoder
    assert found["cross.key_value", 128, stack.width, 2 * stack.width] == stack.layers
    assert found["cross.query", 2 * task.lengths.target, stack.width, stack.width] == stack.layers
    assert {m for name, m, _, _ in found if name == "attention.qkv"} == {128, 2 * task.lengths.target}


def test_a_wide_model_gains_and_a_small_one_does_not():
    large, small = facts_of(*LLAMA)["fp8"], facts_of(cluster=PAIR)["fp8"]
    assert large["pays"] and large["step_speedup"] > 1.15 and not large["asked"]
    assert not small["pays"] and small["speedup"] < 1
    assert small["step_speedup"] == 1, "the host is slower than either"
    asked = facts_of(*LLAMA, "engine.fp8=tensorwise")
    assert asked["fp8"]["asked"] and asked["fp8"]["speedup"] == large["speedup"]
    assert asked["rates"]["predicted"]["step_s"] < facts_of(*LLAMA)["rates"]["predicted"]["step_s"]


def test_where_fp8_is_not_to_be_had_it_is_refused_if_asked_for_and_else_not_spoken_of():
    a100 = replace(NODE, gpu=GPUS["a100"])
    assert facts_of(*LLAMA, "engine.fp8=rowwise", cluster=a100)["fp8"]["refused"] == "A100 80GB has no FP8"
    assert facts_of(*LLAMA, cluster=a100)["fp8"] is None
    assert facts_of(*LLAMA, "engine.zero_stage=3")["fp8"] is None
    assert facts_of("engine.precision=fp32", cluster=PAIR)["fp8"] is None


@pytest.mark.parametrize(
    ("gpu", "overrides", "recipe"),
    [
        ("h100", LLAMA, "tensorwise"),
        ("h100", [*LLAMA, "engine.zero_stage=3", "engine.activation_checkpointing=full"], "tensorwise"),
        ("h100", [*LLAMA, "engine.zero_stage=3"], "off"),
        ("h100", [*LLAMA, "engine.precision=fp32"], "off"),
        ("h100", [*LLAMA, "model.decoder.ff_width=14344"], "off"),
        ("h100", [*LLAMA, "finetune.kind=lora", "init.from=x"], "off"),
        ("h100", [*LLAMA, "optim={kind: adamw, lr: 0.001}", "optim.muon=null", "parallel.tensor=2"], "off"),
        ("h100", ["engine.precision=bf16"], "off"),  # of few columns
        ("a100", LLAMA, "off"),
        (None, LLAMA, "off"),
    ],
)
def test_auto_is_the_recipe_that_pays(gpu, overrides, recipe):
    config = load_config("configs/run/quickstart.yaml", [*overrides, "engine.fp8=auto"])
    cluster = gpu and replace(NODE, gpu=GPUS[gpu])
    assert choose_fp8(config, task_of(config), cluster).engine.fp8 == recipe


def test_the_search_proposes_no_stage_that_refuses_fp8():
    config = load_config("configs/run/quickstart.yaml", [*LLAMA, "engine.fp8=rowwise"])
    engines = [one.layout.engine for one in search(config, task_of(config), NODE, count=99)]
    assert {engine.zero_stage for engine in engines} >= {2, 3}
    assert all(engine.zero_stage < 3 or engine.activation_checkpointing == "full" for engine in engines)
