"""What the tests of the engine train: five parameters of odd sizes, and a loss whose gradient is known by heart."""

import sys
from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from pretrain.config.data import BatchPlan
from pretrain.config.engine import EngineConfig
from pretrain.dist import World
from pretrain.engine.deepspeed_engine import DeepSpeedZeroEngine, build_zero_state
from pretrain.engine.replicated import working_weights
from pretrain.types import Fragment, FragmentStore
from tests.helpers.fake_deepspeed import FakeAccelerator, FakeEngine, fake_deepspeed
from tests.helpers.thread_ranks import Ranks

# 21 + 55 + 1 + 3 + 16 elements in two groups of 92 and 4: worlds of 2, 3 and 4 cut inside parameters, and pad.
SHAPES = {"embedding": (7, 3), "wide": (5, 11), "gain": (1,), "bias": (3,), "square": (4, 4)}
PLAN = BatchPlan(rows=8, rows_per_rank=8, micro=2, accumulation=4)
LR = 0.05


# (device, stage, precision, offload) of every run that there can be.
COMBINATIONS = [
    (device, stage, precision, offload)
    for device in ("cpu", "cuda")
    for stage in range(4)
    for precision in ("fp32", "bf16", "fp16")
    for offload in ("none", "optimizer", "params", "both")
    if (precision != "fp16" or (stage and device == "cuda"))
    and (offload == "none" or stage == 3 or (stage and offload == "optimizer"))
]


def engine_config(stage: int, precision: str, offload: str = "none") -> EngineConfig:
    """The section `engine:` of a run under DeepSpeed."""
    in_host = {"none": (), "both": ("optimizer", "params")}.get(offload, (offload,))
    return EngineConfig(zero_stage=stage, precision=precision, **{f"offload_{name}": "cpu" for name in in_host})


class Toy(nn.Module):
    """The loss is half the square of parameter times batch, summed: the gradient is `parameter x batch^2`."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator)))

    def forward(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        squares = [(parameter.float() * batch).square().sum() for parameter in self.parameters()]
        return torch.stack(squares).sum() / 2, torch.tensor([float(batch), self.training], dtype=torch.float64)


def adamw(
    module: nn.Module, ratios: tuple[float, float] = (1.0, 1.0), decay: float = 0.1, *, fused: bool = False
) -> torch.optim.Optimizer:
    """AdamW over two groups: matrices, which decay, and the rest; and an empty group, as a model without biases has."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": decay, "name": "decay", "lr_ratio": ratios[0]},
        {"params": [p for p in trained if p.ndim == 1], "weight_decay": 0.0, "name": "no_decay", "lr_ratio": ratios[1]},
        {"params": [], "name": "none"},
    ]
    return torch.optim.AdamW(groups, lr=LR, fused=fused)


def train(engine: FakeEngine, steps: range) -> None:
    """Takes steps of one micro-batch each, with a gradient that a loss scale of 2^16 bears."""
    for step in steps:
        loss, _ = engine(torch.tensor(0.1 * (step + 1)))
        engine.backward(loss, scale_wrt_gas=False)
        engine.step()


def names_of(module: nn.Module) -> dict[int, str]:
    """Name of each parameter, by id."""
    return {id(parameter): name for name, parameter in module.named_parameters()}


def fakes(
    ranks: Ranks,
    stage: int,
    precision: str,
    make: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
    frozen: tuple[str, ...] = (),
    **options: Any,
) -> list[tuple[FakeEngine, FragmentStore, dict[int, str]]]:
    """Builds an engine of DeepSpeed's on every rank, and what we make of its state."""

    def build(world: World) -> tuple[FakeEngine, FragmentStore, dict[int, str]]:
        module = Toy()
        for name in frozen:
            getattr(module, name).requires_grad = False
        names, optimizer = names_of(module), make(module)
        engine = FakeEngine(module, optimizer, ranks, stage, precision, **options)
        return engine, build_zero_state(engine, names, stage, world), names

    return ranks.run(build)


def over_fakes(
    monkeypatch: Any,
    ranks: Ranks,
    config: EngineConfig,
    clip: float = 0.0,
    ratios: tuple[float, float] = (1.0, 1.0),
    **options: Any,
) -> list[DeepSpeedZeroEngine]:
    """Builds our engine over a fake of DeepSpeed's on every rank."""
    options = {"stage": config.zero_stage, "precision": config.precision, "clip": clip} | options
    monkeypatch.setitem(sys.modules, "deepspeed", fake_deepspeed(ranks))

    def build(world: World) -> DeepSpeedZeroEngine:
        module = Toy()
        optimizer, accelerator = adamw(module, ratios), FakeAccelerator(ranks, **options)
        return DeepSpeedZeroEngine(module, names_of(module), optimizer, accelerator, config, clip, world)

    return ranks.run(build)


def assemble(stores: list[FragmentStore]) -> dict[tuple[str, str], Tensor]:
    """Returns what the ranks save as whole tensors, by parameter and kind; each element is there exactly once."""
    pieces: dict[tuple[str, str], list[tuple[int, Tensor, tuple[int, ...]]]] = {}
    for store in stores:
        for fragment in store.owned_fragments():
            for kind, tensor in fragment.tensors.items():
                assert tensor.dtype == torch.float32
                assert tensor.shape == (fragment.length,)
                pieces.setdefault((fragment.name, kind), []).append((fragment.offset, tensor.detach(), fragment.shape))
    whole = {}
    for key, parts in pieces.items():
        parts.sort(key=lambda part: part[0])
        (shape,) = {shape for *_, shape in parts}
        ends = [offset + tensor.numel() for offset, tensor, _ in parts]
        assert [offset for offset, *_ in parts] == [0, *ends[:-1]], f"{key} has a gap, or is saved twice"
        flat = torch.cat([tensor for _, tensor, _ in parts])
        whole[key] = flat.view(shape) if flat.numel() == prod(shape) else flat
    return whole


def fill(fragment: Fragment, saved: dict[tuple[str, str], Tensor]) -> None:
    """Copies into a fragment what was saved of it."""
    for kind, tensor in fragment.tensors.items():
        flat = saved[fragment.name, kind].reshape(-1)
        tensor.copy_(flat[fragment.offset : fragment.offset + fragment.length])


def load(
    stores: list[FragmentStore], ranks: Ranks, saved: dict[tuple[str, str], Tensor], step: int, **scalars: float
) -> None:
    """Loads what was saved, on every rank at once."""

    with torch.no_grad():
        for store in stores:
            for fragment in store.held_fragments():
                fill(fragment, saved)
    ranks.run(lambda world: stores[world.rank].finish_load(step, scalars))


def working(pairs: list[tuple[nn.Module, dict[int, str]]], ranks: Ranks) -> list[dict[str, Tensor]]:
    """Returns what the forward pass of each rank reads, as whole tensors: at stage 3 of the shares of all ranks."""

    def read(world: World) -> dict[str, Tensor]:
        module, names = pairs[world.rank]
        whole = {}
        for (name, live), parameter in zip(working_weights(module, names), module.parameters(), strict=True):
            if hasattr(parameter, "ds_tensor"):
                shares = torch.cat(ranks.gather(live.clone()))
                live = shares[: prod(SHAPES[name])].view(SHAPES[name])
            whole[name] = live.detach().clone()
        return whole

    return ranks.run(read)
