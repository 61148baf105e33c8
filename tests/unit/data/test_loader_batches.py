"""What an objective makes of rows reaches the model whole: every array of it, as a tensor."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from pretrain.config.data import BatchConfig, plan_batch
from pretrain.config.objective import MaskedConfig
from pretrain.data.loader import StepBatch, TrainLoader
from pretrain.objective.causal import prefix_rows
from pretrain.objective.masked import masked_rows
from pretrain.objective.seq2seq import pair_rows
from pretrain.rows import ModelRows, TokenRows
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


def first_step(stream, make_rows: Callable[..., ModelRows]) -> StepBatch:
    plan = plan_batch(BatchConfig(global_tokens=8 * SEQ_LEN, seq_len=SEQ_LEN, micro=4), 1)
    loader = TrainLoader(stream, make_rows, plan, rank=0, world_size=1)
    step = next(loader)
    loader.close()
    return step


MAKERS = {
    "masked": (Texts(), partial(masked_rows, config=MaskedConfig(), vocabulary=VOCABULARY, seed=1, document_mask=True)),
    "prefix": (Texts(), partial(prefix_rows, seed=1, document_mask=True)),
    "seq2seq": (Pairs(), partial(pair_rows, start_id=0)),
}


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
                (batch.source.tokens_BS, rows.source.tokens),
                (batch.source.positions_BS, rows.source.positions),
                (batch.source.documents_BS, rows.source.documents),
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
