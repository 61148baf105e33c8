"""Rows read from real tars against rows cut out of one long array."""

from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain.data.order import shard_order
from pretrain.data.stream import TokenStream
from pretrain.errors import DataError
from pretrain.shards.index import DataIndex, build_split
from tests.helpers.shards import EOS, describe_shard, make_shards, read_split


def build_stream(folder, index, split="train", **options) -> TokenStream:
    options = {"seq_len": 16, "seed": 3, "lanes": 4, "block_samples": 8} | options
    return TokenStream(folder, index, split, **options)


def run_stream(folder: Path, index: DataIndex, seed: int, epochs: int) -> tuple[np.ndarray, set[int]]:
    """X: the tokens of the first epochs one after another, and where documents start in them; without our reader."""
    tokens, starts = read_split(folder, index)
    sizes = [shard.num_tokens for shard in index.split("train").shards]
    pieces = np.split(tokens, np.cumsum(sizes)[:-1])
    begins = np.split(np.isin(np.arange(len(tokens)), starts), np.cumsum(sizes)[:-1])
    order = [shard for epoch in range(epochs) for shard in shard_order(len(sizes), seed, epoch)]
    document_starts = np.flatnonzero(np.concatenate([begins[shard] for shard in order]))
    return np.concatenate([pieces[shard] for shard in order]), set(document_starts.tolist())


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    return folder, make_shards(folder, train=(700, 300, 1, 500), validation=(250,))


@settings(max_examples=40)
@given(
    seq_len=st.integers(1, 200),
    lanes=st.integers(1, 6),
    block_samples=st.integers(1, 40),
    seed=st.integers(0, 50),
    start=st.integers(0, 30),
    count=st.integers(1, 12),
)
def test_rows_are_slices_of_the_run_stream(data, seq_len, lanes, block_samples, seed, start, count):
    folder, index = data
    stream = build_stream(folder, index, seq_len=seq_len, lanes=lanes, block_samples=block_samples, seed=seed)
    X, document_starts = run_stream(folder, index, seed, epochs=8)
    rows = stream.read(range(start, start + count))
    assert rows.tokens_BT.dtype == np.uint16 and rows.tokens_BT.shape == (count, seq_len + 1)
    expected_starts = []
    for number, sample in enumerate(rows.sample_ids_B.tolist()):
        first = sample * seq_len
        assert rows.tokens_BT[number].tolist() == X[first : first + seq_len + 1].tolist()
        inside = (at - first for at in sorted(document_starts) if first <= at <= first + seq_len)
        expected_starts += [number * (seq_len + 1) + at for at in inside]
    assert rows.starts.tolist() == expected_starts


@pytest.mark.parametrize("seq_len", [7, 16, 1000, 4000])
def test_each_token_is_a_target_exactly_once_an_epoch_across_every_edge(data, seq_len):
    folder, index = data
    stream = build_stream(folder, index, seq_len=seq_len)
    num_samples = stream.order.epoch_start(3) or 1
    X, _ = run_stream(folder, index, 3, epochs=12)
    rows = stream.read(range(num_samples))
    by_sample = rows.tokens_BT[np.argsort(rows.sample_ids_B)]
    assert by_sample[:, 1:].reshape(-1).tolist() == X[1 : num_samples * seq_len + 1].tolist()


def test_what_one_epoch_leaves_over_the_next_one_carries(data):
    """1501 tokens are not a multiple of 16: the last sample of an epoch ends in the next epoch's first tokens."""
    folder, index = data
    stream = build_stream(folder, index)
    starts = [stream.order.epoch_start(epoch) for epoch in range(17)]
    assert starts[16] * 16 == 16 * 1501
    assert {after - before for before, after in pairwise(starts)} == {93, 94}


def test_one_open_shard_is_enough_and_never_exceeded(data):
    folder, index = data
    narrow, wide = build_stream(folder, index, max_open_shards=1), build_stream(folder, index)
    for position in range(0, 100, 5):
        positions = range(position, position + 5)
        assert narrow.read(positions).tokens_BT.tolist() == wide.read(positions).tokens_BT.tolist()
        assert narrow._reader.cache_info().currsize == 1
    assert wide._reader.cache_info().currsize == 4


def test_shards_are_opened_only_when_they_are_read(tmp_path):
    index = make_shards(tmp_path, train=(700, 300, 500))
    first, *others = shard_order(3, seed=3, epoch=0).tolist()
    for shard in others:
        (tmp_path / index.split("train").shards[shard].name).unlink()
    stream = build_stream(tmp_path, index, lanes=1, block_samples=1)
    last = index.split("train").shards[first].num_tokens // 16
    stream.read(range(last))
    with pytest.raises(DataError, match="cannot be read: No such file"):
        stream.read(range(last, last + 1))


@given(seq_len=st.integers(1, 300), extra=st.integers(0, 5), max_tokens=st.one_of(st.none(), st.integers(1, 400)))
def test_windows_cover_each_token_but_the_first_once_in_the_fixed_order(data, seq_len, extra, max_tokens):
    folder, index = data
    stream = build_stream(folder, index, "validation", seq_len=seq_len)
    tokens, _ = read_split(folder, index, "validation")
    tokens = tokens[:max_tokens]
    num_windows = stream.num_windows(max_tokens)
    rows = stream.read_windows(range(num_windows + extra), max_tokens)
    targets = [row[1:size] for row, size in zip(rows.tokens_BT.tolist(), rows.num_tokens_B.tolist(), strict=True)]
    assert list(chain(*targets)) == tokens[1:].tolist()
    assert all(targets[:num_windows]) and not any(targets[num_windows:])
    padding = [row[size:] for row, size in zip(rows.tokens_BT.tolist(), rows.num_tokens_B.tolist(), strict=True)]
    assert set(chain(*padding)) <= {EOS}


def test_windows_do_not_depend_on_the_seed_of_training(data):
    folder, index = data
    one, other = (build_stream(folder, index, "validation", seed=seed).read_windows(range(5)) for seed in (1, 2))
    assert one.tokens_BT.tolist() == other.tokens_BT.tolist()


def test_32_bit_tokens_are_read(tmp_path):
    index = make_shards(tmp_path, dtype="uint32", vocab_size=200_000)
    tokens, _ = read_split(tmp_path, index, "validation")
    rows = build_stream(tmp_path, index, "validation", seq_len=249).read_windows(range(1))
    assert rows.tokens_BT[0].tolist() == tokens.tolist() and tokens.max() > 2**16


def test_an_empty_split_is_refused(data):
    folder, _ = data
    empty = DataIndex("0", 10, "uint16", 0, {"train": build_split([], 0)})
    with pytest.raises(DataError, match="split 'train' has no tokens; give `pretrain prepare` more text"):
        build_stream(folder, empty)


def test_resuming_a_terabyte_costs_one_round_and_one_layout():
    shards = [describe_shard(f"s{n}.tar", 10**9) for n in range(1000)]
    index = DataIndex("0", 50_000, "uint16", 0, {"train": build_split(shards, 1)})
    stream = TokenStream(Path("absent"), index, "train", seq_len=1024, seed=1, lanes=16, block_samples=8192)
    for position in (0, 10**9):
        with pytest.raises(DataError, match=r"absent/s\d+\.tar: cannot be read: No such file"):
            stream.read(range(position, position + 1))
    assert stream.order._round.cache_info().misses == 2
    assert stream._epoch_layout.cache_info().misses == 2
