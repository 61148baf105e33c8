"""Weights alone, in the checkpoint format: what a model folder holds, and any checkpoint read tensor by tensor.

Nothing here is collective, and neither direction holds more than one file of tensors beside what the caller holds.
"""

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pretrain.checkpoint.fragments import FragmentReader, write_fragments
from pretrain.checkpoint.layout import MANIFEST, SCHEMA, Manifest, load_manifest
from pretrain.checkpoint.state import TrainState
from pretrain.types import Fragment
from pretrain.utils.checksum import FileRecord
from pretrain.utils.io import write_json

MAX_FILE_BYTES = 5 * 10**9


class WeightReader:
    """The weights of a committed checkpoint, whatever topology wrote it.

    Attributes:
        shapes: Shape of every parameter, by name.

    Raises:
        CheckpointError: The manifest or a file cannot be parsed.
    """

    def __init__(self, checkpoint: Path) -> None:
        manifest = load_manifest(checkpoint)
        self.shapes = {name: tuple(shape) for name, shape in manifest.shapes.items()}
        self._reader = FragmentReader(checkpoint / record.name for record in manifest.files)

    def read(self, name: str) -> Tensor:
        """Returns one whole parameter, fp32, on the CPU. Raises: CheckpointError, where a part of it is not there."""
        weight = torch.empty(math.prod(self.shapes[name]))
        self._reader.read_into(name, "weight", 0, weight)
        return weight.view(self.shapes[name])

    def read_part(self, name: str, offset: int, out: Tensor) -> None:
        """Fills `out` (1-D fp32) with elements of a parameter, from `offset` on. Raises: as `read`."""
        self._reader.read_into(name, "weight", offset, out)


def write_weights(
    folder: Path, weights: Iterable[tuple[str, Tensor]], origin: dict[str, Any], *, max_file_bytes: int = MAX_FILE_BYTES
) -> None:
    """Writes weights to a folder as a checkpoint at step 0 without moments, manifest last.

    Args:
        folder: An existing folder, which the caller publishes afterwards.
        weights: (name, fp32 tensor); asked for one by one, and let go with each file.
        origin: What they were made of, noted in the manifest for people.
        max_file_bytes: Files are filled up to this.

    Raises:
        DiskError: The disk refused.
    """
    shapes: dict[str, list[int]] = {}
    files: list[FileRecord] = []
    for number, group in enumerate(_grouped(weights, max_file_bytes), start=1):
        files.append(write_fragments(folder / f"weights-{number:05d}.safetensors", group))
        shapes |= {fragment.name: list(fragment.shape) for fragment in group}
    manifest = Manifest(SCHEMA, TrainState().to_json(), shapes, [], files, origin)
    write_json(folder / MANIFEST, manifest.to_json())


def _grouped(weights: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[list[Fragment]]:
    group: list[Fragment] = []
    size = 0
    for name, tensor in weights:
        if group and size + tensor.numel() * 4 > max_bytes:
            yield group
            group, size = [], 0
        group.append(Fragment(name, 0, tuple(tensor.shape), {"weight": tensor.reshape(-1)}))
        size += tensor.numel() * 4
    if group:
        yield group
