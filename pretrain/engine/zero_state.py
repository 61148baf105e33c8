"""Master weights, moments and loss scale of DeepSpeed's optimizers, as fragments.

    stage 0, fp32   the parameters themselves                                            whole on every rank
    stage 0, bf16   optimizer.fp32_groups, beside optimizer.fp16_groups                  whole on every rank
    stage 1, 2      one flat partition a group; _hp_mapping gives each parameter's part
    stage 3         every parameter sharded evenly over the ranks, padded at its end

Only this file and `deepspeed_engine.py` use attributes outside of DeepSpeed's documented interface;
`tests/integration/test_deepspeed_private.py` fails when one of them changes.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from pretrain.dist import World
from pretrain.engine.replicated import ReplicatedState, place_cut, set_optimizer_step, state_fragments
from pretrain.optim.pieces import Span, WeightPiece
from pretrain.types import Fragment, FragmentStore

# The dynamic loss scale of fp16 (Micikevicius et al. 2018, 3.2), the same on every rank. Without it, a resumed run
# would repeat the overflows of its first steps.

FIELDS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""Attributes of DeepSpeed's DynamicLossScaler that are saved."""


def _scaler(optimizer: Any) -> Any:
    scaler = getattr(optimizer, "loss_scaler", None)
    return scaler if getattr(scaler, "dynamic", False) else None


def read_loss_scale(optimizer: Any) -> dict[str, float]:
    """Returns the state of a DeepSpeed optimizer's loss scale; empty if it is not dynamic."""
    scaler = _scaler(optimizer)
    return {} if scaler is None else {f"loss_scale.{name}": getattr(scaler, name) for name in FIELDS}


def set_loss_scale(optimizer: Any, values: dict[str, float]) -> None:
    """Restores the result of `read_loss_scale`; does nothing if the scale is, or was, not dynamic."""
    scaler = _scaler(optimizer)
    if scaler is not None:
        for name in FIELDS:
            setattr(scaler, name, values.get(f"loss_scale.{name}", getattr(scaler, name)))


def never_raise(optimizer: Any) -> None:
    """Disables DeepSpeed's untyped exception at the minimum scale: such a step is skipped, and counts as a bad step."""
    scaler = _scaler(optimizer)
    if scaler is not None:
        scaler.raise_error_at_min_scale = False


def build_zero_state(engine: Any, names: dict[int, str], stage: int, world: World) -> FragmentStore:
    """Returns the state of a DeepSpeedEngine.

    Args:
        engine: The DeepSpeedEngine.
        names: Name of each parameter of the module, by `id(parameter)`.
        stage: ZeRO stage.
        world: Rank and world size.
    """
    if stage == 3:
        return _PartitionedParameters(engine, names, world)
    if stage in (1, 2):
        return _PartitionedGroups(engine, names, world)
    return _Replicated(engine, names, world)


class _Replicated(ReplicatedState):
    """Stage 0."""

    def __init__(self, engine: Any, names: dict[int, str], world: World) -> None:
        working = getattr(engine.optimizer, "fp16_groups", None)
        masters = engine.optimizer.fp32_groups if working else [g["params"] for g in engine.optimizer.param_groups]
        self._pairs = [
            (lp, hp)
            for lps, hps in zip(working or masters, masters, strict=True)
            for lp, hp in zip(lps, hps, strict=True)
        ]
        named = [(names[id(lp)], hp) for lp, hp in self._pairs]
        super().__init__(named, engine.basic_optimizer, world)

    def finish_load(self, optimizer_step: int, scalars: dict[str, float]) -> None:
        """Copies fp32 masters to bf16 weights; in fp32 they are the same tensors."""
        super().finish_load(optimizer_step, scalars)
        for working, master in self._pairs:
            if working is not master:
                working.data.copy_(master.data)


class _Partitioned:
    """State that is sharded over the ranks; `pieces` are those of this rank."""

    def __init__(self, engine: Any, pieces: list[WeightPiece], masters: list[Any], rank: int) -> None:
        self._zero, self._base, self._pieces = engine.optimizer, engine.basic_optimizer, pieces
        place_cut(self._base, masters, pieces, rank)

    def held_fragments(self) -> Iterator[Fragment]:
        """Yields this rank's part of the parameters, and of the optimizer's state."""
        yield from state_fragments(self._base, self._pieces)

    owned_fragments = held_fragments

    def scalars(self) -> dict[str, float]:
        """Returns the loss scale, in fp16."""
        return read_loss_scale(self._zero)

    def _restore(self, optimizer_step: int, scalars: dict[str, float]) -> None:
        set_optimizer_step(self._base, optimizer_step)
        set_loss_scale(self._zero, scalars)


class _PartitionedGroups(_Partitioned):
    """Stages 1 and 2."""

    def __init__(self, engine: Any, names: dict[int, str], world: World) -> None:
        # The working parameters of a group are in one flat tensor; these are this rank's partitions in fp32.
        masters = engine.optimizer.single_partition_of_fp32_groups
        groups = zip(engine.optimizer.bit16_groups, masters, strict=True)
        pieces = []
        for slot, (group, master) in enumerate(groups):
            for parameter in group:
                mapping = parameter._hp_mapping
                if mapping is not None:
                    place, offset = mapping.hp_fragment_address, mapping.lp_fragment_address.start
                    span = Span(names[id(parameter)], slot, offset, place.start, place.numel)
                    pieces.append(WeightPiece(span, tuple(parameter.shape), master))
        super().__init__(engine, pieces, masters, world.rank)

    @torch.no_grad()
    def finish_load(self, optimizer_step: int, scalars: dict[str, float]) -> None:
        """Copies this rank's masters to its working partition and gathers the others'."""
        self._restore(optimizer_step, scalars)
        self._zero.update_lp_params()


class _PartitionedParameters(_Partitioned):
    """Stage 3: an even share of every parameter, without padding."""

    def __init__(self, engine: Any, names: dict[int, str], world: World) -> None:
        zero = engine.optimizer
        masters = zero.fp32_partitioned_groups_flat
        pieces = []
        self._working: list[tuple[Tensor, Tensor]] = []
        for parameter in (parameter for group in zero.fp16_groups for parameter in group):
            slot, start, _ = zero.grad_position[zero.get_param_id(parameter)]
            share = parameter.ds_tensor.ds_numel
            self._working.append((parameter.ds_tensor, masters[slot].data.narrow(0, start, share)))
            offset = world.rank * share
            length = min(share, parameter.ds_numel - offset)
            if length > 0:
                span = Span(names[id(parameter)], slot, offset, start, length)
                pieces.append(WeightPiece(span, tuple(parameter.ds_shape), masters[slot]))
        super().__init__(engine, pieces, masters, world.rank)

    @torch.no_grad()
    def finish_load(self, optimizer_step: int, scalars: dict[str, float]) -> None:
        """Copies masters to the working shares, and gathers the small parameters that stay whole again."""
        self._restore(optimizer_step, scalars)
        for share, master in self._working:
            share.data.copy_(master)
        persistent = self._zero.persistent_parameters
        if persistent:
            persistent[0].partition(persistent, has_been_updated=False)
            persistent[0].all_gather(persistent)
