"""Who works on which matrix, where the ranks each keep pieces of it. Pure arithmetic, the same on every rank.

    pieces of every rank  ->  for each matrix an owner  ->  parts: (matrix, keeper, owner, where it lies)

A matrix of which one rank keeps all is worked on where it lies. Of the others, the rank that keeps half of one or more
works on it, or else the one with the least to do: at ZeRO 1 and 2, which cut a long row of parameters, few matrices
are cut; at ZeRO 3 all are, and the work is spread evenly.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from torch import Tensor


class Span(NamedTuple):
    """A piece of a parameter on a rank, without its values.

    Attributes:
        name: Parameter.
        slot: Number of the tensor that the piece lies in; the same on every rank.
        offset: First element in the flattened parameter.
        start: First element in the flattened tensor.
        length: Number of elements.
    """

    name: str
    slot: int
    offset: int
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class WeightPiece:
    """A piece of a parameter's fp32 master weight, as it lies on this rank.

    Attributes:
        span: What of which parameter, and where in the tensor.
        shape: Of the whole parameter.
        master: The tensor that the optimizer steps: a parameter, or many of them flattened and cut.
    """

    span: Span
    shape: tuple[int, ...]
    master: Tensor

    @property
    def weight(self) -> Tensor:
        """1-D live view."""
        return self.master.data.view(-1).narrow(0, self.span.start, self.span.length)


@dataclass(frozen=True, slots=True)
class MatrixBlock:
    """A matrix, or a vector, that an optimizer reads as one.

    Attributes:
        name: Parameter that it is a part of.
        number: Which part.
        offset: First element in the flattened parameter.
        shape: Its own.
    """

    name: str
    number: int
    offset: int
    shape: tuple[int, ...]

    @property
    def length(self) -> int:
        """Number of elements."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class BlockPart:
    """What one rank keeps of a block.

    Attributes:
        block: The block.
        keeper: Rank that keeps this part.
        owner: Rank that works on the block.
        start: First element in the keeper's flattened tensor.
        first: First element in the flattened block.
        length: Number of elements.
    """

    block: MatrixBlock
    keeper: int
    owner: int
    start: int
    first: int
    length: int


def blocks_of(name: str, shapes: Sequence[tuple[int, ...]]) -> list[MatrixBlock]:
    """Returns the blocks of a parameter that is made of matrices of these shapes, one below the other."""
    blocks, offset = [], 0
    for number, shape in enumerate(shapes):
        blocks.append(MatrixBlock(name, number, offset, shape))
        offset += prod(shape)
    return blocks


def plan_parts(blocks: Sequence[MatrixBlock], ranks: Sequence[Sequence[Span]]) -> list[list[BlockPart]]:
    """Returns the parts of each block, by rank, with an owner for each block.

    Args:
        blocks: In the same order on every rank.
        ranks: What each rank keeps. Together they keep every element of every block once.
    """
    spans: dict[str, list[tuple[int, Span]]] = {}
    for rank, kept in enumerate(ranks):
        for span in kept:
            spans.setdefault(span.name, []).append((rank, span))
    load = [0] * len(ranks)
    planned = []
    for block in blocks:
        kept_parts = []
        for rank, span in spans[block.name]:
            first = max(span.offset, block.offset)
            length = min(span.offset + span.length, block.offset + block.length) - first
            if length > 0:
                kept_parts.append((rank, span.start + first - span.offset, first - block.offset, length))
        assert sum(length for *_, length in kept_parts) == block.length, f"{block} is not all there"
        keeper, *_, most = max(kept_parts, key=lambda part: (part[3], -part[0]))
        owner = keeper if 2 * most >= block.length else min(range(len(load)), key=lambda rank: (load[rank], rank))
        load[owner] += block.length
        planned.append([BlockPart(block, rank, owner, *place) for rank, *place in kept_parts])
    return planned
