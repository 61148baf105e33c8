"""Expert parallelism: G ranks share the experts of each layer (Lepikhin et al. 2020, GShard, 3.2).

    router, choice               rows of this rank's tokens, sorted by expert
        | exchange of counts, then of rows: to the ranks of their experts
        v
    experts of this rank         rows of the tokens of all G ranks, sorted by expert
        | exchange back
        v
    weighted sum over choices    rows in the order in which they were sent

No row is dropped and none is padded: each rank sends as many rows as chose the experts of the
other, which may be none. Every rank takes part in each exchange, and an expert without rows has a
gradient of zeros, so no rank waits for another.

The gradient of an exchange is an exchange: that of an expert on its rank is the sum over the tokens
of the G ranks. Not here: the sum over the groups of ranks (`engine/shared_parameters.py`).
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as td
import torch.distributed._functional_collectives as collectives
from torch import Tensor, nn

from pretrain.dist import World
from pretrain.model.parts.experts import MixtureOfExperts
from pretrain.model.parts.grouped import GroupedLinear, Take, sort_by_expert
from pretrain.parts import Part

RunExperts = Callable[[Tensor, Tensor], Tensor]
"""Experts of a rank: rows sorted by expert, and the end of each expert's, to rows."""


def _exchange(rows_RD: Tensor, received_G: list[int], sent_G: list[int], group: Any) -> Tensor:
    """Sends runs of rows to the ranks of a group; returns the received rows, by rank."""
    sent = rows_RD.contiguous()
    received = collectives.all_to_all_single_autograd(sent, received_G, sent_G, group)
    return collectives.wait_tensor(received)


class SharedExperts:
    """Passes rows through the experts of all ranks of a group. Collective among them."""

    def __init__(self, group: Any) -> None:
        self._group = group
        # The lengths depend on the data, and the host waits for them: nothing to trace. Not a
        # decorator, which would import the compiler with this module: more than a second.
        self._uncompiled = torch.compiler.disable(self._pass)

    def __call__(self, rows_RD: Tensor, sizes_E: Tensor, run: RunExperts) -> Tensor:
        """Returns the results of rows, sorted by expert; `sizes_E` counts the rows of each."""
        return self._uncompiled(rows_RD, sizes_E, run)

    def _pass(self, rows_RD: Tensor, sizes_E: Tensor, run: RunExperts) -> Tensor:
        sent_GE = sizes_E.view(self._group.size(), -1)
        received_GE = torch.empty_like(sent_GE)
        td.all_to_all_single(received_GE, sent_GE.contiguous(), group=self._group)
        sent_G, received_G = torch.stack((sent_GE.sum(1), received_GE.sum(1))).tolist()
        arrived_RD = _exchange(rows_RD, received_G, sent_G, self._group)
        # By source, then by expert: sorted by expert, and back.
        experts_E = torch.arange(sent_GE.shape[1], device=rows_RD.device)
        # With its length, the host does not wait for the counts again.
        of_expert_R = experts_E.repeat(len(sent_G)).repeat_interleave(
            received_GE.flatten(), output_size=sum(received_G)
        )
        order_R, inverse_R = sort_by_expert(of_expert_R)
        offsets_E = received_GE.sum(0).cumsum(0, dtype=torch.int32)
        results_RD = run(Take.apply(arrived_RD, order_R, inverse_R, 1), offsets_E)
        back_RD = Take.apply(results_RD, inverse_R, order_R, 1)
        return _exchange(back_RD, sent_G, received_G, self._group)


def share_experts(model: nn.Module, world: World, timeout_s: int) -> None:
    """Leaves this rank its part of the experts of a model without storage. Collective.

    `timeout_s` is that of their process group. A model without experts is left as it is.
    """
    layers = [module for module in model.modules() if isinstance(module, MixtureOfExperts)]
    if world.experts == 1 or not layers:
        return
    send = SharedExperts(world.parts_group(timeout_s))
    part = Part(world.rank % world.experts, world.experts)
    for layer in layers:
        layer.send = send
        for linear in layer.children():
            if isinstance(linear, GroupedLinear):
                linear.part = part
                linear._apply(lambda whole: part.take(whole).clone())
