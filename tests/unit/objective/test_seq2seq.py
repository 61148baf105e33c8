"""Pairs: a decoder that is given its targets, shifted behind a start, and the source of each under the same number."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain.config.objective import ObjectiveConfig
from pretrain.data.bin_stream import BinStream
from pretrain.data.loader import build_batch
from pretrain.errors import ConfigError
from pretrain.objective import RowMaker, build_loss, build_rows
from pretrain.rows import IGNORE_INDEX, crop_rows
from pretrain.shards.reader import ShardSet
from pretrain.types import Batch, ModelRows, StackRows
from tests.helpers.shards import EOS
from tests.unit.data.test_bin_stream import make_pairs
from tests.unit.model.tiny import build, random_pairs, two_stacks_config
from tests.unit.objective.texts import context_of

START, TARGET_LEN, SOURCE_LEN = 0, 24, 32


def row_maker(**objective: object) -> RowMaker:
    config, context = context_of(TARGET_LEN, kind="seq2seq", document_mask=True, **objective)
    return build_rows(config, context)


def stream_of(folder, index, packing: str, seed: int = 0) -> BinStream:
    bucket_rows = 8 if packing == "padded" else None
    return BinStream(
        ShardSet(folder, index, "train"),
        seq_len=TARGET_LEN,
        source_len=SOURCE_LEN,
        seed=seed,
        block_samples=5,
        lanes=2,
        bucket_rows=bucket_rows,
    )


def pairs_of(made: ModelRows) -> list[tuple[list[int], list[int]]]:
    """Source and targets of each document that has targets, after checking what the decoder reads."""
    found = []
    num_rows = len(made.tokens_BT)
    documents = np.zeros(made.tokens_BT.shape, int) if made.documents_BT is None else made.documents_BT
    source_documents = made.source.documents_BT
    if source_documents is None:
        source_documents = np.zeros(made.source.tokens_BT.shape, int)
    for row in range(num_rows):
        for number in np.unique(documents[row]).tolist():
            inside = documents[row] == number
            targets = made.targets_BT[row][inside]
            if (targets == IGNORE_INDEX).any():
                assert (targets == IGNORE_INDEX).all(), "padding is a document of its own"
                continue
            assert made.tokens_BT[row][inside].tolist() == [START, *targets[:-1].tolist()]
            if made.positions_BT is not None:
                assert made.positions_BT[row][inside].tolist() == list(range(len(targets)))
            of_source = source_documents[row] == number
            if made.source.positions_BT is not None:
                assert made.source.positions_BT[row][of_source].tolist() == list(range(of_source.sum()))
            found.append((made.source.tokens_BT[row][of_source].tolist(), targets.tolist()))
    return found


@pytest.mark.parametrize("packing", ["bins", "padded"])
@given(sizes=st.lists(st.tuples(st.integers(1, SOURCE_LEN), st.integers(1, TARGET_LEN)), min_size=1, max_size=40))
@settings(max_examples=15)
def test_every_pair_is_learned_once_and_whole(tmp_path_factory, packing, sizes):
    folder = tmp_path_factory.mktemp("pairs")
    index, documents = make_pairs(folder, sizes)
    stream = stream_of(folder, index, packing)
    made = row_maker()(crop_rows(stream.read_windows(range(stream.num_windows()))))
    assert sorted(pairs_of(made)) == sorted((source.tolist(), target.tolist()) for source, target in documents)
    assert made.num_targets() == sum(target for _, target in sizes) == (made.targets_BT != IGNORE_INDEX).sum()
    real = sum(source + target for source, target in sizes)
    assert made.num_tokens() == real


def test_padded_rows_are_one_pair_each_and_end_with_the_longest(tmp_path):
    sizes = [(3, 4), (5, 2), (4, 4), (3, 3), (2, 5), (4, 3), (3, 5), (5, 4)]
    index, _ = make_pairs(tmp_path, sizes)
    stream = stream_of(tmp_path, index, "padded")
    rows = crop_rows(stream.read_windows(range(8)))
    assert rows.source is not None
    made = row_maker()(rows)
    assert made.tokens_BT.shape == (8, 8) and made.source.tokens_BT.shape == (8, 8)
    assert len(pairs_of(made)) == 8
    assert (made.targets_BT == IGNORE_INDEX).sum() == 8 * 8 - sum(target for _, target in sizes)


def test_a_row_that_was_skipped_learns_nothing(tmp_path):
    index, _ = make_pairs(tmp_path, [(3, 4), (5, 2)])
    rows = stream_of(tmp_path, index, "padded").read(range(2))
    width = rows.tokens_BT.shape[1]
    skipped = replace(
        rows,
        tokens_BT=np.where([[True], [False]], EOS, rows.tokens_BT),
        starts=np.append(0, rows.starts[rows.starts >= width]),
        num_tokens_B=np.array([0, rows.num_tokens_B[1]]),
    )
    made = row_maker()(skipped)
    assert (made.targets_BT[0] == IGNORE_INDEX).all()
    assert made.num_targets() == rows.num_tokens_B[1] > 0


def test_smoothing_is_minimised_and_not_shown():
    model = build(two_stacks_config(), dtype=torch.float64)
    batch, _ = random_pairs([9, 3, 14], [10, 4, 7])
    losses = {value: build_loss(ObjectiveConfig(kind="seq2seq", label_smoothing=value)) for value in (0.0, 0.1)}
    plain, smooth = (losses[value](model, batch) for value in (0.0, 0.1))
    assert plain.loss_sum.item() == pytest.approx(plain.nll_sum.item(), rel=1e-12)
    assert smooth.nll_sum.item() == plain.nll_sum.item()
    assert smooth.num_correct == plain.num_correct
    logits = model(batch).logits_BTV[..., : model.vocab_size].flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(
        logits, batch.targets_BT.flatten(), label_smoothing=0.1, reduction="sum", ignore_index=IGNORE_INDEX
    )
    torch.testing.assert_close(smooth.loss_sum, expected, rtol=1e-10, atol=0)


@pytest.mark.parametrize("packing", ["bins", "padded"])
def test_the_loss_of_rows_is_that_of_their_pairs_alone(tmp_path, packing):
    rng = np.random.default_rng(4)
    index, _ = make_pairs(tmp_path, [(int(s), int(t)) for s, t in rng.integers(1, 12, (12, 2))])
    stream = stream_of(tmp_path, index, packing)
    made = row_maker()(crop_rows(stream.read_windows(range(stream.num_windows()))))
    config = two_stacks_config().model_copy(update={"vocab_size": 1000})
    model, loss = build(config, dtype=torch.float64, scale=3.0), build_loss(ObjectiveConfig(kind="seq2seq"))
    total = sum(loss(model, build_batch(_alone(source, target))).loss_sum for source, target in pairs_of(made))
    torch.testing.assert_close(loss(model, build_batch(made)).loss_sum, total, rtol=1e-10, atol=0)


def _alone(source: list[int], target: list[int]) -> ModelRows:
    inputs = np.array([[START, *target[:-1]]])
    return Batch(inputs, np.array([target]), sample_ids_B=np.zeros(1, int), source=StackRows(np.array([source])))


def test_a_tokenizer_without_a_start_is_refused():
    config, context = context_of(TARGET_LEN, kind="seq2seq")
    with pytest.raises(ConfigError, match=r"^the tokenizer has no token that a decoder reads first; prepare with"):
        build_rows(config, replace(context, vocabulary=replace(context.vocabulary, start=None)))
