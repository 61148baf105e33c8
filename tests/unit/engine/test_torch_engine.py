"""DDP or a single process: a step, its learning rates, and when gradients are exchanged."""

import contextlib
import copy
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from pretrain.config.engine import EngineConfig
from pretrain.dist import World
from pretrain.engine.replicated import TorchEngine
from pretrain.errors import LaunchError
from pretrain.optim.rules import decay_cautiously
from tests.unit.engine.toy import LR, SHAPES, Toy, adamw, names_of

X = 0.25
NORM = math.sqrt(sum(float(p.detach().square().sum()) for p in Toy().parameters()))


class Ddp(nn.parallel.DistributedDataParallel):
    """One of torch's without a process group: notes for each forward pass whether its gradients would be exchanged."""

    def __init__(self, module):
        nn.Module.__init__(self)
        self.module, self.exchanges, self.exchanged = module, True, []

    def forward(self, batch):
        self.exchanged.append(self.exchanges)
        return self.module(batch)

    @contextlib.contextmanager
    def no_sync(self):
        self.exchanges = False
        yield
        self.exchanges = True


def prepared():
    """An accelerate on a CPU, which wraps what is not evaluated; on a GPU it wraps from two ranks on."""

    def prepare_model(module, device_placement, evaluation_mode):
        return module if evaluation_mode else Ddp(module)

    return SimpleNamespace(prepare_model=prepare_model, device=torch.device("cpu"))


def build(kind, clip=0.0, ratios=(1.0, 1.0), size=None, fused=False, precision="fp32"):
    module = Toy()
    config = EngineConfig(kind=kind, precision=precision)
    world = World(0, size or (2 if kind == "ddp" else 1), 0)
    return TorchEngine(module, names_of(module), adamw(module, ratios, fused=fused), prepared(), config, clip, world)


def weights(engine):
    return {fragment.name: fragment.tensors["weight"].clone() for fragment in engine.state.held_fragments()}


@pytest.mark.parametrize("kind", ["single", "ddp"])
@pytest.mark.parametrize("clip", [0.0, 0.01])
@pytest.mark.parametrize("fused", [False, True])
def test_a_step_is_torch_s_own_over_the_sum_of_the_micro_batches(kind, clip, fused):
    engine, module = build(kind, clip, fused=fused), Toy()
    reference = adamw(module, fused=fused)
    for _ in range(3):
        for number, value in enumerate((X, 2 * X)):
            sums = engine.forward_backward(torch.tensor(value), 0.5, number == 1)
            assert sums.tolist() == [value, 1.0]
            (module(torch.tensor(value))[0] * 0.5).backward()
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), clip or math.inf)
        reference.step()
        reference.zero_grad()
        update = engine.update(LR)
        assert (update.grad_norm, update.skipped) == (float(norm), False)
        assert all(torch.equal(tensor, getattr(module, name).flatten()) for name, tensor in weights(engine).items())


@pytest.mark.parametrize("bad", [math.inf, math.nan, None])
@pytest.mark.parametrize("optimizer", ["loop", "fused", "fused, cautious"])
@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_bad_gradient_and_one_that_is_to_be_dropped_change_nothing_and_leave_nothing_behind(
    bad, optimizer, is_first, precision
):
    results = []
    for drops in (False, True):
        engine = build("single", 1.0, fused=optimizer != "loop", precision=precision)
        if optimizer == "fused, cautious":
            for group in engine._optimizer.param_groups:
                group["cautious_decay"] = 0.1
            engine._optimizer.register_step_pre_hook(decay_cautiously)
        if not is_first:
            engine.forward_backward(torch.tensor(X), 1.0, True)
            engine.update(LR)
        before = weights(engine)
        if drops:
            engine.forward_backward(torch.tensor(2 * X if bad is None else bad), 1.0, True)
            update = engine.update(LR, drop=bad is None)
            assert update.skipped
            assert math.isfinite(update.grad_norm) == (bad is None)
            assert all(torch.equal(tensor, before[name]) for name, tensor in weights(engine).items())
        engine.forward_backward(torch.tensor(X), 1.0, True)
        assert not engine.update(LR).skipped
        results.append([t.clone() for f in engine.state.held_fragments() for t in f.tensors.values()])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize("ratios", [(1.0, 1.0), (0.5, 0.25)])
def test_the_learning_rate_of_a_step_is_that_of_each_group_times_its_ratio(ratios):
    engine = build("single", ratios=ratios)
    before = weights(engine)
    engine.forward_backward(torch.tensor(X), 1.0, True)
    engine.update(0.02)
    assert [group["lr"] for group in engine._optimizer.param_groups] == [0.02 * ratios[0], 0.02 * ratios[1], 0.02]
    for name, after in weights(engine).items():
        rate, decay = (0.02 * ratios[0], 0.1) if len(SHAPES[name]) > 1 else (0.02 * ratios[1], 0.0)
        expected = before[name] * (1 - rate * decay) - rate * before[name].sign()
        assert torch.allclose(after, expected, rtol=1e-4, atol=1e-5)  # Adam's epsilon


def test_ddp_exchanges_gradients_after_the_last_micro_batch_alone():
    assert not isinstance(build("ddp", size=1)._wrapped, Ddp), "one process has nothing to exchange"
    engine = build("ddp", size=2)
    for is_last in (False, False, True, True):
        engine.forward_backward(torch.tensor(X), 1.0, is_last)
    assert engine._wrapped.exchanged == [False, False, True, True]


@pytest.mark.parametrize("kind", ["single", "ddp"])
def test_evaluation_and_rehearsal_set_their_modes_and_leave_no_gradient(kind):
    engine = build(kind)
    assert engine.evaluate(torch.tensor(X)).tolist() == [X, 0.0]
    engine.rehearse(torch.tensor(X))
    assert engine.module.training
    engine.evaluate(torch.tensor(X))
    assert engine.forward_backward(torch.tensor(0.0), 1.0, True).tolist() == [0.0, 1.0]
    assert engine.update(0.0).grad_norm == 0.0


def test_frozen_parameters_are_no_part_of_what_it_trains():
    module = Toy()
    module.wide.requires_grad = False
    kept = copy.deepcopy(module.wide)
    engine = TorchEngine(
        module, names_of(module), adamw(module), prepared(), EngineConfig(kind="single"), 0.0, World(0, 1, 0)
    )
    assert {weight.dtype for _, weight in engine.working_weights()} == {torch.bfloat16}
    kept = kept.bfloat16()
    assert set(weights(engine)) == SHAPES.keys() - {"wide"}
    engine.forward_backward(torch.tensor(X), 1.0, True)
    # Gradients are rounded to bf16.
    norm = X * X * math.sqrt(NORM**2 - float(kept.square().sum()))
    assert engine.update(LR).grad_norm == pytest.approx(norm, rel=2**-8)
    assert torch.equal(module.wide, kept)
    assert [name for name, _ in engine.working_weights()] == list(SHAPES)


@pytest.mark.parametrize(("kind", "size"), [("single", 1), ("ddp", 4)])
def test_it_says_what_runs(kind, size):
    engine = build(kind, size=size)
    assert engine.description == f"{kind}, fp32, {size} x cpu"
    assert not engine.is_sharded
    assert engine.device == torch.device("cpu")


@pytest.mark.parametrize(("kind", "built", "name"), [("single", "ddp", "Ddp"), ("ddp", "single", "Toy")])
def test_what_accelerate_builds_must_be_what_was_asked_for(kind, built, name):
    module = Toy()
    accelerator = prepared()
    accelerator.prepare_model = lambda module, device_placement, evaluation_mode: (
        module if built == "single" else Ddp(module)
    )
    with pytest.raises(LaunchError, match=f"engine.kind={kind} was asked for, accelerate built {name}; report this"):
        TorchEngine(module, names_of(module), adamw(module), accelerator, EngineConfig(kind=kind), 0.0, World(0, 2, 0))
