"""What an objective makes of rows reaches the model whole: every array of it, as a tensor."""

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial

import numpy as np
import pytest
import torch

from pretrain.config.data import BatchConfig, plan_batch
from pretrain.data.loader import StepBatch, StepCounts, TrainLoader, cut_columns
from pretrain.kinds.objectives.masked import MaskedConfig
from pretrain.objective.causal import prefix_rows
from pretrain.objective.masked import masked_rows
from pretrain.objective.seq2seq import pair_rows
from pretrain.rows import ModelRows, PairRows, SourceRows, TokenRows
from pretrain.types import Batch, Columns, PairBatch, StackRows
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


def names_without(kind: type, key: str) -> list[str]:
    """Fields of a class whose metadata lack a key."""
    return [one.name for one in fields(kind) if key not in one.metadata]


def test_every_array_says_its_axes_or_the_tensor_that_it_becomes():
    assert names_without(TokenRows, "axes") == ["starts", "source"]
    assert names_without(ModelRows, "tensor") == ["num_targets", "sample_ids", "source", "pairs", "num_padding"]
    assert names_without(SourceRows, "tensor") == names_without(PairRows, "tensor") == []
    for arrays, tensors in ((ModelRows, Batch), (SourceRows, StackRows), (PairRows, PairBatch)):
        becomes = {one.metadata["tensor"] for one in fields(arrays) if "tensor" in one.metadata}
        assert becomes <= {one.name for one in fields(tensors)}


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
        pairs = [
            (batch.tokens_BT, rows.inputs),
            (batch.targets_BT, rows.targets),
            (batch.positions_BT, rows.positions),
            (batch.documents_BT, rows.documents),
            (batch.prefix_BT, rows.prefix),
            (batch.target_positions_P, rows.target_positions),
        ]
        assert (batch.source is None) == (rows.source is None)
        if batch.source is not None and rows.source is not None:
            pairs += [
                (batch.source.tokens_BT, rows.source.tokens),
                (batch.source.positions_BT, rows.source.positions),
                (batch.source.documents_BT, rows.source.documents),
            ]
        for tensor, array in pairs:
            assert (tensor is None) == (array is None)
            if tensor is not None:
                assert torch.equal(tensor, torch.from_numpy(np.ascontiguousarray(array)))
        assert batch.sample_ids == tuple(rows.sample_ids.tolist())
    assert step.counts.num_targets == sum(rows.num_targets for rows in made)
    assert step.counts.num_tokens == sum(rows.num_tokens for rows in made)
    assert (
        0
        < step.counts.num_tokens
        < sum(rows.inputs.size + (rows.source.tokens.size if rows.source else 0) for rows in made)
    )


@pytest.mark.parametrize("ranks", [2, 5])
@pytest.mark.parametrize(("stream", "make_rows"), MAKERS.values(), ids=MAKERS)
def test_ranks_that_share_rows_have_their_columns_once_and_count_them_once(stream, make_rows, ranks):
    whole = first_step(stream, make_rows)
    parts = [first_step(stream, make_rows, Columns(rank, ranks)) for rank in range(ranks)]
    assert sum((part.counts for part in parts), StepCounts()) == whole.counts
    for number, batch in enumerate(whole.micro_batches):
        shared = [part.micro_batches[number] for part in parts]
        assert sum(one.num_targets() for one in shared) == batch.num_targets()
        assert all(one.sample_ids == batch.sample_ids for one in shared)
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
