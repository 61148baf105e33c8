"""Several ranks over NCCL on one GPU: a few groups of the arm `ranks` of the GPU campaign."""

import json

import pytest
import torch

from benchmarks.gpu_bench import Bench
from benchmarks.gpu_ranks import ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, which ranks over NCCL share"),
]


@pytest.fixture
def run(tmp_path):
    """Runs groups of the arm; returns the rows by case."""

    def run_groups(*groups, cases=()):
        bench = Bench("ranks", "?", tmp_path, tmp_path, False, "pytest", "", None, cases=cases, groups=groups)
        ranks(bench)
        assert bench.failed == []
        rows = map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())
        return {row["case"]: row for row in rows}

    return run_groups


def test_a_rank_that_waits_alone_is_freed_by_an_abort_and_the_next_group_is_made(run):
    rows = run("abort")
    assert [one["right"] for one in rows["abort: two ranks"]["value"]] == [True] * 3


def test_two_ranks_train_as_one_process(run):
    rows = run("two", cases=("dense, ZeRO 3", "dense, DDP", "experts, ZeRO 1"))
    compared = [row for case, row in rows.items() if case.startswith("two: ")]
    assert [row["held"] for row in compared] == [True] * 4


def test_a_killed_rank_is_named_and_its_run_continues_in_the_same_bits(run):
    rows = run("kill", "again")
    assert "rank 1" in rows["kill: rank 1 of 2 by SIGKILL"]["value"]["named"]
    assert rows["again: kill, continued on the same"]["value"] == "equal"
