"""The arithmetic of one `Weight`: rows stacked and split, matrices transposed, the vocabulary padded and cut.

    tensors of theirs -> from_theirs -> parameter of ours        parameter of ours -> to_theirs -> tensors of theirs

Values are never changed: there and back again is bit-identical.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from pretrain.interop.family import Weight

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
