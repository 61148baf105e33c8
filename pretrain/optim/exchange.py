"""Brings the parts of cut matrices to the ranks that work on them, and the results back.

    keepers -- weight and gradient, all-to-all -->  owners: step whole matrices  -- weight, all-to-all --> keepers

A round moves a bounded number of elements, so that what is whole at any time is small beside the model.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, distributed

from pretrain.optim.pieces import Block, Part

ROUND_ELEMENTS = 2**24
"""Elements that a rank works on in a round, about: 128 MiB of gradients and weights."""


def cut_into_rounds(blocks: Sequence[list[Part]], num_ranks: int) -> list[list[Part]]:
    """Groups the parts of blocks so that each group holds no more than a round should, but at least one block."""
    rounds: list[list[Part]] = []
    size = 0
    for parts in blocks:
        length = parts[0].block.length
        if not rounds or size + length > ROUND_ELEMENTS * num_ranks:
            rounds.append([])
            size = 0
        rounds[-1] += parts
        size += length
    return rounds


class Round:
    """One exchange of parts of cut matrices. Its calls are collective.

    Args:
        parts: Of the blocks of this round, on every rank.
        rank: This one.
        num_ranks: How many there are.
    """

    def __init__(self, parts: list[Part], rank: int, num_ranks: int) -> None:
        # Sorting is stable: between two ranks, both sides see the same parts in the same order.
        self._kept = sorted((p for p in parts if p.keeper == rank), key=lambda part: part.owner)
        self._worked_on = sorted((p for p in parts if p.owner == rank), key=lambda part: part.keeper)
        self._kept_sizes = [sum(p.length for p in self._kept if p.owner == r) for r in range(num_ranks)]
        self._worked_on_sizes = [sum(p.length for p in self._worked_on if p.keeper == r) for r in range(num_ranks)]

    def run(self, master: Tensor, step: Callable[[dict[Block, tuple[Tensor, Tensor]]], None]) -> None:
        """Steps the blocks of this round.

        Args:
            master: fp32; this rank's parts are read from it and from its gradient, and written back to it.
            step: Called with {block: (weight, gradient)}, whole, of this rank's blocks; it changes the weights.
        """
        weights, gradients = master.data.view(-1), master.grad
        assert gradients is not None, "an engine that cuts parameters gives every tensor a gradient"
        whole = self._gather(gradients.view(-1), weights)
        step(whole)
        flat = [whole[p.block][0].view(-1)[p.first : p.first + p.length] for p in self._worked_on]
        back = self._send(flat, weights, self._worked_on_sizes, self._kept_sizes)
        for part, values in zip(self._kept, back.split([p.length for p in self._kept]), strict=True):
            weights[part.start : part.start + part.length] = values

    def _gather(self, gradients: Tensor, weights: Tensor) -> dict[Block, tuple[Tensor, Tensor]]:
        pairs = [source[p.start : p.start + p.length] for p in self._kept for source in (weights, gradients)]
        sizes = [[2 * size for size in side] for side in (self._kept_sizes, self._worked_on_sizes)]
        received = self._send(pairs, weights, *sizes)
        whole: dict[Block, tuple[Tensor, Tensor]] = {}
        lengths = [p.length for p in self._worked_on for _ in range(2)]
        values = iter(received.split(lengths))
        for part in self._worked_on:
            if part.block not in whole:
                whole[part.block] = (weights.new_empty(part.block.shape), weights.new_empty(part.block.shape))
            for target in whole[part.block]:
                target.view(-1)[part.first : part.first + part.length] = next(values)
        return whole

    def _send(self, tensors: list[Tensor], like: Tensor, sizes: list[int], received_sizes: list[int]) -> Tensor:
        out = torch.cat(tensors) if tensors else like.new_empty(0)
        received = like.new_empty(sum(received_sizes))
        distributed.all_to_all_single(received, out, received_sizes, sizes)
        return received
