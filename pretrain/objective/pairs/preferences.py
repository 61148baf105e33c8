"""Preferences (Rafailov et al. 2023, equation 7, and its kin): the better of two answers.

    row   prompt, chosen answer | prompt, rejected answer | ...      documents, a pair together
    log p(answer) = sum over its tokens, or their mean, of the model and of the reference
    score = log p(answer), or log p(answer) - log p_ref(answer)
    loss of a pair = formula(score of the chosen answer, score of the rejected one)

as the record of the loss says (`kinds/preference_losses.py`). A target is a pair: the loss is the
mean over pairs. Reported is the loss without label smoothing.

The reference is the model before its first step. Its log-probabilities are computed once
(training/reference.py) and found by a hash of the pair's tokens, wherever its row is in the order:

    rows with keys  --add_reference(ReferenceTable)-->  with log-probabilities

The weight of a token's gradient, the derivative of the formula, is known when both answers have been
read, so the head runs twice: without gradient for the sums, then for the gradient of the weighted
sum of log-probabilities.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from pkgutil import resolve_name

import numpy as np
import safetensors.numpy
import torch
from safetensors import SafetensorError
from torch import Tensor

from pretrain.errors import DataError
from pretrain.kinds.objectives.dpo import DpoConfig
from pretrain.kinds.preference_losses import PREFERENCE_LOSSES
from pretrain.objective.causal import causal_rows
from pretrain.objective.loss import LossOutput, Model, linear_cross_entropy
from pretrain.objective.pairs.preference_formulas import PairLosses
from pretrain.objective.row_maker import RowContext
from pretrain.objective.token_kinds import TokenKind
from pretrain.rows import IGNORE_INDEX, TokenRows, Vocabulary
from pretrain.types import Batch, ModelRows, PairBatch, RowMaker


def build_preferences(section: DpoConfig, context: RowContext) -> RowMaker:
    """Pairs of answers, one or several a row."""
    return preference_rows


def preference_rows(rows: TokenRows) -> ModelRows:
    """Makes rows of pairs without the reference; documents 2n and 2n + 1 of a row are a pair."""
    made = causal_rows(rows, document_mask=True)
    width = rows.tokens_BT.shape[1]
    num_rows, seq_len = made.tokens_BT.shape
    assert rows.num_tokens_B is not None and rows.loss_mask_BT is not None, "rows are padded"
    row, column = np.divmod(rows.starts, width)
    is_side = column < rows.num_tokens_B[row]  # the last start of a row is that of its padding
    starts = rows.starts[is_side]
    row, column = row[is_side], column[is_side]
    assert len(starts) % 2 == 0, "a row has both answers"
    positions = np.flatnonzero(made.targets_BT != IGNORE_INDEX)
    places = positions // seq_len * width + positions % seq_len
    targets = np.full((num_rows, seq_len), IGNORE_INDEX, dtype=np.int64)
    targets[row[::2], column[::2]] = 0
    pairs = PairBatch(
        targets_P=made.targets_BT.ravel()[positions],
        sides_P=np.searchsorted(starts, places, side="right") - 1,
        keys_A=_hash_pairs(rows, starts, row),
    )
    return replace(made, targets_BT=targets, target_positions_P=positions, pairs=pairs)


def _hash_pairs(rows: TokenRows, starts: np.ndarray, row: np.ndarray) -> np.ndarray:
    """Returns a hash of the tokens and the loss mask of each pair, int64."""
    assert rows.num_tokens_B is not None and rows.loss_mask_BT is not None
    tokens, mask = rows.tokens_BT.astype("<u4").ravel(), rows.loss_mask_BT.ravel()
    width = rows.tokens_BT.shape[1]
    # The end of a side is the start of the next, or of its row's padding.
    row_ends = row * width + rows.num_tokens_B[row]
    ends = np.minimum(np.append(starts[1:], len(tokens)), row_ends)
    keys = []
    bounds = np.stack((starts[::2], ends[::2], ends[1::2]), axis=1)
    for first, middle, end in bounds.tolist():
        digest = hashlib.blake2b(digest_size=8)
        digest.update((middle - first).to_bytes(8, "little"))
        digest.update(tokens[first:end].tobytes())
        digest.update(np.packbits(mask[first:end]).tobytes())
        keys.append(int.from_bytes(digest.digest(), "little", signed=True))
    return np.array(keys, dtype=np.int64)


@dataclass(frozen=True)
class ReferenceTable:
    """Log-probabilities of both answers by the reference, for the pairs of a run."""

    keys: np.ndarray  # int64 [A], ascending, each once
    values: np.ndarray  # float64 [A, 2]

    def find(self, keys: np.ndarray) -> np.ndarray | None:
        """Returns the values of some keys, float64 [keys, 2]; None where one is unknown."""
        places = np.minimum(np.searchsorted(self.keys, keys), max(len(self.keys) - 1, 0))
        if len(keys) and not (len(self.keys) and np.array_equal(self.keys[places], keys)):
            return None
        return self.values[places] if len(keys) else np.empty((0, 2))

    def dump(self) -> bytes:
        """Returns the content of a file of safetensors."""
        return safetensors.numpy.save({"keys": self.keys, "values": self.values})


def build_table(keys: Sequence[int], values: Sequence[Sequence[float]]) -> ReferenceTable:
    """Returns the table of pairs in any order; of a pair that occurs twice the first counts."""
    keys_of_pairs, first = np.unique(np.array(keys, dtype=np.int64), return_index=True)
    return ReferenceTable(keys_of_pairs, np.array(values, dtype=np.float64).reshape(-1, 2)[first])


def read_table(path: Path) -> ReferenceTable:
    """Reads a table. Raises: DataError: It is missing or damaged."""
    try:
        arrays = safetensors.numpy.load(path.read_bytes())
        return ReferenceTable(arrays["keys"], arrays["values"])
    except (OSError, SafetensorError, KeyError) as error:
        problem = "the log-probabilities of the reference cannot be read"
        fix = "put the file back from a copy of the run, or train a new run"
        raise DataError(f"{problem}: {error}", where=str(path), fix=fix) from None


def add_reference(make_rows: RowMaker, table: ReferenceTable | None) -> Callable[[TokenRows], ModelRows]:
    """Returns a row maker of pairs with their reference; None: it gives all answers 0."""

    def make(rows: TokenRows) -> ModelRows:
        made = make_rows(rows)
        assert made.pairs is not None, "rows of preferences"
        keys = made.pairs.keys_A
        log_probs = np.zeros((len(keys), 2)) if table is None else table.find(keys)
        if log_probs is None:
            text = "a pair of answers that the run did not begin with: its reference is not known"
            raise DataError(text, fix="use the data of the run, or train a new run on these")
        return replace(made, pairs=replace(made.pairs, reference_A2=log_probs))

    return make


def sum_preference_loss(model: Model, batch: Batch, loss: str = "sigmoid", **settings: float) -> LossOutput:
    """Sums the losses of the pairs of a batch, and shows their rewards and log-probabilities.

    Args:
        model: The model.
        batch: Rows with pairs.
        loss: Name in `PREFERENCE_LOSSES`.
        settings: Values of the keys that formulas take.
    """
    record = PREFERENCE_LOSSES[loss]
    taken = {name: settings[name] for name in record.settings}
    formula = partial(resolve_name(record.formula), **taken)

    def show(scores_A2: Tensor, sums_A2: Tensor) -> list[Tensor]:
        chosen, rejected = settings["beta"] * scores_A2.sum(dim=0)
        num_correct = (scores_A2[:, 0] > scores_A2[:, 1]).sum()
        return [chosen - rejected, chosen, rejected, num_correct, *sums_A2.sum(dim=0)]

    return sum_pairs(model, batch, formula, show, reference=record.reference, per_token=record.per_token)


def sum_pairs(
    model: Model,
    batch: Batch,
    formula: Callable[[Tensor], PairLosses],
    show: Callable[[Tensor, Tensor], Sequence[Tensor]],
    *,
    reference: bool = True,
    per_token: bool = False,
) -> LossOutput:
    """Sums the losses of two answers, of the scores of both, float64 [A, 2].

    Without the reference that a loss needs nothing is minimised, and what is shown are the
    log-probabilities of the answers, float64 [2 A], the first and the second in turn.

    Args:
        model: The model.
        batch: Rows with pairs.
        formula: Function of the scores.
        show: Function of the scores, and of sums of log-probabilities [A, 2]: `LossOutput.shown_M`.
        reference: Scores are relative to the reference.
        per_token: Scores are means over the tokens of an answer.
    """
    pairs = batch.pairs
    assert pairs is not None and batch.target_positions_P is not None, "rows of preferences"
    output = model(batch, logits=False)
    hidden_PD = output.hidden_BTD.flatten(0, 1).index_select(0, batch.target_positions_P)

    def head_loss(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> LossOutput:
        def score(weights_P: Tensor | None = None) -> LossOutput:
            return linear_cross_entropy(
                hidden,
                weight,
                pairs.targets_P,
                vocab_size=model.head.num_scores,
                bias_V=bias,
                weights_P=weights_P,
                soft_cap=model.head.soft_cap,
                compiled=model.head.compiles_loss,
                chunk_logits=model.head.chunk_logits,
            )

        with torch.no_grad():
            answers = score()
        assert answers.nll_P is not None
        sums_A2 = _sum_sides(-answers.nll_P.double(), pairs)
        if reference and pairs.reference_A2 is None:
            return LossOutput(answers.loss_sum, answers.nll_sum, answers.num_correct, shown_M=sums_A2.flatten())
        lengths_A2 = torch.ones_like(sums_A2)
        if per_token:
            lengths_A2 = _sum_sides(torch.ones_like(pairs.sides_P, dtype=sums_A2.dtype), pairs).clamp(min=1)
        scores_A2 = sums_A2 / lengths_A2
        if reference and pairs.reference_A2 is not None:
            scores_A2 = scores_A2 - pairs.reference_A2 / lengths_A2
        losses, slopes_A2 = _differentiate(formula, scores_A2)
        loss_sum = losses.loss_A.sum().to(answers.loss_sum.dtype)
        if torch.is_grad_enabled():
            weights_2A = -(slopes_A2 / lengths_A2).flatten().to(answers.nll_P.dtype)
            weighted = score(weights_2A.index_select(0, pairs.sides_P)).loss_sum
            loss_sum = weighted + (loss_sum - weighted.detach())
        shown_M = torch.stack([one.double() for one in show(scores_A2, sums_A2)])
        num_correct = (losses.margin_A > 0).sum()
        return LossOutput(loss_sum, losses.plain_A.sum(), num_correct, shown_M=shown_M)

    # The hooks of ZeRO stage 3 may return a plain tuple.
    return LossOutput(*model.head(hidden_PD, head_loss))._replace(routing_LW=output.routing_LW)


def _sum_sides(values_P: Tensor, pairs: PairBatch[Tensor]) -> Tensor:
    """Returns the sums over the tokens of each answer, float64 [A, 2]."""
    sums = torch.zeros(2 * len(pairs.keys_A), dtype=torch.float64, device=values_P.device)
    return sums.index_add_(0, pairs.sides_P, values_P).view(-1, 2)


def _differentiate(formula: Callable[[Tensor], PairLosses], scores_A2: Tensor) -> tuple[PairLosses, Tensor]:
    """Returns the losses of pairs, detached, and the derivative of their sum by the scores [A, 2]."""
    with torch.enable_grad():
        leaf_A2 = scores_A2.detach().requires_grad_()
        losses = formula(leaf_A2)
        (slopes_A2,) = torch.autograd.grad(losses.loss_A.sum(), leaf_A2)
    return PairLosses(*(values_A.detach() for values_A in losses)), slopes_A2


def pair_kinds(rows: ModelRows, section: DpoConfig, vocabulary: Vocabulary) -> list[TokenKind]:
    """Returns the kinds of the tokens of a row of pairs, for `pretrain data show`."""
    assert rows.pairs is not None and rows.target_positions_P is not None
    kinds = [TokenKind.CONTEXT] * rows.tokens_BT.shape[1]
    for place, side in zip(rows.target_positions_P, rows.pairs.sides_P, strict=True):
        kinds[place + 1] = TokenKind.REJECTED if side % 2 else TokenKind.CHOSEN
    return kinds
