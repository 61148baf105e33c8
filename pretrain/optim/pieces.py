"""Plans which rank owns (steps) which matrix, given the pieces of every rank. Pure, and the same on every rank.

    pieces of every rank  ->  an owner for each matrix  ->  parts: (matrix, keeper, owner, position)

The owner of a matrix is the rank that has at least half of it, otherwise the rank with the least work. ZeRO 1 and 2
shard a long concatenation of parameters, so that few matrices are split; ZeRO 3 splits all of them.
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
        span: Position in the parameter and in the tensor.
        shape: Shape of the whole parameter.
        master: Tensor that the optimizer steps: a parameter, or a partition of many, flattened.
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
    """A matrix or vector that an optimizer steps as a whole.

    Attributes:
        name: Parameter that contains it.
        number: Index in the parameter.
        offset: First element in the flattened parameter.
        shape: Shape of the block.
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
    """The part of a block on one rank.

    Attributes:
        block: The block.
        keeper: Rank that stores this part.
        owner: Rank that steps the block.
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
    """Returns the blocks of a parameter, given the shapes of its matrices from the top."""
    blocks, offset = [], 0
    for number, shape in enumerate(shapes):
        blocks.append(MatrixBlock(name, number, offset, shape))
        offset += prod(shape)
    return blocks


def plan_parts(blocks: Sequence[MatrixBlock], ranks: Sequence[Sequence[Span]]) -> list[list[BlockPart]]:
    """Returns the parts of each block, by rank, with an owner for each block.

    Args:
        blocks: In the same order on every rank.
        ranks: Spans of each rank; together they cover every element of every block once.
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
        assert sum(length for *_, length in kept_parts) == block.length, f"{block} is incomplete"
        keeper, *_, most = max(kept_parts, key=lambda part: (part[3], -part[0]))
        owner = keeper if 2 * most >= block.length else min(range(len(load)), key=lambda rank: (load[rank], rank))
        load[owner] += block.length
        planned.append([BlockPart(block, rank, owner, *place) for rank, *place in kept_parts])
    return planned
