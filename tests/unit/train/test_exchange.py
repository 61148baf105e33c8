"""What the ranks tell each other at the end of a step: exact for every value that it carries."""

import multiprocessing
from pathlib import Path

import torch
import torch.distributed as td
from hypothesis import given
from hypothesis import strategies as st

from pretrain.train.step_totals import StepTotals, start_exchange
from tests.helpers.waiting import LIMIT_S


def exchange(
    loss_sum: float,
    num_correct: int,
    digest: int,
    num_skipped: int,
    num_tokens: int,
    next_targets: int,
    is_written: bool,
    stop: bool,
) -> StepTotals:
    """Starts an exchange and waits for it."""
    sums = torch.tensor([loss_sum, num_correct], dtype=torch.float64)
    return start_exchange(sums, digest, num_skipped, num_tokens, next_targets, stop, is_written)()


@given(
    st.floats(0, 1e12),
    st.integers(0, 2**50),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**40),
    st.integers(0, 2**50),
    st.integers(0, 2**50),
    st.booleans(),
    st.booleans(),
)
def test_alone_a_rank_hears_itself(
    loss_sum, num_correct, digest, num_skipped, num_tokens, next_targets, is_written, stop
):
    values = (loss_sum, num_correct, digest, num_skipped, num_tokens, next_targets, is_written, stop)
    assert exchange(*values) == StepTotals(*values)


def coming(number: int, digest: int | None) -> int | None:
    """What one rank hears of the digest of the coming step."""
    sums = torch.zeros(2, dtype=torch.float64)
    return start_exchange(sums, number, 0, 0, 0, False, next_digest=digest)().next_digest


@given(st.integers(0, 2**64 - 1))
def test_the_digest_of_what_comes_next_is_heard_where_anything_comes(digest):
    assert coming(5, digest) == digest
    assert coming(5, None) is None


def test_before_the_first_step_there_is_nothing_done():
    assert exchange(0.0, 0, 0, 0, 0, 7, False, False) == StepTotals(0.0, 0, 0, 0, 0, 7, 0, False)


def rank(number: int, store: Path, results) -> None:
    """One of three ranks; only the last was asked to stop, and only the first is still writing."""
    td.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=3)
    agreed = exchange(0.25 * number, 5, 2**64 - 1 - number, number, 100 * number, 10 + number, number > 0, number == 2)
    results.put(
        (
            number,
            agreed.loss_sum,
            agreed.num_correct,
            agreed.digest,
            agreed.num_skipped,
            agreed.num_tokens,
            agreed.next_targets,
            agreed.num_written,
            agreed.stop,
            coming(number, 2**64 - 1 - number),
            coming(number, None if number == 1 else number),
        )
    )
    td.destroy_process_group()


def test_every_rank_hears_the_same_sums(tmp_path):
    context = multiprocessing.get_context("fork")
    results, store = context.Queue(), tmp_path / "store"
    processes = [context.Process(target=rank, args=(number, store, results)) for number in range(3)]
    for process in processes:
        process.start()
    rows = sorted(results.get(timeout=LIMIT_S) for _ in processes)
    for process in processes:
        process.join(LIMIT_S)
    digest = sum(2**64 - 1 - number for number in range(3)) % 2**64
    assert rows == [(number, 0.75, 15, digest, 3, 300, 33, 2, True, digest, None) for number in range(3)]
