"""Named tensors of a folder, in one file or in shards: listed at once, read one by one.

    model.safetensors, or model.safetensors.index.json and its shards
    pytorch_model.bin, or pytorch_model.bin.index.json and its shards

A `.bin` file is a pickle: it is read by torch's restricted unpickler, which builds tensors and
plain containers only, and is mapped, not copied, where its format allows.

The arithmetic of one `Weight`: rows stacked and split, matrices transposed, the vocabulary padded
and cut. Values never change: there and back again is bit-identical.

    tensors of theirs -> from_theirs -> parameter of ours -> to_theirs -> tensors of theirs
"""

import re
import zipfile
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pretrain.config.engine import PLAIN_ENGINE
from pretrain.config.model import AnyModelConfig, ModelConfig
from pretrain.errors import CheckpointError
from pretrain.families.family import Family, Weight
from pretrain.interop.release_files import PICKLED_WEIGHTS, WEIGHTS, read_object
from pretrain.model import build_model
from pretrain.model.build import named_weights
from pretrain.model.parts.position import sinusoids_2d

FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

_DTYPES: dict[Any, str] = {
    "F64": "fp64", "F32": "fp32", "F16": "fp16", "BF16": "bf16",
    torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16",
}  # fmt: skip
"""Dtype of safetensors or of torch -> our name."""

Shape = tuple[int, ...]
_SCALE = "_scale_inv"
_ACTIVATIONS = ("activation_scale", "input_scale")


class TensorFact(NamedTuple):
    """Shape of a stored tensor, and fp64, fp32, fp16, bf16 or the file's own name of its dtype."""

    shape: Shape
    dtype: str


def parameter_shapes(config: AnyModelConfig) -> dict[str, Shape]:
    """Returns the shape of each weight by name, tied ones once."""
    # On the meta device: a model of any size, without storage.
    model = build_model(config, PLAIN_ENGINE, torch.device("meta"))
    return {name: tuple(weight.shape) for name, weight in named_weights(model)}


def constant_tensors(family: Family, config: ModelConfig) -> dict[str, Tensor]:
    """Returns the tensors of theirs that a model of ours computes: vectors of positions, [1, T, D], fp32."""
    tables = family.sinusoids(config)
    if config.input is None:
        return {}
    grid, before = config.input.grid, config.input.num_before
    return {name: sinusoids_2d(grid, width, before)[None] for name, width in tables.items()}


_File = tuple[dict[str, TensorFact], Callable[[str], Tensor]]
"""Shape and dtype of each tensor by name, and a function that reads one."""


def _open_safetensors(path: Path) -> _File:
    from safetensors import safe_open

    file: Any = safe_open(path, framework="pt")
    facts = {}
    for name in file.keys():  # noqa: SIM118 (not a dict)
        part = file.get_slice(name)
        dtype = part.get_dtype()
        facts[name] = TensorFact(tuple(part.get_shape()), _DTYPES.get(dtype, dtype))
    return facts, file.get_tensor


def _open_pickle(path: Path) -> _File:
    # The format before torch 1.6 is no zip file and cannot be mapped.
    tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    if not isinstance(tensors, dict) or not all(isinstance(value, Tensor) for value in tensors.values()):
        raise ValueError("not a dict of tensors")
    facts = {
        str(name): TensorFact(tuple(tensor.shape), _DTYPES.get(tensor.dtype, str(tensor.dtype)))
        for name, tensor in tensors.items()
    }
    return facts, tensors.__getitem__


def _open(path: Path) -> _File:
    try:
        return _open_safetensors(path) if path.suffix == ".safetensors" else _open_pickle(path)
    except Exception as error:  # a damaged file makes these libraries raise nearly anything
        if not path.is_file():
            raise CheckpointError(
                "no such file",
                where=str(path),
                fix="fetch the model again",
            ) from None
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise CheckpointError(
            f"cannot be parsed: {reason}",
            where=str(path),
            fix="fetch the file again",
        ) from None


class TensorFolder:
    """All tensors of a folder, in any layout of the module's docstring.

    Of an index the files count, as for transformers: a tensor is where it is, listed or not.

    Args:
        folder: Where the files are.
        block: Rows and columns of a matrix that share a scale, beside weights in FP8: W times its
            `weight_scale_inv`. None: weights are read as they are.

    Attributes:
        facts: Shape and dtype by name; of scaled weights the dtype that they stand for.
        listed: File by the name of each tensor of the index, there or not; empty: there is none.

    Raises:
        CheckpointError: There are no weights; a file is missing or damaged, or outside the folder.
    """

    def __init__(self, folder: Path, block: tuple[int, int] | None = None) -> None:
        self.listed, paths = _find(folder)
        self._folder = folder
        self._files = {path: _open(path) for path in paths}
        self.facts: dict[str, TensorFact] = {}
        for facts, _ in self._files.values():
            self.facts |= facts
        self._block = block or (1, 1)
        self._scaled = self._find_scales() if block else set[str]()

    def _find_scales(self) -> set[str]:
        """Returns the names of weights with scales, which are no tensors of the model themselves."""
        scaled = {name for name in self.facts if f"{name}{_SCALE}" in self.facts}
        for name in scaled:
            shape, scales = self.facts[name].shape, self.facts.pop(f"{name}{_SCALE}").shape
            blocks = tuple(-(-size // by) for size, by in zip(shape, self._block, strict=False))
            if prod(scales) > 1 and scales != blocks:
                size = f"{self._block[0]} by {self._block[1]}"
                raise CheckpointError(
                    f"{name}{_SCALE} is {list(scales)}, should be {list(blocks)}, a scale for {size} values",
                    where=str(self._folder),
                    fix="give the config.json that belongs to these weights",
                )
            self.facts[name] = TensorFact(shape, "bf16")
        # Of activations, in programs that have them in FP8 too.
        self.facts = {name: fact for name, fact in self.facts.items() if not name.endswith(_ACTIVATIONS)}
        return scaled

    def load(self, name: str) -> Tensor:
        """Reads a tensor as it is stored, times its scales, if it has any, in fp32.

        It may be a view of the file, so do not write to it.

        Raises: CheckpointError: It is in two files, with different values.
        """
        if name in self._scaled:
            return _scale(self._load(name), self._load(f"{name}{_SCALE}"), self._block)
        return self._load(name)

    def _load(self, name: str) -> Tensor:
        tensor, *copies = (load(name) for facts, load in self._files.values() if name in facts)
        if not all(torch.equal(tensor, other) for other in copies):
            raise CheckpointError(
                f"{name} is in several files, with different values",
                where=str(self._folder),
                fix="fetch the model again",
            )
        return tensor

    def advise(self, missing: Sequence[str]) -> str:
        """Returns the remedy for tensors that no file has; empty: the index does not tell."""
        lacking = sorted({self.listed[name] for name in missing if name in self.listed})
        if lacking:
            return f"fetch {', '.join(lacking)} again: the index has tensors that are not in it"
        names = {path.name for path in self._files}
        suffix = next(iter(self._files)).suffix
        beside = sorted({path.name for path in self._folder.glob(f"*{suffix}")} - names)
        if self.listed and beside:
            return f"fetch the index again: it does not list {', '.join(beside)} beside it"
        return ""


def _scale(weight: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """Returns a matrix times the scales of its blocks, fp32; those at its ends may be smaller."""
    grown = scales.float()
    if grown.numel() > 1:
        rows, columns = weight.shape
        grown = grown.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    return weight.float() * grown


def _find(folder: Path) -> tuple[dict[str, str], list[Path]]:
    """Returns the name of the file of each tensor that an index lists, and all files."""
    for name in (WEIGHTS, PICKLED_WEIGHTS):
        if (folder / name).is_file():
            return {}, [folder / name]
        index = folder / f"{name}.index.json"
        if not index.is_file():
            continue
        places = read_object(index).get("weight_map")
        if not isinstance(places, dict) or not places:
            raise CheckpointError("has no weight_map", where=str(index), fix="fetch the file again")
        suffix = Path(name).suffix
        for file in places.values():
            if not isinstance(file, str) or not FILE_NAME.fullmatch(file) or not file.endswith(suffix):
                raise CheckpointError(
                    f"{file!r} is not the name of a {suffix} file of this folder",
                    where=str(index),
                    fix="do not trust it",
                )
        return places, [folder / file for file in sorted(set(places.values()))]
    raise CheckpointError(
        f"has neither {WEIGHTS} nor {PICKLED_WEIGHTS}, nor an index of either",
        where=str(folder),
        fix="check the path",
    )


def from_theirs(weight: Weight, tensors: Sequence[Tensor], shape: Shape) -> Tensor:
    """Makes our parameter of `shape` from `tensors`, which are in the order of `weight.theirs`.

    It is a new tensor in the dtype of the first; rows that pad the vocabulary are zeros. The rows
    of experts, [E, outputs, inputs], are those of all of them, one below the other.
    """
    whole = tensors[0].new_zeros(shape)
    ours = whole.view(-1, shape[-1]) if len(shape) == 3 else whole
    start = 0
    for tensor, (name, rows) in zip(tensors, weight.theirs, strict=True):
        turned = tensor[0] if weight.row else tensor.t() if weight.transposed else tensor
        if weight.fused:
            turned = _swap(tensor.mT if tensor.ndim == 3 else tensor, weight, of_theirs=True).flatten(0, 1)
        if weight.shape is not None and weight.shape[0] == -1:
            turned = tensor.reshape(-1, *ours.shape[1:])
            rows = len(turned)
        elif weight.shape is not None and tensor.shape == weight.shape:
            turned = tensor.reshape(rows, *ours.shape[1:])
        assert turned.shape == (rows, *ours.shape[1:]), (name, tensor.shape, weight.ours, shape)
        ours[start : start + rows] = turned
        start += rows
    if weight.order:
        ours.copy_(ours.unflatten(0, (-1, len(weight.order)))[:, list(weight.order)].flatten(0, 1))
    assert start == len(ours) or weight.vocab, (weight.ours, shape, start)
    return whole


def to_theirs(weight: Weight, ours: Tensor) -> list[tuple[str, Tensor]]:
    """Makes their tensors, views of ours where possible, without padding of the vocabulary."""
    rows = [count for _, count in weight.theirs]
    ours = ours.flatten(0, 1) if ours.ndim == 3 else ours
    assert sum(rows) == ours.shape[0] or (weight.vocab and sum(rows) < ours.shape[0]), weight.ours
    if weight.order:
        inverse = torch.tensor(weight.order).argsort().tolist()
        ours = ours.unflatten(0, (-1, len(inverse)))[:, inverse].flatten(0, 1)
    if weight.fused:
        parts_EO = _swap(ours.unflatten(0, (weight.fused, -1)), weight, of_theirs=False)
        return [(weight.theirs[0][0], parts_EO.mT if parts_EO.ndim == 3 else parts_EO)]
    parts = torch.split(ours[: sum(rows)], rows)
    if weight.shape is not None:
        names = (name for name, _ in weight.theirs)
        return [(name, part.reshape(weight.shape)) for name, part in zip(names, parts, strict=True)]
    return [
        (name, part[None] if weight.row else part.t() if weight.transposed else part)
        for (name, _), part in zip(weight.theirs, parts, strict=True)
    ]


def _swap(rows_EO: Tensor, weight: Weight, *, of_theirs: bool) -> Tensor:
    """Returns the outputs of each expert in our order, gate and then up, or in theirs."""
    if not weight.interleaved:
        return rows_EO
    return rows_EO.unflatten(1, (-1, 2) if of_theirs else (2, -1)).transpose(1, 2).flatten(1, 2)


def their_shapes(weight: Weight, shape: Shape) -> dict[str, Shape]:
    """Returns the shape of each tensor of theirs, for a parameter of ours of `shape`."""
    parts = to_theirs(weight, torch.empty(shape, device="meta"))
    return {name: tuple(part.shape) for name, part in parts}
