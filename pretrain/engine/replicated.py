"""Optimizer state as fragments, and engines and state that are whole on every rank.

DDP and one process are `TorchEngine`, in 16 bits over `FlatMasters` (`masters.py`); their state is
`ReplicatedState`, also of ZeRO 0.

torch optimizers create their state in the first `step()`; loading, and saving at step 0, need it
before. AdamW has two moments of the shape of each parameter; an optimizer over whole matrices
yields its own (`WholeOptimizer.fragments`).

Frozen parameters are state too, as weights without moments and without an fp32 master copy:

    fp32 working weights   saved and loaded in place
    bf16, fp16             converted to fp32 while saving or loading; the round trip is exact
    ZeRO 3                 this rank's share; otherwise whole, and each rank saves an even part
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pretrain import dist
from pretrain.config.engine import EngineConfig
from pretrain.dist import World
from pretrain.engine.engine import Update
from pretrain.engine.masters import FlatMasters
from pretrain.engine.shared_parameters import norm_over_ranks
from pretrain.engine.weight_average import AveragedState
from pretrain.errors import LaunchError
from pretrain.optim.build import create_moments_of, moments_of
from pretrain.optim.fused import FusedStep
from pretrain.optim.matrices import Span, WeightPiece, WholeOptimizer
from pretrain.parts import Part, part_of
from pretrain.types import Batch, Fragment, FragmentStore


def place_whole(optimizer: torch.optim.Optimizer, masters: Sequence[Tensor], pieces: Sequence[WeightPiece]) -> None:
    """Registers the matrices of an optimizer over whole matrices: each is whole on every rank.

    Of experts over ranks each is whole on the rank that has it.
    """
    if isinstance(optimizer, WholeOptimizer):
        parts = [part_of(piece.master) for piece in pieces]
        mine = max(parts, key=lambda part: part.ranks)
        spans: list[list[Span]] = [[] for _ in range(mine.ranks)]
        for piece, part in zip(pieces, parts, strict=True):
            for rank in range(part.ranks) if part.ranks > 1 else (mine.rank,):
                name, slot, _, start, length = piece.span
                (place,) = Part(rank, *part[1:]).places(piece.master.shape, 0, length)
                spans[rank].append(Span(name, slot, place.offset, start, length))
        optimizer.place(masters, pieces, spans, mine.rank)


def place_cut(
    optimizer: torch.optim.Optimizer, masters: Sequence[Tensor], pieces: Sequence[WeightPiece], rank: int
) -> None:
    """Registers the matrices of an optimizer over whole matrices: each is sharded. Collective."""
    if isinstance(optimizer, WholeOptimizer):
        gathered = dist.gather_objects([piece.span for piece in pieces])
        spans = [[Span(*values) for values in values_of_spans] for values_of_spans in gathered]
        optimizer.place(masters, pieces, spans, rank)


def weight_pieces(parameter: Any, shape: Sequence[int], span: Span, master: Tensor) -> Iterator[WeightPiece]:
    """Yields the pieces of a whole parameter that a span of this rank's part is, of this shape."""
    part = part_of(parameter)
    whole = tuple(part.whole(shape))
    for place in part.places(shape, span.offset, span.length):
        start = span.start + place.start - span.offset
        at = Span(span.name, span.slot, place.offset, start, place.length)
        yield WeightPiece(at, whole, master, place.stripes)


def state_fragments(optimizer: torch.optim.Optimizer, pieces: Sequence[WeightPiece]) -> Iterator[Fragment]:
    """Yields master weights with their moments, then the state of whole matrices."""
    over_matrices = isinstance(optimizer, WholeOptimizer)
    for piece in pieces:
        tensors = {"weight": piece.weight}
        if not (over_matrices and optimizer.takes_whole(piece.master)):
            create_moments_of(optimizer, piece.master)
            for key in moments_of(optimizer):
                flat = optimizer.state[piece.master][key].view(-1)
                tensors[key] = flat.narrow(0, piece.span.start, piece.span.length)
        yield Fragment(piece.span.name, piece.span.offset, piece.shape, tensors, piece.stripes)
    if over_matrices:
        yield from optimizer.fragments()


def set_optimizer_step(optimizer: torch.optim.Optimizer, step: int) -> None:
    """Sets the step count of all state."""
    for state in optimizer.state.values():
        if "step" in state:  # under ZeRO, the flat tensor of whole matrices has no AdamW state
            state["step"].fill_(step)
    if isinstance(optimizer, WholeOptimizer):
        optimizer.set_step(step)


def working_weights(module: nn.Module, names: dict[int, str]) -> Iterator[tuple[str, Tensor]]:
    """Yields name in checkpoints and live tensor of each parameter; at ZeRO 3 its shares."""
    for parameter in module.parameters():
        share = getattr(parameter, "ds_tensor", None)
        weight: Any = parameter.data if share is None else share.data
        if part_of(parameter).ranks > 1:
            weight.part = part_of(parameter)
        yield names[id(parameter)], weight


def unexpected(problem: str) -> LaunchError:
    """Returns the error of a library that did not build what the config requests."""
    return LaunchError(problem, fix="report this as a bug")


class WrappedModule:
    """Forward passes without gradient, and the weights they read, for every engine.

    Args:
        wrapped: The module in the wrapper of DeepSpeed or DDP.
        module: The same without the wrapper.
        names: Name of each parameter in checkpoints, by `id(parameter)`.
    """

    def __init__(self, wrapped: Any, module: nn.Module, names: dict[int, str]) -> None:
        self.module = module
        self.average: AveragedState | None = None
        self._wrapped = wrapped
        self._names = names

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor:
        """See `Engine.evaluate`."""
        self._wrapped.eval()
        return self._wrapped(batch)[1]

    @torch.no_grad()
    def rehearse(self, batch: Batch) -> Tensor:
        """See `Engine.rehearse`."""
        self._wrapped.train()
        return self._wrapped(batch)[1]

    def working_weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `Engine.working_weights`."""
        return working_weights(self.module, self._names)


def _is_whole(parameter: Tensor) -> bool:
    """Returns whether a rank has all of a parameter and of its gradient, or is to have its experts."""
    # Marks of ZeRO 3, of DTensor, and of an expert of DeepSpeed, whose gradient is not the world's.
    is_sharded = hasattr(parameter, "ds_tensor") or hasattr(parameter, "to_local")
    is_shared = part_of(parameter).ranks > 1
    return not is_sharded and (is_shared or getattr(parameter, "allreduce", True))


def _norm(parameters: Sequence[Tensor]) -> Tensor:
    assert all(map(_is_whole, parameters)), "a norm over several process groups is its engine's"
    return norm_over_ranks(parameters)


def clip_or_drop(
    parameters: Sequence[Tensor], grad_clip: float, drop: bool = False, norm: Tensor | None = None
) -> Update:
    """Clips reduced gradients to a global norm; discards them if it is not finite, or with `drop`.

    Every torch optimizer skips a parameter without a gradient, its moments and step count too. All
    ranks have the same reduced gradients, and the norm those of the experts of others, so that they
    decide alike; other parameters that are sharded, or reduced over some ranks, are refused. `norm`:
    the norm, where it is known.
    """
    norm = _norm(parameters) if norm is None else norm
    grad_norm = float(norm)
    skipped = drop or not math.isfinite(grad_norm)
    if skipped:
        for parameter in parameters:
            parameter.grad = None
    elif grad_clip:
        torch.nn.utils.clip_grads_with_norm_(parameters, grad_clip, norm)
    return Update(grad_norm, skipped)


def _skips_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether the optimizer's own kernel skips a step by `found_inf`.

    Those of torch's fused AdamW do, and ours. Cautious decay comes before torch's kernel, and is not skipped by it.
    """
    if isinstance(optimizer, FusedStep):
        return True
    is_fused = isinstance(optimizer, torch.optim.AdamW) and bool(optimizer.defaults["fused"])
    return is_fused and not any("cautious_decay" in group for group in optimizer.param_groups)


def _even_share(fragment: Fragment, world: World, part: Part) -> Iterator[Fragment]:
    """Yields what this rank saves of a fragment that all ranks with this part have, if anything."""
    rank, size = world.rank // part.ranks, world.size // part.ranks
    run, stride = fragment.stripes or (1, 1)
    length = fragment.length // run
    first, last = length * rank // size, length * (rank + 1) // size
    if first < last:
        tensors = {key: tensor[first * run : last * run] for key, tensor in fragment.tensors.items()}
        yield replace(fragment, offset=fragment.offset + first * stride, tensors=tensors)


class ReplicatedState:
    """Master weights and moments that are whole on every rank; each rank saves an even share.

    `masters` are the names and fp32 parameters that the optimizer updates, or flat tensors of many.
    Experts over ranks are whole on the ranks that have them.
    """

    def __init__(
        self,
        masters: list[tuple[str, Tensor]] | FlatMasters,
        optimizer: torch.optim.Optimizer,
        world: World,
    ) -> None:
        self._optimizer = optimizer
        self._world = world
        self._flat = masters if isinstance(masters, FlatMasters) else None
        self._pieces: list[WeightPiece] = []
        if isinstance(masters, FlatMasters):
            tensors, self._pieces = masters.tensors, masters.pieces
        else:
            tensors = [master for _, master in masters]
            for slot, (name, master) in enumerate(masters):
                span = Span(name, slot, offset=0, start=0, length=master.numel())
                self._pieces += weight_pieces(master, master.shape, span, master)
        self._parts = {piece.span.name: part_of(piece.master) for piece in self._pieces}
        place_whole(optimizer, tensors, self._pieces)

    def held_fragments(self) -> Iterator[Fragment]:
        """Yields every parameter, and the state of every matrix, whole."""
        yield from state_fragments(self._optimizer, self._pieces)

    def owned_fragments(self) -> Iterator[Fragment]:
        """Yields this rank's even share of every fragment."""
        for whole in self.held_fragments():
            yield from _even_share(whole, self._world, self._parts[whole.name])

    def scalars(self) -> dict[str, float]:
        """Returns nothing: there is no loss scale."""
        return {}

    def finish_load(self, optimizer_step: int, scalars: dict[str, float]) -> None:
        """See `FragmentStore.finish_load`."""
        set_optimizer_step(self._optimizer, optimizer_step)
        if self._flat is not None:
            self._flat.write_weights()


class TorchEngine(WrappedModule):
    """torch's DistributedDataParallel, or a single process; in 16 bits with fp32 masters."""

    def __init__(
        self,
        module: nn.Module,
        names: dict[int, str],
        optimizer: torch.optim.Optimizer,
        accelerator: Any,
        config: EngineConfig,
        grad_clip: float,
        world: World,
    ) -> None:
        self._masters: FlatMasters | None = None
        if config.has_masters:
            module.to(accelerator.device)
            self._masters = FlatMasters(module, names, optimizer, torch.bfloat16)
        # evaluation_mode makes accelerate move and autocast a model without the wrapper of DDP, which one
        # process does not need, and which accelerate gives it on a CPU alone.
        exchanges = config.kind == "ddp" and world.size > 1
        # Without device_placement accelerate imports DTensor, to look for one in the model; and on a CPU it
        # copies each parameter, out of its flat tensor too.
        moves, alone = self._masters is None, not exchanges
        wrapped = accelerator.prepare_model(module, device_placement=moves, evaluation_mode=alone)
        is_ddp = isinstance(wrapped, nn.parallel.DistributedDataParallel)
        if is_ddp != exchanges:
            built = f"accelerate built {type(wrapped).__name__}"
            raise unexpected(f"engine.kind={config.kind} was asked for, {built}")
        super().__init__(wrapped, module, names)
        self.device = accelerator.device
        devices = f"{world.on(self.device.type)}{config.on_host}"
        self.description = f"{config.kind}, {config.arithmetic}, {devices}"
        self._optimizer = optimizer
        self._grad_clip = grad_clip
        self._is_ddp = is_ddp
        self.is_sharded = self.needs_all_ranks = False
        masters: FlatMasters | list[tuple[str, Tensor]]
        if self._masters is not None:
            masters, self._stepped = self._masters, self._masters.tensors
        else:
            trained = [p for group in optimizer.param_groups for p in group["params"]]
            masters = [(names[id(p)], p) for p in trained]
            self._stepped = list(module.parameters())
        self.state: FragmentStore = ReplicatedState(masters, optimizer, world)

    def forward_backward(self, batch: Batch, scale: float, is_last: bool) -> Tensor:
        """See `Engine.forward_backward`."""
        if not self._wrapped.training:  # setting the mode walks every module
            self._wrapped.train()
        waits = self._is_ddp and not is_last
        with self._wrapped.no_sync() if waits else contextlib.nullcontext():
            loss_sum, sums = self._wrapped(batch)
            (loss_sum * scale).backward()
        return sums

    def update(self, learning_rate: float, drop: bool = False) -> Update:
        """See `Engine.update`."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate * group.get("lr_ratio", 1.0)
        if self._masters is not None:
            self._masters.take_gradients()
        if not drop and _skips_on_device(self._optimizer):
            return self._update_on_device()
        update = clip_or_drop(self._stepped, self._grad_clip, drop, self._norm())
        self._step()
        return update

    def _norm(self) -> Tensor:
        return _norm(self._stepped) if self._masters is None else self._masters.norm()

    def _step(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if self._masters is not None and not isinstance(self._optimizer, FusedStep):
            self._masters.write_weights()

    def _update_on_device(self) -> Update:
        """Queues the update, then waits for its norm: a GPU is not idle in between."""
        optimizer: Any = self._optimizer
        norm = self._norm()
        norm_on_host = dist.start_copy_to_host(norm)
        if self._grad_clip and isinstance(optimizer, FusedStep):
            optimizer.grad_scale = ((norm + 1e-6) / self._grad_clip).clamp(min=1.0)
        elif self._grad_clip:
            torch.nn.utils.clip_grads_with_norm_(self._stepped, self._grad_clip, norm)
        optimizer.found_inf = norm.isfinite().logical_not().float()
        self._step()
        optimizer.found_inf = optimizer.grad_scale = None
        grad_norm = float(norm_on_host())
        return Update(grad_norm, not math.isfinite(grad_norm))


class KeptTensor(NamedTuple):
    """A tensor that checkpoints keep and no optimizer steps.

    Attributes:
        name: Parameter, in checkpoints.
        kind: `weight`, or the kind of a tensor of another size, as in `Fragment`.
        tensor: The live tensor.
        shape: Shape of the whole parameter; None: that of the tensor.
    """

    name: str
    kind: str
    tensor: Tensor
    shape: tuple[int, ...] | None = None


class CompleteState:
    """State of an engine, and what else a checkpoint keeps: frozen parameters, loads of experts."""

    def __init__(self, trained: FragmentStore, kept: Sequence[KeptTensor], world: World) -> None:
        self._trained = trained
        self._kept = kept
        self._world = world
        self._filled: list[tuple[Tensor, Tensor]] = []

    def held_fragments(self) -> Iterator[Fragment]:
        """Yields the trained state, and this rank's part of what is kept beside it."""
        yield from self._trained.held_fragments()
        self._filled = []
        for one in self._kept:
            for fragment in self._pieces_of(one):
                live = fragment.tensors[one.kind]
                values = live if live.dtype == torch.float32 else live.float()
                if values is not live:
                    self._filled.append((live, values))
                yield replace(fragment, tensors={one.kind: values})

    def owned_fragments(self) -> Iterator[Fragment]:
        """Yields the fragments that this rank saves."""
        yield from self._trained.owned_fragments()
        for one in self._kept:
            for fragment in self._pieces_of(one):
                is_share = hasattr(one.tensor, "ds_tensor")
                pieces = (fragment,) if is_share else _even_share(fragment, self._world, part_of(one.tensor))
                for piece in pieces:
                    yield replace(piece, tensors={one.kind: piece.tensors[one.kind].float()})

    def _pieces_of(self, one: KeptTensor) -> Iterator[Fragment]:
        tensor: Any = one.tensor
        live, shape, first = tensor.data.view(-1), tensor.shape, 0
        if hasattr(tensor, "ds_tensor"):
            live, shape = tensor.ds_tensor.data, tensor.ds_shape
            first = tensor.ds_zero_partition_rank * tensor.ds_tensor.ds_numel
            live = live[: max(0, tensor.ds_numel - first)]
        span = Span(one.name, 0, first, 0, live.numel())
        for piece in weight_pieces(tensor, shape, span, live):
            whole = one.shape or piece.shape
            yield Fragment(one.name, piece.span.offset, whole, {one.kind: piece.weight}, piece.stripes)

    def scalars(self) -> dict[str, float]:
        """See `FragmentStore.scalars`."""
        return self._trained.scalars()

    @torch.no_grad()
    def finish_load(self, optimizer_step: int, scalars: dict[str, float]) -> None:
        """Copies loaded values to working weights, before ZeRO 3 gathers small parameters."""
        for live, values in self._filled:
            live.copy_(values)
        self._filled = []
        self._trained.finish_load(optimizer_step, scalars)
