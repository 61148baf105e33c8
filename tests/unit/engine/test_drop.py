"""A step that is thrown away, by the way out that each of DeepSpeed's optimizers has."""

import math

import pytest
import torch

from pretrain.engine.deepspeed_engine import dropping, read_loss_scale
from tests.helpers.fake_zero import FakeOverflowChecker, FakeZero3, FakeZero12
from tests.helpers.thread_ranks import Ranks
from tests.unit.engine.toy import assemble, engine_config, fakes, over_fakes, train

CASES = [(0, "bf16"), *((stage, precision) for stage in (1, 2, 3) for precision in ("fp32", "bf16", "fp16"))]


def accumulate(engine):
    loss, _ = engine(torch.tensor(0.2))
    engine.backward(loss, scale_wrt_gas=False)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(("stage", "precision"), CASES)
def test_nothing_changes_and_the_next_step_is_as_if_it_had_not_been(stage, precision, size):
    results = []
    for drops in (False, True):
        ranks = Ranks(size)
        built = fakes(ranks, stage, precision)

        def dropped(world, built=built):
            engine = built[world.rank][0]
            accumulate(engine)
            with dropping(engine.optimizer):
                engine.step()
            assert not engine.was_step_applied()
            assert engine.optimizer._global_grad_norm == math.inf

        ranks.run(lambda world, built=built: train(built[world.rank][0], range(2)))
        stores = [store for _, store, _ in built]
        before = assemble(stores)
        scales = [read_loss_scale(engine.optimizer) for engine, _, _ in built]
        if drops:
            ranks.run(dropped)
            after = assemble(stores)
            assert all(torch.equal(before[key], after[key]) for key in before)
            assert [read_loss_scale(engine.optimizer) for engine, _, _ in built] == scales
        ranks.run(lambda world, built=built: train(built[world.rank][0], range(2, 3)))
        assert all(engine.was_step_applied() for engine, _, _ in built)
        results.append(assemble(stores))
    assert all(torch.equal(results[0][key], results[1][key]) for key in results[0])


@pytest.mark.parametrize(("stage", "precision"), CASES)
def test_the_optimizer_is_itself_again_also_after_an_error(stage, precision):
    ((engine, _, _),) = fakes(Ranks(1), stage, precision)
    owner = getattr(engine.optimizer, "overflow_checker", engine.optimizer)
    scale, attributes = read_loss_scale(engine.optimizer), set(vars(owner))
    with pytest.raises(KeyError), dropping(engine.optimizer):
        assert set(vars(owner)) > attributes
        for name in scale:
            setattr(engine.optimizer.loss_scaler, name.removeprefix("loss_scale."), 3)
        raise KeyError
    assert set(vars(owner)) == attributes
    assert read_loss_scale(engine.optimizer) == scale


def test_a_drop_takes_what_any_arguments_and_keywords_ask():
    ((engine, _, _),) = fakes(Ranks(1), 2, "fp32")
    with dropping(engine.optimizer):
        assert engine.optimizer.scaled_global_norm(norm_type=2) == math.inf


@pytest.mark.parametrize(("stage", "precision"), CASES)
def test_gradients_are_read_for_their_norm_alone_also_after_a_drop(monkeypatch, stage, precision):
    def read(*_, **__):
        raise AssertionError("every gradient is read once more")

    for kind in (FakeOverflowChecker, FakeZero12, FakeZero3):
        monkeypatch.setattr(kind, "has_overflow", read)
    (engine,) = over_fakes(monkeypatch, Ranks(1), engine_config(stage, precision))
    found = []
    for value, drop in ((0.1, False), (math.inf, False), (0.1, True), (math.nan, False), (0.1, False)):
        engine.forward_backward(torch.tensor(value), 1.0, True)
        found.append(engine.update(0.1, drop).skipped)
    assert found == [False, True, True, True, False]
