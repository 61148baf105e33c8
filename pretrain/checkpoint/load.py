"""Loading of checkpoints of any topology: into a model, by tensor, and as a mean."""

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pretrain.checkpoint.agree import agree
from pretrain.checkpoint.format import MANIFEST, SCHEMA, Manifest, load_manifest
from pretrain.checkpoint.fragments import FragmentReader, write_fragments
from pretrain.checkpoint.state import TrainState
from pretrain.errors import CheckpointError
from pretrain.types import EMA, Fragment, FragmentStore
from pretrain.utils.io import FileRecord, write_json

log = logging.getLogger(__name__)


def load_checkpoint(path: Path, store: FragmentStore, place: float = 0.0) -> TrainState:
    """Fills the ranges that this rank keeps from a verified checkpoint of any topology. Collective.

    An average of the weights that the checkpoint lacks begins at its weights. `place` is the share
    of the ranks before this one, by which it finds the files that it needs.

    Raises:
        CheckpointError: It is not of this model; a parameter that differs is named.
    """
    manifest = load_manifest(path)
    reader = FragmentReader((path / record.name for record in manifest.files), place)
    averages = any(EMA in fragment.tensors for fragment in store.held_fragments())
    begins_average = averages and EMA not in manifest.moments
    if begins_average:
        log.info("optim.ema: the average of the weights begins at those of %s", path)

    def read() -> None:
        for fragment in store.held_fragments():
            saved = manifest.shapes.get(fragment.name)
            if saved != list(fragment.shape):
                shape = "no such parameter" if saved is None else f"shape {saved}"
                raise CheckpointError(
                    f"{fragment.name} has shape {list(fragment.shape)} in this model, in the checkpoint {shape}",
                    where=str(path),
                    fix="use the config that the checkpoint was trained with",
                )
            for kind, tensor in fragment.tensors.items():
                kind = "weight" if kind == EMA and begins_average else kind
                if kind != "weight" and kind not in manifest.moments:
                    moments = ", ".join(manifest.moments) or "weights alone"
                    raise CheckpointError(
                        f"it was saved under another optimizer: it has {moments}, and no {kind}",
                        fix="use the optim.kind it was trained with, or start another run from "
                        "its weights with init.from",
                    )
                reader.read_into(fragment.name, kind, fragment.offset, tensor, fragment.stripes)

    agree(read)
    state = TrainState.from_json(manifest.state, str(path))
    store.finish_load(state.optimizer_step, manifest.scalars)
    return state


MAX_FILE_BYTES = 5 * 10**9


def read_pairs(paths: tuple[Path, Path], kinds: Sequence[str]) -> Iterator[tuple[str, str, Tensor, Tensor]]:
    """Yields name, kind, and values in both, fp32 [elements], of what two checkpoints of a model have.

    Raises: CheckpointError: A piece is missing.
    """
    manifests = [load_manifest(path) for path in paths]
    readers = [
        FragmentReader(path / record.name for record in manifest.files)
        for path, manifest in zip(paths, manifests, strict=True)
    ]
    for name, shape in manifests[0].shapes.items():
        for kind in kinds:
            if all(reader.has(name, kind) for reader in readers):
                one, other = (torch.empty(math.prod(shape)) for _ in readers)
                readers[0].read_into(name, kind, 0, one)
                readers[1].read_into(name, kind, 0, other)
                yield name, kind, one, other


class WeightReader:
    """The weights of a committed checkpoint of any topology, tensor by tensor. Not collective.

    With `averaged` they are the moving average of `optim.ema`; a frozen parameter is its own. Its
    files are open from the beginning: they may be removed before they are read. Raises:
    CheckpointError, where the manifest or a file cannot be parsed, or there is no average.
    """

    def __init__(self, checkpoint: Path, *, averaged: bool = False) -> None:
        self.path = checkpoint
        self.manifest = load_manifest(checkpoint)
        self.averaged = averaged
        if averaged and EMA not in self.manifest.moments:
            raise CheckpointError(
                "it has no average of the weights",
                where=str(checkpoint),
                fix=f"train with optim.ema, or leave /{EMA} out for the weights themselves",
            )
        self.shapes = {name: tuple(shape) for name, shape in self.manifest.shapes.items()}
        self._reader = FragmentReader(checkpoint / record.name for record in self.manifest.files)

    @property
    def place(self) -> Path:
        """Model path of these weights: the checkpoint, or `ema` under it."""
        return self.path / EMA if self.averaged else self.path

    def read(self, name: str) -> Tensor:
        """Returns a whole parameter, fp32, on the CPU. Raises: CheckpointError."""
        weight = torch.empty(math.prod(self.shapes[name]))
        self.read_part(name, 0, weight)
        return weight.view(self.shapes[name])

    def read_part(self, name: str, offset: int, out: Tensor) -> None:
        """Fills `out` (1-D fp32) with elements from `offset` on. Raises: as `read`."""
        kind = EMA if self.averaged and self._reader.has(name, EMA) else "weight"
        self._reader.read_into(name, kind, offset, out)


def write_weights(
    folder: Path, weights: Iterable[tuple[str, Tensor]], origin: dict[str, Any], *, max_file_bytes: int = MAX_FILE_BYTES
) -> None:
    """Writes weights to an existing folder as a checkpoint at step 0 without moments.

    The (name, fp32 tensor) pairs are asked for one by one, and released with each file: a file, and
    so the tensors in memory, has `max_file_bytes`. `origin` is for people. Raises: DiskError.
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


PIECE = 2**22
"""Elements that are added up at once: 16 MiB of each checkpoint, 32 MiB of sums."""


class MeanReader:
    """The mean weights of checkpoints of one model; reads like `WeightReader`.

    Sums are in float64 and rounded to fp32 once, so that the order of the checkpoints does not
    show. Memory: one parameter in fp32 and a piece of it in float64, for any number of checkpoints.

    Raises:
        CheckpointError: The parameters differ: the first that does is named.
    """

    def __init__(self, readers: Sequence[WeightReader], piece: int = PIECE) -> None:
        self._piece = piece
        self._readers = readers
        self.shapes = readers[0].shapes
        for reader in readers:
            _check_same(self.shapes, reader.shapes, readers[0].path, reader.path)

    def read(self, name: str) -> Tensor:
        """Returns the mean of a parameter, fp32, on the CPU. Raises: as `WeightReader.read`."""
        mean = torch.empty(math.prod(self.shapes[name]))
        for start in range(0, mean.numel(), self._piece):
            part = mean[start : start + self._piece]
            values = torch.empty_like(part)
            total = torch.zeros(part.numel(), dtype=torch.float64)
            for reader in self._readers:
                reader.read_part(name, start, values)
                total += values
            part.copy_(total / len(self._readers))
        return mean.view(self.shapes[name])


def _check_same(
    expected: dict[str, tuple[int, ...]], shapes: dict[str, tuple[int, ...]], first: Path, other: Path
) -> None:
    for name in [*expected, *shapes]:
        mine = expected.get(name)
        its = shapes.get(name)
        if mine != its:
            shown = ["is missing" if shape is None else f"has shape {list(shape)}" for shape in (its, mine)]
            raise CheckpointError(
                f"{name} {shown[0]}, and {shown[1]} in {first}",
                where=str(other),
                fix="average checkpoints of one model",
            )
