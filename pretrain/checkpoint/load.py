"""Loading a checkpoint into a model, whatever topology wrote it: each rank reads the ranges that it holds."""

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pretrain import dist
from pretrain.checkpoint.format import MANIFEST, SCHEMA, Manifest, load_manifest
from pretrain.checkpoint.fragments import FragmentReader, write_fragments
from pretrain.checkpoint.state import TrainState
from pretrain.errors import CheckpointError, PretrainError
from pretrain.types import Fragment, FragmentStore
from pretrain.utils.checksum import FileRecord
from pretrain.utils.io import write_json


def _check_kind(kind: str, manifest: Manifest) -> None:
    if kind != "weight" and kind not in manifest.moments:
        saved = ", ".join(manifest.moments) or "weights alone"
        raise CheckpointError(
            f"it was saved under another optimizer: it has {saved}, and no {kind}",
            fix="use the optim.kind it was trained with, or start another run from its weights with init.from",
        )


def load_checkpoint(path: Path, store: FragmentStore) -> TrainState:
    """Fills a model's state from a verified checkpoint, whatever topology wrote it. Collective.

    Args:
        path: The checkpoint folder.
        store: Where it goes.

    Raises:
        CheckpointError: It is not of this model; the parameters that differ are named.
    """
    manifest = load_manifest(path)
    reader = FragmentReader(path / record.name for record in manifest.files)
    problem = None
    try:
        for fragment in store.held_fragments():
            saved = manifest.shapes.get(fragment.name)
            if saved != list(fragment.shape):
                shape = "no such parameter" if saved is None else f"shape {saved}"
                raise CheckpointError(
                    f"{fragment.name} has shape {list(fragment.shape)} in this model, in the checkpoint {shape}",
                    where=str(path),
                    fix="use the config that the checkpoint was trained with",
                )
            for kind in fragment.tensors:
                _check_kind(kind, manifest)
                reader.read_into(fragment.name, kind, fragment.offset, fragment.tensors[kind])
    except PretrainError as error:
        problem = str(error)
    first = next((text for text in dist.gather_objects(problem) if text), None)
    if first is not None:
        raise CheckpointError(first)
    state = TrainState.from_json(manifest.state, str(path))
    store.finish_load(state.optimizer_step, manifest.scalars)
    return state


# Weights alone: a model folder written in the checkpoint format, and any checkpoint read tensor by
# tensor.
#
# Not collective; memory: one file of tensors beyond those of the caller.


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


# The mean of the weights of several checkpoints, read piece by piece whatever topology wrote each.
#
# Sums are in float64 and rounded to fp32 once, so that the order of the checkpoints does not show.
# Memory: one parameter in fp32 and a piece of it in float64, however many checkpoints there are.


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
