"""Ranks that check their stack, sound or with a known defect."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as td
from torch import Tensor, nn

from pretrain.config.load import load_config
from pretrain.dist import World
from pretrain.engine.build import forget_accelerator, start_accelerator
from pretrain.errors import LaunchError
from pretrain.model.backends.sdpa import SdpaAttention
from pretrain.model.parts import attention
from pretrain.model.tensor_parallel import ColumnsLinear
from pretrain.run.folder import RunDir, begin_attempt
from pretrain.training.health import self_check

BASE = [
    "data.path=none", "model.vocab_size=4096", "run.self_check=on", "engine.device=cpu", "engine.precision=fp32",
]  # fmt: skip


def check(world: World, folder: str, overrides: list[str], defect: str = "none") -> dict[str, Any]:
    """Checks the stack of a config; returns what it has passed, and the error."""
    config = load_config("configs/run/quickstart.yaml", [*BASE, f"run.dir={folder}", *overrides])
    parallel = config.parallel
    world = replace(world, sequence=parallel.sequence, experts=parallel.experts, tensor=parallel.tensor)
    forget_accelerator()
    accelerator = start_accelerator(config.engine.on(world.size), 0.0, config.plan_ranks(world.size), 1000, world)
    run = RunDir(Path(folder) / "run")
    with DEFECTS[defect]():
        try:
            checked = self_check.check_stack(config, run, world, accelerator.device)
        except LaunchError as error:
            return {"what": error.what, "fix": error.fix}
    if world.is_main:
        run.path.mkdir(exist_ok=True)
        begin_attempt(run, "a", checked)
    td.barrier() if world.size > 1 else None
    again = self_check.check_stack(config, run, world, accelerator.device)
    return {"checked": checked, "again": again}


@contextmanager
def none() -> Iterator[None]:
    """A sound stack."""
    yield


class Compiled:
    """A compiler that leaves code as it is, and says while compiled code runs."""

    runs = False

    @classmethod
    def compile(cls, function: Callable[..., Any], **_: Any) -> Callable[..., Any]:
        """In place of torch.compile."""

        def run(*arguments: Any, **named: Any) -> Any:
            cls.runs = True
            try:
                return function(*arguments, **named)
            finally:
                cls.runs = False

        return run


@contextmanager
def rotation_without_gradient() -> Iterator[None]:
    """pytorch issue 180642: a compiled rotation of queries and keys had no gradient."""

    def rotated(x: Tensor, rotation: Any, before: Any = attention.rotate) -> Tensor:
        turned = before(x, rotation)
        return turned.detach() if Compiled.runs else turned

    with mock.patch.object(torch, "compile", Compiled.compile), mock.patch.object(attention, "rotate", rotated):
        yield


@contextmanager
def stale_gradient_of_a_norm() -> Iterator[None]:
    """pytorch issue 193061: of several norms in a compiled graph one got what lay in memory for its gradient."""

    def normed(norm: nn.RMSNorm, x: Tensor, before: Any = nn.RMSNorm.forward) -> Tensor:
        if not Compiled.runs:
            return before(norm, x)
        stale = norm.weight.view(-1) + 0
        stale.register_hook(lambda gradient: torch.full_like(gradient, 1e-3))
        return nn.functional.rms_norm(x, norm.normalized_shape, stale, norm.eps)

    with mock.patch.object(torch, "compile", Compiled.compile), mock.patch.object(nn.RMSNorm, "forward", normed):
        yield


@contextmanager
def changed_engine(change: Callable[[Any], None]) -> Iterator[None]:
    """An engine that is changed once it is built."""

    def build(*arguments: Any, before: Any = self_check.build_engine, **named: Any) -> Any:
        engine = before(*arguments, **named)
        change(engine)
        return engine

    with mock.patch.object(self_check, "build_engine", build):
        yield


def lose_half(engine: Any) -> None:
    """DeepSpeed issue 8224: at ZeRO 2 in bf16, on several ranks, part of a gradient was not reduced where a module is
    used more than once in a step."""
    if td.get_rank() == 1:
        engine.module.model.get_parameter("embedding.weight").register_hook(lambda gradient: gradient * 0)


def unscale(engine: Any) -> None:
    """DeepSpeed pull request 7839: at stage 0 in bf16 gradients were divided by a loss scale that no loss had."""
    before = engine.forward_backward
    engine.forward_backward = lambda batch, scale, is_last: before(batch, scale / 65536, is_last)


def accumulate(engine: Any) -> None:
    """The same: nor were they cleared after the step."""
    before = engine.forward_backward
    taken: list[tuple[Any, ...]] = []

    def repeat(batch: Any, scale: float, is_last: bool) -> Any:
        taken.append((batch, scale))
        for earlier in taken[:-1] if len(taken) % self_check.MICRO_BATCHES == 1 else ():
            before(*earlier, False)
        return before(batch, scale, is_last)

    engine.forward_backward = repeat


def gather_before(engine: Any) -> None:
    """Weights are gathered before they are updated: the next forward pass reads those of the step before."""
    before = engine.update

    def update(learning_rate: float, drop: bool = False) -> Any:
        stale = [(weight, weight.clone()) for _, weight in engine.working_weights()]
        done = before(learning_rate, drop)
        for weight, value in stale:
            weight.data.copy_(value)
        return done

    engine.update = update


@contextmanager
def coalesced_gather() -> Iterator[None]:
    """gloo: gathers that run as one collective return what another has gathered."""
    started: list[Tensor] = []

    def gather(
        output: Tensor, value: Tensor, *arguments: Any, before: Any = td.all_gather_into_tensor, **named: Any
    ) -> Any:
        started.append(value)
        return before(output, started[1] if len(started) == 3 else value, *arguments, **named)

    with mock.patch.object(td, "all_gather_into_tensor", gather):
        yield


@contextmanager
def biases_on_each_rank() -> Iterator[None]:
    """A bias of shared columns is added on each rank, before the sum."""

    def forward(layer: ColumnsLinear, x: Tensor) -> Tensor:
        return layer._ranks.sum(nn.functional.linear(x, layer.weight, layer.bias))

    with mock.patch.object(ColumnsLinear, "forward", forward):
        yield


def forget_moments(engine: Any) -> None:
    """A load that leaves out the moments."""
    before = engine.state.finish_load

    def finish_load(step: int, scalars: dict[str, float]) -> None:
        for piece in engine.state.held_fragments():
            for name in piece.tensors.keys() - {"weight"}:
                piece.tensors[name].zero_()
        before(step, scalars)

    engine.state.finish_load = finish_load


@contextmanager
def wrong_scale() -> Iterator[None]:
    """A backend that scales its scores as another one does."""

    def attend(backend: SdpaAttention, *tensors: Any, before: Any = SdpaAttention.attend, **options: Any) -> Tensor:
        return before(backend, *tensors, **(options | {"scale": 0.3}))

    with mock.patch.object(SdpaAttention, "attend", attend):
        yield


DEFECTS: dict[str, Callable[[], Any]] = {
    "none": none,
    "180642": rotation_without_gradient,
    "193061": stale_gradient_of_a_norm,
    "8224": partial(changed_engine, lose_half),
    "7839 scale": partial(changed_engine, unscale),
    "7839 clear": partial(changed_engine, accumulate),
    "gather before the step": partial(changed_engine, gather_before),
    "coalesced gather": coalesced_gather,
    "biases twice": biases_on_each_rank,
    "resumed elsewhere": partial(changed_engine, forget_moments),
    "backend": wrong_scale,
}
