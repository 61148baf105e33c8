"""Reading as ranks do, and keeping account: what a run reads, and that whatever is wrong with a stream is noticed."""

import weakref
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretrain.data.loader import TrainLoader
from pretrain.data.stream import TokenStream
from pretrain.datacheck.hash import TokenSums
from pretrain.datacheck.reading import Order, plan_reading, plan_rows
from pretrain.datacheck.replay import choose_kills, plan_ranks, rank_rows, read_course
from pretrain.errors import DataError
from pretrain.shards.dataset import ONLY, Dataset, DataSource
from pretrain.shards.store import LocalStore
from tests.helpers.rows import CAUSAL
from tests.helpers.shards import make_shards

ORDER = Order(seq_len=16, lanes=3, block_samples=8, seed=3)
SIZES = (1, 2, 3, 4)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    return folder, make_shards(folder, train=(700, 300, 900))


@pytest.fixture(scope="module")
def course(data):
    folder, index = data
    return plan_reading(Dataset((DataSource(ONLY, folder, index),)), LocalStore(folder), "train", ORDER, SIZES, 0)


def read(course, world_sizes=(2,), limit=None, restarts=2):
    ticks = []
    limit = limit or course.num_rows
    reading = read_course(course, world_sizes, limit=limit, restarts=restarts, sums=TokenSums(1000), tick=ticks.append)
    assert sum(ticks) == limit
    return reading


@given(st.integers(1, 5000), st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_a_global_batch_is_cut_by_every_world_size_without_rest(num_samples, world_sizes):
    rows = plan_rows(num_samples, world_sizes)
    for size in world_sizes:
        plan = plan_ranks(rows, size)
        assert plan.rows == rows == size * plan.accumulation * plan.micro
        parts = [rank_rows(plan, size, number) for number in range(2 * size * plan.accumulation)]
        assert [row for part in parts for row in part] == list(range(2 * rows))


@pytest.mark.parametrize("world_size", SIZES)
def test_ranks_read_what_the_loader_of_a_run_reads(data, world_size):
    folder, index = data
    stream = TokenStream(folder, index, "train", seq_len=16, lanes=3, block_samples=8, seed=3)
    plan = plan_ranks(24, world_size)
    for rank in range(world_size):
        loader = TrainLoader(stream, CAUSAL, plan, rank=rank, world_size=world_size)
        loaded = [step.sample_ids for step in (next(loader), next(loader), next(loader))]
        loader.close()
        mine = [
            sample
            for number in range(3 * world_size * plan.accumulation)
            if number // plan.accumulation % world_size == rank
            for sample in stream.order.samples(rank_rows(plan, world_size, number)).tolist()
        ]
        assert mine == [sample for ids in loaded for sample in ids]


@pytest.mark.parametrize("num_steps", [1, 2, 3, 50])
def test_kills_fall_between_steps_and_there_are_as_many_as_fit(num_steps):
    kills = choose_kills(num_steps, 3, (1, 2))
    assert kills == sorted(set(kills)) and len(kills) == min(3, num_steps - 1)
    assert all(0 < step < num_steps for step in kills)
    assert choose_kills(num_steps, 0, (1, 2)) == []


def test_every_way_to_read_gives_the_same_sums(course):
    readings = [read(course, sizes) for sizes in ((1,), (2,), (3,), (4,), (4, 1, 3))]
    assert len({reading.hashes for reading in readings}) == 1
    assert {reading.num_samples for reading in readings} == {119}
    assert {reading.num_tokens for reading in readings} == {1900}
    assert {reading.restarts for reading in readings} == {2}


def test_what_a_start_opened_is_let_go_of_before_the_next(course, monkeypatch):
    """Streams are cycles; twenty starts would keep twenty mappings of each shard."""
    opened = []
    monkeypatch.setattr(
        "pretrain.shards.reader.finalize", lambda reader, *_: opened.append(weakref.ref(reader)) or Quiet
    )
    alive = []

    def open_counted():
        alive.append(sum(reader() is not None for reader in opened))
        return course.open()

    read(replace(course, open=open_counted), restarts=4)
    assert len(opened) > 5 and alive == [0] * 5


class Quiet:
    """What stands for a finalizer that does nothing."""

    atexit = False


def test_a_part_of_a_course_can_be_read(course):
    assert {read(course, (size,), limit=50).hashes for size in SIZES} == {read(course, limit=50).hashes}
    assert read(course, limit=50).num_samples == 50


def broken(course, change):
    """The course of a stream that is wrong: `change` gets positions and rows."""

    def open_broken():
        whole = course.open()
        return lambda positions: change(positions, whole(positions))

    return replace(course, open=open_broken)


def test_a_sample_that_comes_twice_is_named(course):
    fifth = int(course.open()(range(5, 6)).sample_ids_B[0])

    def change(positions, rows):
        if 77 in positions and 5 not in positions:
            rows.sample_ids_B[77 - positions.start] = fifth
        return rows

    with pytest.raises(DataError, match=rf"world size 2: not exactly once: sample {fifth} came twice; verify again"):
        read(broken(course, change))


def test_a_sample_that_comes_twice_at_once_is_noticed(course):
    def change(positions, rows):
        rows.sample_ids_B[0] = rows.sample_ids_B[-1]
        return rows

    with pytest.raises(DataError, match=r"not exactly once: 119 rows hold only \d+ different samples"):
        read(broken(course, change))


def test_a_sample_that_never_comes_is_named(course):
    def change(positions, rows):
        rows.sample_ids_B[rows.sample_ids_B == 33] = 5000
        return rows

    with pytest.raises(DataError, match="not exactly once: sample 33 never came"):
        read(broken(course, change))


def test_what_a_kill_makes_different_is_noticed(course):
    """A stream that depends on when it was opened, as one with a state that is lost does."""
    opened = []

    def open_broken():
        opened.append(1)
        shift, whole = len(opened) - 1, course.open()
        return lambda positions: whole(range(positions.start + shift, positions.stop + shift))

    with pytest.raises(DataError, match=r"not exactly once: sample \d+ (came twice|never came)"):
        read(replace(course, open=open_broken))


def test_padded_rows_of_the_next_epoch_own_nothing(data):
    folder, index = data
    dataset, order = Dataset((DataSource(ONLY, folder, index),)), replace(ORDER, packing="padded")
    course = plan_reading(dataset, LocalStore(folder), "train", order, SIZES, 0)
    assert course.num_rows > course.num_samples
    reading = read(course, (3,))
    assert (reading.num_samples, reading.num_tokens) == (course.num_samples, 1900)
    assert not np.array_equal(course.open()(range(20)).sample_ids_B, np.arange(20))
