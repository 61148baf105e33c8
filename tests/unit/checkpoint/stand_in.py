"""Something with fragments, to save and load without an engine."""

from collections.abc import Iterator
from pathlib import Path

import torch

from pretrain.checkpoint.manager import CheckpointManager
from pretrain.checkpoint.state import TrainState
from pretrain.dist import World
from pretrain.types import Fragment

KINDS = ("weight", "exp_avg", "exp_avg_sq")
SHAPES = {"embed": (3, 4), "norm": (5,)}


class StandIn:
    """Parameters of `SHAPES` and their moments; every value tells the step, so that a mixture of two would show."""

    def __init__(self, step: int, shapes: dict[str, tuple[int, ...]] = SHAPES, cut: int = 6) -> None:
        self.step, self.shapes, self.cut = step, shapes, cut
        self.finished_with: int | None = None
        self.loaded_scalars: dict[str, float] | None = None
        self.tensors = {
            name: {kind: torch.full((torch.Size(shape).numel(),), float(step)) for kind in KINDS}
            for name, shape in shapes.items()
        }

    def held_fragments(self) -> Iterator[Fragment]:
        """Yields every parameter in pieces of `cut` elements."""
        for name, shape in self.shapes.items():
            for start in range(0, torch.Size(shape).numel(), self.cut):
                tensors = {kind: values[start : start + self.cut] for kind, values in self.tensors[name].items()}
                yield Fragment(name, start, shape, tensors)

    owned_fragments = held_fragments

    def scalars(self) -> dict[str, float]:
        """One, which tells the step as well."""
        return {"loss_scale": float(self.step)}

    def finish_load(self, optimizer_step: int, scalars: dict[str, float]) -> None:
        """Notes that loading came to its end."""
        self.finished_with, self.loaded_scalars = optimizer_step, scalars

    def values(self) -> set[float]:
        """All values there are."""
        return {value for kinds in self.tensors.values() for tensor in kinds.values() for value in tensor.tolist()}


def manager(folder: Path, keep: int = 2) -> CheckpointManager:
    """The checkpoints of a world of one."""
    return CheckpointManager(folder, keep, World(0, 1, 0), {"world_size": 1})


def save(folder: Path, *steps: int, keep: int = 2) -> list[Path]:
    """Saves a checkpoint of each step."""
    return [manager(folder, keep).save(StandIn(step), state_of(step)) for step in steps]


def state_of(step: int) -> TrainState:
    """A state that the step can be told from."""
    return TrainState(step, step, 10 * step, 3 * step, "data", "tokenizer")


def load_newest(folder: Path) -> int | None:
    """Loads the newest good checkpoint and returns its step, having checked that all of it is of that step."""
    engine = StandIn(-1, cut=5)
    state = manager(folder).load_newest(engine)
    if state is None:
        assert engine.values() == {-1.0}
        return None
    assert state == state_of(state.step)
    assert engine.values() == {float(state.step)}
    assert engine.finished_with == state.step
    return state.step
