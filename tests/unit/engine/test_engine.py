"""Which engine is built, and what its state leaves out."""

import sys
from types import SimpleNamespace

import pytest
import torch

from pretrain.config.engine import EngineConfig
from pretrain.dist import World
from pretrain.engine.build import build_engine
from pretrain.engine.deepspeed_engine import DeepSpeedZeroEngine
from pretrain.engine.replicated import TorchEngine
from pretrain.errors import LaunchError
from tests.helpers.fake_deepspeed import FakeAccelerator, fake_deepspeed
from tests.helpers.thread_ranks import Ranks
from tests.unit.engine.test_torch_engine import Ddp
from tests.unit.engine.toy import SHAPES, Toy, adamw, names_of

KINDS = [("single", 0), ("ddp", 0), *(("deepspeed", stage) for stage in range(4))]


def build(monkeypatch, kind, stage, frozen=(), size=1, processes=1, **options):
    ranks = Ranks(1)
    monkeypatch.setitem(sys.modules, "deepspeed", fake_deepspeed(ranks))
    module = Toy()
    for name in frozen:
        getattr(module, name).requires_grad = False
    accelerator = FakeAccelerator(ranks, stage=stage, precision="bf16" if kind == "deepspeed" else "fp32")
    accelerator.num_processes = processes
    accelerator.prepare_model = lambda module, device_placement, evaluation_mode: (
        module if evaluation_mode else Ddp(module)
    )
    config = EngineConfig(kind=kind, zero_stage=stage, precision="bf16" if kind == "deepspeed" else "fp32")
    return build_engine(module, names_of(module), adamw(module), accelerator, config, 1.0, World(0, size, 0), **options)


@pytest.mark.parametrize(("kind", "stage"), KINDS)
def test_the_engine_is_the_one_that_was_asked_for(monkeypatch, kind, stage):
    engine = build(monkeypatch, kind, stage)
    assert type(engine) is (DeepSpeedZeroEngine if kind == "deepspeed" else TorchEngine)
    assert engine.is_sharded == (stage == 3)
    assert {fragment.name for fragment in engine.state.held_fragments()} == SHAPES.keys()
    assert engine.forward_backward(torch.tensor(0.25), 1.0, True).tolist() == [0.25, 1.0]
    assert not engine.update(0.1).skipped


@pytest.mark.parametrize(("kind", "stage"), KINDS)
def test_frozen_parameters_are_of_its_state_unless_another_keeps_them(monkeypatch, kind, stage):
    frozen = ("wide", "gain")
    for saves_frozen in (True, False):
        engine = build(monkeypatch, kind, stage, frozen, saves_frozen=saves_frozen)
        kinds = {fragment.name: len(fragment.tensors) for fragment in engine.state.owned_fragments()}
        expected = {name: 1 if name in frozen else 3 for name in SHAPES if saves_frozen or name not in frozen}
        assert kinds == expected


@pytest.mark.parametrize(("size", "processes"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("kind", ["single", "ddp", "deepspeed"])
def test_ranks_that_accelerate_does_not_see_are_refused(monkeypatch, kind, size, processes):
    expected = f"accelerate sees {processes} processes, the launcher started {size}; start the ranks with `pretrain l"
    with pytest.raises(LaunchError, match=expected):
        build(monkeypatch, kind, 0, size=size, processes=processes)


def test_every_parameter_of_the_module_has_a_name_in_checkpoints(monkeypatch):
    module = Toy()
    accelerator = SimpleNamespace(
        num_processes=1,
        device=torch.device("cpu"),
        prepare_model=lambda module, device_placement, evaluation_mode: module,
    )
    config = EngineConfig(kind="single", precision="fp32")
    names = {key: f"model.{name}" for key, name in names_of(module).items()}
    engine = build_engine(module, names, adamw(module), accelerator, config, 0.0, World(0, 1, 0))
    assert {fragment.name for fragment in engine.state.held_fragments()} == {f"model.{name}" for name in SHAPES}
