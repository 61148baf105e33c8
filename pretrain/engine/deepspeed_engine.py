"""DeepSpeed, ZeRO 0 to 3 behind accelerate: its steps, dropped steps, and its state.

Master weights and moments are stored by stage, and yielded as fragments:

    stage 0, fp32   the parameters themselves                                   whole on every rank
    stage 0, bf16   optimizer.fp32_groups, beside optimizer.fp16_groups         whole on every rank
    stage 1, 2      one flat partition a group; _hp_mapping gives each parameter's part
    stage 3         every parameter sharded evenly over the ranks, padded at its end

Only this file uses attributes outside of DeepSpeed's documented interface;
`tests/integration/test_deepspeed_private.py` fails when one of them changes.
"""

import contextlib
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from pretrain.config.engine import EngineConfig
from pretrain.dist import World, start_copy_to_host
from pretrain.engine.engine import Update
from pretrain.engine.replicated import (
    ReplicatedState,
    WrappedModule,
    clip_or_drop,
    place_cut,
    set_optimizer_step,
    state_fragments,
    unexpected,
    weight_pieces,
)
from pretrain.engine.shared_parameters import known_parts
from pretrain.model.block import Block
from pretrain.model.lazy_compiler import deferred_decorators
from pretrain.optim.matrices import Span, WeightPiece
from pretrain.types import Batch, Fragment, FragmentStore


def clips_itself(config: EngineConfig) -> bool:
    """Returns whether our engine, not DeepSpeed's optimizer, clips and checks the gradient."""
    return config.zero_stage == 0 and config.precision == "fp32"


# The dynamic loss scale of fp16 (Micikevicius et al. 2018, 3.2), the same on every rank. Without
# it, a resumed run would repeat the overflows of its first steps.

FIELDS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""Attributes of DeepSpeed's DynamicLossScaler that are saved."""


def _scaler(optimizer: Any) -> Any:
    scaler = getattr(optimizer, "loss_scaler", None)
    return scaler if getattr(scaler, "dynamic", False) else None


def read_loss_scale(optimizer: Any) -> dict[str, float]:
    """Returns the state of a DeepSpeed optimizer's loss scale; empty if it is not dynamic."""
    scaler = _scaler(optimizer)
    names = () if scaler is None else FIELDS
    return {f"loss_scale.{name}": getattr(scaler, name) for name in names}


def set_loss_scale(optimizer: Any, values: dict[str, float]) -> None:
    """Restores the result of `read_loss_scale`, if the scale is and was dynamic."""
    scaler = _scaler(optimizer)
    if scaler is not None:
        for name in FIELDS:
            setattr(scaler, name, values.get(f"loss_scale.{name}", getattr(scaler, name)))


def never_raise(optimizer: Any) -> None:
    """Disables DeepSpeed's exception at the minimum scale: such a step is skipped, as a bad one."""
    scaler = _scaler(optimizer)
    if scaler is not None:
        scaler.raise_error_at_min_scale = False


def judge_by_norm(optimizer: Any) -> None:
    """Leaves it to the norm of the gradient to show that one is not finite.

    DeepSpeed skips a step for its norm too. Before, at ZeRO 0 to 2 and in fp16, it reads every
    gradient once more, and has the ranks and the host exchange a flag. Its own key for that,
    `bf16.check_grad_overflow: false`, leaves out the check of the norm as well. With the optimizer
    in host memory at ZeRO 1 and 2, the flag comes with the copies, and is kept.
    """
    if getattr(optimizer, "cpu_offload", False):
        return
    owner = getattr(optimizer, "overflow_checker", optimizer)
    owner.has_overflow = lambda *arguments, **named: False


# Dropping a step: DeepSpeed's own path for a gradient that is not finite, triggered by a patched
# method: the norm of the gradient (ZeRO 1, 2), the norms of its groups (ZeRO 3), or the overflow
# check (stage 0, bf16). Weights and moments are unchanged, buffers are cleared, and every rank
# drops the same step, so that no collective is left unmatched. The loss scale of fp16, which
# DeepSpeed halves then, is restored.


@contextlib.contextmanager
def dropping(optimizer: Any) -> Iterator[None]:
    """Context in which a step of `DeepSpeedEngine.optimizer` discards the gradient."""
    scale = read_loss_scale(optimizer)
    # DeepSpeed warns of a gradient that is not finite, which this one is.
    logger = logging.getLogger("DeepSpeed")
    level = logger.level
    logger.setLevel(logging.ERROR)
    owner, name, answer = _overflow_hook(optimizer)
    before = vars(owner).get(name)  # None: a method of the class
    setattr(owner, name, lambda *arguments, **named: answer)
    try:
        yield
    finally:
        logger.setLevel(level)
        delattr(owner, name)
        if before is not None:
            setattr(owner, name, before)
        set_loss_scale(optimizer, scale)


def _overflow_hook(optimizer: Any) -> tuple[Any, str, Any]:
    """Returns owner, name and result of the method that detects a non-finite gradient."""
    if hasattr(optimizer, "overflow_checker"):
        return optimizer.overflow_checker, "has_overflow", True
    if hasattr(optimizer, "_get_norm_groups"):
        return optimizer, "_get_norm_groups", [math.inf]
    return optimizer, "scaled_global_norm", math.inf


def forget_evaluation(optimizer: Any) -> None:
    """Frees what an evaluation at ZeRO 3 has left gathered, and the order of modules to gather ahead.

    Both are those of a forward pass alone, which may leave modules out. A training pass would keep
    parameters that its recomputation gathers, which torch's selective checkpointing refuses.
    """
    optimizer.empty_partition_cache()
    trace = optimizer.parameter_offload.param_coordinator
    if not trace.is_invalid_trace():
        trace._invalidate_trace()


def order_gathers(optimizer: Any) -> None:
    """Has DeepSpeed gather weights at ZeRO 3 behind what this stream has queued, which writes them.

    On a GPU it gathers on a stream of its own, which waits for none. In its own step a gather of
    persistent parameters, which is left out here, has the host wait for the whole device instead.
    """
    stream = optimizer.parameter_offload._DeepSpeedZeRoOffload__allgather_stream
    if stream is not None:  # there is none on CPUs
        stream.wait_stream(torch.cuda.current_stream())


def _check_offload(optimizer: Any, config: EngineConfig, device: torch.device) -> None:
    # The attribute of offloading has one name at stages 1 and 2, and two others at stage 3.
    early = getattr(optimizer, "cpu_offload", False)
    state = {
        "offload_optimizer": early or getattr(optimizer, "offload_optimizer", False),
        "offload_params": getattr(optimizer, "offload_param", False),
    }
    late_masters = getattr(optimizer, "fp32_partitioned_groups_flat", ())
    masters = getattr(optimizer, "single_partition_of_fp32_groups", late_masters)
    place = "cpu" if config.offload_optimizer != "none" else device.type
    wrong = [name for name, is_on in state.items() if bool(is_on) != (getattr(config, name) != "none")]
    if any(master.device.type != place for master in masters):
        wrong.append("offload_optimizer")
    if wrong:
        requested = f"engine.{wrong[0]}={getattr(config, wrong[0])}"
        raise unexpected(f"{requested} was asked for, DeepSpeed did otherwise")


class DeepSpeedZeroEngine(WrappedModule):
    """A `deepspeed.DeepSpeedEngine` at the ZeRO stage of the config."""

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
        import deepspeed

        if config.compiles(accelerator.device.type) and config.zero_stage == 3:
            # Gathers the weights of a block at once, by hooks outside of its compiled graph.
            deepspeed.utils.set_z3_leaf_modules(module, [Block])
        # Some of DeepSpeed's optimizers step with zero gradients when built, and weight decay would
        # shrink the fp32 masters. `update` sets the learning rate of each step.
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        with known_parts(module, optimizer, world, config), deferred_decorators():
            wrapped, _ = accelerator.prepare(module, optimizer)
        if not isinstance(wrapped, deepspeed.DeepSpeedEngine):
            raise unexpected(f"DeepSpeed was asked for, accelerate built {type(wrapped).__name__}")
        stage = wrapped.zero_optimization_stage()
        if stage != config.zero_stage:
            raise unexpected(f"ZeRO stage {config.zero_stage} was asked for, stage {stage} runs")
        _check_offload(wrapped.optimizer, config, accelerator.device)
        super().__init__(wrapped, module, names)
        self.device = accelerator.device
        devices = f"{world.on(self.device.type)}{config.on_host}"
        self.description = f"DeepSpeed ZeRO-{stage}, {config.arithmetic}, {devices}"
        self._clip = grad_clip if clips_itself(config) else None
        self._parameters = list(module.parameters())
        self.is_sharded, self.needs_all_ranks = stage == 3, stage == 3 or world.parts > 1
        if self.is_sharded:
            # Gathered with those of a block: not behind the optimizer, which waits for the device.
            wrapped.optimizer.persistent_parameters = []
        never_raise(wrapped.optimizer)
        self._norm: Callable[[], Tensor] | None = None
        if self._clip is None:
            judge_by_norm(wrapped.optimizer)
            wrapped.basic_optimizer.register_step_pre_hook(self._start_norm)
        self.state = build_zero_state(wrapped, names, stage, world)
        set_optimizer_step(wrapped.basic_optimizer, 0)  # undoes the step at construction

    def forward_backward(self, batch: Batch, scale: float, is_last: bool) -> Tensor:
        """See `Engine.forward_backward`."""
        # Setting the mode walks every module. DeepSpeed's `eval()` does not update its `training`.
        if not self._wrapped.module.training:
            self._wrapped.train()
            if self.is_sharded:
                forget_evaluation(self._wrapped.optimizer)
        self._wrapped.set_gradient_accumulation_boundary(is_last)
        loss_sum, sums = self._wrapped(batch)
        self._wrapped.backward(loss_sum * scale, scale_wrt_gas=False)
        return sums

    def update(self, learning_rate: float, drop: bool = False) -> Update:
        """See `Engine.update`."""
        for group in self._wrapped.basic_optimizer.param_groups:
            group["lr"] = learning_rate * group.get("lr_ratio", 1.0)
        if self._clip is not None:
            update = clip_or_drop(self._parameters, self._clip, drop)
            self._wrapped.step()
            return update
        self._norm = None
        with dropping(self._wrapped.optimizer) if drop else contextlib.nullcontext():
            self._wrapped.step()
        if self.is_sharded:
            order_gathers(self._wrapped.optimizer)
        skipped = not self._wrapped.was_step_applied()
        assert skipped or self._norm is not None, "a step that is applied has a norm"
        return Update(math.nan if self._norm is None else float(self._norm()), skipped)

    def _start_norm(self, *_: Any) -> None:
        """Begins to copy the norm before the optimizer's work is queued: the host waits for no more."""
        if self._norm is None:  # the optimizer steps once a group
            norm = torch.as_tensor(self._wrapped.optimizer._global_grad_norm, dtype=torch.float64)
            self._norm = start_copy_to_host(norm)


def build_zero_state(engine: Any, names: dict[int, str], stage: int, world: World) -> FragmentStore:
    """Returns the state of a DeepSpeedEngine; `names` of parameters are by `id(parameter)`."""
    if stage == 3:
        return _PartitionedParameters(engine, names, world)
    if stage in (1, 2):
        return _PartitionedGroups(engine, names, world)
    return _Replicated(engine, names, world)


class _Replicated(ReplicatedState):
    """Stage 0."""

    def __init__(self, engine: Any, names: dict[int, str], world: World) -> None:
        zero = engine.optimizer
        groups = getattr(zero, "fp16_groups", None)
        masters = zero.fp32_groups if groups else [group["params"] for group in zero.param_groups]
        self._pairs: list[tuple[Tensor, Tensor]] = []
        for group, group_masters in zip(groups or masters, masters, strict=True):
            self._pairs += zip(group, group_masters, strict=True)
        named = [(names[id(parameter)], master) for parameter, master in self._pairs]
        super().__init__(named, engine.basic_optimizer, world)

    def finish_load(self, optimizer_step: int, scalars: dict[str, float]) -> None:
        super().finish_load(optimizer_step, scalars)
        for working, master in self._pairs:
            if working is not master:
                working.data.copy_(master.data)


class _Partitioned:
    """State that is sharded over the ranks; `pieces` are this rank's."""

    def __init__(self, engine: Any, pieces: list[WeightPiece], masters: list[Any], rank: int) -> None:
        self._zero = engine.optimizer
        self._base = engine.basic_optimizer
        self._pieces = pieces
        place_cut(self._base, masters, pieces, rank)

    def held_fragments(self) -> Iterator[Fragment]:
        yield from state_fragments(self._base, self._pieces)

    owned_fragments = held_fragments

    def scalars(self) -> dict[str, float]:
        return read_loss_scale(self._zero)

    def _restore(self, optimizer_step: int, scalars: dict[str, float]) -> None:
        set_optimizer_step(self._base, optimizer_step)
        set_loss_scale(self._zero, scalars)


class _PartitionedGroups(_Partitioned):
    """Stages 1 and 2."""

    def __init__(self, engine: Any, names: dict[int, str], world: World) -> None:
        # The working parameters of a group are in one flat tensor; this rank's partitions in fp32:
        masters = engine.optimizer.single_partition_of_fp32_groups
        groups = zip(engine.optimizer.bit16_groups, masters, strict=True)
        pieces: list[WeightPiece] = []
        for slot, (group, master) in enumerate(groups):
            for parameter in group:
                mapping = parameter._hp_mapping
                if mapping is not None:
                    place = mapping.hp_fragment_address
                    first = mapping.lp_fragment_address.start
                    span = Span(names[id(parameter)], slot, first, place.start, place.numel)
                    pieces += weight_pieces(parameter, parameter.shape, span, master)
        super().__init__(engine, pieces, masters, world.rank)

    @torch.no_grad()
    def finish_load(self, optimizer_step: int, scalars: dict[str, float]) -> None:
        self._restore(optimizer_step, scalars)
        self._zero.update_lp_params()


class _PartitionedParameters(_Partitioned):
    """Stage 3: an even share of every parameter, without padding."""

    def __init__(self, engine: Any, names: dict[int, str], world: World) -> None:
        zero = engine.optimizer
        masters = zero.fp32_partitioned_groups_flat
        pieces: list[WeightPiece] = []
        self._working: list[tuple[Tensor, Tensor]] = []
        for parameter in (parameter for group in zero.fp16_groups for parameter in group):
            slot, start, _ = zero.grad_position[zero.get_param_id(parameter)]
            share = parameter.ds_tensor.ds_numel
            self._working.append((parameter.ds_tensor, masters[slot].data.narrow(0, start, share)))
            # Within its group, which need not be the world.
            offset = parameter.ds_zero_partition_rank * share
            length = min(share, parameter.ds_numel - offset)
            span = Span(names[id(parameter)], slot, offset, start, length)
            pieces += weight_pieces(parameter, parameter.ds_shape, span, masters[slot])
        super().__init__(engine, pieces, masters, world.rank)

    @torch.no_grad()
    def finish_load(self, optimizer_step: int, scalars: dict[str, float]) -> None:
        self._restore(optimizer_step, scalars)
        self._zero.empty_partition_cache()  # an evaluation may have left any weight gathered
        for share, master in self._working:
            share.data.copy_(master)
        self._zero.invalidate_secondary_tensor()  # the copy of `engine.zero_hpz`
        order_gathers(self._zero)
