"""Steps torch optimizers over whole matrices (Muon, Adafactor) on masters that are flattened and sharded over ranks.

Muon sets the singular values of a matrix's update equal, Adafactor's variance is a row times a column: neither works on
the flat pieces of ZeRO. So, in each step:

    matrices that are whole on this rank   ->  stepped in place, as views
    matrices that are sharded              ->  gathered on one rank each, stepped there, and sent back
    parameters of other groups             ->  AdamW, on the tensors of the engine

    keepers -- weight and gradient, all-to-all -->  owners: step whole matrices  -- weight, all-to-all --> keepers

The update rule is torch's class, unchanged, with its own state on the owner of a matrix. Without a sharding engine,
every matrix is whole on every rank, and nothing is sent.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, distributed, nn

from pretrain.optim.groups import ParameterGroup
from pretrain.optim.pieces import BlockPart, MatrixBlock, Span, WeightPiece, blocks_of, plan_parts
from pretrain.types import Fragment

ROUND_ELEMENTS = 2**24
"""Elements of a rank in one exchange, about: 128 MiB of gradients and weights."""


def cut_into_rounds(blocks: Sequence[list[BlockPart]], num_ranks: int) -> list[list[BlockPart]]:
    """Groups the parts of blocks into rounds of bounded size, each of at least one block."""
    rounds: list[list[BlockPart]] = []
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
    """One exchange of the parts of sharded matrices. Its calls are collective.

    Args:
        parts: Parts of the blocks of this round, of every rank.
        rank: This rank.
        num_ranks: Number of ranks.
    """

    def __init__(self, parts: list[BlockPart], rank: int, num_ranks: int) -> None:
        # Sorting is stable: between two ranks, both sides see the same parts in the same order.
        self._kept = sorted((p for p in parts if p.keeper == rank), key=lambda part: part.owner)
        self._worked_on = sorted((p for p in parts if p.owner == rank), key=lambda part: part.keeper)
        self._kept_sizes = [sum(p.length for p in self._kept if p.owner == r) for r in range(num_ranks)]
        self._worked_on_sizes = [sum(p.length for p in self._worked_on if p.keeper == r) for r in range(num_ranks)]

    def run(self, master: Tensor, step: Callable[[dict[MatrixBlock, tuple[Tensor, Tensor]]], None]) -> None:
        """Steps the blocks of this round.

        Args:
            master: fp32; this rank's parts are read from it and from its gradient, and written back to it.
            step: Called with {block: (weight, gradient)} of this rank's blocks; modifies the weights in place.
        """
        weights, gradients = master.data.view(-1), master.grad
        assert gradients is not None, "a sharding engine gives every tensor a gradient"
        whole = self._gather(gradients.view(-1), weights)
        step(whole)
        flat = [whole[p.block][0].view(-1)[p.first : p.first + p.length] for p in self._worked_on]
        back = self._send(flat, weights, self._worked_on_sizes, self._kept_sizes)
        for part, values in zip(self._kept, back.split([p.length for p in self._kept]), strict=True):
            weights[part.start : part.start + part.length] = values

    def _gather(self, gradients: Tensor, weights: Tensor) -> dict[MatrixBlock, tuple[Tensor, Tensor]]:
        pairs = [source[p.start : p.start + p.length] for p in self._kept for source in (weights, gradients)]
        sizes = [[2 * size for size in side] for side in (self._kept_sizes, self._worked_on_sizes)]
        received = self._send(pairs, weights, *sizes)
        whole: dict[MatrixBlock, tuple[Tensor, Tensor]] = {}
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


MakeRule = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True, slots=True)
class WholeGroup:
    """Parameters whose matrices are stepped whole.

    Attributes:
        group: Parameters and the matrices of each.
        make: Builds the torch optimizer over matrices of this group.
        lr: Peak learning rate.
        lr_ratio: `lr` over `optim.lr`, to which the schedule applies.
    """

    group: ParameterGroup
    make: MakeRule
    lr: float
    lr_ratio: float = 1.0


class WholeOptimizer(torch.optim.Optimizer):
    """AdamW for some groups, and for others a torch optimizer over whole matrices.

    Leaves the matrices unchanged until `place` has registered them: a sharding engine takes a step of zeros while it
    is built.

    Args:
        groups: Groups of whole matrices.
        elementwise: Optimizer of all other parameters; None if there are none.
    """

    def __init__(self, groups: Sequence[WholeGroup], elementwise: torch.optim.Optimizer | None) -> None:
        own = [
            {"params": list(g.group.parameters), "lr": g.lr, "lr_ratio": g.lr_ratio, "name": g.group.name}
            for g in groups
        ]
        # The dicts of the elementwise optimizer are shared: an engine replaces the parameters in them.
        super().__init__([*own, *(elementwise.param_groups if elementwise else [])], {})
        self._elementwise = elementwise
        if elementwise is not None:
            elementwise.state = self.state
        self._groups = {g.group.name: g for g in groups}
        self._rules: dict[str, _Rule] = {}
        self._masters: set[int] = set()

    def place(
        self, masters: Sequence[Tensor], pieces: Sequence[WeightPiece], ranks: Sequence[Sequence[Span]], rank: int
    ) -> None:
        """Registers where the masters are.

        Args:
            masters: Every tensor that the engine steps, by slot, with or without a piece on this rank.
            pieces: Pieces on this rank.
            ranks: Spans of the pieces of every rank; of this rank only, if every rank has all.
            rank: Index of this rank in `ranks`.
        """
        for name, group in self._groups.items():
            members = dict(zip(group.group.names, group.group.blocks, strict=True))
            shared = [[span for span in spans if span.name in members] for spans in ranks]
            slots = {span.name: span.slot for spans in shared for span in spans}
            assert slots.keys() == members.keys(), "every parameter of the group is kept by some rank"
            blocks = [block for key, shapes in members.items() for block in blocks_of(key, shapes)]
            own = {slot: masters[slot] for slot in set(slots.values())}
            shapes = {piece.span.name: piece.shape for piece in pieces}
            self._rules[name] = _Rule(group.make, own, slots, shapes, plan_parts(blocks, shared), rank, len(ranks))
            self._masters |= {id(master) for master in own.values()}

    def takes_whole(self, master: Tensor) -> bool:
        """Tells whether a master contains matrices that are stepped whole; their state is in `fragments`."""
        return id(master) in self._masters

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Steps every group; collective if matrices are sharded."""
        assert closure is None
        for group in self.param_groups:
            if group["name"] not in self._groups:
                assert self._elementwise is not None
                self._elementwise.param_groups = [group]
                self._elementwise.step()
            elif self._rules:
                self._rules[group["name"]].step(group["params"], group["lr"])

    def fragments(self) -> Iterator[Fragment]:
        """Yields the state of the matrices that this rank owns, and creates missing state."""
        for rule in self._rules.values():
            yield from rule.fragments()

    def set_step(self, step: int) -> None:
        """Sets the step counts of the rules."""
        for rule in self._rules.values():
            rule.set_step(step)


class _Rule:
    """A torch optimizer over the matrices that one rank owns."""

    def __init__(
        self,
        make: MakeRule,
        masters: dict[int, Tensor],
        slots: dict[str, int],
        shapes: dict[str, tuple[int, ...]],
        planned: list[list[BlockPart]],
        rank: int,
        num_ranks: int,
    ) -> None:
        self._slots = {id(master): slot for slot, master in masters.items()}
        self._shapes = shapes
        self._local: dict[int, list[BlockPart]] = {}
        cut: dict[int, list[list[BlockPart]]] = {}
        for parts in planned:
            slot = slots[parts[0].block.name]
            if len(parts) > 1:
                cut.setdefault(slot, []).append(parts)
            elif parts[0].keeper == rank:
                self._local.setdefault(slot, []).append(parts[0])
        self._rounds = {
            slot: [Round(parts, rank, num_ranks) for parts in cut_into_rounds(blocks, num_ranks)]
            for slot, blocks in cut.items()
        }
        device = next(iter(masters.values())).device
        # A handle identifies a matrix and its state in the optimizer; between steps it is empty.
        self._handles = {
            parts[0].block: nn.Parameter(torch.empty(0, *parts[0].block.shape[1:], device=device), requires_grad=False)
            for parts in planned
            if parts[0].owner == rank
        }
        self._optimizer = make(list(self._handles.values())) if self._handles else None

    def step(self, masters: list[Tensor], learning_rate: float) -> None:
        """Steps the matrices of these masters."""
        here: dict[MatrixBlock, tuple[Tensor, Tensor]] = {}
        for master in masters:
            if master.grad is None:
                continue
            weights, gradients = master.data.view(-1), master.grad.reshape(-1)
            for part in self._local.get(self._slots[id(master)], []):
                place = slice(part.start, part.start + part.length)
                here[part.block] = weights[place].view(part.block.shape), gradients[place].view(part.block.shape)
        self._step_whole(here, learning_rate)
        for master in masters:
            for exchange in self._rounds.get(self._slots[id(master)], []):
                exchange.run(master, lambda whole: self._step_whole(whole, learning_rate))

    def _step_whole(self, matrices: dict[MatrixBlock, tuple[Tensor, Tensor]], learning_rate: float) -> None:
        if self._optimizer is None or not matrices:
            return
        for block, (weight, gradient) in matrices.items():
            self._handles[block].data, self._handles[block].grad = weight, gradient
        self._optimizer.param_groups[0]["lr"] = learning_rate
        self._optimizer.step()
        for block in matrices:
            self._release(self._handles[block])

    @staticmethod
    def _release(handle: nn.Parameter) -> None:
        handle.grad = None
        handle.data = handle.data.new_empty(0, *handle.shape[1:])

    def fragments(self) -> Iterator[Fragment]:
        """Yields the state of each matrix; a tensor of its size as a piece of the parameter's state."""
        if self._optimizer is None:
            return
        for block, handle in self._handles.items():
            if not self._optimizer.state.get(handle):
                self._create_state(block)
            for key, value in self._optimizer.state[handle].items():
                if key == "step":
                    continue
                shape = self._shapes[block.name]
                if value.numel() == block.length:
                    yield Fragment(block.name, block.offset, shape, {key: value.view(-1)})
                else:
                    yield Fragment(block.name, 0, shape, {f"{key}.{block.number}": value.view(-1)})

    @torch.no_grad()
    def _create_state(self, block: MatrixBlock) -> None:
        """Makes the optimizer create the state of a matrix, by a step of zeros."""
        handle = self._handles[block]
        zeros = torch.zeros(block.shape, device=handle.device)
        self._step_whole({block: (zeros, torch.zeros_like(zeros))}, 0.0)
        self._reset_step(handle, 0)

    def set_step(self, step: int) -> None:
        """Sets the step count of every matrix that has state."""
        if self._optimizer is not None:
            for handle in self._optimizer.state:
                self._reset_step(handle, step)

    def _reset_step(self, handle: Tensor, step: int) -> None:
        assert self._optimizer is not None
        count = self._optimizer.state[handle].get("step")
        if count is not None:
            count.fill_(step)
