"""Parts of parameters that ranks share: rows, columns, or experts, and where a part's elements lie.

    Part.take(whole)    -> this rank's part of a parameter
    Part.places(...)    -> places of a range of the flattened part in the flattened parameter

Not here: which parameters have parts (`model/tensor_parallel.py`, `model/expert_parallel.py`).
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor


class Stripes(NamedTuple):
    """Columns of a matrix in its flattened elements: the first `run` of every `stride`."""

    run: int
    stride: int


class Place(NamedTuple):
    """Where elements of a flattened part lie in the flattened parameter.

    Attributes:
        start: First of them in the part.
        offset: First of them in the parameter.
        length: Their number; of `stripes` a multiple of their run.
        stripes: How those after the first lie in the parameter. None: one after another.
    """

    start: int
    offset: int
    length: int
    stripes: Stripes | None = None


class Part(NamedTuple):
    """What a rank has of a parameter: part `rank` of `ranks` equal parts of a dimension.

    Attributes:
        rank: Number of the part.
        ranks: Number of parts; 1: all is here.
        dim: 0, as of experts and of rows; or 1, the columns of a matrix.
        sections: Lengths along dimension 0 of the matrices of a fused parameter, of each of which
            the rank has a part. Empty: it is one matrix.
    """

    rank: int = 0
    ranks: int = 1
    dim: int = 0
    sections: tuple[int, ...] = ()

    def whole(self, shape: Sequence[int]) -> torch.Size:
        """Returns the shape of a parameter by the shape of a part."""
        lengths = list(shape)
        if self.ranks > 1:
            lengths[self.dim] *= self.ranks
        return torch.Size(lengths)

    def take(self, whole: Tensor) -> Tensor:
        """Returns this part; a view, but for sections."""
        if self.ranks == 1:
            return whole
        if not self.sections:
            return whole.chunk(self.ranks, self.dim)[self.rank]
        return torch.cat([one.chunk(self.ranks)[self.rank] for one in whole.split(self.sections)])

    def places(self, shape: Sequence[int], start: int, length: int) -> list[Place]:
        """Returns the places of a range of the flattened part of this shape."""
        if length <= 0 or self.ranks == 1:
            return [Place(start, start, length)] if length > 0 else []
        end, (rows, *rest) = start + length, shape
        width = math.prod(rest)
        if self.dim == 1:
            first, last = -(-start // width) * width, end // width * width
            cuts = [start, end] if first > last else [start, first, last, end]
            stripes = Stripes(width, width * self.ranks)
            ranges = []
            # A row that begins before, whole rows, and one that ends behind.
            for a, b in pairwise(cuts):
                offset = (a // width * self.ranks + self.rank) * width + a % width
                ranges.append(Place(a, offset, b - a, stripes if b - a > width else None))
            return [place for place in ranges if place.length]
        ranges, inside, whole = [], 0, 0
        for section in self.sections or (rows * self.ranks,):
            size = section // self.ranks * width
            a, b = max(start, inside), min(end, inside + size)
            if a < b:
                ranges.append(Place(a, whole * width + self.rank * size + a - inside, b - a))
            inside, whole = inside + size, whole + section
        return ranges


def part_of(parameter: Tensor) -> Part:
    """Returns the part of a parameter that this rank has; all of it, unless ranks share it."""
    return getattr(parameter, "part", Part())
