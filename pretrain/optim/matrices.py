"""Steps torch optimizers over whole matrices (Muon, Adafactor) on masters sharded over ranks.

Muon sets the singular values of a matrix's update equal, Adafactor's variance is a row times a
column: neither works on the flat pieces of ZeRO. So, in each step:

    matrices that are whole on this rank  ->  stepped in place, as views
    matrices that are sharded             ->  gathered on one rank each, stepped, and sent back
    parameters of other groups            ->  AdamW, on the tensors of the engine

    keepers  --weight and gradient, all-to-all-->  owners: step whole matrices
    owners   --weight, all-to-all-->               keepers

An owner is planned for each matrix, the same on every rank: the rank that has at least half of it,
otherwise the rank with the least work. ZeRO 1 and 2 shard a long concatenation of parameters, so
that few matrices are split; ZeRO 3 splits all of them.

The update rule is a torch optimizer, with its own state on the owner of a matrix.
Without a sharding engine, every matrix is whole on every rank, and nothing is sent.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, distributed, nn

from pretrain.optim.groups import ParameterGroup
from pretrain.parts import Stripes
from pretrain.types import Fragment


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
    """A piece of a parameter of some shape in a tensor on this rank.

    `master` is the fp32 tensor that the optimizer steps: a parameter, or a flat partition of many.
    `stripes` are its elements after the first; None: one after another.
    """

    span: Span
    shape: tuple[int, ...]
    master: Tensor
    stripes: Stripes | None = None

    @property
    def weight(self) -> Tensor:
        """1-D live view."""
        return self.master.data.view(-1).narrow(0, self.span.start, self.span.length)


@dataclass(frozen=True, slots=True)
class MatrixBlock:
    """A matrix or vector that an optimizer steps as a whole.

    It is number `number` of parameter `name`, from element `offset` of the flattened parameter on.
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
    """The part of a block on one rank, the keeper; the owner steps the block.

    `start` is the first element in the keeper's flattened tensor, `first` that in the flattened
    block.
    """

    block: MatrixBlock
    keeper: int
    owner: int
    start: int
    first: int
    length: int


def blocks_of(name: str, shapes: Sequence[tuple[int, ...]]) -> list[MatrixBlock]:
    """Returns the blocks of a parameter, given the shapes of its matrices from the top."""
    blocks = []
    offset = 0
    for number, shape in enumerate(shapes):
        blocks.append(MatrixBlock(name, number, offset, shape))
        offset += prod(shape)
    return blocks


def plan_parts(blocks: Sequence[MatrixBlock], ranks: Sequence[Sequence[Span]]) -> list[list[BlockPart]]:
    """Returns the parts of each block, by rank, with an owner for each block.

    Blocks have the same order on every rank. The spans of all ranks cover every element once.
    """
    spans = defaultdict(list)
    for rank, owned in enumerate(ranks):
        for span in owned:
            spans[span.name].append((rank, span))
    load = [0] * len(ranks)
    planned = []
    for block in blocks:
        kept_parts = []
        for rank, span in spans[block.name]:
            first = max(span.offset, block.offset)
            length = min(span.offset + span.length, block.offset + block.length) - first
            if length > 0:
                start = span.start + first - span.offset
                kept_parts.append((rank, start, first - block.offset, length))
        assert sum(length for *_, length in kept_parts) == block.length, f"{block} is incomplete"
        keeper, *_, most = max(kept_parts, key=lambda part: (part[3], -part[0]))
        owner = keeper if 2 * most >= block.length else load.index(min(load))
        load[owner] += block.length
        planned.append([BlockPart(block, rank, owner, *place) for rank, *place in kept_parts])
    return planned


Matrices = dict[MatrixBlock, tuple[Tensor, Tensor]]
"""Weight and gradient of each block."""

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
    """One exchange of the parts of sharded matrices, given every rank's. Collective."""

    def __init__(self, parts: list[BlockPart], rank: int, num_ranks: int) -> None:
        # Sorting is stable: between two ranks, both sides see the same parts in the same order.
        self._kept = sorted((p for p in parts if p.keeper == rank), key=lambda part: part.owner)
        self._owned = sorted((p for p in parts if p.owner == rank), key=lambda part: part.keeper)
        ranks = range(num_ranks)
        self._kept_sizes = [sum(p.length for p in self._kept if p.owner == r) for r in ranks]
        self._owned_sizes = [sum(p.length for p in self._owned if p.keeper == r) for r in ranks]

    def run(self, master: Tensor, step: Callable[[Matrices], None]) -> None:
        """Steps the blocks of this round; `step` modifies the weights in place.

        This rank's parts are read from the fp32 master and from its gradient, and written back.
        """
        weights, gradients = master.data.view(-1), master.grad
        assert gradients is not None, "a sharding engine gives every tensor a gradient"
        whole = self._gather(gradients.view(-1), weights)
        step(whole)
        flat = [whole[p.block][0].view(-1)[p.first : p.first + p.length] for p in self._owned]
        back = self._send(flat, weights, self._owned_sizes, self._kept_sizes)
        pieces = back.split([p.length for p in self._kept])
        for part, values in zip(self._kept, pieces, strict=True):
            weights[part.start : part.start + part.length] = values

    def _gather(self, gradients: Tensor, weights: Tensor) -> Matrices:
        pairs = []
        for part in self._kept:
            place = slice(part.start, part.start + part.length)
            pairs += [weights[place], gradients[place]]
        sizes = [[2 * size for size in side] for side in (self._kept_sizes, self._owned_sizes)]
        received = self._send(pairs, weights, *sizes)
        whole: Matrices = {}
        values = iter(received.split([p.length for p in self._owned for _ in range(2)]))
        for part in self._owned:
            if part.block not in whole:
                shape = part.block.shape
                whole[part.block] = (weights.new_empty(shape), weights.new_empty(shape))
            for target in whole[part.block]:
                target.view(-1)[part.first : part.first + part.length] = next(values)
        return whole

    def _send(self, tensors: list[Tensor], like: Tensor, sizes: list[int], received_sizes: list[int]) -> Tensor:
        out = torch.cat(tensors) if tensors else like.new_empty(0)
        received = like.new_empty(sum(received_sizes))
        distributed.all_to_all_single(received, out, received_sizes, sizes)
        return received


MakeRule = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class WholeGroup(NamedTuple):
    """Parameters whose matrices are stepped whole, by the torch optimizer that `make` builds.

    `lr_ratio` is the peak learning rate `lr` over `optim.lr`, to which the schedule applies.
    """

    group: ParameterGroup
    make: MakeRule
    lr: float
    lr_ratio: float


class WholeOptimizer(torch.optim.Optimizer):
    """AdamW for some groups, and for others a torch optimizer over whole matrices.

    Leaves the matrices unchanged until `place` has registered them: a sharding engine takes a step
    of zeros while it is built. `elementwise` steps all other parameters; None if there are none.
    """

    def __init__(self, groups: Sequence[WholeGroup], elementwise: torch.optim.Optimizer | None) -> None:
        groups_of_rules = [
            {"params": list(group.parameters), "lr": lr, "lr_ratio": lr_ratio, "name": group.name}
            for group, _, lr, lr_ratio in groups
        ]
        # The dicts of the elementwise optimizer are shared: an engine replaces the parameters in
        # them.
        super().__init__([*groups_of_rules, *(elementwise.param_groups if elementwise else [])], {})
        self._elementwise = elementwise
        if elementwise is not None:
            elementwise.state = self.state
        self._groups = {whole.group.name: whole for whole in groups}
        self._rules: dict[str, _Rule] = {}

    def place(
        self, masters: Sequence[Tensor], pieces: Sequence[WeightPiece], ranks: Sequence[Sequence[Span]], rank: int
    ) -> None:
        """Registers every tensor that the engine steps, by slot, and the pieces on this rank.

        `ranks` are the spans of the pieces of every rank; of this rank only, if every rank has all.
        `rank` is the index of this rank in `ranks`.
        """
        for name, whole in self._groups.items():
            self._rules[name] = _Rule(whole, masters, pieces, ranks, rank)

    def takes_whole(self, master: Tensor) -> bool:
        """Returns whether a master contains matrices; their state is in `fragments`."""
        return any(id(master) in rule.masters for rule in self._rules.values())

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
        whole: WholeGroup,
        masters: Sequence[Tensor],
        pieces: Sequence[WeightPiece],
        ranks: Sequence[Sequence[Span]],
        rank: int,
    ) -> None:
        members = dict(zip(whole.group.names, whole.group.blocks, strict=True))
        shared = [[span for span in spans if span.name in members] for spans in ranks]
        placed = {span.name: masters[span.slot] for spans in shared for span in spans}
        assert placed.keys() == members.keys(), "some rank keeps every parameter of the group"
        self.masters = {id(master) for master in placed.values()}
        self._shapes = {piece.span.name: piece.shape for piece in pieces}
        blocks = [block for name, shapes in members.items() for block in blocks_of(name, shapes)]
        # Matrices by master: whole on this rank, and cut over several.
        self._local: dict[int, list[BlockPart]] = defaultdict(list)
        self._rounds: dict[int, list[Round]] = defaultdict(list)
        # A handle identifies a matrix and its state in the optimizer; between steps it is empty.
        self._handles: dict[MatrixBlock, nn.Parameter] = {}
        parts = plan_parts(blocks, shared)
        self._divide([(block, placed[block.name]) for block in blocks], parts, rank, len(ranks))
        self._optimizer = whole.make(list(self._handles.values())) if self._handles else None

    def _divide(
        self,
        blocks: Sequence[tuple[MatrixBlock, Tensor]],
        planned: Sequence[list[BlockPart]],
        rank: int,
        num_ranks: int,
    ) -> None:
        cut: dict[int, list[list[BlockPart]]] = defaultdict(list)
        for (block, master), parts in zip(blocks, planned, strict=True):
            if len(parts) > 1:
                cut[id(master)].append(parts)
            elif parts[0].keeper == rank:
                self._local[id(master)].append(parts[0])
            if parts[0].owner == rank:
                empty = torch.empty(0, *block.shape[1:], device=master.device)
                self._handles[block] = nn.Parameter(empty, requires_grad=False)
        for master_id, parts_of_blocks in cut.items():
            for parts in cut_into_rounds(parts_of_blocks, num_ranks):
                self._rounds[master_id].append(Round(parts, rank, num_ranks))

    def step(self, masters: list[Tensor], learning_rate: float) -> None:
        here: Matrices = {}
        for master in masters:
            if master.grad is None:
                continue
            weights = master.data.view(-1)
            gradients = master.grad.reshape(-1)
            for part in self._local[id(master)]:
                place = slice(part.start, part.start + part.length)
                shape = part.block.shape
                here[part.block] = weights[place].view(shape), gradients[place].view(shape)
        self._step_whole(here, learning_rate)
        for master in masters:
            for exchange in self._rounds[id(master)]:
                exchange.run(master, lambda whole: self._step_whole(whole, learning_rate))

    def _step_whole(self, matrices: Matrices, learning_rate: float) -> None:
        if self._optimizer is None or not matrices:
            return
        for block, (weight, gradient) in matrices.items():
            self._handles[block].data = weight
            self._handles[block].grad = gradient
        self._optimizer.param_groups[0]["lr"] = learning_rate
        self._optimizer.step()
        for block in matrices:
            handle = self._handles[block]
            handle.grad = None
            handle.data = handle.data.new_empty(0, *handle.shape[1:])

    def fragments(self) -> Iterator[Fragment]:
        """Yields the state of each matrix; tensors of its size as pieces of the parameter's."""
        if self._optimizer is None:
            return
        state = self._optimizer.state
        for block, handle in self._handles.items():
            if not state.get(handle):
                self._create_state(block, state)
            shape = self._shapes[block.name]
            for key, value in state[handle].items():
                if key == "step":
                    continue
                offset = block.offset
                if value.shape != block.shape:
                    offset, key = 0, f"{key}.{block.number}"
                yield Fragment(block.name, offset, shape, {key: value.view(-1)})

    @torch.no_grad()
    def _create_state(self, block: MatrixBlock, state: dict[Tensor, dict[str, Tensor]]) -> None:
        handle = self._handles[block]
        zeros = torch.zeros(block.shape, device=handle.device)
        self._step_whole({block: (zeros, torch.zeros_like(zeros))}, 0.0)
        _set_step(state[handle], 0)

    def set_step(self, step: int) -> None:
        if self._optimizer is not None:
            for state in self._optimizer.state.values():
                _set_step(state, step)


def _set_step(state: dict[str, Tensor], step: int) -> None:
    if "step" in state:
        state["step"].fill_(step)
