"""Rows of damaged members: where skipping is allowed they keep their places and ids, and lose their targets."""

import logging
from itertools import pairwise

import numpy as np
import pytest

from pretrain.config.data import DataConfig
from pretrain.data.bin_stream import BinStream
from pretrain.data.damage import DamagePolicy
from pretrain.data.loader import count_skipped
from pretrain.data.mixture import MixtureOrder, MixtureStream
from pretrain.data.stream import TokenStream
from pretrain.errors import DataError
from pretrain.objective.causal import causal_rows
from pretrain.objective.seq2seq import pair_rows
from pretrain.shards.index import DataIndex, build_split, write_index
from pretrain.shards.reader import ShardReader, ShardSet
from pretrain.shards.store import LocalStore
from pretrain.shards.writer import ShardWriter
from pretrain.types import IGNORE_INDEX
from tests.helpers.shards import EOS, add_document, make_shards

SEQ_LEN = 16
ORDER = {"seq_len": SEQ_LEN, "seed": 3, "lanes": 2, "block_samples": 4}


def damage_member(folder, index, shard=1, member=2, split="train", column=0):
    """Flips a bit in an array of a member; returns which tokens of its shard the member holds."""
    entry = index.split(split).shards[shard]
    reader = ShardReader(folder, entry, index.dtype)
    offset, first = reader._rows[member][column], reader.member_starts[member]
    size = reader._rows[member][1]
    path = folder / entry.name
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)
    return range(first, first + size)


def targets_of(rows):
    """What the model learns from rows."""
    return (pair_rows(rows, 0) if rows.source is not None else causal_rows(rows, True)).targets_BT


@pytest.fixture
def folder(tmp_path):
    index = make_shards(tmp_path, train=(700, 300, 500))
    return tmp_path, index


def compare(whole, found, num_skipped):
    """Rows are those of the undamaged stream, but for some that have no targets; returns which these are."""
    assert np.array_equal(found.sample_ids_B, whole.sample_ids_B)
    theirs, mine = targets_of(whole), targets_of(found)
    (skipped,) = np.nonzero((mine == IGNORE_INDEX).all(axis=1) & (theirs != IGNORE_INDEX).any(axis=1))
    others = np.setdiff1d(np.arange(len(mine)), skipped)
    assert np.array_equal(mine[others], theirs[others])
    assert count_skipped(found) == len(skipped) == num_skipped > 0
    return skipped.tolist()


def test_exactly_the_rows_that_touch_a_damaged_member_have_no_targets(folder):
    path, index = folder
    whole = TokenStream(path, index, "train", **ORDER).read(range(90))
    lost = damage_member(path, index)
    policy = DamagePolicy("skip", 100)
    found = TokenStream(path, index, "train", **ORDER, damage=policy).read(range(90))
    skipped = compare(whole, found, policy.num_skipped_rows)
    # The shards of epoch 0 in their order: where the damaged member lies in the stream of the run.
    stream = TokenStream(path, index, "train", **ORDER)
    shards, starts = stream._epoch_layout(0)
    first = starts[shards.index(1)] + lost.start
    touching = [
        row
        for row, sample in enumerate(whole.sample_ids_B.tolist())
        if sample * SEQ_LEN < first + len(lost) and sample * SEQ_LEN + SEQ_LEN >= first
    ]
    assert skipped == touching
    assert (found.tokens_BT[skipped] == EOS).all()
    width = SEQ_LEN + 1
    assert not set(skipped) & set((found.starts // width).tolist())
    kept = [start for start in whole.starts.tolist() if start // width not in skipped]
    assert found.starts.tolist() == kept


def test_any_cut_of_the_positions_skips_the_same_rows(folder):
    path, index = folder
    damage_member(path, index)
    policy = DamagePolicy("skip", 100)
    stream = TokenStream(path, index, "train", **ORDER, damage=policy)
    whole = targets_of(stream.read(range(90)))
    counted = policy.num_skipped_rows
    for first, last in pairwise([0, 1, 7, 40, 41, 90]):
        assert np.array_equal(targets_of(stream.read(range(first, last))), whole[first:last])
    assert policy.num_skipped_rows == counted, "a row that is read again is counted once"


def test_without_leave_to_skip_damage_is_an_error_that_names_shard_and_member(folder):
    path, index = folder
    damage_member(path, index)
    with pytest.raises(DataError, match=r"train/part-00000-0001\.tar: 00000002\.tokens\.npy is damaged: CRC32 of"):
        TokenStream(path, index, "train", **ORDER).read(range(90))


def test_one_row_beyond_the_limit_is_an_error():
    policy = DamagePolicy("skip", 4)
    policy.check(4)
    with pytest.raises(DataError, match=r"5 rows cannot be read, more than data\.max_skipped_rows=4; .*or raise the"):
        policy.check(5)


def test_each_damaged_member_is_warned_about_once(folder, caplog):
    path, index = folder
    damage_member(path, index, shard=1, member=2)
    damage_member(path, index, shard=0, member=1)
    stream = TokenStream(path, index, "train", **ORDER, damage=DamagePolicy("skip", 1000))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            stream.read(range(180))
    told = sorted(record.getMessage() for record in caplog.records)
    assert len(told) == 2
    assert f"rows are skipped in {path}: train/part-00000-0000.tar: 00000001.tokens.npy is damaged" in told[0]
    assert "train/part-00000-0001.tar: 00000002.tokens.npy is damaged" in told[1]


def test_rows_of_a_shard_that_cannot_be_opened_are_skipped(folder):
    path, index = folder
    whole = TokenStream(path, index, "train", **ORDER).read(range(90))
    (path / index.split("train").shards[2].name).unlink()
    policy = DamagePolicy("skip", 100)
    found = TokenStream(path, index, "train", **ORDER, damage=policy).read(range(90))
    compare(whole, found, policy.num_skipped_rows)


def test_windows_of_a_damaged_member_have_no_targets(folder):
    path, index = folder
    whole = TokenStream(path, index, "validation", seq_len=SEQ_LEN).read_windows(range(16))
    damage_member(path, index, shard=0, member=1, split="validation")
    policy = DamagePolicy("skip", 100)
    stream = TokenStream(path, index, "validation", seq_len=SEQ_LEN, damage=policy)
    for _ in range(2):
        found = stream.read_windows(range(16))
    compare(whole, found, policy.num_skipped_rows)


def make_kind(folder, kind):
    """Shards of 30 short documents each, two members a shard."""
    (folder / "train").mkdir(parents=True)
    rng, shards = np.random.default_rng(0), []
    for number in range(3):
        writer = ShardWriter(folder / "train" / f"part-0000{number}-0000.tar", "uint16", 100, kind)
        for _ in range(30):
            tokens = rng.integers(1, 900, rng.integers(2, 12))
            if kind == "pairs":
                add_document(writer, tokens, source=rng.integers(1, 900, rng.integers(2, 12)))
            elif kind == "records":
                add_document(writer, tokens, loss=np.arange(len(tokens)) % 2)
            else:
                add_document(writer, tokens)
        shards.append(writer.close())
    index = DataIndex("0" * 64, 1000, "uint16", EOS, {"train": build_split(shards, 0)}, kind)
    write_index(folder, index)
    return index


@pytest.mark.parametrize(
    ("kind", "column"), [("text", 0), ("pairs", 0), ("pairs", 6), ("records", 0), ("records", 6), ("text", 2)]
)
def test_packed_rows_of_a_damaged_shard_have_no_targets_on_either_side(tmp_path, kind, column):
    """Columns of the table: 0 tokens, 2 documents, 6 the source of pairs or what is learned of records."""
    index = make_kind(tmp_path, kind)
    options = {**ORDER, "source_len": SEQ_LEN if kind == "pairs" else None}
    whole_stream = BinStream(ShardSet(tmp_path, index, "train"), **options)
    whole = whole_stream.read(range(whole_stream.order.num_tokens))
    damage_member(tmp_path, index, shard=1, member=1, column=column)
    policy = DamagePolicy("skip", 1000)
    stream = BinStream(ShardSet(tmp_path, index, "train"), **options, damage=policy)
    found = stream.read(range(stream.order.num_tokens))
    skipped = compare(whole, found, policy.num_skipped_rows)
    for side in (found.source, found) if kind == "pairs" else (found,):
        assert (side.num_tokens_B[skipped] == 0).all() and (side.tokens_BT[skipped] == EOS).all()
    # Rows of other shards are whole.
    assert len(skipped) <= stream._counts[1]


def test_bins_that_are_still_to_be_made_of_damaged_lengths_are_an_error_at_start(tmp_path):
    index = make_kind(tmp_path, "text")
    path = tmp_path / index.split("train").shards[1].lengths.name
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(
        DataError, match=r"part-00001-0000\.lengths\.npy: its CRC32 or its shape differs from the index"
    ):
        BinStream(ShardSet(tmp_path, index, "train"), **ORDER, damage=DamagePolicy("skip", 1000))


def test_a_mixture_skips_rows_of_one_source_only(tmp_path):
    indexes = [make_shards(tmp_path / name, train=(700, 300)) for name in "ab"]
    order = MixtureOrder([(0, [1, 1])])

    def mixed(policy=None):
        streams = [
            TokenStream(tmp_path / name, index, "train", **ORDER, damage=policy)
            for name, index in zip("ab", indexes, strict=True)
        ]
        return MixtureStream(streams, order).read(range(80))

    whole = mixed()
    damage_member(tmp_path / "b", indexes[1], shard=0, member=3)
    policy = DamagePolicy("skip", 100)
    skipped = compare(whole, mixed(policy), policy.num_skipped_rows)
    picked, _ = order.pick(range(80))
    assert set(picked[skipped].tolist()) == {1}


class Fetching(LocalStore):
    """A store that says that it fetches, and counts how often it is asked for each shard."""

    fetches = True

    def __init__(self, folder):
        super().__init__(folder)
        self.asked = []

    def path(self, name):
        self.asked.append(name)
        return super().path(name)


def test_a_shard_that_cannot_be_fetched_is_waited_for_once(folder):
    path, index = folder
    missing = index.split("train").shards[2].name
    (path / missing).unlink()
    store, policy = Fetching(path), DamagePolicy("skip", 100)
    TokenStream(store, index, "train", **ORDER, damage=policy).read(range(90))
    assert policy.num_skipped_rows > 5
    assert store.asked.count(missing) == 1


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"on_error": "skip"}, "on_error=skip and max_skipped_rows=0 contradict each other"),
        ({"max_skipped_rows": 5}, "on_error=stop and max_skipped_rows=5 contradict each other"),
    ],
)
def test_a_limit_goes_with_skipping_and_not_without(values, words):
    with pytest.raises(ValueError, match=words):
        DataConfig(path="data", **values)
    assert DataConfig(path="data", on_error="skip", max_skipped_rows=5).max_skipped_rows == 5
