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

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from pretrain.config.model import ExpertsConfig, StackConfig


def relu_squared(x: Tensor) -> Tensor:
    """Returns `max(x, 0)^2` (So et al. 2021, 3)."""
    return functional.relu(x).square()


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


# A product of each run of rows with its expert's matrix. An operation of its own: to the compiler
# it is opaque and has a fixed shape, where a loop over the experts depends on the data. On one core
# of a CPU the loop is as fast as one dense product of as many rows (64 experts: within 5%), as is
# torch's grouped kernel there, which only takes rows of whole 16 bytes.


def _has_kernel(x: Tensor, weight_EOI: Tensor) -> bool:
    """Returns whether torch's grouped kernel runs: bf16 on CUDA, where a loop waits for offsets."""
    sizes = weight_EOI.shape[1:]
    is_fit = x.is_cuda and x.dtype == torch.bfloat16 and not any(size % 8 for size in sizes)
    return is_fit and hasattr(functional, "grouped_mm")


def _runs(offsets_E: Tensor) -> Iterator[tuple[int, slice]]:
    """Yields the experts that have rows, and these."""
    start = 0
    for expert, end in enumerate(offsets_E.tolist()):
        if end > start:
            yield expert, slice(start, end)
        start = end


@torch.library.custom_op("pretrain::grouped_linear", mutates_args=())
def grouped_linear(x_RI: Tensor, weight_EOI: Tensor, offsets_E: Tensor) -> Tensor:
    """Returns `x W_e^T` of the rows of each expert, [R, outputs]; differentiable once.

    Args:
        x_RI: Rows, sorted by expert, [R, inputs].
        weight_EOI: Matrices in the dtype of the rows, [E, outputs, inputs].
        offsets_E: int32; end of each expert's rows, which may have none.
    """
    if _has_kernel(x_RI, weight_EOI):
        return functional.grouped_mm(x_RI, weight_EOI.transpose(1, 2), offs=offsets_E)
    out_RO = x_RI.new_empty(x_RI.shape[0], weight_EOI.shape[1])
    for expert, rows in _runs(offsets_E):
        torch.mm(x_RI[rows], weight_EOI[expert].t(), out=out_RO[rows])
    return out_RO


@grouped_linear.register_fake
def _grouped_shape(x_RI: Tensor, weight_EOI: Tensor, offsets_E: Tensor) -> Tensor:
    return x_RI.new_empty(x_RI.shape[0], weight_EOI.shape[1])


@torch.library.custom_op("pretrain::grouped_linear_backward", mutates_args=())
def _grouped_backward(
    grad_RO: Tensor, x_RI: Tensor, weight_EOI: Tensor, offsets_E: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns the gradients of rows and matrices; zeros for an expert without rows."""
    if _has_kernel(x_RI, weight_EOI):
        grad_x_RI = functional.grouped_mm(grad_RO, weight_EOI, offs=offsets_E)
        return grad_x_RI, functional.grouped_mm(grad_RO.t(), x_RI, offs=offsets_E)
    grad_x_RI = torch.empty_like(x_RI)
    grad_weight_EOI = torch.zeros_like(weight_EOI)
    for expert, rows in _runs(offsets_E):
        torch.mm(grad_RO[rows], weight_EOI[expert], out=grad_x_RI[rows])
        torch.mm(grad_RO[rows].t(), x_RI[rows], out=grad_weight_EOI[expert])
    return grad_x_RI, grad_weight_EOI


@_grouped_backward.register_fake
def _backward_shapes(
    grad_RO: Tensor, x_RI: Tensor, weight_EOI: Tensor, offsets_E: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return torch.empty_like(x_RI), torch.empty_like(weight_EOI)


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, grad_RO: Tensor) -> tuple[Tensor, Tensor, None]:
    x_RI, weight_EOI, offsets_E = ctx.saved_tensors
    return *_grouped_backward(grad_RO.contiguous(), x_RI, weight_EOI, offsets_E), None


grouped_linear.register_autograd(_differentiate, setup_context=_save)


class GroupedLinear(nn.Module):
    """A linear map for each expert, with their matrices in one parameter, [E, outputs, inputs].

    Their biases are one vector, [E outputs]: of one dimension, as any bias that is no matrix to an
    optimizer.
    """

    def __init__(self, experts: int, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, outputs, inputs))
        self.bias = nn.Parameter(torch.empty(experts * outputs)) if bias else None

    def forward(self, x_RI: Tensor, offsets_E: Tensor) -> Tensor:
        """Maps rows that are sorted by expert, in autocast's dtype where it is on."""
        device = x_RI.device.type
        dtype = x_RI.dtype
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        out_RO = grouped_linear(x_RI.to(dtype), self.weight.to(dtype), offsets_E)
        if self.bias is None:
            return out_RO
        rows_R = torch.arange(len(out_RO), dtype=offsets_E.dtype, device=offsets_E.device)
        experts_R = torch.searchsorted(offsets_E, rows_R, right=True)
        return out_RO + self.bias.to(dtype).view(len(offsets_E), -1).index_select(0, experts_R)


class _Take(torch.autograd.Function):
    """Row `index_R[i] // copies` at place i; its gradient is a gather too: sums have one order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index_R: Tensor, inverse_R: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(inverse_R)
        ctx.copies = copies
        return x.index_select(0, index_R // copies if copies > 1 else index_R)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse_R,) = ctx.saved_tensors
        rows = grad.index_select(0, inverse_R)
        if ctx.copies > 1:
            rows = rows.unflatten(0, (-1, ctx.copies)).sum(1)
        return rows, None, None, None


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
    entropy = torch.special.entr(known_PE).mul(counted_P1).sum()
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

    def forward(self, x_BTD: Tensor, counted_BT: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Maps [B, T, D] to the same; returns also the sums of the counted tokens (`Router`)."""
        x_PD = x_BTD.flatten(0, 1)
        counted_P = None if counted_BT is None else counted_BT.flatten()
        experts_PJ, weights_PJ, sums_W = self.router(x_PD, counted_P)
        chosen_R = experts_PJ.flatten()
        order_R = chosen_R.argsort(stable=True)  # by expert, then by token
        places_R = torch.arange(len(order_R), device=order_R.device)
        inverse_R = torch.empty_like(order_R).scatter_(0, order_R, places_R)
        sizes_E = torch.zeros(self.count, dtype=torch.int32, device=chosen_R.device)
        sizes_E = sizes_E.scatter_add(0, chosen_R, torch.ones_like(chosen_R, dtype=torch.int32))
        rows_RD = _Take.apply(x_PD, order_R, inverse_R, self.top_k)
        rows_RD = self._run(rows_RD, sizes_E.cumsum(0, dtype=torch.int32))
        rows_PJD = _Take.apply(rows_RD, inverse_R, order_R, 1).unflatten(0, (-1, self.top_k))
        result_PD = (rows_PJD * weights_PJ[..., None].to(rows_PJD.dtype)).sum(dim=1)
        result_BTD = result_PD.view_as(x_BTD)
        if self.shared is not None:
            result_BTD = result_BTD + self.shared(x_BTD)
        return result_BTD, sums_W

    def _run(self, rows_RD: Tensor, offsets_E: Tensor) -> Tensor:
        """Passes rows, sorted by expert, through their experts."""
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
