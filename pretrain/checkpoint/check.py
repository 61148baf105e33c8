"""Whether what the ranks have written is a whole model, and the same one as before."""

import math
from typing import Any

from pretrain.errors import CheckpointError


def check_complete(votes: list[dict[str, Any]], previous: dict[str, list[int]]) -> dict[str, list[int]]:
    """Returns the shape of every parameter.

    Args:
        votes: Of each rank: `shapes` of the parameters that it has pieces of, and `num_weights`, the elements of each.
        previous: Shapes in the checkpoint before; empty: none.

    Raises:
        CheckpointError: A parameter is not whole, has two shapes, or another shape than before; it is named.
    """
    shapes: dict[str, list[int]] = {}
    found: dict[str, int] = {}
    for vote in votes:
        for name, shape in vote["shapes"].items():
            _check_same(name, shapes.setdefault(name, shape), shape, "on another rank")
        for name, number in vote["num_weights"].items():
            found[name] = found.get(name, 0) + number
    for name, shape in shapes.items():
        if found.get(name, 0) != math.prod(shape):
            raise _refusal(f"{name} has {math.prod(shape):,} elements, and the ranks have {found.get(name, 0):,} of it")
    if previous:
        for name in sorted({*previous, *shapes}):
            _check_same(name, previous.get(name), shapes.get(name), "now")
    return shapes


def _check_same(name: str, expected: list[int] | None, shape: list[int] | None, where: str) -> None:
    if expected != shape:
        shown = ["no such parameter" if values is None else f"shape {values}" for values in (expected, shape)]
        raise _refusal(f"{name} has {shown[0]} in what was saved, {shown[1]} {where}")


def _refusal(what: str) -> CheckpointError:
    return CheckpointError(
        f"checkpoint not saved: {what}", fix="the checkpoints before it are good; report this as a bug"
    )
