"""What a stream reads and an objective makes of it reaches the model whole: every array, as a tensor."""

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial

import numpy as np
import pytest
import torch

from pretrain.config.data import BatchConfig, plan_batch
from pretrain.config.lengths import RowLengths
from pretrain.data.loader import StepBatch, StepCounts, TrainLoader, build_batch, cut_columns
from pretrain.kinds.objectives.masked import MaskedConfig
from pretrain.objective.causal import prefix_rows
from pretrain.objective.masked import masked_rows
from pretrain.objective.mixed import merge
from pretrain.objective.seq2seq import pair_rows
from pretrain.rows import TokenRows, axes_of, crop_rows, merge_rows, select_rows
from pretrain.types import Batch, Columns, ModelRows
from tests.unit.objective.test_masked import VOCABULARY, random_rows

SEQ_LEN = 24


class Texts:
    """A stream whose rows are a function of their position; some are padded."""

    def read(self, positions: range) -> TokenRows:
        return random_rows(len(positions), SEQ_LEN, seed=positions.start, first_id=positions.start, padded=True)


class Pairs:
    """The same on both sides of a pair."""

    def read(self, positions: range) -> TokenRows:
        source = random_rows(len(positions), 10, seed=99, first_id=positions.start, padded=True)
        return replace(Texts().read(positions), source=source)


def first_step(stream, make_rows: Callable[..., ModelRows], columns: Columns | None = None) -> StepBatch:
    plan = plan_batch(BatchConfig(global_tokens=8 * SEQ_LEN, seq_len=SEQ_LEN, micro=4), 1)
    loader = TrainLoader(stream, make_rows, plan, rank=0, world_size=1, columns=columns)
    step = next(loader)
    loader.close()
    return step


MAKERS = {
    "masked": (Texts(), partial(masked_rows, config=MaskedConfig(), vocabulary=VOCABULARY, seed=1, document_mask=True)),
    "prefix": (Texts(), partial(prefix_rows, seed=1, document_mask=True)),
    "seq2seq": (Pairs(), partial(pair_rows, start_id=0)),
}


SIZES = {"T": 5, "P": 6, "2": 2, "C": 1, "Y": 2, "X": 2, "A": 3}


def filled(kind: type, num_rows: int, first: int = 0):
    """Rows of a class with every array that it may have; `number` tells the rows of an array apart."""
    sizes = {**SIZES, "B": num_rows, "P": 2 * num_rows}
    arrays = {}
    for one in fields(kind):
        axes = axes_of(one.name)
        if axes.isupper():
            number = first + np.arange(sizes[axes[0]]) // (sizes[axes[0]] // num_rows)
            arrays[one.name] = number.reshape(-1, *(1 for _ in axes[1:])) + np.zeros(
                [sizes[axis] for axis in axes], int
            )
    if kind is TokenRows:
        return TokenRows(**arrays, starts=np.arange(num_rows) * SIZES["T"] + 2)
    arrays["target_positions_P"] = (np.arange(num_rows)[:, None] * SIZES["T"] + [1, 4]).ravel()
    return Batch(**arrays)


def numbers(rows, name: str) -> list[int]:
    """The number of each row, or place, of an array."""
    array = np.asarray(getattr(rows, name))
    return array.reshape(len(array), -1)[:, 0].tolist()


def test_every_array_of_raw_rows_is_selected_merged_and_cropped():
    raw = merge_rows([filled(TokenRows, 3), filled(TokenRows, 2, first=3)], np.array([1, 4, 0, 2, 3]))
    some = select_rows(raw, np.array([True, False, False, True, True]))
    cropped = crop_rows(replace(some, num_tokens_B=np.array([1, 1, 1])))
    for one in fields(TokenRows):
        if axes_of(one.name).isupper():
            assert numbers(raw, one.name) == [2, 0, 3, 4, 1], one.name
            assert numbers(some, one.name) == [2, 4, 1], one.name
    assert raw.starts.tolist() == [2, 7, 12, 17, 22] and some.starts.tolist() == [2, 7, 12]
    assert cropped.tokens_BT.shape == (3, 5) and numbers(cropped, "pixels_BCYX") == [2, 4, 1]


def test_every_array_of_a_batch_is_merged_cut_and_moved():
    made = merge([filled(Batch, 3), filled(Batch, 2, first=3)], np.array([1, 4, 0, 2, 3]), RowLengths(5, 6), 9)
    assert made.target_positions_P.tolist() == [place for row in range(5) for place in (6 * row + 1, 6 * row + 4)]
    order = {"B": [2, 0, 3, 4, 1], "P": [row for row in [2, 0, 3, 4, 1] for _ in range(2)]}
    parts = [build_batch(made, Columns(rank, 2)).to(torch.device("meta")).on_host for rank in (0, 1)]
    names = [one.name for one in fields(Batch) if axes_of(one.name).isupper() and one.name != "target_positions_P"]
    for name in names:
        assert numbers(made, name) == order[name.rpartition("_")[2][0]], name
        for batch in parts:
            assert numbers(batch, name) == (order["B"] if "P" not in axes_of(name) else [2, 0, 3, 4, 1]), name
            moved = batch.to(torch.device("meta"))
            assert getattr(moved, name).device.type == "meta" and moved.on_host is batch
    for name in made.along("BT"):
        assert made.along("BT")[name].shape == (5, 6), name
    assert made.documents_BT[0].tolist() == [2, 2, 2, 2, 2, -1] and made.tokens_BT[0].tolist() == [2, 2, 2, 2, 2, 9]


def test_an_array_that_a_part_lacks_is_what_none_stands_for():
    short, long = filled(TokenRows, 2), filled(TokenRows, 1, first=2)
    raw = merge_rows([replace(short, num_tokens_B=None), long], np.array([0, 2, 1]))
    assert raw.num_tokens_B.tolist() == [SIZES["T"], 2, SIZES["T"]]
    with pytest.raises(AssertionError, match="all parts or none have labels_BT"):
        merge_rows([replace(short, labels_BT=None), long], np.arange(3))


def test_columns_of_a_row_have_what_belongs_to_their_targets():
    row_BT = torch.arange(8)[None]
    places_P = torch.tensor([1, 4, 6])
    batch = Batch(row_BT, row_BT, target_positions_P=places_P, draws_P=places_P / 8, mixed_P2=places_P[:, None] * 1.0)
    first, second = (cut_columns(batch, Columns(rank, 2)) for rank in range(2))
    assert (first.target_positions_P.tolist(), second.target_positions_P.tolist()) == ([1], [0, 2])
    assert (first.draws_P.tolist(), second.draws_P.tolist()) == ([0.125], [0.5, 0.75])
    assert second.mixed_P2.tolist() == [[4.0], [6.0]]


@pytest.mark.parametrize(("stream", "make_rows"), MAKERS.values(), ids=MAKERS)
def test_a_batch_holds_what_the_objective_made(stream, make_rows):
    step = first_step(stream, make_rows)
    made = [make_rows(stream.read(range(first, first + 4))) for first in (0, 4)]
    for batch, rows in zip(step.micro_batches, made, strict=True):
        for of_model, of_objective in ((batch, rows), (batch.source, rows.source)):
            assert (of_model is None) == (of_objective is None)
            if of_model is None:
                continue
            tensors, arrays = of_model.along(""), of_objective.along("")
            assert list(tensors) == list(arrays)
            for name, tensor in tensors.items():
                assert torch.equal(tensor, torch.from_numpy(np.ascontiguousarray(arrays[name]))), name
    assert step.counts.num_targets == sum(rows.num_targets() for rows in made)
    assert step.counts.num_tokens == sum(rows.num_tokens() for rows in made)
    assert 0 < step.counts.num_tokens < sum(rows.num_tokens() + rows.num_padding for rows in made)


@pytest.mark.parametrize("ranks", [2, 5])
@pytest.mark.parametrize(("stream", "make_rows"), MAKERS.values(), ids=MAKERS)
def test_ranks_that_share_rows_have_their_columns_once_and_count_them_once(stream, make_rows, ranks):
    whole = first_step(stream, make_rows)
    parts = [first_step(stream, make_rows, Columns(rank, ranks)) for rank in range(ranks)]
    assert sum((part.counts for part in parts), StepCounts()) == whole.counts
    for number, batch in enumerate(whole.micro_batches):
        shared = [part.micro_batches[number] for part in parts]
        assert sum(one.num_targets() for one in shared) == batch.num_targets()
        assert all(one.sample_ids() == batch.sample_ids() for one in shared)
        length = batch.tokens_BT.shape[1]

        def joined(name: str, shared: list[Batch] = shared, length: int = length) -> torch.Tensor:
            return torch.cat([getattr(one, name) for one in shared], dim=1)[:, :length]

        assert torch.equal(joined("tokens_BT"), batch.tokens_BT)
        assert torch.equal(joined("targets_BT"), batch.targets_BT)
        positions = torch.arange(length).expand_as(batch.tokens_BT)
        assert torch.equal(joined("positions_BT"), positions if batch.positions_BT is None else batch.positions_BT)
        for one in shared:
            # What masks are made of is whole, and padding beyond the rows is hidden.
            assert one.documents_BT is None or bool((one.documents_BT[:, length:] == -1).all())
            assert (one.documents_BT is None) == (batch.documents_BT is None)
            if one.documents_BT is not None:
                assert torch.equal(one.documents_BT[:, :length], batch.documents_BT)
            elif length % ranks:
                assert one.lengths_B is not None and one.lengths_B.tolist() == [length] * len(positions)
        if batch.target_positions_P is not None:
            found = [one.targets_BT.flatten()[one.target_positions_P] for one in shared]
            expected = batch.targets_BT.flatten()[batch.target_positions_P]
            assert sorted(torch.cat(found).tolist()) == sorted(expected.tolist())
