"""The optimizers of `fake_deepspeed.py`, which cut real tensors where DeepSpeed 0.19 cuts them, and step them.

    stage 0, bf16     FakeUnfused   FP16_UnfusedOptimizer
    stage 1, 2        FakeZero12    DeepSpeedZeroOptimizer
    stage 3           FakeZero3     DeepSpeedZeroOptimizer_Stage3

Before, `convert_to_zero` has cut the parameters of stage 3.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.helpers.thread_ranks import Ranks


class FakeScaler:
    """DynamicLossScaler, with the hysteresis and window of the config that we write."""

    dynamic = True

    def __init__(self) -> None:
        self.cur_scale, self.cur_iter, self.last_overflow_iter, self.cur_hysteresis = 2.0**16, 0, -1, 2
        self.raise_error_at_min_scale = True

    def fake_update(self, overflow: bool) -> None:
        """`update_scale` of the real one."""
        if overflow:
            if self.cur_hysteresis > 1:
                self.cur_hysteresis -= 1
            elif self.cur_scale == 1.0 and self.raise_error_at_min_scale:
                raise Exception("Current loss scale already at minimum")
            else:
                self.cur_scale = max(self.cur_scale / 2, 1.0)
            self.last_overflow_iter = self.cur_iter
        self.cur_iter += 1


class FakeFixedScaler:
    """LossScaler of a precision that has no scale."""

    dynamic = False
    cur_scale = 1.0

    def fake_update(self, overflow: bool) -> None:
        """Nothing changes."""


@dataclass
class FragmentAddress:
    """`fragment_address`."""

    numel: int
    start: int


@dataclass
class TensorFragment:
    """`tensor_fragment`: where the part of a parameter that this rank owns lies in it, and in the rank's partition."""

    lp_fragment_address: FragmentAddress
    hp_fragment_address: FragmentAddress


class FakeOverflowChecker:
    """CheckOverflow."""

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Whether a gradient is not finite."""
        return any(not bool(p.grad.isfinite().all()) for p in params if p.grad is not None)


class _FakeOptimizer:
    """What the three have in common: a step that is skipped where the norm of the gradient is not finite."""

    fake_overflow, _global_grad_norm = False, 0.0

    def fake_apply(self, scale: float, norm: float, clip: float) -> bool:
        """Says whether to go on, and how much larger than the gradient of the step what was accumulated is."""
        self.fake_overflow = not math.isfinite(norm)
        self._global_grad_norm = math.inf if self.fake_overflow else norm / scale
        self.fake_divisor = scale * max(1.0, (norm / scale + 1e-6) / clip) if clip else scale
        return not self.fake_overflow


class FakeUnfused(_FakeOptimizer):
    """FP16_UnfusedOptimizer: stage 0 in bf16. A whole fp32 copy of each parameter on every rank."""

    def __init__(self, base: torch.optim.Optimizer, clip: float) -> None:
        self.fake_base, self.fake_clip = base, clip
        self.fp16_groups = [[p for p in group["params"] if p.requires_grad] for group in base.param_groups]
        self.fp32_groups = [[p.clone().float().detach() for p in group] for group in self.fp16_groups]
        for group, masters in zip(base.param_groups, self.fp32_groups, strict=True):
            group["params"] = masters
            for master in masters:
                master.requires_grad, master.grad = True, torch.zeros_like(master)
        self.overflow_checker = FakeOverflowChecker()
        base.step()  # initialize_optimizer_states: of zeros, which Adam counts
        base.zero_grad()

    def fake_step(self) -> None:
        """`step`."""
        working = [p for group in self.fp16_groups for p in group]
        masters = [p for group in self.fp32_groups for p in group]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in working]
        bad = self.overflow_checker.has_overflow(working)
        norm = math.inf if bad else _norm(gradients)
        if self.fake_apply(1.0, norm, self.fake_clip):
            for master, gradient in zip(masters, gradients, strict=True):
                master.grad = gradient.float() / self.fake_divisor
            self.fake_base.step()
            self.fake_base.zero_grad()
            for parameter, master in zip(working, masters, strict=True):
                parameter.data.copy_(master.data)


class _FakeZero(_FakeOptimizer):
    """ZeRO 1 to 3: masters in flat tensors, one a slot, which the torch optimizer steps."""

    def __init__(self, base: torch.optim.Optimizer, ranks: Ranks, clip: float, precision: str) -> None:
        self.fake_base, self.fake_ranks, self.fake_clip = base, ranks, clip
        self.loss_scaler = FakeScaler() if precision == "fp16" else FakeFixedScaler()
        self.fake_gradients: dict[Tensor, Tensor] = {}

    def fake_gradient(self, parameter: Tensor, shape: Sequence[int]) -> Tensor:
        """What has been accumulated, fp32, flat; zeros where there is nothing."""
        kept = self.fake_gradients.get(parameter)
        return (torch.zeros(shape) if kept is None else kept.float()).view(-1)

    def has_overflow(self, partition_gradients: bool = True) -> bool:
        """Whether a gradient is not finite."""
        return not all(bool(gradient.isfinite().all()) for gradient in self.fake_gradients.values())

    def fake_step_slots(self, norm: float) -> None:
        """`step`: of each slot by itself, its group alone having parameters."""
        scale = self.loss_scaler.cur_scale
        norm = math.inf if self.has_overflow() else norm
        goes_on = self.fake_apply(scale, norm, self.fake_clip)
        self.loss_scaler.fake_update(not goes_on)
        groups = self.fake_base.param_groups
        for number, master, gradient in self.fake_slots() if goes_on else ():
            master.grad = gradient / self.fake_divisor
            kept = [group["params"] for group in groups]
            for group in groups:
                group["params"] = [master] if group is groups[number] else []
            self.fake_base.step()
            master.grad = None
            for group, params in zip(groups, kept, strict=True):
                group["params"] = params
        self.fake_gradients = {}

    def fake_slots(self) -> Iterable[tuple[int, Tensor, Tensor]]:
        """Yields (number of its group, master, gradient) of each slot."""
        raise NotImplementedError


class FakeZero12(_FakeZero):
    """DeepSpeedZeroOptimizer: the parameters of a group in a row, padded at its end, cut evenly over the ranks."""

    def __init__(
        self, base: torch.optim.Optimizer, ranks: Ranks, clip: float, precision: str, offload_optimizer: bool
    ) -> None:
        super().__init__(base, ranks, clip, precision)
        self.cpu_offload = offload_optimizer
        self.bit16_groups = [[p for p in group["params"] if p.requires_grad] for group in base.param_groups]
        self.single_partition_of_fp32_groups, self.fake_flat = [], []
        for torch_group, group in zip(base.param_groups, self.bit16_groups, strict=True):
            flat = self.fake_row([p.data for p in group])
            start = 0
            for parameter in group:
                parameter.data = flat.narrow(0, start, parameter.numel()).view(parameter.shape)
                parameter._hp_mapping = self.fake_place(parameter, start, flat.numel() // ranks.size)
                start += parameter.numel()
            master = flat.chunk(ranks.size)[ranks.rank].detach().clone().float()
            master.requires_grad = True
            self.fake_flat.append(flat)
            self.single_partition_of_fp32_groups.append(master)
            torch_group["params"] = [master]

    def fake_row(self, tensors: list[Tensor]) -> Tensor:
        """Tensors flattened, one after another, and the zeros after them: two elements a rank are the alignment."""
        length = sum(tensor.numel() for tensor in tensors)
        padding = -length % (2 * self.fake_ranks.size)
        return torch.cat([*(tensor.reshape(-1) for tensor in tensors), tensors[0].new_zeros(padding)])

    def fake_place(self, parameter: Tensor, start: int, partition: int) -> TensorFragment | None:
        """Where the part of a parameter that lies in this rank's partition is."""
        begin, end = partition * self.fake_ranks.rank, partition * (self.fake_ranks.rank + 1)
        first, last = max(begin, start), min(end, start + parameter.numel())
        if first >= last:
            return None
        return TensorFragment(
            FragmentAddress(last - first, first - start), FragmentAddress(last - first, first - begin)
        )

    def fake_slots(self) -> Iterable[tuple[int, Tensor, Tensor]]:
        """See `_FakeZero`."""
        for number, master in enumerate(self.single_partition_of_fp32_groups):
            row = self.fake_row([self.fake_gradient(p, p.shape) for p in self.bit16_groups[number]])
            yield number, master, row.chunk(self.fake_ranks.size)[self.fake_ranks.rank]

    def scaled_global_norm(self) -> float:
        """Of what was accumulated, the loss scale included."""
        return _norm(self.fake_gradients.values())

    def fake_step(self) -> None:
        """`step`."""
        self.fake_step_slots(float(self.scaled_global_norm()))
        if not self.fake_overflow:
            self.update_lp_params()

    @torch.no_grad()
    def update_lp_params(self) -> None:
        """Copies masters to working weights, and gathers those of the other ranks. Collective."""
        partitions = self.fake_ranks.gather([master.data.clone() for master in self.single_partition_of_fp32_groups])
        for flat, parts in zip(self.fake_flat, zip(*partitions, strict=True), strict=True):
            flat.copy_(torch.cat(parts))


class FakeTrace:
    """PartitionedParameterCoordinator, which has no order of modules."""

    def is_invalid_trace(self) -> bool:
        """Returns whether there is none."""
        return True

    def _invalidate_trace(self) -> None:
        raise RuntimeError("attempted to invalidate already invalid trace")


class FakeOffload:
    """DeepSpeedZeRoOffload."""

    def __init__(self) -> None:
        self.param_coordinator = FakeTrace()
        self._DeepSpeedZeRoOffload__allgather_stream = None


class FakeZero3(_FakeZero):
    """DeepSpeedZeroOptimizer_Stage3: every parameter cut evenly, padded at its end; shares in a row, a slot a row."""

    def __init__(
        self,
        base: torch.optim.Optimizer,
        ranks: Ranks,
        clip: float,
        precision: str,
        offload: tuple[bool, bool],
        sub_group_size: int,
        persistent: list[Any],
    ) -> None:
        super().__init__(base, ranks, clip, precision)
        self.offload_optimizer, self.offload_param = offload
        self.persistent_parameters = self.fake_persistent = persistent
        self.parameter_offload = FakeOffload()
        self.fp16_groups, self.fp32_partitioned_groups_flat = [], []
        self.grad_position: dict[int, list[int]] = {}
        self.fake_number_of_group: list[int] = []
        for number, group in enumerate(base.param_groups):
            for row in _sub_groups([p for p in group["params"] if p.requires_grad], sub_group_size):
                start = 0
                for parameter in row:
                    share = parameter.ds_tensor.ds_numel
                    self.grad_position[self.get_param_id(parameter)] = [len(self.fp16_groups), start, share]
                    start += share
                master = torch.cat([parameter.ds_tensor for parameter in row]).detach().clone().float()
                master.requires_grad = True
                self.fp16_groups.append(row)
                self.fp32_partitioned_groups_flat.append(master)
                self.fake_number_of_group.append(number)
            group["params"] = []

    def get_param_id(self, parameter: Any) -> int:
        """The key of `grad_position`."""
        return id(parameter) + 1  # DeepSpeed's are numbers of its own

    def fake_slots(self) -> Iterable[tuple[int, Tensor, Tensor]]:
        """See `_FakeZero`."""
        for number, row, master in zip(
            self.fake_number_of_group, self.fp16_groups, self.fp32_partitioned_groups_flat, strict=True
        ):
            shares = [_share(self.fake_gradient(p, p.ds_shape), self.fake_ranks) for p in row]
            yield number, master, torch.cat(shares)

    def _get_norm_groups(self) -> list[float]:
        return [_norm(self.fake_gradient(p, p.ds_shape) for p in row) for row in self.fp16_groups]

    def empty_partition_cache(self) -> None:
        """Leaves this rank the shares of what it has gathered."""
        for parameter in self.fake_persistent:
            parameter.partition([parameter])

    def invalidate_secondary_tensor(self) -> None:
        """Forgets the copies of `zero_hpz_partition_size`, of which there are none."""

    @torch.no_grad()
    def fake_step(self) -> None:
        """`step`."""
        self.empty_partition_cache()
        self.fake_step_slots(math.hypot(*map(float, self._get_norm_groups())))
        if self.fake_overflow:
            return
        for parameter in (p for row in self.fp16_groups for p in row):
            slot, start, length = self.grad_position[self.get_param_id(parameter)]
            parameter.ds_tensor.copy_(self.fp32_partitioned_groups_flat[slot].data.narrow(0, start, length))
        if self.persistent_parameters:
            self.persistent_parameters[0].all_gather(self.persistent_parameters)


def convert_to_zero(parameters: Sequence[Any], ranks: Ranks) -> None:
    """Cuts parameters over the ranks, as `deepspeed.zero.Init` does; those that are cut stay as they are."""

    def all_gather(param_list: list[Any]) -> None:
        for parameter in param_list:
            shares = ranks.gather(parameter.ds_tensor.data.clone())
            parameter.data = torch.cat(shares)[: parameter.ds_numel].view(parameter.ds_shape)

    def partition(param_list: list[Any], *, has_been_updated: bool = False) -> None:
        assert not has_been_updated, "the shares would be read from the whole"
        for parameter in param_list:
            parameter.data = parameter.data.new_empty(0)

    for parameter in parameters:
        if not hasattr(parameter, "ds_tensor"):
            parameter.ds_shape, parameter.ds_numel = parameter.shape, parameter.numel()
            parameter.ds_tensor = _share(parameter.data.reshape(-1), ranks)
            parameter.ds_tensor.ds_numel = parameter.ds_tensor.numel()
            parameter.ds_zero_partition_rank = ranks.rank
            parameter.all_gather, parameter.partition = all_gather, partition
            parameter.convert_to_zero_parameters = lambda param_list: convert_to_zero(param_list, ranks)
            parameter.data = parameter.data.new_empty(0)


def _norm(tensors: Iterable[Tensor]) -> float:
    return math.hypot(*(float(tensor.float().norm()) for tensor in tensors))


def _share(flat: Tensor, ranks: Ranks) -> Tensor:
    share = math.ceil(flat.numel() / ranks.size)
    padded = torch.cat([flat, flat.new_zeros(share * ranks.size - flat.numel())])
    return padded.narrow(0, share * ranks.rank, share).clone()


def _sub_groups(parameters: list[Any], size: int) -> list[list[Any]]:
    """Rows of parameters, each ended by the one that brings it to `size` shares; none where there are none."""
    rows: list[list[Any]] = []
    length = size
    for parameter in parameters:
        if length >= size:
            rows.append([])
            length = 0
        rows[-1].append(parameter)
        length += parameter.ds_tensor.ds_numel
    return rows
