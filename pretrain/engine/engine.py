"""The engine: one interface over accelerate, DeepSpeed and DDP, and the check that what runs is what was asked for.

    start_accelerator (start.py)  ->  build_engine  ->  step of micro-batches: forward_backward ... then update

The loss that goes in is a sum over this rank's target tokens times a scale; what comes out is the gradient of the
token mean over the global batch, because every engine averages over the ranks and the scale is
`world_size / global targets`.

Deliberately not here: data (accelerate would re-shard a loader), checkpoints (the engine only yields fragments), and
the learning-rate schedule (a pure function of the step that the loop evaluates).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from pretrain.config.data import BatchPlan
from pretrain.config.engine import EngineConfig
from pretrain.dist import World
from pretrain.engine.frozen import CompleteState
from pretrain.errors import LaunchError
from pretrain.types import Batch, FragmentStore

if TYPE_CHECKING:
    from accelerate import Accelerator


@dataclass(frozen=True, slots=True)
class Update:
    """What an optimizer step did.

    Attributes:
        grad_norm: Global L2 norm of the gradient before clipping; not finite if the step was skipped.
        skipped: Whether weights and moments were left alone because the gradient was not finite.
    """

    grad_norm: float
    skipped: bool


class Engine(Protocol):
    """A model and an optimizer, distributed.

    Attributes:
        device: Where batches go.
        description: What runs, for people.
        module: What is trained, without wrappers.
        is_sharded: Whether a rank holds a share of the weights only (ZeRO 3).
    """

    device: torch.device
    description: str
    module: nn.Module
    is_sharded: bool

    @property
    def state(self) -> FragmentStore:
        """Weights and moments, for checkpoints."""
        ...

    def forward_backward(self, batch: Batch, scale: float, is_last: bool) -> Tensor:
        """Runs one micro-batch and accumulates the gradient of `scale x (sum of its losses)`.

        Args:
            batch: Tensors on `device`.
            scale: World size over the number of target tokens of the global batch.
            is_last: Whether this is the last micro-batch of the step; gradients are then reduced over the ranks.

        Returns:
            What the module shows of it: float64 [2], the sum of -log p(target) and the number of targets held for the
            likeliest.
        """
        ...

    def update(self, learning_rate: float, drop: bool = False) -> Update:
        """Clips, applies the optimizer, clears the gradients. A non-finite gradient changes nothing on any rank.

        Args:
            learning_rate: Of this step.
            drop: Change nothing whatever the gradient is. The same on every rank.
        """
        ...

    def evaluate(self, batch: Batch) -> Tensor:
        """Returns the same without gradient or dropout. Collective under ZeRO 3."""
        ...

    def rehearse(self, batch: Batch) -> None:
        """Runs a micro-batch forward as in training, dropout and all, without gradient. Collective under ZeRO 3."""
        ...

    def working_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, live tensor) of what the forward pass reads on this rank; at ZeRO 3 this rank's shares."""
        ...


def build_engine(
    module: nn.Module,
    names: dict[int, str],
    optimizer: torch.optim.Optimizer,
    accelerator: "Accelerator",
    config: EngineConfig,
    grad_clip: float,
    plan: BatchPlan,
    world: World,
    *,
    saves_frozen: bool = True,
) -> Engine:
    """Wraps a module and its optimizer.

    Args:
        module: Its `forward(batch)` returns the sum of the losses, a scalar, and what is shown of it, float64 [2].
        names: Name of each of its parameters in checkpoints, by `id(parameter)`.
        optimizer: Over its parameters.
        accelerator: From `start_accelerator`.
        config: What was asked for.
        grad_clip: Largest global gradient norm; 0: no clipping.
        plan: How a global batch is cut.
        world: This process's place.
        saves_frozen: Parameters that need no gradient are of its state too, as weights without moments.

    Raises:
        LaunchError: What was built is not what `config` asks for.
    """
    from pretrain.engine.deepspeed_engine import DeepSpeedZeroEngine
    from pretrain.engine.torch_engine import TorchEngine

    if accelerator.num_processes != world.size:
        raise LaunchError(
            f"accelerate sees {accelerator.num_processes} processes, the launcher started {world.size}",
            fix="start the ranks with `pretrain launch`, torchrun, accelerate or deepspeed",
        )
    engine: DeepSpeedZeroEngine | TorchEngine
    if config.kind == "deepspeed":
        engine = DeepSpeedZeroEngine(module, names, optimizer, accelerator, config, grad_clip, plan, world)
    else:
        engine = TorchEngine(module, names, optimizer, accelerator, config, grad_clip, world)
    frozen = [(names[id(p)], p) for p in module.parameters() if saves_frozen and not p.requires_grad]
    if frozen:
        engine.state = CompleteState(engine.state, frozen, world)
    return engine
