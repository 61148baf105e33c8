"""Launches of a step against the tables of the dry CUDA runtime, and the bytes of updates by engine."""

from pathlib import Path

import pytest

from pretrain.config.load import load_config
from pretrain.plan.launches import attention_kernel, count_launches, update_traffic
from pretrain.plan.roofline import recompute_share
from pretrain.plan.task import ParallelLayout, task_of

TABLE = Path(__file__).parents[2] / "cuda_dry" / "torch-2.13.txt"
LAUNCHED = ("kernel", "compiled kernel", "product 16 bits", "fill", "copy ")


def rows_of(case):
    """Calls and amount of each row of a case of the table."""
    (block,) = (one for one in TABLE.read_text().split("\n\n") if one.partition("\n")[0] == case)
    rows = (line.split(maxsplit=2) for line in block.splitlines()[1:])
    return {name: (int(calls), int(amount.replace(",", ""))) for calls, amount, name in rows}


def counted(case):
    """Kernels, products, fills and copies of a case of the table."""
    return sum(calls for name, (calls, _) in rows_of(case).items() if name.startswith(LAUNCHED))


def layout_of(*overrides):
    values = ["model=null", "model.preset=llama-5m", "model.vocab_size=96", "engine.zero_stage=1"]
    values += ["batch={global_tokens: 8192, seq_len: 512, micro: 4}", "engine.compile=false", "engine.precision=bf16"]
    config = load_config("configs/run/llama_1b.yaml", [*values, *overrides])
    return task_of(config), ParallelLayout(config.engine, 4, 4)


@pytest.mark.parametrize(
    ("case", "overrides"),
    [
        ("zero1", []),
        ("zero2", ["engine.zero_stage=2"]),
        ("single", ["engine.kind=single", "engine.zero_stage=0"]),
        ("autocast", ["engine.kind=single", "engine.zero_stage=0", "engine.gradients=fp32"]),
        ("full", ["engine.activation_checkpointing=full"]),
        ("compiled", ["engine.compile=true"]),
        ("compiled, ddp", ["engine.kind=ddp", "engine.zero_stage=0", "engine.compile=true"]),
        ("mistral", ["model={preset: mistral-tiny, vocab_size: 96, max_seq_len: 512}"]),
    ],
)
def test_launches_are_those_of_the_dry_runtime(case, overrides):
    task, layout = layout_of(*overrides)
    found = count_launches(task, layout, recompute_share(task, layout.engine), "cuda")
    assert found == pytest.approx(counted(case), rel=0.12)
    assert count_launches(task, layout, 0.0, "cpu") == 0


@pytest.mark.parametrize(
    ("overrides", "each"),
    [
        (["engine.kind=single", "engine.zero_stage=0", "engine.gradients=fp32"], 4 * 12 + 3 * 12 + 12 + 28),
        (["engine.kind=single", "engine.zero_stage=0"], 3 * 6 + 24 + 28),
        (["engine.kind=single", "engine.zero_stage=0", "engine.compile=true"], 3 * 6 + 6 + 28),
        (["engine.zero_stage=0"], 3 * 6 + 12 + 30 + 28),
        (["engine.zero_stage=1"], 3 * 6 + 18 + 42 + 28),
        (["engine.zero_stage=2"], 3 * 6 + 4 * 18 + 42 + 28),
        (["engine.zero_stage=3"], 3 * 6 + 4 * 24 + 42 + 28),
    ],
)
def test_an_update_moves_what_its_engine_copies_and_what_adamw_reads_and_writes(overrides, each):
    """Casts and sums of each micro-batch, copies to buckets, the engine's own, and 28 bytes of AdamW."""
    task, layout = layout_of(*overrides)
    assert update_traffic(task, layout, 1) == each * task.values.trained


def test_an_update_of_our_own_engine_is_one_compiled_kernel_of_28_bytes_a_weight():
    """Beside it some 25 kernels of the norm and of numbers, whatever the number of tensors."""
    rows = rows_of("update")
    assert rows["compiled kernel"][0] == 1
    assert rows["compiled kernel: bytes a weight"] == (1, 28)
    assert counted("update") <= 34


def test_ranks_share_what_they_own_and_not_what_they_copy():
    task, layout = layout_of()
    alone, eight = (update_traffic(task, layout, ranks) / task.values.trained for ranks in (1, 8))
    assert alone - eight == pytest.approx(7 / 8 * (42 + 28))


@pytest.mark.parametrize(
    ("overrides", "kernel"),
    [
        ([], "flash"),
        (["data.document_mask=false"], "cudnn"),
        (["data.document_mask=false", "engine.attention=varlen"], "flash"),
        (["data.document_mask=false", "engine.precision=fp32"], "flash"),
    ],
)
def test_rows_of_one_document_have_cudnns_kernel(overrides, kernel):
    task, layout = layout_of(*overrides)
    assert attention_kernel(task, layout.engine) == kernel
