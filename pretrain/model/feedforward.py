"""The feed-forward layer of a block: one for all tokens, or experts (Shazeer et al. 2017).

    scores    softmax or sigmoid of W x, in fp32   ->  J experts of each token, and their weights
    rows      one a token and choice, by expert    ->  gate_up, activation, down
    result    back in the order of tokens          ->  weighted sum over choices, + shared experts

Nothing is dropped and nothing padded (Gale et al. 2023, MegaBlocks): the result of a token depends
on that token alone, so micro-batches and ranks do not change it. The matrices of all experts of a
layer are one parameter, [E, outputs, inputs]: an expert without tokens has a gradient of zeros, and
no engine waits for a gradient that never comes.

Not here: even use of the experts (`train/balance.py`), for which a layer returns `RoutingSums`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from pretrain.config.model import ExpertsConfig, StackConfig
from pretrain.model.grouped import Combine, GroupedLinear, Take, sort_by_expert


class _ReluSquared(torch.autograd.Function):
    """`max(x, 0)^2`, bit-equal to both functions in half their passes over memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        positive = functional.relu(x)
        ctx.save_for_backward(positive)
        return positive * positive

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Returns `2 max(x, 0) grad`."""
        (positive,) = ctx.saved_tensors
        return (2 * positive).mul_(grad)


def relu_squared(x: Tensor) -> Tensor:
    """Returns `max(x, 0)^2` (So et al. 2021, 3)."""
    # Called here: torch 2.11 does not compile an `apply` that is an attribute of a module.
    squared: Tensor = _ReluSquared.apply(x)
    return squared


def quick_gelu(x: Tensor) -> Tensor:
    """Returns `x sigmoid(1.702 x)` (Hendrycks and Gimpel 2016, 2)."""
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "quick_gelu": quick_gelu,
    "silu": functional.silu,
    "relu": functional.relu,
    "relu2": relu_squared,
}


class Gate(nn.Module):
    """`activation(gate) * up` of both halves of [..., 2F], or of [..., F] the activation alone.

    With `gate_limit` l and `gate_shift` s, `activation(min(gate, l)) * (clamp(up, -l, l) + s)`
    (gpt-oss, as released).
    """

    def __init__(self, config: StackConfig) -> None:
        super().__init__()
        self.gated = config.gated
        self.limit, self.shift = config.gate_limit, config.gate_shift
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, x: Tensor) -> Tensor:
        if not self.gated:
            return self.activation(x)
        gate, up = x.chunk(2, dim=-1)
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return self.activation(gate) * (up + self.shift if self.shift else up)


class FeedForward(nn.Module):
    """`down(activation(up(x)))` (Vaswani et al. 2017, 3.3), [B, T, D] to [B, T, D].

    Gated: `down(activation(gate(x)) * up(x))` (Shazeer 2020). `gate` and `up` are one matrix
    product: rows 0..F-1 of `gate_up.weight` are the gate. `width` is F; None: `ff_width`.
    """

    def __init__(self, config: StackConfig, width: int | None = None) -> None:
        super().__init__()
        width = width or config.ff_width
        self.gated = config.gated
        if self.gated:
            self.gate_up = nn.Linear(config.width, 2 * width, bias=config.bias)
        else:
            self.up = nn.Linear(config.width, width, bias=config.bias)
        self.down = nn.Linear(width, config.width, bias=config.bias)
        self.gate = Gate(config)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(self.gate(self.gate_up(x_BTD) if self.gated else self.up(x_BTD)))


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
    groups_PG = choice_PGE.topk(2, dim=-1).values.sum(dim=-1).topk(config.top_groups, dim=-1).indices
    hidden_PG = torch.ones_like(choice_PGE[..., 0], dtype=torch.bool).scatter(1, groups_PG, False)
    return choice_PGE.masked_fill(hidden_PG[..., None], -torch.inf).flatten(1)


def _sum_routing(logits_PE: Tensor, scores_PE: Tensor, experts_PJ: Tensor, counted_P: Tensor) -> Tensor:
    """Returns packed `RoutingSums`."""
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
    `down.weight` [E, D, F]; further `router.weight` [E, D] and a dense layer `shared`. Biases of
    experts are `gate_up.bias` [2 E F] and `down.bias` [E D], and of the router [E].
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
        self.shared = FeedForward(config, experts.shared * width) if experts.shared else None
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
            result_BTD = result_BTD + self.shared(x_BTD)
        return result_BTD, sums_W

    def run(self, rows_RD: Tensor, offsets_E: Tensor) -> Tensor:
        """Passes rows, sorted by expert, through the experts of this rank."""
        first = self.gate_up if self.gated else self.up
        return self.down(self.gate(first(rows_RD, offsets_E)), offsets_E)


def pass_tokens(
    layer: nn.Module, x_BTD: Tensor, counted_BT: Tensor | None, tiles: int
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Passes tokens through the layer of a block in `tiles` parts; returns also the sums of experts.

    Each part is computed again in its backward pass (Chen et al. 2016): saved is the input alone,
    and the hidden values of one part at a time exist. Gradients of weights are summed over parts.
    """
    counted = (counted_BT,) if isinstance(layer, MixtureOfExperts) else ()
    # Ranks that share experts exchange once a part, be it without tokens.
    if not isinstance(layer, MixtureOfExperts) or layer.send is None:
        tiles = min(tiles, x_BTD.shape[0] * x_BTD.shape[1])
    if tiles == 1:
        found = layer(x_BTD, *counted)
        return found if counted else (found, None)
    # Pieces, not slices: the gradient of a slice has the size of the whole.
    pieces: list[tuple[Tensor | None, ...]] = []
    for x in (x_BTD, *counted):
        pieces.append((None,) * tiles if x is None else x.flatten(0, 1)[None].tensor_split(tiles, dim=1))
    again = torch.is_grad_enabled()
    made = [
        checkpoint(layer, *part, use_reentrant=False) if again else layer(*part) for part in zip(*pieces, strict=True)
    ]
    results = [one[0] for one in made] if counted else made
    sums = [one[1] for one in made if one[1] is not None] if counted else []
    return torch.cat(results, dim=1).view_as(x_BTD), torch.stack(sums).sum(dim=0) if sums else None
