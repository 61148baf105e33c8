"""Steps of every rank: the same rows whatever the topology, resumed anywhere, with errors as themselves."""

import threading
from itertools import chain, islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain.config.data import BatchConfig, plan_batch
from pretrain.data.loader import StepBatch, TrainLoader, ValidationLoader, digest_rows
from pretrain.data.stream import TokenStream
from pretrain.errors import DataError
from pretrain.rows import TokenRows, cut_rows
from pretrain.types import IGNORE_INDEX
from tests.helpers.rows import CAUSAL, DENSE
from tests.helpers.shards import make_shards, read_split

SEQ_LEN = 16
ROWS = 24


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    return folder, make_shards(folder, train=(700, 300, 500), validation=(250,))


def build_stream(data, split="train") -> TokenStream:
    return TokenStream(*data, split, seq_len=SEQ_LEN, seed=3, lanes=4, block_samples=8)


def load_steps(
    data, num_steps, *, rank=0, world_size=1, micro=1, start=0, document_mask=True, **options
) -> list[StepBatch]:
    plan = plan_batch(BatchConfig(global_tokens=ROWS * SEQ_LEN, seq_len=SEQ_LEN, micro=micro), world_size)
    loader = TrainLoader(
        build_stream(data),
        CAUSAL if document_mask else DENSE,
        plan,
        rank=rank,
        world_size=world_size,
        start_position=start,
        **options,
    )
    steps = list(islice(loader, num_steps))
    loader.close()
    return steps


GROWING = BatchConfig.model_validate(
    {
        "global_tokens": 6 * SEQ_LEN,
        "seq_len": SEQ_LEN,
        "micro": 1,
        "schedule": [
            {"tokens": 11 * SEQ_LEN, "global_tokens": 24 * SEQ_LEN},
            {"tokens": 50 * SEQ_LEN, "global_tokens": 12 * SEQ_LEN},
        ],
    }
)
"""Steps of 6, 6, 24, 24 and then 12 rows."""


def row_contents(step: StepBatch) -> list[tuple]:
    """Each row of a step as plain values, document arrays filled in where they are None."""
    rows = []
    for batch in step.micro_batches:
        shape = batch.tokens_BT.shape
        positions = torch.arange(shape[1]).expand(shape) if batch.positions_BT is None else batch.positions_BT
        documents = torch.zeros(shape) if batch.documents_BT is None else batch.documents_BT
        parts = (batch.tokens_BT, batch.targets_BT, positions, documents)
        rows += zip(batch.sample_ids(), *(part.tolist() for part in parts), strict=True)
    return rows


@settings(max_examples=25)
@given(
    world_and_micro=st.sampled_from([(w, m) for w in (1, 2, 3, 4) for m in (1, 2, 3, 6) if ROWS % (w * m) == 0]),
    workers=st.integers(0, 3),
    prefetch=st.integers(1, 9),
    document_mask=st.booleans(),
)
def test_rows_targets_and_digest_do_not_depend_on_topology_or_threads(
    data, world_and_micro, workers, prefetch, document_mask
):
    world_size, micro = world_and_micro
    options = {"workers": workers, "prefetch": prefetch, "document_mask": document_mask}
    ranks = [
        load_steps(data, 6, rank=rank, world_size=world_size, micro=micro, **options) for rank in range(world_size)
    ]
    expected = load_steps(data, 6, document_mask=document_mask)
    for number, whole in enumerate(expected):
        steps = [rank[number] for rank in ranks]
        assert list(chain(*map(row_contents, steps))) == row_contents(whole)
        assert sum(step.counts.num_targets for step in steps) == whole.counts.num_targets
        assert sum(step.counts.digest for step in steps) % 2**64 == whole.counts.digest
        assert {step.position for step in steps} == {whole.position}
        assert {len(step.micro_batches) for step in steps} == {ROWS // (world_size * micro)}


def test_every_sample_is_read_once_an_epoch_over_all_ranks(data):
    order = build_stream(data).order
    num_steps = -(-order.epoch_start(3) // ROWS)
    ranks = [load_steps(data, num_steps, rank=rank, world_size=3, micro=4) for rank in range(3)]
    samples = [sample for rank in ranks for step in rank for sample in step.sample_ids]
    assert len(samples) == len(set(samples)) == num_steps * ROWS
    assert set(range(order.epoch_start(3))) <= set(samples)


@pytest.mark.parametrize("stop", [1, 3, 11])
def test_resume_yields_same_rows_with_another_world_size(data, stop):
    """Steps 3 and 11 of 24 rows lie before and behind the end of the first epoch, of 93 samples."""
    whole = load_steps(data, 14)
    position = whole[stop - 1].next_position
    resumed = [load_steps(data, 14 - stop, rank=rank, world_size=2, micro=3, start=position) for rank in range(2)]
    for number, expected in enumerate(whole[stop:]):
        assert list(chain(*(row_contents(rank[number]) for rank in resumed))) == row_contents(expected)
        assert resumed[0][number].position == expected.position


def test_resume_works_at_a_position_that_is_no_multiple_of_the_batch(data):
    stream = build_stream(data)
    for position in (1, 23, 92, 93, 94, 1000):
        (step,) = load_steps(data, 1, start=position)
        assert list(step.sample_ids) == stream.order.samples(range(position, position + ROWS)).tolist()
        assert (step.position, step.next_position) == (position, position + ROWS)


def test_an_epoch_shorter_than_a_batch_is_repeated(tmp_path):
    data = tmp_path, make_shards(tmp_path, train=(40,))
    steps = load_steps(data, 4)
    assert sorted(chain(*(step.sample_ids for step in steps))) == list(range(4 * ROWS))


def test_num_targets_is_what_the_tensors_say(data):
    for step in load_steps(data, 5, micro=4):
        assert step.counts.num_targets == sum(batch.num_targets() for batch in step.micro_batches) < ROWS * SEQ_LEN
    for step in load_steps(data, 5, document_mask=False):
        assert step.counts.num_targets == ROWS * SEQ_LEN


def test_a_damaged_member_surfaces_at_next_as_itself(tmp_path):
    data = tmp_path, make_shards(tmp_path, train=(700,))
    path = tmp_path / "train/part-00000-0000.tar"
    content = bytearray(path.read_bytes())
    content[512 + 128 + 5] ^= 4
    path.write_bytes(content)
    before = set(threading.enumerate())
    with pytest.raises(DataError, match=r"part-00000-0000\.tar: 00000000\.tokens\.npy is damaged"):
        load_steps(data, 50, workers=2)
    assert before.issuperset(threading.enumerate())


def test_a_closed_loader_ends_and_leaves_no_thread(data):
    before = set(threading.enumerate())
    plan = plan_batch(BatchConfig(global_tokens=ROWS * SEQ_LEN, seq_len=SEQ_LEN, micro=8), 1)
    loader = TrainLoader(build_stream(data), CAUSAL, plan, rank=0, world_size=1, workers=3)
    next(loader)
    loader.close()
    assert list(loader) == []
    assert before.issuperset(threading.enumerate())
    assert loader.wait_s >= 0


@pytest.mark.parametrize(("world_size", "micro"), [(1, 1), (1, 4), (2, 3), (3, 2), (4, 5), (4, 16)])
def test_validation_reads_each_target_once_in_as_many_batches_on_every_rank(data, world_size, micro):
    stream = build_stream(data, "validation")
    loaders = [
        ValidationLoader(stream, DENSE, micro=micro, rank=rank, world_size=world_size) for rank in range(world_size)
    ]
    ranks = [list(loader) for loader in loaders]
    assert {len(batches) for batches in ranks} == {len(loaders[0])}
    assert all(batch.tokens_BT.shape == (micro, SEQ_LEN) for batches in ranks for batch in batches)
    in_order = [ranks[rank][number] for number in range(len(loaders[0])) for rank in range(world_size)]
    targets = torch.cat([batch.targets_BT.reshape(-1) for batch in in_order])
    tokens, _ = read_split(*data, "validation")
    assert targets[targets != IGNORE_INDEX].tolist() == tokens[1:].tolist()
    assert [batch.tokens_BT.tolist() for batch in loaders[0]] == [batch.tokens_BT.tolist() for batch in ranks[0]]


def test_validation_can_be_cut_short(data):
    loader = ValidationLoader(build_stream(data, "validation"), DENSE, micro=2, rank=0, world_size=1, max_tokens=50)
    assert sum(batch.num_targets() for batch in loader) == 49


def test_leaving_validation_early_leaves_no_thread(data):
    before = set(threading.enumerate())
    for _ in ValidationLoader(build_stream(data, "validation"), CAUSAL, micro=1, rank=0, world_size=1):
        break
    assert before.issuperset(threading.enumerate())


@settings(max_examples=25)
@given(
    world_and_micro=st.sampled_from([(1, 1), (1, 6), (2, 3), (3, 2), (6, 1)]),
    start=st.integers(0, 6),
    workers=st.integers(0, 2),
)
def test_a_batch_that_grows_reads_the_same_samples_in_the_same_order_from_any_step(
    data, world_and_micro, start, workers
):
    world_size, micro = world_and_micro
    plan = plan_batch(GROWING.model_copy(update={"micro": micro}), world_size)
    position = GROWING.steps.before(start)
    options = {"world_size": world_size, "start_step": start, "start_position": position, "workers": workers}
    loaders = [TrainLoader(build_stream(data), CAUSAL, plan, rank=rank, **options) for rank in range(world_size)]
    found, sizes = [], []
    for _ in range(4):
        steps = [next(loader) for loader in loaders]
        rows = list(chain(*map(row_contents, steps)))
        assert {(step.position, step.next_position) for step in steps} == {(position, position + len(rows))}
        digests = [sum(step.counts.digest for step in steps) % 2**64]
        ids = np.array([row[0] for row in rows])
        assert digests == [digest_rows(ids, np.arange(len(ids)))]
        position += len(rows)
        found += rows
        sizes.append(len(rows))
    for loader in loaders:
        loader.close()
    assert sizes == [6, 6, 24, 24, 12, 12, 12, 12, 12, 12][start : start + 4]
    first = GROWING.steps.before(start)
    constant = chain(*map(row_contents, load_steps(data, len(found) // ROWS + 1, start=first)))
    assert found == list(islice(constant, len(found)))


@given(
    num_rows=st.integers(1, 4),
    parts=st.sampled_from([1, 2, 4, 8]),
    starts=st.sets(st.integers(0, 4 * (SEQ_LEN + 1) - 1)),
    cleared=st.booleans(),
)
def test_rows_that_are_cut_are_the_pieces_of_rows_with_the_starts_in_them(num_rows, parts, starts, cleared):
    width, length = SEQ_LEN + 1, SEQ_LEN // parts
    whole = np.arange(num_rows * width).reshape(num_rows, width)
    begun = np.array(sorted(start for start in starts if start < whole.size), dtype=np.int64)
    num_tokens = np.full(num_rows, width) if cleared else None
    if num_tokens is not None:
        num_tokens[0] = 0
    found = cut_rows(TokenRows(whole, np.arange(num_rows) + 7, begun, num_tokens), length)
    pieces = [row[first : first + length + 1] for row in whole for first in range(0, SEQ_LEN, length)]
    assert found.tokens_BT.tolist() == [piece.tolist() for piece in pieces]
    assert found.starts.tolist() == [place for place, token in enumerate(found.tokens_BT.ravel()) if token in begun]
    assert found.sample_ids_B.tolist() == [7 + row for row in range(num_rows) for _ in range(parts)]
    if num_tokens is not None:
        expected = [length + 1 if row else 0 for row in range(num_rows) for _ in range(parts)]
        assert found.num_tokens_B.tolist() == expected


def test_steps_have_the_window_of_their_tokens(data):
    short = [{"until_tokens": ROWS * SEQ_LEN + 1, "window": 4}, {"until_tokens": 3 * ROWS * SEQ_LEN, "window": 8}]
    values = {"global_tokens": ROWS * SEQ_LEN, "seq_len": SEQ_LEN, "micro": 3, "short_windows": short}
    batch = BatchConfig.model_validate(values)
    steps = load_steps(data, 4, micro=3, window_at=batch.window_at)
    windows = [{one.window for one in step.micro_batches} for step in steps]
    assert windows == [{4}, {4}, {8}, {None}]


def test_steps_of_short_rows_have_the_tokens_targets_and_digest_of_whole_ones(data):
    short = [{"until_tokens": ROWS * SEQ_LEN + 1, "seq_len": 4}, {"until_tokens": 3 * ROWS * SEQ_LEN, "seq_len": 8}]
    values = {"global_tokens": ROWS * SEQ_LEN, "seq_len": SEQ_LEN, "micro": 3, "short_rows": short}
    batch = BatchConfig.model_validate(values)
    cut = load_steps(data, 4, micro=3, length_at=batch.length_at)
    for step, expected, length in zip(cut, load_steps(data, 4, micro=3), (4, 4, 8, 16), strict=True):
        assert step.counts == expected.counts
        for ours, whole in zip(step.micro_batches, expected.micro_batches, strict=True):
            assert ours.tokens_BT.shape == (3 * SEQ_LEN // length, length)
            assert torch.equal(ours.tokens_BT.view_as(whole.tokens_BT), whole.tokens_BT)
            assert torch.equal(ours.targets_BT.view_as(whole.targets_BT), whole.targets_BT)
            assert ours.positions_BT is None or int(ours.positions_BT.max()) < length
