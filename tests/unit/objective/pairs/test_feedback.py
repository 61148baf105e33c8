"""Records that are judged: their rows, and the loss of KTO beside its formula on answers that are read one by one."""

import numpy as np
import pytest
import torch

from pretrain.config.objective import ObjectiveConfig
from pretrain.data.loader import build_batch
from pretrain.evaluation.row_loss import ModelLoss
from pretrain.objective import build_loss, shown_of
from pretrain.objective.pairs.feedback import feedback_kinds, feedback_rows
from pretrain.objective.pairs.preferences import add_reference, build_table
from pretrain.rows import IGNORE_INDEX, TokenRows, select_rows
from tests.unit.objective.pairs.test_preferences import build, log_probability

WIDTH = 17
# (prompt, answer, wanted) of each row; a record alone; a row that could not be read.
RECORDS = [
    [([3, 4, 5], [6, 7], True), ([12], [13, 14, 15], False), ([30, 31], [33], False)],
    [([20, 21, 22, 23], [24, 25, 26], True)],
    [],
    [([5], [40, 41], False), ([7, 8], [42], False)],
]
WEIGHTS = {"desirable_weight": 1.5, "undesirable_weight": 0.5}


def raw_rows() -> TokenRows:
    """Rows as the stream gives them."""
    tokens = np.zeros((len(RECORDS), WIDTH), np.uint16)
    mask = np.zeros(tokens.shape, bool)
    labels = np.full(tokens.shape, IGNORE_INDEX, np.int16)
    counts, starts = [], []
    for number, row in enumerate(RECORDS):
        at = 0
        for prompt, answer, is_wanted in row:
            starts.append(number * WIDTH + at)
            end = at + len(prompt) + len(answer)
            tokens[number, at:end] = prompt + answer
            mask[number, at + len(prompt) : end] = True
            labels[number, at:end] = is_wanted
            at = end
        counts.append(at)
        starts.append(number * WIDTH + at)
    return TokenRows(tokens, np.arange(len(RECORDS)), np.array(starts), np.array(counts), mask, labels)


def rows_of_pairs(rows: TokenRows):
    return feedback_rows(rows, fill=0)


def batch_of(reference, rows=None):
    table = build_table(rows_of_pairs(raw_rows()).pairs.keys_A, reference)
    return build_batch(add_reference(rows_of_pairs, table)(rows or raw_rows()))


def test_a_record_is_read_with_its_answer_and_with_that_of_the_next():
    made = rows_of_pairs(raw_rows())
    assert made.tokens_BT.shape == (4, 32) and made.num_targets() == 6
    first = [3, 4, 5, 6, 7, 3, 4, 5, 13, 14, 15, 12, 13, 14, 15, 12, 33, 30, 31, 33, 30, 31, 6, 7]
    assert made.tokens_BT[0].tolist() == [*first, *[0] * 8]
    assert made.pairs.targets_P.tolist()[:12] == [6, 7, 13, 14, 15, 13, 14, 15, 33, 33, 6, 7]
    assert made.pairs.rows_A.tolist() == [0, 0, 0, 1, 3, 3]
    assert made.pairs.wanted_A.tolist() == [True, False, False, True, False, False]
    alone = [side for side, row in zip(made.pairs.sides_P, made.target_positions_P // 32, strict=True) if row == 1]
    assert alone == [6, 6, 6], "the second answer of a record that is alone has no loss"
    row = rows_of_pairs(select_rows(raw_rows(), np.arange(4) == 0))
    kinds = feedback_kinds(row, None, None)
    assert [kind.value for kind in kinds[3:16]] == [*["chosen"] * 2, *["context"] * 7, *["rejected"] * 3, "context"]


@pytest.mark.parametrize("beta", [0.3, 3.0])
def test_loss_and_gradients_are_those_of_the_formula(beta):
    """As TRL's KTOTrainer (`loss_type: kto`) writes it, a batch a row."""
    model, reference = build(1), build(2)
    sides = [
        (prompt, answer, row[(number + 1) % len(row)][1] if len(row) > 1 else [])
        for row in RECORDS
        for number, (prompt, answer, _) in enumerate(row)
    ]
    with torch.no_grad():
        known = [[log_probability(reference, prompt, one).item() for one in both] for prompt, *both in sides]
    config = ObjectiveConfig(kind="kto", kto={"beta": beta, **WEIGHTS})
    found = build_loss(config)(model, batch_of(known))
    found.loss_sum.backward()
    ours = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    scores = [
        [log_probability(model, prompt, one) - other for one, other in zip(both, theirs, strict=True)]
        for (prompt, *both), theirs in zip(sides, known, strict=True)
    ]
    losses, right, divergences, rest = [], 0, [], iter(scores)
    for row in RECORDS:
        of_row = [next(rest) for _ in row]
        divergence = torch.stack([other.detach() for _, other in of_row]).mean().clamp(min=0) if row else 0
        for (_, _, is_wanted), (score, _) in zip(row, of_row, strict=True):
            signed = beta * (score - divergence) if is_wanted else beta * (divergence - score)
            weight = WEIGHTS["desirable_weight" if is_wanted else "undesirable_weight"]
            losses.append(weight * (1 - torch.sigmoid(signed)))
            right += bool(signed > 0)
            divergences.append(divergence.item())
    torch.stack(losses).sum().backward()
    assert found.loss_sum.item() == pytest.approx(sum(losses).item(), rel=1e-11)
    assert found.num_correct.item() == right and max(divergences) > 0
    rewards = np.array([beta * score.item() for score, _ in scores])
    wanted = np.array([is_wanted for row in RECORDS for _, _, is_wanted in row])
    metrics = shown_of(ObjectiveConfig(kind="kto")).metrics((found.shown_M / 6).tolist())
    assert metrics["rewards/chosen"] == pytest.approx(rewards[wanted].mean())
    assert metrics["rewards/rejected"] == pytest.approx(rewards[~wanted].mean())
    assert metrics["rewards/margins"] == pytest.approx(rewards[wanted].mean() - rewards[~wanted].mean())
    assert metrics["kl"] == pytest.approx(np.mean(divergences))
    assert len(metrics) == 6 and {"logps/chosen", "logps/rejected"} <= metrics.keys()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-8, atol=1e-11, msg=name)


def test_a_step_without_a_wanted_record_has_no_mean_of_them():
    metrics = shown_of(ObjectiveConfig(kind="kto")).metrics([0.0, -0.5, 0.0, -9.0, 0.0, 1.0, 0.25])
    assert metrics == {"rewards/rejected": -0.5, "logps/rejected": -9.0, "kl": 0.25}


def test_the_sums_of_rows_are_those_of_the_rows_alone():
    loss = ModelLoss(build(1), build_loss(ObjectiveConfig(kind="kto")))
    reference = np.random.default_rng(0).normal(-9, 3, (6, 2))
    by_row = loss.evaluate_rows(batch_of(reference))
    alone = [loss.evaluate(batch_of(reference, select_rows(raw_rows(), np.arange(4) == row))) for row in range(4)]
    torch.testing.assert_close(by_row, torch.stack(alone)[:, :2])
    assert by_row[2].tolist() == [0, 0]
