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


def test_ranks_over_nccl_train_as_one_process_and_continue_after_a_kill_in_the_same_bits(tmp_path):
    """One test, as two jobs at once would share the device: workers of pytest would run several."""
    bench = Bench(
        arm="ranks",
        question="?",
        out=tmp_path,
        scratch=tmp_path,
        rehearse=False,
        command="pytest",
        commit="",
        nanogpt=None,
        groups=("abort", "two", "kill", "again"),
        cases=("dense, ZeRO 3", "dense, DDP", "experts, ZeRO 1"),
    )
    ranks(bench)
    written = map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())
    rows = {row["case"]: row for row in written}
    assert bench.failed == []
    assert [one["right"] for one in rows["abort: two ranks"]["value"]] == [True] * 3
    assert [row["held"] for case, row in rows.items() if case.startswith("two: ")] == [True] * 4
    assert "rank 1" in rows["kill: rank 1 of 2 by SIGKILL"]["value"]["named"]
    assert rows["again: kill, continued on the same"]["value"] == "equal"
