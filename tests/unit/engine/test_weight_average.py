"""The moving average of the weights on every layout, against one of whole tensors that the test keeps itself."""

import pytest
import torch

from pretrain.engine.weight_average import AveragedState
from pretrain.types import EMA
from tests.helpers.thread_ranks import Ranks
from tests.unit.engine.test_zero_state import CASES
from tests.unit.engine.toy import assemble, fakes, load, train, working

DECAYS = [0.1, 0.6, 0.9]


def averaged(size, stage, precision, **options):
    ranks = Ranks(size)
    built = fakes(ranks, stage, precision, **options)
    stores = ranks.run(lambda world: AveragedState(built[world.rank][1]))
    return ranks, built, stores


def trained(size, stage, precision):
    """Ranks that have taken steps, and the average of their weights by its definition."""
    ranks, built, stores = averaged(size, stage, precision)
    expected = {name: value.clone() for (name, kind), value in assemble(stores).items() if kind == "weight"}
    for step, decay in enumerate(DECAYS):
        ranks.run(lambda world, step=step: train(built[world.rank][0], range(step, step + 1)))
        for store in stores:
            store.follow(decay)
        saved = assemble(stores)
        for name, average in expected.items():
            expected[name] = decay * average + (1 - decay) * saved[name, "weight"]
    return ranks, built, stores, expected


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(("stage", "precision"), CASES)
def test_it_is_saved_whole_once_and_continues_in_another_layout(size, stage, precision):
    _, _, stores, expected = trained(size, stage, precision)
    saved = assemble(stores)
    for name, average in expected.items():
        torch.testing.assert_close(saved[name, EMA], average)
        assert not torch.equal(saved[name, EMA], saved[name, "weight"])
    others, _, elsewhere = averaged(4 - size, (stage + 1) % 4, "fp32")
    load(elsewhere, others, saved, len(DECAYS))
    assert all(torch.equal(value, saved[key]) for key, value in assemble(elsewhere).items())


@pytest.mark.parametrize(("stage", "precision"), CASES)
def test_an_evaluation_reads_the_average_and_training_goes_on_as_without_it(stage, precision):
    ranks, built, stores, _ = trained(2, stage, precision)
    before = assemble(stores)
    pairs = [(engine.module, names) for engine, _, names in built]
    read = working(pairs, ranks)
    contexts = [store.exchanged(len(DECAYS)) for store in stores]
    ranks.run(lambda world: contexts[world.rank].__enter__())
    for weights in working(pairs, ranks):
        for name, weight in weights.items():
            assert torch.equal(weight, before[name, EMA].to(weight.dtype)), name
    ranks.run(lambda world: contexts[world.rank].__exit__(None, None, None))
    assert all(torch.equal(value, before[key]) for key, value in assemble(stores).items())
    for weights, again in zip(read, working(pairs, ranks), strict=True):
        assert all(torch.equal(weights[name], again[name]) for name in weights)


def test_frozen_parameters_have_none():
    _, _, stores = averaged(1, 2, "fp32", frozen=("wide",))
    saved = assemble(stores)
    assert ("square", EMA) in saved
    assert ("wide", EMA) not in saved
