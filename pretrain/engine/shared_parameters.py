"""Parameters that ranks share, experts and matrices, under DeepSpeed: what it must know, and a norm.

With W ranks of which each G consecutive ones share the experts of a layer, the gradient of an
expert is the sum over the tokens of G ranks, and so is that of a part of a matrix that they share.
Summed over the W / G ranks that have it, and divided by W, it is the mean over all ranks, as that of
any other parameter. DeepSpeed does so for its own layers of experts, and shards their state over
those W / G ranks; it takes ours for such by

    ZeRO 0 to 2   attributes of the parameters, groups of the optimizer of their own, and a module
                  of its class of layers of experts, without parameters, while the engine is built
    ZeRO 3        attributes by which a parameter has a group of ranks; that class is refused there

`tests/integration/test_expert_parallel.py` fails when one of these changes.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pretrain.config.engine import EngineConfig
from pretrain.dist import World
from pretrain.parts import part_of

_MARKER = "experts_over_ranks"


def describe_part(parameter: Any, world: World, timeout_s: int) -> None:
    """Gives a parameter that ranks share the attributes that DeepSpeed reads. Collective.

    Any other parameter is left as it is. Its process groups have `timeout_s`.
    """
    part = part_of(parameter)
    if part.ranks == 1:
        return
    from deepspeed.utils import groups

    name = f"ep_size_{part.ranks}"
    if name not in groups._EXPERT_PARALLEL_GROUP:
        groups._EXPERT_PARALLEL_GROUP[name] = world.parts_group(timeout_s)
        groups._EXPERT_DATA_PARALLEL_GROUP[name] = world.copies_group(timeout_s)
        copies = range(part.rank, world.size, part.ranks)
        groups._EXPERT_DATA_PARALLEL_GROUP_RANKS[name] = list(copies)
    parameter.allreduce, parameter.group_name = False, name
    parameter.ds_zero_placement_family = "autoep_expert"
    parameter.ds_zero_partition_group_name = name
    parameter.ds_zero_partition_process_group = groups._EXPERT_DATA_PARALLEL_GROUP[name]


@contextlib.contextmanager
def known_parts(
    module: nn.Module, optimizer: torch.optim.Optimizer, world: World, config: EngineConfig
) -> Iterator[None]:
    """Context in which DeepSpeed builds an engine that knows what ranks share. Collective."""
    # Frozen ones too, or they would be sent to all ranks, as what all have is.
    for parameter in module.parameters():
        describe_part(parameter, world, config.group_timeout_s)
    trained = optimizer.param_groups
    parts = [group for group in trained if any(part_of(p).ranks > 1 for p in group["params"])]
    if not parts:
        yield
        return
    from deepspeed.moe.layer import MoE
    from deepspeed.utils import groups

    for group in parts:
        group["moe"] = True
        # Looked up by the name of a group, which is ours.
        shared = groups._EXPERT_DATA_PARALLEL_GROUP[group["params"][0].group_name]
        groups._EXPERT_DATA_PARALLEL_GROUP[group["name"]] = shared
    if config.zero_stage == 3:
        yield
        return

    class Marker(MoE):
        """A layer of experts to DeepSpeed, without any."""

        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.num_experts = 1

        def set_deepspeed_parallelism(self, *_: Any, **__: Any) -> None:
            """Makes no groups: they are made."""

    module.add_module(_MARKER, Marker())
    yield
    delattr(module, _MARKER)


def norm_over_ranks(parameters: Sequence[Tensor]) -> Tensor:
    """Returns the norm of reduced gradients, parts on other ranks included. Collective with any."""
    shared = [p for p in parameters if p.grad is not None and part_of(p).ranks > 1]
    if not shared:
        return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    from deepspeed.utils import groups

    whole = [p.grad for p in parameters if p.grad is not None and part_of(p).ranks == 1]
    squares = torch.nn.utils.get_total_norm([p.grad for p in shared if p.grad is not None]).square()
    group = groups._EXPERT_PARALLEL_GROUP[f"ep_size_{part_of(shared[0]).ranks}"]
    torch.distributed.all_reduce(squares, group=group)
    return (squares + torch.nn.utils.get_total_norm(whole).square()).sqrt()
