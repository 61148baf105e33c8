"""Experts in place of the feed-forward layer of a block (Shazeer et al. 2017).

    scores    softmax or sigmoid of W x, in fp32   ->  J experts of each token, and their weights
    rows      one a token and choice, by expert    ->  gate_up, activation, down
    result    back in the order of tokens          ->  weighted sum over choices, + shared experts

Nothing is dropped and nothing padded (Gale et al. 2023, MegaBlocks): the result of a token depends
on that token alone, so micro-batches and ranks do not change it. The matrices of all experts of a
layer are one parameter, [E, outputs, inputs]: an expert without tokens has a gradient of zeros, and
no engine waits for a gradient that never comes.

Not here: even use of the experts (`training/balance.py`), for which a layer returns `RoutingSums`.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from pretrain.config.model import ExpertsConfig, StackConfig
from pretrain.model.parts.feedforward import FeedForward, Gate
from pretrain.model.parts.grouped import Combine, GroupedLinear, Take, sort_by_expert


class RoutingSums(NamedTuple):
    """Sums over the tokens of a micro-batch, without padding, fp32; of one layer, or of L layers.

    Attributes:
        load_E: Tokens that chose each expert; a count, without a gradient.
        score_E: Scores of each expert, which sum to 1 for a token; differentiable.
        z: `(log sum exp logits)^2`; differentiable.
        entropy: Entropy of the scores in nats, without a gradient.
    """

    load_E: Tensor
    score_E: Tensor
    z: Tensor
    entropy: Tensor

    @staticmethod
    def unpack(packed_W: Tensor) -> "RoutingSums":
        """Returns views of packed sums, [2E + 2] or [L, 2E + 2]."""
        experts = packed_W.shape[-1] // 2 - 1
        load_E, score_E, rest = packed_W.split([experts, experts, 2], dim=-1)
        return RoutingSums(load_E, score_E, rest[..., 0], rest[..., 1])


class Balance(nn.Module):
    """The bias by which experts are chosen, but not weighted (Wang et al. 2024, 3), zeros at first.

    A buffer, saved like a weight. It stays in fp32 where an engine converts the model to 16 bits,
    in which steps of 0.001 would be lost.
    """

    bias: Tensor

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.register_buffer("bias", torch.zeros(experts, dtype=torch.float32))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Balance":
        before = self.bias
        super()._apply(fn, recurse)
        if self.bias.device == before.device:  # a change of the dtype alone
            self.bias = before
        return self


class Router(nn.Module):
    """Chooses experts for each token and weighs them, in fp32 under any precision."""

    def __init__(self, width: int, config: ExpertsConfig, bias: bool) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.count, width))
        self.bias = nn.Parameter(torch.empty(config.count)) if bias else None
        self.balance = Balance(config.count) if config.balance == "bias" else None

    def forward(self, x_PD: Tensor, counted_P: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns experts_PJ (int64), weights_PJ, and packed `RoutingSums` of counted tokens.

        Args:
            x_PD: Tokens.
            counted_P: bool; tokens that are no padding. None: no sums are asked for.
        """
        config = self.config
        exact = torch.promote_types(x_PD.dtype, torch.float32)
        with torch.autocast(x_PD.device.type, enabled=False):
            bias_E = None if self.bias is None else self.bias.to(exact)
            logits_PE = functional.linear(x_PD.to(exact), self.weight.to(exact), bias_E)
            is_softmax = config.scores == "softmax"
            scores_PE = logits_PE.softmax(dim=-1) if is_softmax else logits_PE.sigmoid()
            choice_PE = scores_PE.detach()
            if self.balance is not None:
                choice_PE = choice_PE + self.balance.bias
            if config.groups > 1:
                choice_PE = _of_best_groups(choice_PE, config)
            experts_PJ = choice_PE.topk(config.top_k, dim=-1).indices
            weights_PJ = scores_PE.gather(1, experts_PJ)
            if config.normalize:
                weights_PJ = weights_PJ / weights_PJ.sum(dim=-1, keepdim=True)
            if config.scale != 1.0:
                weights_PJ = weights_PJ * config.scale
            if counted_P is None:
                return experts_PJ, weights_PJ, None
            if not is_softmax:
                scores_PE = scores_PE / scores_PE.sum(dim=-1, keepdim=True)
            return experts_PJ, weights_PJ, _sum_routing(logits_PE, scores_PE, experts_PJ, counted_P)


def _of_best_groups(choice_PE: Tensor, config: ExpertsConfig) -> Tensor:
    """Returns the scores of the groups that a token chooses, minus infinity in the others (DeepSeek-V3, 2.1.2)."""
    choice_PGE = choice_PE.unflatten(1, (config.groups, -1))
    groups_PG = choice_PGE.topk(config.group_scores, dim=-1).values.sum(dim=-1).topk(config.top_groups, dim=-1).indices
    hidden_PG = torch.ones_like(choice_PGE[..., 0], dtype=torch.bool).scatter(1, groups_PG, False)
    return choice_PGE.masked_fill(hidden_PG[..., None], -torch.inf).flatten(1)


def _sum_routing(logits_PE: Tensor, scores_PE: Tensor, experts_PJ: Tensor, counted_P: Tensor) -> Tensor:
    counted_P1 = counted_P[:, None].to(logits_PE.dtype)
    load_E = logits_PE.new_zeros(logits_PE.shape[1])
    load_E = load_E.scatter_add(0, experts_PJ.flatten(), counted_P1.expand_as(experts_PJ).flatten())
    known_PE = scores_PE.detach()
    # Not `entr`, which CUDA compiles at its first call.
    entropy = -torch.xlogy(known_PE, known_PE).mul(counted_P1).sum()
    z = logits_PE.logsumexp(dim=-1, keepdim=True).square().mul(counted_P1).sum()
    return torch.cat((load_E, scores_PE.mul(counted_P1).sum(dim=0), z[None], entropy[None]))


class MixtureOfExperts(nn.Module):
    """E feed-forward layers of which each token passes J, and shared ones that all pass.

    Parameters as in `FeedForward`, but of three dimensions: `gate_up.weight` [E, 2F, D] and
    `down.weight` [E, D, F]; further `router.weight` [E, D], a dense layer `shared`, and its
    `shared_gate.weight` [1, D]. Biases of experts are `gate_up.bias` [2 E F] and `down.bias` [E D],
    and of the router [E].
    """

    def __init__(self, config: StackConfig) -> None:
        super().__init__()
        assert config.experts is not None
        experts, width = config.experts, config.expert_width
        self.width, self.gated = config.width, config.gated
        self.count, self.top_k = experts.count, experts.top_k
        self.router = Router(config.width, experts, config.bias)
        if self.gated:
            self.gate_up = GroupedLinear(experts.count, config.width, 2 * width, config.bias)
        else:
            self.up = GroupedLinear(experts.count, config.width, width, config.bias)
        self.down = GroupedLinear(experts.count, width, config.width, config.bias)
        self.shared = FeedForward(config, config.shared_width) if experts.shared else None
        self.shared_gate = nn.Linear(config.width, 1, bias=False) if experts.shared_gate else None
        self.gate = Gate(config)
        # With experts over ranks, what sends rows to their experts (`expert_parallel.py`).
        self.send: Callable[..., Tensor] | None = None

    def forward(self, x_BTD: Tensor, counted_BT: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Maps [B, T, D] to the same; returns also the sums of the counted tokens (`Router`)."""
        x_PD = x_BTD.flatten(0, 1)
        counted_P = None if counted_BT is None else counted_BT.flatten()
        experts_PJ, weights_PJ, sums_W = self.router(x_PD, counted_P)
        chosen_R = experts_PJ.flatten()
        order_R, inverse_R = sort_by_expert(chosen_R)
        sizes_E = torch.zeros(self.count, dtype=torch.int32, device=chosen_R.device)
        sizes_E = sizes_E.scatter_add(0, chosen_R, torch.ones_like(chosen_R, dtype=torch.int32))
        rows_RD = Take.apply(x_PD, order_R, inverse_R, self.top_k)
        if self.send is None:
            rows_RD = self.run(rows_RD, sizes_E.cumsum(0, dtype=torch.int32))
        else:
            rows_RD = self.send(rows_RD, sizes_E, self.run)
        result_PD = Combine.apply(rows_RD, weights_PJ.to(rows_RD.dtype), order_R, inverse_R)
        result_BTD = result_PD.view_as(x_BTD)
        if self.shared is not None:
            shared_BTD = self.shared(x_BTD)
            if self.shared_gate is not None:
                shared_BTD = shared_BTD * self.shared_gate(x_BTD).sigmoid()
            result_BTD = result_BTD + shared_BTD
        return result_BTD, sums_W

    def run(self, rows_RD: Tensor, offsets_E: Tensor) -> Tensor:
        """Passes rows, sorted by expert, through the experts of this rank."""
        first = self.gate_up if self.gated else self.up
        return self.down(self.gate(first(rows_RD, offsets_E)), offsets_E)
