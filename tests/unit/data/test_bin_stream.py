"""Packed streams: every document once an epoch, whole, beside others that it does not see."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain.data.bin_stream import BinStream
from pretrain.data.bins import BinStore
from pretrain.errors import DataError
from pretrain.objective.causal import causal_rows
from pretrain.shards.index import DataIndex, build_split, write_index
from pretrain.shards.reader import ShardReader, ShardSet
from pretrain.shards.writer import ShardWriter
from pretrain.types import IGNORE_INDEX
from tests.helpers.shards import EOS, add_document, make_shards

SEQ_LEN = 24


def stream_of(folder, index, **options):
    return BinStream(ShardSet(folder, index, "train"), seq_len=SEQ_LEN, block_samples=5, lanes=3, **options)


def documents_of(rows, width):
    """The documents of some rows, padding left out."""
    found = []
    for row, tokens in enumerate(rows.tokens_BT):
        columns = [start - row * width for start in rows.starts.tolist() if row * width <= start < (row + 1) * width]
        filled = int(rows.num_tokens_B[row])
        bounds = [*[column for column in columns if column < filled], min(filled, width - 1)]
        found += [tokens[a:b].tolist() for a, b in pairwise(bounds)]
    return found


def make_pairs(folder, sizes, kind="pairs"):
    (folder / "train").mkdir(parents=True)
    writer, rng = ShardWriter(folder / "train" / "part-00000-0000.tar", "uint16", 40, kind), np.random.default_rng(0)
    documents = [(rng.integers(1, 900, s), rng.integers(1, 900, t)) for s, t in sizes]
    for source, target in documents:
        if kind == "pairs":
            add_document(writer, target, source=source)
        else:
            add_document(writer, target, loss=np.arange(len(target)) % 2)
    index = DataIndex("0" * 64, 1000, "uint16", EOS, {"train": build_split([writer.close()], 0)}, kind)
    write_index(folder, index)
    return index, documents


@given(seed=st.integers(0, 50), longest=st.integers(3, 70))
@settings(max_examples=20)
def test_an_epoch_holds_every_document_once_and_whole_unless_it_is_longer_than_a_row(tmp_path_factory, seed, longest):
    folder = tmp_path_factory.mktemp("shards")
    index = make_shards(folder, train=(700, 300), longest=longest)
    stream = stream_of(folder, index, seed=seed)
    rows = stream.read(range(stream.order.num_tokens))
    written = [d.tolist() for d in make_documents_of(folder, index)]
    pieces = [d[first : first + SEQ_LEN] for d in written for first in range(0, len(d), SEQ_LEN)]
    assert sorted(documents_of(rows, SEQ_LEN + 1)) == sorted(pieces)


def make_documents_of(folder, index):
    for shard in index.splits["train"].shards:
        reader = ShardReader(folder, shard, index.dtype)
        for member in range(shard.num_members):
            tokens, docs = reader.member(member)
            yield from np.split(tokens, docs[1:].tolist())


def test_targets_stay_inside_documents_and_padding_is_a_document_without_loss(tmp_path):
    index = make_shards(tmp_path, train=(700,), longest=40)
    rows = stream_of(tmp_path, index).read(range(20))
    packed = causal_rows(rows, document_mask=True)
    for row in range(20):
        filled = int(rows.num_tokens_B[row])
        for place in range(SEQ_LEN):
            target = packed.targets_BT[row, place]
            if target == IGNORE_INDEX:
                ends = (
                    place + 1 >= filled
                    or packed.documents_BT[row, min(place + 1, SEQ_LEN - 1)] != packed.documents_BT[row, place]
                )
                assert ends or place == SEQ_LEN - 1
            else:
                assert target == rows.tokens_BT[row, place + 1] and place + 1 < filled
        if filled < SEQ_LEN:
            numbers = packed.documents_BT[row]
            assert numbers[filled] == numbers[filled - 1] + 1 and (numbers[filled:] == numbers[filled]).all()
    # A document that goes on after its row gives the row's last token a target.
    going_on = rows.num_tokens_B == SEQ_LEN + 1
    assert going_on.any() and (packed.targets_BT[going_on] != IGNORE_INDEX).all()


def test_any_positions_are_read_alike_whatever_came_before(tmp_path):
    index = make_shards(tmp_path, train=(700, 300, 500))
    whole = stream_of(tmp_path, index, seed=3).read(range(150))
    again = stream_of(tmp_path, index, seed=3)
    for first in (100, 7, 149, 0):
        part = again.read(range(first, min(first + 9, 150)))
        assert np.array_equal(part.tokens_BT, whole.tokens_BT[first : first + 9])
        assert np.array_equal(part.sample_ids_B, whole.sample_ids_B[first : first + 9])
    epoch = again.order.num_tokens
    assert epoch < 150, "two epochs are in these positions"
    assert not np.array_equal(whole.tokens_BT[:epoch][: 150 - epoch], whole.tokens_BT[epoch:])


def test_bins_are_kept_and_made_again_where_they_do_not_fit(tmp_path):
    index = make_shards(tmp_path, train=(700,))
    first = stream_of(tmp_path, index).read(range(20))
    (file,) = (tmp_path / "bins").iterdir()
    content = file.read_bytes()
    for damaged in (b"", content[:40], b"x" * len(content)):
        file.write_bytes(damaged)
        assert np.array_equal(stream_of(tmp_path, index).read(range(20)).tokens_BT, first.tokens_BT)
        assert file.read_bytes() == content


def test_pairs_lie_side_by_side_under_the_same_numbers(tmp_path):
    rng = np.random.default_rng(1)
    sizes = [(int(s), int(t)) for s, t in rng.integers(1, 20, (60, 2))] + [(200, 3), (3, 200)]
    index, documents = make_pairs(tmp_path, sizes)
    stream = stream_of(tmp_path, index, source_len=30)
    assert stream.num_too_long == 2
    rows = stream.read(range(stream.order.num_tokens))
    found = list(zip(documents_of(rows.source, 31), documents_of(rows, SEQ_LEN + 1), strict=True))
    written = [(source.tolist(), target.tolist()) for source, target in documents[:-2]]
    assert sorted(found) == sorted(written)


def test_only_what_is_learned_of_records_has_a_target(tmp_path):
    index, _ = make_pairs(tmp_path, [(1, t) for t in range(2, 20)], kind="records")
    rows = stream_of(tmp_path, index).read(range(10))
    packed = causal_rows(rows, document_mask=True)
    for row in range(10):
        kept = packed.targets_BT[row] != IGNORE_INDEX
        places = packed.positions_BT[row][kept] + 1
        assert (places % 2 == 1).all(), "tokens of odd places are learned"
    assert packed.num_targets() == int((packed.targets_BT != IGNORE_INDEX).sum()) > 0


def test_pairs_that_all_exceed_a_row_are_refused(tmp_path):
    index, _ = make_pairs(tmp_path, [(99, 99)])
    with pytest.raises(DataError, match=r"no document fits a row; raise batch\.seq_len"):
        stream_of(tmp_path, index, source_len=30)


def test_bins_are_counted_by_shard_in_whatever_order_they_are_made(tmp_path):
    index = make_shards(tmp_path, train=(700, 300, 500, 900, 100, 400), longest=160)
    shards = ShardSet(tmp_path, index, "train")
    store = BinStore(shards, 64)
    counts, num_documents, num_cut = store.survey()
    assert counts.tolist() == [len(store.load(number)) for number in range(6)]
    assert num_documents == index.split("train").num_documents
    assert num_cut == sum(int((shards.lengths(number, "tokens") > 64).sum()) for number in range(6)) > 0
