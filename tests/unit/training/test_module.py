"""What a training module tells by source of a mixture."""

import numpy as np
import pytest
import torch

from pretrain.config.engine import PLAIN_ENGINE
from pretrain.config.model import parse_model
from pretrain.config.objective import ObjectiveConfig
from pretrain.config.presets import expand_preset
from pretrain.data.mixture import SOURCE_BITS
from pretrain.model import build_model, init_weights
from pretrain.objective import LossOutput, build_loss
from pretrain.objective.loss_sums import LOSS_SUMS
from pretrain.training.step import TrainModule, sum_by_source
from pretrain.types import IGNORE_INDEX, Batch

MODEL = {"preset": "llama-tiny", "vocab_size": 64, "max_seq_len": 8, "decoder": {"width": 32, "ff_width": 48}}


@pytest.fixture
def batch() -> Batch:
    """Four rows, of the sources 2, 0, 2 and 1; one has no targets, the others have some."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(64, (4, 9), generator=generator)
    targets = tokens[:, 1:].clone()
    for row, kept in enumerate((8, 3, 5, 0)):
        targets[row, kept:] = IGNORE_INDEX
    return Batch(tokens[:, :-1].contiguous(), targets, sample_ids_B=torch.tensor([2, 0, 2, 1]) << (63 - SOURCE_BITS))


def loss_of(nll_P: torch.Tensor | None) -> LossOutput:
    """A loss of which nothing else is read."""
    return LossOutput(torch.zeros(()), torch.zeros(()), torch.zeros(()), nll_P)


def test_the_sums_of_each_source_are_those_of_its_rows(batch):
    nll_BT = torch.arange(32.0).view(4, 8) * (batch.targets_BT != IGNORE_INDEX)
    expected = [[nll_BT[1].sum(), 0, nll_BT[0].sum() + nll_BT[2].sum()], [3, 0, 13]]
    assert sum_by_source(batch, loss_of(nll_BT.flatten()), 3).tolist() == expected
    (places,) = np.nonzero(batch.targets_BT.flatten().numpy() != IGNORE_INDEX)
    few = Batch(
        batch.tokens_BT, batch.targets_BT, target_positions_P=torch.from_numpy(places), sample_ids_B=batch.sample_ids_B
    )
    assert sum_by_source(few, loss_of(nll_BT.flatten()[places]), 3).tolist() == expected


def test_a_loss_that_tells_no_tokens_has_no_sources(batch):
    assert sum_by_source(batch, loss_of(None), 3).tolist() == [[0.0] * 3] * 2


def test_sources_are_told_in_training_and_add_up_to_the_loss(batch):
    config = parse_model(expand_preset(MODEL))
    model = build_model(config, PLAIN_ENGINE, torch.device("cpu"))
    init_weights(model, config, seed=0)
    module = TrainModule(model, build_loss(ObjectiveConfig()), num_sources=3)
    _, shown = module(batch)
    assert module.layout.sizes == {"nll": 1, "correct": 1, "by_source": 6}
    sums = module.layout.unpack(shown.tolist())
    assert sum(sums["by_source"][:3]) == pytest.approx(sums["nll"][0], rel=1e-6)  # the one is summed in fp32
    assert sums["by_source"][3:] == (3.0, 0.0, 13.0)
    assert len(module.eval()(batch)[1]) == len(LOSS_SUMS) == 2
    assert TrainModule(model, build_loss(ObjectiveConfig())).layout == LOSS_SUMS


def test_an_evaluation_has_all_sums_that_a_loss_shows(batch):
    """As many as it has: without a reference, the log-probabilities of the answers of a batch."""
    shown = torch.arange(4.0, dtype=torch.float64)
    loss = LossOutput(torch.zeros(()), torch.full((), 5.0), torch.full((), 2), shown_M=shown)
    config = parse_model(expand_preset(MODEL))
    model = build_model(config, PLAIN_ENGINE, torch.device("cpu"))
    module = TrainModule(model, lambda model, batch: loss, shown=("margin", "chosen", "rejected"))
    assert module.eval()(batch)[1].tolist() == [5.0, 2.0, 0.0, 1.0, 2.0, 3.0]
    assert module.train()(batch)[1].tolist() == [5.0, 2.0, 0.0, 1.0, 2.0]
