"""The parameters of a run, a checkpoint, a model folder or a Hugging Face folder, one by one."""

import math
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pretrain.artifact.model_path import find_checkpoint, is_release
from pretrain.checkpoint.load import WeightReader
from pretrain.interop.release import open_release

_WIDTH = 200
"""Columns where nothing says how many there are: what reads a pipe wants a parameter a line."""


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """One parameter.

    Attributes:
        name: Name in our models.
        shape: Shape of the parameter.
        dtype: In which it is on disk.
        norm: Square root of the sum of its squares; None where values were not asked for.
        largest: Largest magnitude of its finite values.
        non_finite: How many of its values are infinite or not a number.
    """

    name: str
    shape: list[int]
    dtype: str
    norm: float | None = None
    largest: float | None = None
    non_finite: int | None = None

    def facts(self) -> dict[str, Any]:
        """Returns plain values; those that were not asked for are left out."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def list_tensors(path: Path, stats: bool) -> list[TensorFacts]:
    """Returns the parameters of a model of any kind; with `stats` all values are read, one parameter at a time.

    Raises:
        CheckpointError: It is none of these, or it is damaged.
    """
    shapes: dict[str, tuple[int, ...]]
    read: Callable[[str], Tensor]
    if is_release(path):
        release = open_release(path)
        shapes, read, dtype = (
            {name: tuple(shape) for name, shape in release.shapes.items()},
            release.read,
            release.dtype,
        )
    else:
        reader = WeightReader(find_checkpoint(path))
        shapes, read, dtype = reader.shapes, reader.read, "fp32"
    return [
        _measure(name, shape, dtype, read(name)) if stats else TensorFacts(name, list(shape), dtype)
        for name, shape in shapes.items()
    ]


def _measure(name: str, shape: tuple[int, ...], dtype: str, values: Tensor) -> TensorFacts:
    finite = values[torch.isfinite(values)].double()
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    return TensorFacts(
        name, list(shape), dtype, float(finite.norm()), largest, non_finite=values.numel() - finite.numel()
    )


def print_tensors(tensors: list[TensorFacts]) -> None:
    """Prints parameters as a table."""
    from rich.console import Console
    from rich.table import Table

    with_stats = any(tensor.norm is not None for tensor in tensors)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("parameter", overflow="fold")
    for title in ("shape", "elements", "dtype", *(("norm", "largest", "not finite") if with_stats else ())):
        table.add_column(title, justify="right", no_wrap=True)
    for tensor in tensors:
        shape = " x ".join(map(str, tensor.shape)) or "1"
        values = [] if tensor.norm is None else [f"{tensor.norm:.5g}", f"{tensor.largest:.5g}", str(tensor.non_finite)]
        table.add_row(tensor.name, shape, f"{math.prod(tensor.shape):,}", tensor.dtype, *values)
    width = None if sys.stdout.isatty() else _WIDTH
    Console(highlight=False, width=width).print(table)
