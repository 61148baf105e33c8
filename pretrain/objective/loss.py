"""The loss of all objectives: cross-entropy of a linear head at the positions with a target.

    Model, Batch  --Loss-->  LossOutput     inside the module that the engine wraps

    z = cap tanh(logits / cap), or the logits        log Z = logsumexp(z)
    loss = (1 - s) (log Z - z_target) + s mean(log Z - z) + c (log Z)^2
    d loss / d z = (1 + 2 c log Z) softmax(z) - (1 - s) [target] - s / V

with label smoothing s (Szegedy et al. 2016, section 7), the coefficient c of the z-loss (Chowdhery
et al. 2022, section 5) and the cap of Gemma 2 (Gemma Team 2024, section 2). The mean and V are of
the real vocabulary, without padding. With a second target of share a (mixup), z_target is
(1 - a) z_first + a z_second.

The head runs without materialising all logits:

    for each chunk of tokens:  logits = h W^T  ->  losses, d loss / d logits
                               ->  d loss / d h, d loss / d W summed
    backward:                  both, times the gradient of the sum

On a GPU the gradient of W is summed in fp32 by the product itself, where torch has one that does.
With `engine.compile` what is between the products is one compiled function: the scores of a chunk
are read twice and their gradient written once, instead of some ten passes.

Gradients are computed in the forward pass, while the logits of a chunk exist: the same three
matrix products as with materialised logits, none recomputed. Saved for the backward pass are two
tensors of the shapes of h and W. Computing them in the backward pass would take one more product
without lowering the peak: the head's backward pass comes first, when all activations still exist,
and W is not gathered there (ZeRO stage 3). Without gradients (evaluation) only the losses are
computed.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial, reduce
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pretrain.objective.chunk_loss import CrossEntropy, sum_chunk, sum_shared_chunk
from pretrain.objective.distillation import Distillation
from pretrain.plan.memory import chunk_logits
from pretrain.types import IGNORE_INDEX, Batch, ModelOutput, continuing, take_next


class Model(Protocol):
    """A model that an objective can train.

    `head(hidden_BTD, loss)` returns `loss(hidden_BTD, weight_VD, bias_V)`, evaluated inside of the
    head's forward: only there are the head's weights gathered under ZeRO stage 3.
    `head.num_scores` is the number of rows of the weight, without padding; `head.compiles_loss`
    asks for the compiled loss, `head.chunk_logits` for a size of chunks; `head.shared` are the ranks
    over which these rows are cut, if any.
    A head of vectors returns `loss(vectors_PD, log_scale)` likewise.
    `embedding.patches(pixels_BCYX)` returns what a head of pixels predicts. `generator` is the model
    whose samples replace tokens (`objective.kind: replaced`).
    """

    head: Any
    embedding: Any
    generator: Any
    training: bool

    def __call__(self, batch: Batch, *, logits: bool) -> ModelOutput:
        """Runs a batch; with `logits=False` returns hidden states only."""


class LossOutput(NamedTuple):
    """Loss of one micro-batch, summed: dividing by the targets of the global batch comes later.

    Attributes:
        loss_sum: Scalar, fp32 (fp64 for fp64 inputs), differentiable once: the minimised loss.
        nll_sum: Scalar, the same dtype, detached: -log p(target), the loss of logs and evaluations.
        num_correct: Scalar int64: targets with the largest score; among equal scores the first.
        nll_P: Detached summands of `nll_sum`, at `Batch.target_positions_P` or at every position; 0
            without a target. None: not available, and then no loss by source is logged.
        routing_LW: That of the model's output; losses of it are added by the training step.
        ahead: fp64 [modules, 3] of those that predict further tokens: sum of -log p(target), correct
            targets, and their number. None: there are none.
        shown_M: Further sums, float64, detached, by `Objective.shown`. None: there are none.
    """

    loss_sum: Tensor
    nll_sum: Tensor
    num_correct: Tensor
    nll_P: Tensor | None = None
    routing_LW: Tensor | None = None
    ahead: Tensor | None = None
    shown_M: Tensor | None = None


Loss = Callable[..., LossOutput]
"""`loss(model, batch)`, and `distillation` beside where the model has a teacher."""


def sum_token_loss(
    model: Model,
    batch: Batch,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    multi_token_weight: float = 0.0,
    distillation: Distillation | None = None,
) -> LossOutput:
    """Sums the cross-entropy of every target. Positions without one (IGNORE_INDEX) add nothing.

    If `batch.target_positions_P` lists the few positions with a target, the head reads only these.
    Modules that predict further tokens add the mean of their losses, weighted; the target of each is
    that of the next position in the same document. Divergence from a teacher is added.
    """
    output = model(batch, logits=False)
    hidden_BTD = output.hidden_BTD
    if output.ahead:
        hidden_BTD = torch.cat((hidden_BTD, *output.ahead))
    targets_BT = batch.targets_BT
    if batch.target_positions_P is not None:
        hidden_BTD = hidden_BTD.flatten(0, 1).index_select(0, batch.target_positions_P)
        targets_BT = targets_BT.flatten().index_select(0, batch.target_positions_P)
        if model.head.shared is not None:
            hidden_BTD, targets_BT = model.head.shared.fill(hidden_BTD, targets_BT)

    def cross_entropy(
        hidden: Tensor,
        targets: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        distillation: Distillation | None = None,
    ) -> LossOutput:
        return linear_cross_entropy(
            hidden,
            weight,
            targets,
            vocab_size=model.head.num_scores,
            bias_V=bias,
            mixed_P2=batch.mixed_P2,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            soft_cap=model.head.soft_cap,
            compiled=model.head.compiles_loss,
            chunk_logits=model.head.chunk_logits,
            shared=model.head.shared,
            distillation=distillation,
        )

    def head_loss(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> LossOutput:
        if not output.ahead:  # the gradient of a part would be a copy
            return cross_entropy(hidden, targets_BT, weight, bias, distillation)
        first, *ahead = hidden.chunk(1 + len(output.ahead))
        found = cross_entropy(first, targets_BT, weight, bias, distillation)
        continuing_BT = continuing(batch.documents_BT, batch.lengths_B, targets_BT.shape[1])
        losses, sums, further_BT = [], [], targets_BT
        for each in ahead:
            further_BT = take_next(further_BT, continuing_BT, IGNORE_INDEX)
            one = cross_entropy(each, further_BT, weight, bias)
            losses.append(one.loss_sum)
            num_targets = (further_BT != IGNORE_INDEX).sum()
            sums.append(torch.stack((one.nll_sum, one.num_correct, num_targets)))
        weighted = multi_token_weight * torch.stack(losses).mean()
        return found._replace(loss_sum=found.loss_sum + weighted, ahead=torch.stack(sums).double())

    # The hooks of ZeRO stage 3 may return a plain tuple.
    found = LossOutput(*model.head(hidden_BTD, head_loss))._replace(routing_LW=output.routing_LW)
    if batch.target_positions_P is not None and found.nll_P is not None:
        found = found._replace(nll_P=found.nll_P[: len(batch.target_positions_P)])
    return found


@cache
def _compiled_sum_chunk() -> Callable[..., tuple[Tensor, Tensor, Tensor, Tensor | None]]:
    """Returns `sum_chunk` compiled: one graph for full chunks, one for chunks of any other length."""
    return torch.compile(sum_chunk)


@cache
def logits_of_chunk(device: torch.device) -> int:
    """Returns the number of logits of a chunk on a device, as `plan` counts them."""
    is_gpu = device.type == "cuda"
    return chunk_logits(torch.cuda.get_device_properties(device).total_memory if is_gpu else 0)


@cache
def _adds_in_fp32(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns whether a product of 16-bit matrices on a device can add to an fp32 matrix.

    Tried: it depends on the device and on the version of torch.
    """
    if device.type != "cuda":
        return False
    factor, total = torch.ones(8, 8, dtype=dtype, device=device), torch.ones(8, 8, device=device)
    try:
        torch.addmm(total, factor, factor, out_dtype=torch.float32, out=total)
    except (TypeError, RuntimeError):
        return False
    return True


def linear_cross_entropy(
    hidden_BTD: Tensor,
    weight_VD: Tensor,
    targets_BT: Tensor,
    *,
    vocab_size: int,
    bias_V: Tensor | None = None,
    mixed_P2: Tensor | None = None,
    weights_P: Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    compiled: bool = False,
    chunk_logits: int = 0,
    shared: Any = None,
    distillation: Distillation | None = None,
) -> LossOutput:
    """Sums the cross-entropy of `softmax(hidden weight^T + bias)` over the targets.

    The sums are the same with gradients on and off; the softmax has their precision.

    Args:
        hidden_BTD: Floating point, or [P, D]; matrix products run in its dtype, or in autocast's.
        weight_VD: Head weight. Rows from `vocab_size` on are padding, outside of the softmax.
        targets_BT: int64, or [P]; IGNORE_INDEX where there is no loss.
        vocab_size: Real rows of the weight.
        bias_V: Head bias; None: 0.
        mixed_P2: Second target and its share, as in `Batch`; what is correct goes by the first.
        weights_P: Factor of each token in the loss. None: 1.
        label_smoothing: Share of the target's probability, spread evenly over the real vocabulary.
        z_loss: Coefficient of the squared log of the softmax's denominator.
        soft_cap: Bound that logits approach, `cap tanh(logits / cap)`; None: unbounded.
        compiled: Compile what is between the matrix products, at the first call.
        chunk_logits: Logits that are held at once; 0: by the device.
        shared: Ranks that share the vocabulary and the tokens; then collective (`TensorRanks`).
        distillation: Teacher, whose divergence is added to the loss and shown. None: there is none.
    """
    hidden = hidden_BTD.flatten(0, -2)
    targets = targets_BT.flatten()
    form = CrossEntropy(vocab_size, label_smoothing, z_loss, soft_cap)
    sum_logits = _compiled_sum_chunk() if compiled else sum_chunk
    if shared is not None:
        assert mixed_P2 is None, "mixed targets are those of images"
        sum_logits = partial(sum_shared_chunk, shared=shared)
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden = hidden.to(dtype)
        weight_VD = weight_VD.to(dtype)
        bias_V = None if bias_V is None else bias_V.to(dtype)
    assert weights_P is None or not (label_smoothing or z_loss or shared), "log-probabilities"
    inputs = hidden, weight_VD, bias_V, targets, mixed_P2, weights_P
    assert distillation is None or shared is None, "a teacher has all scores of a token"
    options = sum_logits, chunk_logits or logits_of_chunk(hidden.device), shared, distillation
    with torch.autocast(device, enabled=False):
        # Inside a Function gradients are always off: the current mode is passed in.
        loss_sum, nll_sum, correct, nll_P, divergence = _Sums.apply(*inputs, form, torch.is_grad_enabled(), *options)
    shown_M = None if divergence is None else divergence.double()[None]
    return LossOutput(loss_sum, nll_sum, correct, nll_P, shown_M=shown_M)


class _Gradients:
    """Gradients of hidden states, weight and bias, summed over chunks; None where they are not `needed`.

    The first chunk's are the sums to which others are added, without zeros before it.
    """

    def __init__(self, needed: Sequence[bool], exact: torch.dtype) -> None:
        self._needed = needed
        self._exact = exact
        self.hidden_PD: Tensor | None = None
        self.weight_VD: Tensor | None = None
        self.bias_V: Tensor | None = None

    def reserve(self, hidden_PD: Tensor) -> None:
        """Takes the memory of the gradient of all hidden states, where there are several chunks."""
        self.hidden_PD = torch.empty_like(hidden_PD) if self._needed[0] else None

    def add(self, chunk: slice, grad_PV: Tensor, hidden_PD: Tensor, weight_VD: Tensor, shared: Any) -> None:
        if self._needed[0]:
            self._add_hidden(chunk, grad_PV, weight_VD, shared)
        if self._needed[1]:
            self.weight_VD = self._sum_weight(grad_PV.t(), hidden_PD)
        if self._needed[2]:
            bias_V = grad_PV.sum(dim=0, dtype=self._exact)
            self.bias_V = bias_V if self.bias_V is None else self.bias_V.add_(bias_V)

    def _add_hidden(self, chunk: slice, grad_PV: Tensor, weight_VD: Tensor, shared: Any) -> None:
        rows = None if self.hidden_PD is None else self.hidden_PD[chunk]
        if shared is None:
            part_PD = torch.mm(grad_PV, weight_VD, out=rows)
        else:
            part_PD = shared.sum(grad_PV @ weight_VD, 0)
            if rows is not None:
                rows.copy_(part_PD)
        self.hidden_PD = part_PD if rows is None else self.hidden_PD

    def _sum_weight(self, grad_VP: Tensor, hidden_PD: Tensor) -> Tensor:
        total = self.weight_VD
        if hidden_PD.dtype == self._exact:
            return torch.mm(grad_VP, hidden_PD) if total is None else total.addmm_(grad_VP, hidden_PD)
        if not _adds_in_fp32(hidden_PD.device, hidden_PD.dtype):
            product_VD = grad_VP @ hidden_PD
            # Added as it is: in fp32 it would be a second copy of the sum.
            return product_VD.to(self._exact) if total is None else total.add_(product_VD)
        if total is None:
            total = grad_VP.new_zeros(len(grad_VP), hidden_PD.shape[1], dtype=self._exact)
        return torch.addmm(total, grad_VP, hidden_PD, out_dtype=torch.float32, out=total)


def _sum_taught(
    distillation: Distillation | None,
    chunk: slice,
    sum_logits: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor | None]],
    logits_PV: Tensor,
    targets_P1: Tensor,
    mixed_P2: Tensor | None,
    form: CrossEntropy,
    needs_grad: bool,
) -> tuple[Any, Tensor, Tensor, Tensor, Tensor | None]:
    """Returns the divergence from a teacher, if any, and `sum_logits` with it."""
    if distillation is None:
        return None, *sum_logits(logits_PV, targets_P1, mixed_P2, form, needs_grad)
    # First: the scores are overwritten.
    learned, of_teacher = distillation.add(logits_PV, targets_P1, chunk, form, needs_grad)
    loss, nll_P1, correct, grad_PV = sum_logits(logits_PV, targets_P1, mixed_P2, form, needs_grad)
    if grad_PV is not None and of_teacher is not None:
        grad_PV[:, : of_teacher.shape[1]] += of_teacher
    return learned, loss + learned, nll_P1, correct, grad_PV


class _Sums(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_PD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_P: Tensor,
        mixed_P2: Tensor | None,
        weights_P: Tensor | None,
        form: CrossEntropy,
        grad_enabled: bool,
        sum_logits: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor | None]],
        num_logits: int,
        shared: Any,
        distillation: Distillation | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        exact = torch.promote_types(hidden_PD.dtype, torch.float32)
        needed = [grad_enabled and needs for needs in ctx.needs_input_grad[:3]]
        grads = _Gradients(needed, exact)
        needs_grad = any(needed)
        sums, nll_parts, divergences = [], [], list[Any]()
        rows = weight_VD.shape[0] * (shared.size if shared is not None else 1)
        size = max(1, num_logits // rows)
        if size < len(targets_P):
            grads.reserve(hidden_PD)
        for start in range(0, max(1, len(targets_P)), size):
            chunk = slice(start, start + size)
            hidden = hidden_PD[chunk]
            targets_P1 = targets_P[chunk, None]
            if shared is not None:
                hidden, targets_P1 = shared.gather(hidden, 0), shared.gather(targets_P1, 0)
            logits_PV = torch.nn.functional.linear(hidden, weight_VD, bias_V)
            mixed = None if mixed_P2 is None else mixed_P2[chunk]
            scores = logits_PV, targets_P1, mixed, form, needs_grad
            learned, loss, nll_P1, correct, grad_PV = _sum_taught(distillation, chunk, sum_logits, *scores)
            divergences.append(learned)
            if weights_P is not None:
                weights_P1 = weights_P[chunk, None]
                loss = (weights_P1 * nll_P1).sum()
                grad_PV = None if grad_PV is None else grad_PV.mul_(weights_P1)
            sums.append((loss, nll_P1.sum(), correct))
            nll_parts.append(nll_P1[:, 0])
            if grad_PV is not None:
                grads.add(chunk, grad_PV, hidden, weight_VD, shared)
        if needs_grad:
            rounded = _round_like(grads.weight_VD, weight_VD), _round_like(grads.bias_V, bias_V)
            ctx.save_for_backward(grads.hidden_PD, *rounded)
        loss_sum, nll_sum, num_correct = (reduce(torch.add, parts) for parts in zip(*sums, strict=True))
        nll_P = nll_parts[0] if len(nll_parts) == 1 else torch.cat(nll_parts)
        divergence = None if distillation is None else reduce(torch.add, divergences)
        ctx.mark_non_differentiable(*filter(torch.is_tensor, (nll_sum, num_correct, nll_P, divergence)))
        ctx.set_materialize_grads(False)
        return loss_sum, nll_sum, num_correct, nll_P, divergence

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        # In place: a copy of the weight's gradient would cost a tenth of its product. Autograd
        # therefore refuses a second backward pass through the same graph.
        scaled = (None if saved is None else saved.mul_(grad) for saved in ctx.saved_tensors)
        return *scaled, *(None,) * 9


def _round_like(grad: Tensor | None, parameter: Tensor | None) -> Tensor | None:
    """Returns a gradient in the precision of its parameter; of fp16 parameters as it is."""
    # A sum over many tokens may overflow fp16 before the backward pass applies the loss scale;
    # autograd rounds it after that.
    if grad is None or parameter is None or parameter.dtype == torch.float16:
        return grad
    return grad.to(parameter.dtype)
