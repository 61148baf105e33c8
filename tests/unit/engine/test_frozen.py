"""Parameters that no optimizer steps: saved once as weights, and loaded, at every stage."""

import pytest
import torch

from pretrain.engine.replicated import CompleteState, KeptTensor
from tests.helpers.fake_deepspeed import DTYPES
from tests.helpers.thread_ranks import Ranks
from tests.unit.engine.test_zero_state import CASES
from tests.unit.engine.toy import SHAPES, assemble, fakes, load, train, working

FROZEN = ("wide", "gain")  # of three ranks the last has less of one, and only the first has the other


def complete(ranks, stage, precision, **options):
    built = fakes(ranks, stage, precision, frozen=FROZEN, **options)
    stores = [
        CompleteState(store, [KeptTensor(name, "weight", getattr(engine.module, name)) for name in FROZEN], ranks_world)
        for (engine, store, _), ranks_world in zip(built, ranks.run(lambda world: world), strict=True)
    ]
    return built, stores


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(("stage", "precision"), CASES)
def test_they_are_saved_once_without_moments_and_loaded_in_full(size, stage, precision):
    ranks = Ranks(size)
    built, stores = complete(ranks, stage, precision)
    before = working([(engine.module, names) for engine, _, names in built], ranks)[0]
    ranks.run(lambda world: train(built[world.rank][0], range(1)))
    saved = assemble(stores)
    moments = {(name, kind) for name in SHAPES if name not in FROZEN for kind in ("exp_avg", "exp_avg_sq")}
    assert saved.keys() == {(name, "weight") for name in SHAPES} | moments
    for name in FROZEN:
        assert torch.equal(saved[name, "weight"], before[name].float())
    generator = torch.Generator().manual_seed(1)
    other = {key: torch.randn(tensor.shape, generator=generator).abs() for key, tensor in saved.items()}
    load(stores, ranks, other, 1)
    for read in working([(engine.module, names) for engine, _, names in built], ranks):
        assert all(torch.equal(read[name], other[name, "weight"].to(DTYPES[precision])) for name in SHAPES)
    rounded = {name: other[name, "weight"].to(DTYPES[precision]).float() for name in FROZEN}
    again = assemble(stores)
    assert all(torch.equal(again[name, "weight"], rounded[name]) for name in FROZEN)


@pytest.mark.parametrize("size", [1, 3])
def test_small_ones_that_stage_3_keeps_whole_are_gathered_with_what_they_were_filled_with(size):
    ranks = Ranks(size)
    built, stores = complete(ranks, 3, "bf16", persistent=3)
    ranks.run(lambda world: train(built[world.rank][0], range(1)))
    saved = {key: torch.full_like(tensor, 0.75) for key, tensor in assemble(stores).items()}
    load(stores, ranks, saved, 1)
    ranks.run(torch.no_grad()(lambda world: built[world.rank][0](torch.tensor(1.0))))
    for engine, _, _ in built:
        assert engine.module.gain.data.tolist() == [0.75]


def test_a_load_that_was_given_up_leaves_them_as_they_are():
    """Only what is filled last is copied: fragments that were handed out before are of no more use."""
    ranks = Ranks(1)
    ((engine, _, _),), (store,) = complete(ranks, 2, "bf16")
    kept = engine.module.wide.data.clone()
    for fragment in store.held_fragments():
        if fragment.name == "wide":
            fragment.tensors["weight"].fill_(7.0)
    list(store.held_fragments())
    store.finish_load(0, {})
    assert torch.equal(engine.module.wide.data, kept)


@pytest.mark.parametrize(("precision", "scalars"), [("bf16", {}), ("fp16", {"loss_scale.cur_scale": 8.0})])
def test_the_rest_of_the_state_is_the_engine_s(precision, scalars):
    ((_, trained, _),), (store,) = complete(Ranks(1), 2, precision)
    store.finish_load(5, scalars)
    assert store.scalars() == trained.scalars()
    assert scalars.items() <= store.scalars().items()
