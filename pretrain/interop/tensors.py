"""Named tensors of a folder, in one file or in shards: listed at once, each read when it is asked for.

    model.safetensors, or model.safetensors.index.json and its shards, or the same two of pytorch_model.bin

A `.bin` file is a pickle: it is read by torch's restricted unpickler, which builds tensors and
plain containers only, and is mapped, not copied, where its format allows.
"""

import re
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from pretrain.errors import CheckpointError
from pretrain.interop.family import Weight
from pretrain.interop.fields import PICKLED_WEIGHTS, WEIGHTS, read_object

_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

_SAFETENSORS_DTYPES = {"F64": "fp64", "F32": "fp32", "F16": "fp16", "BF16": "bf16"}

_TORCH_DTYPES = {torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


@dataclass(frozen=True, slots=True)
class TensorFact:
    """What is known of a tensor before it is read.

    Attributes:
        shape: Shape of the tensor.
        dtype: fp64, fp32, fp16, bf16; or the file's own name of any other dtype.
    """

    shape: tuple[int, ...]
    dtype: str


class _File(Protocol):
    facts: dict[str, TensorFact]

    def load(self, name: str) -> Tensor: ...


class _SafetensorsFile:
    """A safetensors file, mapped."""

    def __init__(self, path: Path) -> None:
        from safetensors import safe_open

        self._file: Any = safe_open(path, framework="pt")
        self.facts: dict[str, TensorFact] = {}
        for name in self._file.keys():  # noqa: SIM118 (not a dict)
            tensor = self._file.get_slice(name)
            dtype = tensor.get_dtype()
            self.facts[name] = TensorFact(tuple(tensor.get_shape()), _SAFETENSORS_DTYPES.get(dtype, dtype))

    def load(self, name: str) -> Tensor:
        return self._file.get_tensor(name)


class _PickledFile:
    """A file of `torch.save`: of the format that can be mapped, or the one before it (torch 1.5), which is read."""

    def __init__(self, path: Path) -> None:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
            raise ValueError("not a dict of tensors")
        self._tensors: dict[str, Tensor] = found
        self.facts = {
            str(name): TensorFact(tuple(tensor.shape), _TORCH_DTYPES.get(tensor.dtype, str(tensor.dtype)))
            for name, tensor in found.items()
        }

    def load(self, name: str) -> Tensor:
        return self._tensors[name]


def _open(path: Path) -> _File:
    try:
        return _SafetensorsFile(path) if path.suffix == ".safetensors" else _PickledFile(path)
    except Exception as error:  # a damaged file makes these libraries raise nearly anything
        if not path.is_file():
            raise CheckpointError("no such file", where=str(path), fix="fetch the model again") from None
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise CheckpointError(f"cannot be parsed: {reason}", where=str(path), fix="fetch the file again") from None


class TensorFolder:
    """All tensors of a folder.

    Args:
        folder: Holds weights under one of the names above.

    Attributes:
        facts: Shape and dtype by name.

    Raises:
        CheckpointError: There are no weights; a file is missing or damaged; the index names files outside the folder,
            or tensors that their file lacks.
    """

    def __init__(self, folder: Path) -> None:
        self._place = _find(folder)
        files = {path: _open(path) for path in sorted(set(self._place.values()))}
        if not any(self._place):
            (path,) = self._place.values()
            self._place = dict.fromkeys(files[path].facts, path)
        lost = [name for name, path in self._place.items() if name not in files[path].facts]
        if lost:
            path = self._place[lost[0]]
            raise CheckpointError(
                f"lacks {lost[0]}, which the index says it has", where=str(path), fix="fetch it again"
            )
        self._files = files
        self.facts = {name: files[path].facts[name] for name, path in self._place.items()}

    def load(self, name: str) -> Tensor:
        """Reads a tensor as it is stored; it may be a view of the file, so do not write to it."""
        return self._files[self._place[name]].load(name)


def _find(folder: Path) -> dict[str, Path]:
    """Returns the file of each tensor; where there is one file for all, that file under an empty name."""
    for name in (WEIGHTS, PICKLED_WEIGHTS):
        if (folder / name).is_file():
            return {"": folder / name}
        index = folder / f"{name}.index.json"
        if index.is_file():
            places = read_object(index).get("weight_map")
            if not isinstance(places, dict) or not places:
                raise CheckpointError("has no weight_map", where=str(index), fix="fetch the file again")
            return {tensor: folder / _checked(file, Path(name).suffix, index) for tensor, file in places.items()}
    raise CheckpointError(
        f"has neither {WEIGHTS} nor {PICKLED_WEIGHTS}, nor an index of either", where=str(folder), fix="check the path"
    )


def _checked(file: Any, suffix: str, index: Path) -> str:
    if not isinstance(file, str) or not _FILE_NAME.fullmatch(file) or not file.endswith(suffix):
        raise CheckpointError(
            f"{file!r} is not the name of a {suffix} file of this folder", where=str(index), fix="do not trust it"
        )
    return file


# The arithmetic of one `Weight`: rows stacked and split, matrices transposed, the vocabulary padded
# and cut.
#
#     tensors of theirs -> from_theirs -> parameter of ours        parameter of ours -> to_theirs -> tensors of theirs
#
# Values are never changed: there and back again is bit-identical.


Shape = tuple[int, ...]


def their_shapes(weight: Weight, shape: Shape) -> dict[str, Shape]:
    """Returns the shape that each tensor of theirs must have.

    Args:
        weight: A correspondence.
        shape: That of our parameter, the padding of the vocabulary included.
    """
    return {name: _turned(weight, (rows, *shape[1:])) for name, rows in weight.theirs}


def _turned(weight: Weight, shape: Shape) -> Shape:
    """The shape, in theirs, of these rows of ours."""
    if weight.row:
        return (1, *shape)
    return shape[::-1] if weight.transposed else shape


def from_theirs(weight: Weight, tensors: Sequence[Tensor], shape: Shape) -> Tensor:
    """Makes our parameter.

    Args:
        weight: The correspondence.
        tensors: Those of `weight.theirs`, in that order.
        shape: That of our parameter.

    Returns:
        A new tensor of `shape`, in the dtype of the first; rows of the vocabulary that theirs has not are zeros.
    """
    ours = tensors[0].new_zeros(shape)
    start = 0
    for tensor, (name, rows) in zip(tensors, weight.theirs, strict=True):
        turned = tensor[0] if weight.row else tensor.t() if weight.transposed else tensor
        assert turned.shape == (rows, *shape[1:]), f"{name} is {tuple(tensor.shape)}, for {weight.ours} {shape}"
        ours[start : start + rows] = turned
        start += rows
    assert start == shape[0] or weight.vocab, f"{weight.ours} has {shape[0]} rows, theirs make {start}"
    return ours


def to_theirs(weight: Weight, ours: Tensor) -> list[tuple[str, Tensor]]:
    """Makes their tensors, views of ours where that is possible, in the order of `weight.theirs`.

    Args:
        weight: The correspondence.
        ours: Our parameter; rows beyond the vocabulary are left out.
    """
    rows = [count for _, count in weight.theirs]
    assert sum(rows) == ours.shape[0] or (weight.vocab and sum(rows) < ours.shape[0]), weight.ours
    parts = torch.split(ours[: sum(rows)], rows)
    return [
        (name, part[None] if weight.row else part.t() if weight.transposed else part)
        for (name, _), part in zip(weight.theirs, parts, strict=True)
    ]
