"""Our engine over DeepSpeed's: what it checks when it is built, and what its steps do."""

import itertools
import math
import sys
from types import SimpleNamespace

import pytest
import torch

from pretrain.dist import World
from pretrain.engine.deepspeed_engine import DeepSpeedZeroEngine, _check_offload
from pretrain.errors import LaunchError
from pretrain.model.block import Block
from tests.helpers.fake_deepspeed import DTYPES, FakeAccelerator, fake_deepspeed
from tests.helpers.thread_ranks import Ranks
from tests.unit.engine.toy import LR, SHAPES, Toy, adamw, assemble, engine_config, names_of, over_fakes

CASES = [
    *((0, precision) for precision in ("fp32", "bf16")),
    *((stage, precision) for stage in (1, 2, 3) for precision in ("fp32", "bf16", "fp16")),
]
NORM = math.sqrt(sum(float(p.detach().square().sum()) for p in Toy().parameters()))
# The norm is that of parameters and gradients rounded to the precision.
ROUNDING = {"fp32": 1e-6, "bf16": 2**-8, "fp16": 2**-10}
X = 0.25
"""A batch; the gradient is the parameters times its square."""


def step(built, ranks, values, drop=False, lr=LR):
    """One step of a micro-batch for each value, on every rank alike; returns each rank's update."""

    def stepped(world):
        engine = built[world.rank]
        for number, value in enumerate(values):
            engine.forward_backward(torch.tensor(value), 1.0, number == len(values) - 1)
        return engine.update(lr, drop)

    return ranks.run(stepped)


def state(built):
    return assemble([engine.state for engine in built])


def same(one, other):
    return all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize(("stage", "precision"), CASES)
def test_master_weights_are_those_of_the_model_before_the_first_step(monkeypatch, stage, precision):
    """Some of DeepSpeed's optimizers take a step of zeros when they are built."""
    built = over_fakes(monkeypatch, Ranks(2), engine_config(stage, precision))
    found = state(built)
    for name, parameter in Toy().named_parameters():
        assert torch.equal(found[name, "weight"], parameter.detach().to(DTYPES[precision]).float())


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(("stage", "precision"), CASES)
def test_a_step_tells_the_norm_of_the_gradient_and_clips_it(monkeypatch, stage, precision, size):
    ranks = Ranks(size)
    norm = 2 * X * X * NORM  # two micro-batches are summed, ranks are averaged
    for clip in (0.0, 0.01):
        built = over_fakes(monkeypatch, ranks, engine_config(stage, precision), clip)
        before = state(built)
        updates = step(built, ranks, [X, X])
        assert [update.skipped for update in updates] == [False] * size
        assert [update.grad_norm for update in updates] == pytest.approx([norm] * size, rel=ROUNDING[precision])
        after = state(built)
        moment = math.hypot(*(float(after[name, "exp_avg"].norm()) for name in SHAPES))
        assert moment == pytest.approx(0.1 * (clip or norm), rel=max(2e-4, ROUNDING[precision]))
        assert not any(torch.equal(before[key], after[key]) for key in after)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize(("stage", "precision"), CASES)
def test_a_gradient_that_is_not_finite_changes_nothing_and_leaves_nothing_behind(monkeypatch, stage, precision, bad):
    ranks = Ranks(2)
    results = []
    for poisoned in (False, True):
        built = over_fakes(monkeypatch, ranks, engine_config(stage, precision), 0.5)
        step(built, ranks, [X])
        before = state(built)
        if poisoned:
            for update in step(built, ranks, [X, bad]):
                assert update.skipped
                assert not math.isfinite(update.grad_norm)
            assert same(before, state(built))
        assert [update.skipped for update in step(built, ranks, [X])] == [False, False]
        results.append(state(built))
    assert same(*results)


@pytest.mark.parametrize(("stage", "precision"), CASES)
def test_a_step_is_dropped_on_demand_and_the_next_is_as_if_it_had_not_been(monkeypatch, stage, precision):
    ranks, results = Ranks(2), []
    for drops in (False, True):
        built = over_fakes(monkeypatch, ranks, engine_config(stage, precision), 0.5)
        step(built, ranks, [X])
        before, scalars = state(built), built[0].state.scalars()
        if drops:
            assert [update.skipped for update in step(built, ranks, [2 * X, X], drop=True)] == [True, True]
            assert same(before, state(built))
            assert built[0].state.scalars() == scalars
        assert [update.skipped for update in step(built, ranks, [X])] == [False, False]
        results.append(state(built))
    assert same(*results)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_overflow_of_fp16_lowers_the_loss_scale_down_to_its_least(monkeypatch, stage):
    ranks = Ranks(2)
    built = over_fakes(monkeypatch, ranks, engine_config(stage, "fp16"))
    scales = []
    for _ in range(20):
        (update, _) = step(built, ranks, [math.inf])
        assert update.skipped
        scales.append(built[1].state.scalars()["loss_scale.cur_scale"])
    # The first overflow uses up the hysteresis; at the least DeepSpeed would raise an error.
    assert scales == [2.0**16, *(2.0**power for power in range(15, -1, -1)), 1.0, 1.0, 1.0]
    assert not step(built, ranks, [X])[0].skipped


@pytest.mark.parametrize("ratios", [(1.0, 1.0), (0.5, 1.0), (0.25, 0.125)])
@pytest.mark.parametrize(("stage", "precision"), CASES)
def test_the_learning_rate_of_a_step_is_that_of_each_group_times_its_ratio(monkeypatch, stage, precision, ratios):
    """The first step of Adam moves every weight by its learning rate, but for what the decay takes away."""
    ranks = Ranks(1)
    built = over_fakes(monkeypatch, ranks, engine_config(stage, precision), ratios=ratios)
    before = state(built)
    step(built, ranks, [X], lr=0.02)
    after = state(built)
    for name, shape in SHAPES.items():
        rate, decay = (ratios[0] * 0.02, 0.1) if len(shape) > 1 else (ratios[1] * 0.02, 0.0)
        old = before[name, "weight"]
        expected = old * (1 - rate * decay) - rate * old.sign()
        # Adam's epsilon beside the smallest gradients.
        assert torch.allclose(after[name, "weight"], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("stage", "precision"), CASES)
def test_adam_counts_no_step_that_was_taken_when_it_was_built(monkeypatch, stage, precision):
    (engine,) = over_fakes(monkeypatch, Ranks(1), engine_config(stage, precision))
    step([engine], Ranks(1), [X])
    counts = {float(kept["step"]) for kept in engine._wrapped.basic_optimizer.state.values()}
    assert counts == {1.0}


def test_weights_are_gathered_behind_the_step_and_the_load_that_write_them(monkeypatch):
    (engine,) = over_fakes(monkeypatch, Ranks(1), engine_config(3, "bf16"))
    said, zero = [], engine._wrapped.optimizer
    stream = SimpleNamespace(wait_stream=said.append)
    monkeypatch.setattr(zero.parameter_offload, "_DeepSpeedZeRoOffload__allgather_stream", stream)
    engine._wrapped.basic_optimizer.register_step_post_hook(lambda *_: said.append("step"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "queued so far")
    step([engine], Ranks(1), [X])
    assert said == ["step", "step", "queued so far"]  # of two groups
    monkeypatch.setattr(zero, "invalidate_secondary_tensor", lambda: said.append("loaded"))
    engine.state.finish_load(1, {})
    assert said[3:] == ["loaded", "queued so far"]


def test_gradients_are_exchanged_after_the_last_micro_batch_alone(monkeypatch):
    (engine,) = over_fakes(monkeypatch, Ranks(1), engine_config(2, "fp32"))
    said, inner = [], engine._wrapped
    monkeypatch.setattr(inner, "set_gradient_accumulation_boundary", said.append)
    monkeypatch.setattr(inner, "backward", lambda loss, scale_wrt_gas: said.append((loss.item(), scale_wrt_gas)))
    loss = float(Toy()(torch.tensor(X))[0].detach())
    for is_last in (False, False, True):
        sums = engine.forward_backward(torch.tensor(X), 0.5, is_last)
        assert sums.tolist() == [X, 1.0]
    scaled = (pytest.approx(loss / 2), False)
    assert said == [False, scaled, False, scaled, True, scaled]


@pytest.mark.parametrize("stage", range(4))
def test_evaluation_and_rehearsal_set_their_modes_and_leave_no_gradient(monkeypatch, stage):
    ranks = Ranks(2)
    built = over_fakes(monkeypatch, ranks, engine_config(stage, "bf16"))

    def looked(world):
        engine = built[world.rank]
        seen = [engine.evaluate(torch.tensor(X))]
        seen.append(engine.forward_backward(torch.tensor(0.0), 1.0, False))  # a loss of zero
        seen.append(engine.evaluate(torch.tensor(X)))
        engine.rehearse(torch.tensor(X))
        seen.append(torch.tensor([engine.module.training]))
        seen.append(engine.forward_backward(torch.tensor(0.0), 1.0, True))
        return [tensor.tolist() for tensor in seen], engine.update(0.0).grad_norm

    # The toy shows the batch, and whether it was in training mode.
    assert ranks.run(looked) == [([[X, 0.0], [0.0, 1.0], [X, 0.0], [True], [0.0, 1.0]], 0.0)] * 2


@pytest.mark.parametrize(
    ("stage", "offload", "description"),
    [
        (0, "none", "DeepSpeed ZeRO-0, bf16, 3 x cpu"),
        (2, "optimizer", "DeepSpeed ZeRO-2, bf16, 3 x cpu, optimizer in host memory"),
        (3, "params", "DeepSpeed ZeRO-3, bf16, 3 x cpu, params in host memory"),
        (3, "both", "DeepSpeed ZeRO-3, bf16, 3 x cpu, optimizer and params in host memory"),
    ],
)
def test_it_says_what_runs(monkeypatch, stage, offload, description):
    in_host = {"none": (), "both": ("optimizer", "params")}.get(offload, (offload,))
    built = over_fakes(monkeypatch, Ranks(3), engine_config(stage, "bf16", offload), offload=in_host)
    assert [engine.description for engine in built] == [description] * 3
    assert [engine.is_sharded for engine in built] == [stage == 3] * 3
    assert list(dict(built[2].working_weights())) == list(SHAPES)


@pytest.mark.parametrize(("compiles", "stage"), itertools.product([False, True], range(4)))
def test_the_blocks_of_a_compiled_stage_3_are_gathered_as_one(monkeypatch, compiles, stage):
    config = engine_config(stage, "bf16").model_copy(update={"compile": compiles})
    (engine,) = over_fakes(monkeypatch, Ranks(1), config)
    told = [(engine.module, [Block])] if compiles and stage == 3 else []
    assert sys.modules["deepspeed"].fake_leaves == told


def test_what_is_built_must_be_deepspeed_s_and_of_the_stage_that_was_asked_for(monkeypatch):
    module = Toy()
    arguments = module, names_of(module), adamw(module)
    monkeypatch.setitem(sys.modules, "deepspeed", fake_deepspeed(Ranks(1)))
    bare = SimpleNamespace(device=torch.device("cpu"), prepare=lambda module, optimizer: (module, optimizer))
    with pytest.raises(LaunchError, match="DeepSpeed was asked for, accelerate built Toy; report this as a bug"):
        DeepSpeedZeroEngine(*arguments, bare, engine_config(2, "bf16"), 1.0, World(0, 1, 0))
    other = FakeAccelerator(Ranks(1), stage=1, precision="bf16")
    with pytest.raises(LaunchError, match="ZeRO stage 2 was asked for, stage 1 runs; report this as a bug"):
        DeepSpeedZeroEngine(*arguments, other, engine_config(2, "bf16"), 1.0, World(0, 1, 0))


@pytest.mark.parametrize(
    ("stage", "asked", "found", "wrong"),
    [
        *((stage, asked, asked, None) for stage in (1, 2, 3) for asked in ("none", "optimizer")),
        *((3, asked, asked, None) for asked in ("params", "both")),
        *((stage, "none", "optimizer", "offload_optimizer=none") for stage in (1, 2, 3)),
        *((stage, "optimizer", "none", "offload_optimizer=cpu") for stage in (1, 2, 3)),
        (3, "none", "params", "offload_params=none"),
        (3, "params", "none", "offload_params=cpu"),
        (3, "both", "optimizer", "offload_params=cpu"),
        (3, "both", "none", "offload_optimizer=cpu"),
    ],
)
def test_what_was_to_be_in_host_memory_must_be_said_to_be_there(monkeypatch, stage, asked, found, wrong):
    in_host = {"none": (), "both": ("optimizer", "params")}.get(found, (found,))
    config = engine_config(stage, "bf16", asked)
    if wrong is None:
        over_fakes(monkeypatch, Ranks(1), config, offload=in_host)
        return
    with pytest.raises(
        LaunchError, match=f"engine.{wrong} was asked for, DeepSpeed did otherwise; report this as a bug"
    ):
        over_fakes(monkeypatch, Ranks(1), config, offload=in_host)


@pytest.mark.parametrize("name", ["single_partition_of_fp32_groups", "fp32_partitioned_groups_flat"])
@pytest.mark.parametrize(
    ("offload", "places", "is_right"),
    [
        ("none", ["meta", "meta"], True),
        ("none", ["meta", "cpu"], False),
        ("optimizer", ["cpu", "cpu"], True),
        ("optimizer", ["cpu", "meta"], False),
    ],
)
def test_master_weights_must_be_where_they_were_asked_to_be(name, offload, places, is_right):
    """Whatever the optimizer says of itself. `meta` stands for a GPU."""
    optimizer = SimpleNamespace(cpu_offload=offload == "optimizer")
    setattr(optimizer, name, [torch.zeros(1, device=place) for place in places])
    config = engine_config(2, "bf16", offload)
    if is_right:
        _check_offload(optimizer, config, torch.device("meta"))
        return
    with pytest.raises(LaunchError, match=f"engine.offload_optimizer={config.offload_optimizer} was asked for"):
        _check_offload(optimizer, config, torch.device("meta"))
