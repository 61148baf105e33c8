"""A mixture of streams: the rows of each source, in its own order, at the positions that its weight gives it."""

import numpy as np
import pytest

from pretrain.data.bin_stream import BinStream
from pretrain.data.mixture import MixtureOrder, MixtureStream, source_of
from pretrain.data.stream import TokenStream
from pretrain.shards.reader import ShardSet
from tests.helpers.shards import make_shards

SEQ_LEN = 16


@pytest.fixture(params=["concat", "bins"])
def sources(request, tmp_path):
    found = []
    for number, size in enumerate((600, 900, 400)):
        folder = tmp_path / f"source-{number}"
        index = make_shards(folder, train=(size,), vocab_size=100 + number)
        if request.param == "concat":
            found.append(TokenStream(folder, index, "train", seq_len=SEQ_LEN, seed=number, lanes=2, block_samples=4))
        else:
            found.append(BinStream(ShardSet(folder, index, "train"), seq_len=SEQ_LEN, seed=number))
    return found


def test_every_source_is_read_in_its_own_order(sources):
    order = MixtureOrder([(0, [0.5, 0.3, 0.2]), (70, [0, 1, 1])])
    rows = MixtureStream(sources, order).read(range(200))
    picked, _ = order.pick(range(200))
    assert np.array_equal(source_of(rows.sample_ids_B), picked)
    width = SEQ_LEN + 1
    for number, source in enumerate(sources):
        mine = np.nonzero(picked == number)[0]
        alone = source.read(range(len(mine)))
        assert np.array_equal(rows.tokens_BT[mine], alone.tokens_BT)
        for place, row in enumerate(mine.tolist()):
            found = rows.starts[(rows.starts >= row * width) & (rows.starts < (row + 1) * width)] - row * width
            expected = (
                alone.starts[(alone.starts >= place * width) & (alone.starts < (place + 1) * width)] - place * width
            )
            assert np.array_equal(found, expected)


def test_any_cut_of_the_positions_gives_the_same_rows(sources):
    mixture = MixtureStream(sources, MixtureOrder([(0, [3, 1, 1]), (50, [1, 1, 1])]))
    whole = mixture.read(range(120))
    for first, last in ((0, 1), (47, 53), (1, 120), (119, 120)):
        part = mixture.read(range(first, last))
        assert np.array_equal(part.tokens_BT, whole.tokens_BT[first:last])
        assert np.array_equal(part.sample_ids_B, whole.sample_ids_B[first:last])
        if whole.num_tokens_B is not None:
            assert np.array_equal(part.num_tokens_B, whole.num_tokens_B[first:last])
