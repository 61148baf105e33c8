"""Every case of the dry CUDA runtime against its table, and the allocator's peaks against `pretrain plan`."""

from pathlib import Path

import pytest
import torch

from pretrain.config.data import plan_batch
from pretrain.config.load import load_config
from pretrain.plan.cluster import Cluster
from pretrain.plan.gpus import find_gpu
from pretrain.plan.memory import rank_memory
from pretrain.plan.task import ParallelLayout, task_of
from tests.cuda_dry.__main__ import CASES, GOLDEN, STEPS, build, lines_of, prepare, read_table, run

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(torch.version.cuda is None, reason="needs the CUDA build of torch (and no GPU)"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with config and data, and the library in it."""
    folder = tmp_path_factory.mktemp("dry")
    build(folder)
    prepare(folder)
    return folder


@pytest.mark.parametrize("name", CASES)
def test_a_step_asks_of_the_device_what_the_table_says(name, folder):
    table = read_table()
    if name not in table:
        pytest.skip(f"{GOLDEN.name} was made before this case")
    assert lines_of(name, run(folder, CASES[name])) == table[name]


GPT2 = [
    "model.preset=gpt2-124m",
    "model.max_seq_len=1024",
    "batch.seq_len=1024",
    "batch.micro=8",
    "batch.global_tokens=16384",
]
LLAMA = [
    *("model.preset=llama3.2-1b", "model.decoder.layers=2"),
    *("model.max_seq_len=2048", "batch.seq_len=2048", "batch.micro=4", "batch.global_tokens=16384"),
]


@pytest.mark.parametrize(
    ("shape", "engine"),
    [
        (GPT2, ["engine.compile=true"]),
        (GPT2, ["engine.zero_stage=3"]),
        (LLAMA, []),
        (LLAMA, ["engine.compile=true", "engine.zero_stage=3"]),
        (LLAMA, ["engine.compile=true", "engine.activation_checkpointing=selective"]),
        (LLAMA, ["engine.activation_checkpointing=full"]),
        (GPT2, ["engine.compile=true", "engine.offload_activations=cpu"]),
        (GPT2, ["engine.activation_checkpointing=full", "engine.offload_activations=cpu"]),
    ],
)
def test_the_peak_is_within_a_tenth_of_the_plan(shape, engine, folder):
    overrides = ["model.vocab_size=50257", *shape, *engine]
    found = run(folder, overrides)["memory: peak allocated"][1]
    config = load_config(folder / "dry.yaml", ["run.name=dry", f"train.steps={STEPS}", *overrides])
    cluster = Cluster(1, 1, find_gpu("h200"))
    plan = plan_batch(config.batch, cluster.size)
    planned = rank_memory(task_of(config), ParallelLayout(config.engine, plan.micro, plan.accumulation), cluster)
    assert found == pytest.approx(planned.total - planned.overhead, rel=0.1)
