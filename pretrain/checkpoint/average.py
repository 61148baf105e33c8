"""The mean of the weights of several checkpoints, read piece by piece whatever topology wrote each.

Sums are in float64 and rounded to fp32 once, so that the order of the checkpoints does not show. Memory: one parameter
in fp32 and a piece of it in float64, however many checkpoints there are.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from pretrain.checkpoint.fragments import FragmentReader
from pretrain.checkpoint.layout import load_manifest
from pretrain.errors import CheckpointError

PIECE = 2**22
"""Elements that are added up at once: 16 MiB of each checkpoint, 32 MiB of sums."""


class MeanReader:
    """The mean weights of committed checkpoints of one model; reads like `WeightReader`.

    Args:
        checkpoints: At least one, verified by the caller.

    Attributes:
        shapes: Shape of every parameter, by name.

    Raises:
        CheckpointError: A manifest or a file cannot be parsed, or the parameters differ: the first that does is named.
    """

    def __init__(self, checkpoints: Sequence[Path], piece: int = PIECE) -> None:
        assert checkpoints and piece > 0
        self._piece, self._readers = piece, []
        self.shapes: dict[str, tuple[int, ...]] = {}
        for number, checkpoint in enumerate(checkpoints):
            manifest = load_manifest(checkpoint)
            shapes = {name: tuple(shape) for name, shape in manifest.shapes.items()}
            if number == 0:
                self.shapes = shapes
            _check_same(self.shapes, shapes, checkpoints[0], checkpoint)
            self._readers.append(FragmentReader(checkpoint / record.name for record in manifest.files))

    def read(self, name: str) -> Tensor:
        """Returns the mean of one parameter, fp32, on the CPU. Raises: CheckpointError, where a part is not there."""
        mean = torch.empty(math.prod(self.shapes[name]))
        for start in range(0, mean.numel(), self._piece):
            part = mean[start : start + self._piece]
            values, total = torch.empty_like(part), torch.zeros(part.numel(), dtype=torch.float64)
            for reader in self._readers:
                reader.read_into(name, "weight", start, values)
                total += values
            part.copy_(total / len(self._readers))
        return mean.view(self.shapes[name])


def _check_same(
    expected: dict[str, tuple[int, ...]], shapes: dict[str, tuple[int, ...]], first: Path, other: Path
) -> None:
    for name in [*expected, *shapes]:
        mine, its = expected.get(name), shapes.get(name)
        if mine != its:
            shown = ["is missing" if shape is None else f"has shape {list(shape)}" for shape in (its, mine)]
            raise CheckpointError(
                f"{name} {shown[0]}, and {shown[1]} in {first}",
                where=str(other),
                fix="average checkpoints of one model",
            )
