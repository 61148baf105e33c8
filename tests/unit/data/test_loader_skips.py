"""Batches of a run that leaves ranges of positions out: all other samples once, in order, whatever the topology."""

from itertools import chain

import pytest

from pretrain.config.data import BatchConfig, plan_batch
from pretrain.data.loader import TrainLoader
from pretrain.data.order import SkipRanges
from tests.helpers.rows import CAUSAL
from tests.unit.data.test_loader import ROWS, SEQ_LEN, build_stream, data, load_steps, row_contents  # noqa: F401

WHOLE = SkipRanges.of([(2 * ROWS, 5 * ROWS), (7 * ROWS, 8 * ROWS)])
CUT = SkipRanges.of([(10, 50), (61, 62), (63, 70)])
"""Not at the edges of batches, as after a change of the batch size: micro-batches and rows of a rank are cut too."""


@pytest.mark.parametrize("skips", [WHOLE, CUT], ids=["whole batches", "anywhere"])
@pytest.mark.parametrize(("world_size", "micro"), [(1, 24), (2, 3), (3, 8)])
def test_every_sample_but_the_skipped_ones_comes_once_in_order(data, skips, world_size, micro):  # noqa: F811
    ranks = [
        load_steps(data, 6, rank=rank, world_size=world_size, micro=micro, skips=skips) for rank in range(world_size)
    ]
    order = build_stream(data).order
    expected = [
        int(order.samples(span)[0]) for place in range(6 * ROWS) for span in skips.spans(range(place, place + 1))
    ]
    assert [sample for steps in zip(*ranks, strict=True) for step in steps for sample in step.sample_ids] == expected
    whole = load_steps(data, 6, skips=skips)
    for number, step in enumerate(whole):
        assert sum(rank[number].counts.digest for rank in ranks) % 2**64 == step.counts.digest
        assert list(chain(*(row_contents(rank[number]) for rank in ranks))) == row_contents(step)
        assert {rank[number].next_position for rank in ranks} == {skips.position_of((number + 1) * ROWS)}


@pytest.mark.parametrize("skips", [WHOLE, CUT], ids=["whole batches", "anywhere"])
def test_a_cursor_resumes_before_between_and_behind_skipped_ranges(data, skips):  # noqa: F811
    whole = load_steps(data, 8, skips=skips)
    for stop in range(1, 7):
        position = whole[stop - 1].next_position
        ranks = [load_steps(data, 2, rank=r, world_size=2, micro=3, start=position, skips=skips) for r in range(2)]
        for number, expected in enumerate(whole[stop : stop + 2]):
            assert list(chain(*(row_contents(rank[number]) for rank in ranks))) == row_contents(expected)
            assert ranks[0][number].position == expected.position


def test_a_loader_restarts_elsewhere_with_other_skips(data):  # noqa: F811
    plan = plan_batch(BatchConfig(global_tokens=ROWS * SEQ_LEN, seq_len=SEQ_LEN, micro=4), 1)
    first = TrainLoader(build_stream(data), CAUSAL, plan, rank=0, world_size=1, workers=2)
    next(first), next(first)
    again = first.restarted(1, ROWS, WHOLE)
    assert list(first) == []
    found = [next(again), next(again)]
    again.close()
    (expected,) = load_steps(data, 1, start=5 * ROWS)
    assert row_contents(found[1]) == row_contents(expected)
    assert (found[0].position, found[0].next_position, found[1].position) == (ROWS, 5 * ROWS, 5 * ROWS)
