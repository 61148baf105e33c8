"""The parameters of a run, a checkpoint, a model folder or a Hugging Face folder, one by one."""

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from pretrain.artifact.model_path import is_release, open_newest
from pretrain.interop.release import open_release
from pretrain.utils.log import printable

_WIDTH = 200
"""Columns in a pipe, whose readers want a parameter a line."""


def list_tensors(path: Path, stats: bool) -> list[dict[str, Any]]:
    """Returns name in our models, shape and dtype on disk of each parameter of a model of any kind.

    With `stats` all values are read, one parameter at a time: `norm` is the L2 norm of the finite
    ones, `largest` their largest magnitude, `non_finite` the number of the others.

    Raises:
        CheckpointError: There is no model, or it is damaged.
    """
    read: Callable[[str], Tensor]
    if is_release(path):
        release = open_release(path)
        shapes = {name: list(shape) for name, shape in release.shapes.items()}
        read = release.read
        dtype = release.dtype
    else:
        reader = open_newest(path)
        shapes = {name: list(shape) for name, shape in reader.shapes.items()}
        read = reader.read
        dtype = "fp32"  # of every checkpoint of ours
    return [
        {"name": name, "shape": shape, "dtype": dtype, **(_measure(read(name)) if stats else {})}
        for name, shape in shapes.items()
    ]


def _measure(values: Tensor) -> dict[str, Any]:
    finite = values[torch.isfinite(values)].double()
    return {
        "norm": float(finite.norm()),
        "largest": float(finite.abs().max()) if finite.numel() else 0.0,
        "non_finite": values.numel() - finite.numel(),
    }


def print_tensors(tensors: list[dict[str, Any]]) -> None:
    """Prints parameters as a table."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("parameter", overflow="fold")
    titles = ["shape", "elements", "dtype"]
    if "norm" in tensors[0]:
        titles += ["norm", "largest", "not finite"]
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    for tensor in tensors:
        shape = " x ".join(map(str, tensor["shape"])) or "1"
        cells = [printable(tensor["name"]), shape, f"{math.prod(tensor['shape']):,}", printable(tensor["dtype"])]
        if "norm" in tensor:
            cells += [f"{tensor['norm']:.5g}", f"{tensor['largest']:.5g}", str(tensor["non_finite"])]
        table.add_row(*cells)
    Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else _WIDTH).print(table)
