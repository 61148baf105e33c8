"""The exchange of a step's totals: exact for every value, and equal on all ranks."""

import multiprocessing
from pathlib import Path

import torch
import torch.distributed as td
from hypothesis import given
from hypothesis import strategies as st

from pretrain.data.loader import StepCounts
from pretrain.objective.loss_sums import SumLayout
from pretrain.training.step import StepTotals, start_exchange
from tests.helpers.waiting import LIMIT_S

counts = st.builds(
    StepCounts, st.integers(0, 2**50), st.integers(0, 2**50), st.integers(0, 2**40), st.integers(0, 2**64 - 1)
)


def exchange(
    sums: dict[str, tuple[float, ...]],
    done: StepCounts,
    coming: StepCounts | None,
    *,
    stop: bool = False,
    is_written: bool = False,
) -> StepTotals:
    """Starts an exchange and waits for it."""
    layout = SumLayout({name: len(values) for name, values in sums.items()})
    values = layout.pack({name: torch.tensor(one, dtype=torch.float64) for name, one in sums.items()})
    return start_exchange(values, done, coming, layout, stop=stop, is_written=is_written)()


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
    sums = {"nll": (loss_sum,), "correct": (num_correct,), "by_source": tuple(by_source)}
    totals = exchange(sums, done, coming, stop=stop, is_written=is_written)
    assert totals == StepTotals(sums, done, coming, is_written, stop)
    assert (totals.loss_sum, totals.num_correct, totals.shown) == (loss_sum, num_correct, {})


def test_every_sum_has_its_name():
    sums = {"nll": (3.5,), "correct": (2.0,), "shown.gap": (4.0,), "shown.wins": (1.0,), "routed": (7.0, 8.0, 9.0)}
    totals = exchange(sums, StepCounts(), None)
    assert (totals.sums, totals.shown, totals.multi_token_loss) == (sums, {"gap": 4.0, "wins": 1.0}, None)
    totals = exchange({"ahead": (6.0, 1.0, 4.0, 8.0, 3.0, 3.0)}, StepCounts(), None)
    assert totals.multi_token_loss == 2.0
    assert totals.of_modules() == {
        "multi_token_loss_1": 1.5,
        "multi_token_accuracy_1": 0.25,
        "multi_token_loss_2": 8 / 3,
        "multi_token_accuracy_2": 1.0,
    }


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
            exchange({"nll": (0.25 * number,), "correct": (5,)}, done, coming, stop=number == 2, is_written=number > 0),
            exchange({"nll": (0.0,)}, done, None if number == 1 else coming).coming,
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
    sums = {"nll": (0.75,), "correct": (15.0,)}
    totals = StepTotals(sums, StepCounts(18, 300, 3, digest), StepCounts(33, 21, 0, 3), 2, stop=True)
    assert rows == [(number, totals, None) for number in range(3)]
