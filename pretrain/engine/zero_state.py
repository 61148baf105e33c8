"""Where DeepSpeed keeps master weights and moments at each ZeRO stage, as fragments.

    stage 0, fp32   the parameters themselves                                     whole on every rank
    stage 0, bf16   optimizer.fp32_groups, beside optimizer.fp16_groups           whole on every rank
    stage 1, 2      a flat partition a group; where each parameter's part lies in it, by _hp_mapping
    stage 3         every parameter cut evenly over the ranks, padded at its end

This file and `deepspeed_engine.py` are the only ones that touch attributes that DeepSpeed does not promise to keep;
`tests/integration/test_deepspeed_private.py` fails when one of them moves.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from pretrain.dist import World
from pretrain.engine.moments import create_moments, create_moments_of, moment_views, set_optimizer_step
from pretrain.engine.replicated import ReplicatedState
from pretrain.types import Fragment, FragmentStore


def build_zero_state(engine: Any, names: dict[int, str], stage: int, world: World) -> FragmentStore:
    """Returns the state of a DeepSpeedEngine.

    Args:
        engine: The DeepSpeedEngine.
        names: Name of each parameter of the module, by `id(parameter)`.
        stage: ZeRO stage.
        world: This process's place.
    """
    if stage == 3:
        return _PartitionedParameters(engine, names, world)
    if stage in (1, 2):
        return _PartitionedGroups(engine, names)
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

    def finish_load(self, optimizer_step: int) -> None:
        """Copies fp32 masters to bf16 weights; in fp32 they are the same tensors."""
        super().finish_load(optimizer_step)
        for working, master in self._pairs:
            if working is not master:
                working.data.copy_(master.data)


class _PartitionedGroups:
    """Stages 1 and 2."""

    def __init__(self, engine: Any, names: dict[int, str]) -> None:
        self._zero, self._base = engine.optimizer, engine.basic_optimizer
        # Each group's working parameters lie in one flat tensor; this is our partition of its fp32 copy.
        partitions = self._zero.single_partition_of_fp32_groups
        groups = zip(self._zero.bit16_groups, partitions, strict=True)
        self._named = [(names[id(p)], p, partition) for group, partition in groups for p in group]

    def held_fragments(self) -> Iterator[Fragment]:
        """Yields the parts of parameters that fall into this rank's partition."""
        create_moments(self._base)
        for name, parameter, partition in self._named:
            mapping = parameter._hp_mapping
            if mapping is not None:
                start, length = mapping.hp_fragment_address.start, mapping.hp_fragment_address.numel
                whole = {"weight": partition.data, **moment_views(self._base, partition)}
                tensors = {key: tensor.narrow(0, start, length) for key, tensor in whole.items()}
                yield Fragment(name, mapping.lp_fragment_address.start, tuple(parameter.shape), tensors)

    owned_fragments = held_fragments

    @torch.no_grad()
    def finish_load(self, optimizer_step: int) -> None:
        """Copies this rank's masters to its working partition and gathers the others'."""
        set_optimizer_step(self._base, optimizer_step)
        self._zero.update_lp_params()


class _PartitionedParameters:
    """Stage 3."""

    def __init__(self, engine: Any, names: dict[int, str], world: World) -> None:
        self._zero, self._base, self._rank = engine.optimizer, engine.basic_optimizer, world.rank
        self._named = [(names[id(p)], p) for group in self._zero.fp16_groups for p in group]

    def held_fragments(self) -> Iterator[Fragment]:
        """Yields this rank's even share of every parameter, without the padding of the last ones."""
        for flat in self._zero.fp32_partitioned_groups_flat:
            create_moments_of(self._base, flat)
        for name, parameter in self._named:
            share = parameter.ds_tensor.ds_numel
            offset = self._rank * share
            length = min(share, parameter.ds_numel - offset)
            if length > 0:
                tensors = {key: view[:length] for key, view in self._views(parameter).items()}
                yield Fragment(name, offset, tuple(parameter.ds_shape), tensors)

    owned_fragments = held_fragments

    def _views(self, parameter: Any) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_local_fp32_param, safe_get_local_optimizer_state

        views = {"weight": safe_get_local_fp32_param(parameter).data}
        for key in ("exp_avg", "exp_avg_sq"):
            views[key] = safe_get_local_optimizer_state(parameter, key)
        return views

    @torch.no_grad()
    def finish_load(self, optimizer_step: int) -> None:
        """Copies masters to the working shares, and gathers again the small parameters that stay whole."""
        set_optimizer_step(self._base, optimizer_step)
        for _, parameter in self._named:
            parameter.ds_tensor.data.copy_(self._views(parameter)["weight"])
        persistent = self._zero.persistent_parameters
        if persistent:
            persistent[0].partition(persistent, has_been_updated=False)
            persistent[0].all_gather(persistent)
