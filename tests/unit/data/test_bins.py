"""Best-fit packing: every token once, nothing cut that fits, rows nearly full."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain.data.bins import pack_documents, pack_pairs

LENGTHS = st.lists(st.integers(1, 90), min_size=1, max_size=60)


def pieces_of(bins):
    return list(zip(bins.document.tolist(), bins.offset.tolist(), bins.length.tolist(), strict=True))


@given(LENGTHS, st.integers(1, 64))
@settings(max_examples=200)
def test_every_token_is_in_one_bin_and_only_what_cannot_fit_is_cut(lengths, capacity):
    bins = pack_documents(np.array(lengths), capacity)
    covered = [np.zeros(length, dtype=int) for length in lengths]
    for document, offset, length in pieces_of(bins):
        covered[document][offset : offset + length] += 1
        assert length == min(lengths[document] - offset, capacity)
    assert all((counts == 1).all() for counts in covered)
    assert (np.add.reduceat(bins.length, bins.starts[:-1]) <= capacity).all()
    assert (np.diff(bins.starts) > 0).all()
    documents_in_bins = np.split(bins.document, bins.starts[1:-1])
    assert all((np.diff(documents) > 0).all() for documents in documents_in_bins)


@given(LENGTHS, st.integers(8, 64))
@settings(max_examples=100)
def test_a_bin_is_opened_only_for_what_no_earlier_one_has_room_for(lengths, capacity):
    bins = pack_documents(np.array(lengths), capacity)
    room = capacity - np.add.reduceat(bins.length, bins.starts[:-1])
    largest = np.maximum.reduceat(bins.length, bins.starts[:-1])  # the longest come first: it opened the bin
    for number in range(1, len(bins)):
        assert (room[:number] < largest[number]).all()


def test_documents_of_a_real_shape_fill_their_rows():
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(5.5, 1.1, 20_000).astype(int), 1, None)
    bins = pack_documents(lengths, 1024)
    assert lengths.sum() / (len(bins) * 1024) > 0.999


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=60), st.integers(8, 32))
@settings(max_examples=150)
def test_both_sides_of_a_bin_of_pairs_fit(sizes, capacity):
    sources, targets = np.array(sizes).T
    bins = pack_pairs(sources, targets, capacity + 3, capacity)
    fitting = [n for n, (s, t) in enumerate(sizes) if s <= capacity + 3 and t <= capacity]
    assert sorted(bins.document.tolist()) == fitting
    assert bins.length.tolist() == targets[bins.document].tolist()
    for number in range(len(bins)):
        inside = bins.document[bins.starts[number] : bins.starts[number + 1]]
        assert sources[inside].sum() <= capacity + 3 and targets[inside].sum() <= capacity


def test_short_pairs_fill_their_rows():
    rng = np.random.default_rng(0)
    sources = rng.integers(5, 40, 5000)
    targets = np.clip(sources + rng.integers(-4, 5, 5000), 2, None)
    bins = pack_pairs(sources, targets, 256, 256)
    assert (sources.sum() + targets.sum()) / (len(bins) * 512) > 0.95


def test_nothing_gives_no_bins():
    assert len(pack_documents(np.array([], dtype=np.int64), 8)) == 0
    assert len(pack_pairs(np.array([50]), np.array([1]), 8, 8)) == 0
