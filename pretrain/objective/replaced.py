"""Replaced-token detection (ELECTRA, Clark et al. 2020): which tokens of a text a generator has replaced.

    row        tokens --masked_rows--> inputs of the generator, masked positions, a number u of each
    generator  log p(token) at these positions; a sample by u, without gradient, takes each place
    model      the text with samples -> a score of each token: is it another than in the text?

    loss = weight x mean over tokens of -log p(replaced or not)
         + sum over masked positions of -log p(token) / (rate x tokens)

`rate x tokens` is the expected number of masked positions, so that the gradient is exact for any
ranks and micro-batches; a sample that is the token itself counts as not replaced (3.1). A target is
a token: loss and accuracy are those of the model. The numbers u are drawn by (seed, sample), so
that a resumed run, an evaluation and other ranks draw the same samples.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, linear

from pretrain.kinds.objectives.replaced import ReplacedConfig
from pretrain.objective.loss import LossOutput, Model, linear_cross_entropy, logits_of_chunk
from pretrain.objective.masked import find_mask, masked_rows
from pretrain.objective.row_maker import RowContext, real_tokens
from pretrain.rows import IGNORE_INDEX, TokenRows
from pretrain.types import Batch, ModelRows, RowMaker
from pretrain.utils.rng import draw_uniform


def build_replaced(section: ReplacedConfig, context: RowContext) -> RowMaker:
    """Raises: ConfigError: The tokenizer has no mask token."""
    find_mask("replaced", context.vocabulary)
    return partial(replaced_rows, config=section, context=context)


def replaced_rows(rows: TokenRows, config: ReplacedConfig, context: RowContext) -> ModelRows:
    """Masks tokens as `masked_rows`; targets are all tokens, as in the text, and draws are for the masked ones."""
    seq_len = rows.tokens_BT.shape[1] - 1
    made = masked_rows(rows, config, context.vocabulary, context.seed, context.document_mask)
    targets = rows.tokens_BT[:, :-1].astype(np.int64)
    real = real_tokens(rows, seq_len)
    if real is not None:
        targets[~real] = IGNORE_INDEX
    draws = draw_uniform("replaced", context.seed, rows.sample_ids_B, seq_len)
    return replace(made, targets_BT=targets, draws_P=draws.ravel()[made.target_positions_P])


def sum_replaced_loss(model: Model, batch: Batch, weight: float, rate: float) -> LossOutput:
    """Sums the losses of the model and of its generator, and shows the sums that its record names."""
    masked_P, draws_P = batch.target_positions_P, batch.draws_P
    assert masked_P is not None and draws_P is not None, "rows of `replaced_rows`"
    originals_P = batch.targets_BT.flatten().index_select(0, masked_P)
    of_generator, samples_P = _predict(model.generator, batch, masked_P, originals_P, draws_P)
    tokens_BT = batch.tokens_BT.flatten().index_copy(0, masked_P, samples_P).view_as(batch.tokens_BT)
    output = model(replace(batch, tokens_BT=tokens_BT), logits=False)
    scores_BT = model.head(output.hidden_BTD)[..., 0]
    scores_BT = scores_BT.to(torch.promote_types(scores_BT.dtype, torch.float32))
    is_real_BT = batch.targets_BT != IGNORE_INDEX
    is_replaced_BT = is_real_BT & (tokens_BT != batch.targets_BT)
    losses_BT = binary_cross_entropy_with_logits(scores_BT, is_replaced_BT.to(scores_BT.dtype), reduction="none")
    nll_sum = torch.where(is_real_BT, losses_BT, 0.0).sum()
    says_BT = scores_BT > 0
    shown = (of_generator.nll_sum / rate, is_replaced_BT.sum(), (is_replaced_BT & says_BT).sum())
    return LossOutput(
        weight * nll_sum + of_generator.loss_sum / rate,
        nll_sum.detach(),
        (is_real_BT & (says_BT == is_replaced_BT)).sum(),
        shown_M=torch.stack([each.double() for each in shown]),
    )


def _predict(
    generator: Model, batch: Batch, masked_P: Tensor, originals_P: Tensor, draws_P: Tensor
) -> tuple[LossOutput, Tensor]:
    """Returns the loss of a generator at masked positions, and a sample of its prediction for each, int64 [P]."""
    hidden_PD = generator(batch, logits=False).hidden_BTD.flatten(0, 1).index_select(0, masked_P)
    head = generator.head

    def head_loss(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
        output = linear_cross_entropy(
            hidden,
            weight,
            originals_P,
            vocab_size=head.num_scores,
            bias_V=bias,
            compiled=head.compiles_loss,
            chunk_logits=head.chunk_logits,
        )
        with torch.no_grad():
            score = partial(
                linear, weight=weight[: head.num_scores], bias=None if bias is None else bias[: head.num_scores]
            )
            samples_P = sample_tokens(hidden, score, draws_P, max(1, logits_of_chunk(weight.device) // len(weight)))
        return output.loss_sum, output.nll_sum, output.num_correct, samples_P

    *sums, samples_P = head(hidden_PD, head_loss)
    return LossOutput(*sums), samples_P


def sample_tokens(hidden_PD: Tensor, score: Callable[[Tensor], Tensor], draws_P: Tensor, size: int) -> Tensor:
    """Returns the token at which the cumulated softmax of its scores passes each number, int64 [P].

    Args:
        hidden_PD: Inputs of `score`, which are read `size` rows at a time.
        score: Returns the scores of the vocabulary, [P, V].
        draws_P: Numbers of [0, 1).
        size: Rows of a chunk.
    """
    samples = [draws_P.new_empty(0, dtype=torch.int64)]
    for hidden, draws in zip(hidden_PD.split(size), draws_P.split(size), strict=True):
        logits = score(hidden)
        exact = torch.promote_types(logits.dtype, torch.float32)
        cumulated_PV = logits.softmax(dim=-1, dtype=exact).cumsum(dim=-1)
        # Of the rounded sum of all: a token without probability is never drawn.
        places_P1 = draws[:, None].to(exact) * cumulated_PV[:, -1:]
        tokens_P = torch.searchsorted(cumulated_PV, places_P1, right=True)[:, 0]
        samples.append(tokens_P.clamp(max=logits.shape[-1] - 1))
    return torch.cat(samples)
