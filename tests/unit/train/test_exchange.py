"""The exchange of a step's totals: exact for every value, and equal on all ranks."""

import multiprocessing
from pathlib import Path

import torch
import torch.distributed as td
from hypothesis import given
from hypothesis import strategies as st

from pretrain.data.loader import StepCounts
from pretrain.train.step import StepTotals, start_exchange
from tests.helpers.waiting import LIMIT_S

counts = st.builds(
    StepCounts, st.integers(0, 2**50), st.integers(0, 2**50), st.integers(0, 2**40), st.integers(0, 2**64 - 1)
)


def exchange(
    sums: list[float], done: StepCounts, coming: StepCounts | None, *, stop: bool = False, is_written: bool = False
) -> StepTotals:
    """Starts an exchange and waits for it."""
    values = torch.tensor(sums, dtype=torch.float64)
    return start_exchange(values, done, coming, stop=stop, is_written=is_written)()


@given(
    st.floats(0, 1e12),
    st.integers(0, 2**50),
    st.lists(st.floats(0, 1e12), max_size=4),
    counts,
    st.none() | counts,
    st.booleans(),
    st.booleans(),
)
def test_alone_a_rank_gets_its_own_values(loss_sum, num_correct, by_source, done, coming, is_written, stop):
    totals = exchange([loss_sum, num_correct, *by_source], done, coming, stop=stop, is_written=is_written)
    assert totals == StepTotals(loss_sum, num_correct, (), tuple(by_source), done, coming, is_written, stop)


def test_loads_of_experts_are_the_last_values():
    values = torch.tensor([3.5, 2, 1, 1, 7, 8, 9], dtype=torch.float64)
    totals = start_exchange(values, StepCounts(), None, num_routed=3)()
    assert (totals.by_source, totals.routed) == ((1.0, 1.0), (7.0, 8.0, 9.0))


@given(st.lists(counts, max_size=5))
def test_counters_of_micro_batches_add_up(parts):
    total = sum(parts, StepCounts())
    for name in ("num_targets", "num_tokens", "num_skipped"):
        assert getattr(total, name) == sum(getattr(part, name) for part in parts)
    assert total.digest == sum(part.digest for part in parts) % 2**64


def rank(number: int, store: Path, results) -> None:
    """One of three ranks; only the last was asked to stop, and only the first is still writing."""
    td.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=3)
    done = StepCounts(5 + number, 100 * number, number, 2**64 - 1 - number)
    coming = StepCounts(10 + number, 7, 0, number)
    results.put(
        (
            number,
            exchange([0.25 * number, 5], done, coming, stop=number == 2, is_written=number > 0),
            exchange([0.0, 0.0], done, None if number == 1 else coming).coming,
        )
    )
    td.destroy_process_group()


def test_every_rank_gets_the_same_sums(tmp_path):
    context = multiprocessing.get_context("fork")
    results, store = context.Queue(), tmp_path / "store"
    processes = [context.Process(target=rank, args=(number, store, results)) for number in range(3)]
    for process in processes:
        process.start()
    rows = sorted((results.get(timeout=LIMIT_S) for _ in processes), key=lambda row: row[0])
    for process in processes:
        process.join(LIMIT_S)
    digest = sum(2**64 - 1 - number for number in range(3)) % 2**64
    totals = StepTotals(0.75, 15, (), (), StepCounts(18, 300, 3, digest), StepCounts(33, 21, 0, 3), 2, stop=True)
    assert rows == [(number, totals, None) for number in range(3)]
