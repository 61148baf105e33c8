"""Pairs of answers: their rows, and the loss of DPO beside its formula on answers that are read one by one."""

import numpy as np
import pytest
import torch

from pretrain.config.engine import PLAIN_ENGINE
from pretrain.config.model import parse_model
from pretrain.config.objective import ObjectiveConfig
from pretrain.config.presets import expand_preset
from pretrain.data.loader import build_batch
from pretrain.errors import DataError
from pretrain.evaluation.row_loss import ModelLoss
from pretrain.kinds.preference_losses import PREFERENCE_LOSSES
from pretrain.model import build_model, init_weights
from pretrain.objective import build_loss
from pretrain.objective.pairs.preference_formulas import odds_loss
from pretrain.objective.pairs.preferences import ReferenceTable, add_reference, build_table, preference_rows, read_table
from pretrain.rows import IGNORE_INDEX, TokenRows, select_rows
from pretrain.types import Batch

WIDTH = 33
# (prompt, chosen, rejected) of each row; the last row could not be read.
PAIRS = [
    [([3, 4, 5], [6, 7], [8, 9, 10, 11]), ([12], [13, 14, 15], [16])],
    [([20, 21, 22, 23], [24, 25, 26], [24, 27])],
    [],
]
MODEL = {"preset": "llama-tiny", "vocab_size": 64, "max_seq_len": 32, "decoder": {"width": 32, "ff_width": 48}}


def raw_rows(pairs=PAIRS) -> TokenRows:
    """Rows as the stream gives them."""
    tokens = np.zeros((len(pairs), WIDTH), np.uint16)
    mask = np.zeros(tokens.shape, bool)
    counts, starts = [], []
    for number, row in enumerate(pairs):
        at = 0
        for prompt, *answers in row:
            for answer in answers:
                starts.append(number * WIDTH + at)
                end = at + len(prompt) + len(answer)
                tokens[number, at:end] = prompt + answer
                mask[number, at + len(prompt) : end] = True
                at = end
        counts.append(at)
        starts.append(number * WIDTH + at)
    return TokenRows(tokens, np.arange(len(pairs)), np.array(starts), np.array(counts), mask)


def build(seed: int):
    config = parse_model(expand_preset(MODEL))
    model = build_model(config, PLAIN_ENGINE, torch.device("cpu"))
    init_weights(model, config, seed)
    return model.double()


def batch_of(reference, rows=None):
    table = build_table(preference_rows(raw_rows()).pairs.keys_A, reference)
    return build_batch(add_reference(preference_rows, table)(rows or raw_rows()))


def log_probability(model, prompt, answer):
    """Sum over the tokens of one answer, in a row of its own, from the model's scores."""
    tokens = torch.tensor([prompt + answer])
    scores = model(Batch(tokens[:, :-1], tokens[:, 1:]), logits=True).logits_BTV[0, :, :64]
    each = torch.log_softmax(scores, dim=-1).gather(1, tokens[0, 1:, None])[:, 0]
    return each[len(prompt) - 1 :].sum()


def test_a_row_has_its_pairs_as_documents_and_one_target_a_pair():
    made = preference_rows(raw_rows())
    assert made.num_targets() == 3
    assert np.argwhere(made.targets_BT != IGNORE_INDEX).tolist() == [[0, 0], [0, 12], [1, 0]]
    answers = [answer for row in PAIRS for _, *both in row for answer in both]
    assert made.pairs.targets_P.tolist() == [token for answer in answers for token in answer]
    assert made.pairs.sides_P.tolist() == [side for side, answer in enumerate(answers) for _ in answer]
    assert made.positions_BT[0, 12:16].tolist() == [0, 1, 2, 3] and made.num_padding == 2 * 32 - 18 - 13 + 32


def test_the_key_of_a_pair_is_that_of_its_tokens_wherever_it_is():
    first, second = PAIRS[0]
    keys = preference_rows(raw_rows()).pairs.keys_A
    moved = preference_rows(raw_rows([[second], PAIRS[1], [first]])).pairs.keys_A
    assert moved.tolist() == [keys[1], keys[2], keys[0]]
    prompt, chosen, rejected = first
    others = [(prompt, rejected, chosen), (prompt[:-1], [5, *chosen], [5, *rejected]), (prompt, chosen, [*rejected, 1])]
    found = preference_rows(raw_rows([[other] for other in others])).pairs.keys_A
    assert len({*found.tolist(), *keys.tolist()}) == 6


def sigmoid(model, reference, beta, smoothing=0.0, gamma=0.0):
    x = beta * ((model[0] - model[1]) - (reference[0] - reference[1])) - gamma
    logsigmoid = torch.nn.functional.logsigmoid
    return -logsigmoid(x) * (1 - smoothing) - logsigmoid(-x) * smoothing


def squared(model, reference, beta):
    return ((model[0] - model[1]) - (reference[0] - reference[1]) - 1 / (2 * beta)) ** 2


def odds(model, reference, beta):
    p = [one.exp() for one in model]
    ratio = torch.log(p[0] / (1 - p[0])) - torch.log(p[1] / (1 - p[1]))
    return -model[0] - beta * torch.log(torch.sigmoid(ratio))


SMOOTHED = {"label_smoothing": 0.2}
LOSSES = {
    "sigmoid": ({"beta": 0.3}, sigmoid),
    "sigmoid, smoothed": ({"beta": 0.3, **SMOOTHED}, lambda *answers: sigmoid(*answers, 0.3, 0.2)),
    "sigmoid_norm": ({"beta": 2.0}, sigmoid),
    "ipo": ({"beta": 0.4}, squared),
    "simpo": ({"beta": 2.5, "gamma": 1.25}, lambda *answers: sigmoid(*answers, 2.5, gamma=1.25)),
    "simpo, smoothed": ({"beta": 2.5, **SMOOTHED}, lambda *answers: sigmoid(*answers, 2.5, 0.2, 0.5)),
    "orpo": ({"beta": 0.2}, odds),
}


@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradients_are_those_of_the_formula(name):
    """As TRL writes the losses of these names, of answers that are read one by one."""
    settings, formula = LOSSES[name]
    loss = name.split(",")[0]
    record, beta = PREFERENCE_LOSSES[loss], settings["beta"]
    model, reference = build(1), build(2)
    pairs = [pair for row in PAIRS for pair in row]
    with torch.no_grad():
        known = [[log_probability(reference, prompt, one).item() for one in both] for prompt, *both in pairs]
    config = ObjectiveConfig(kind="dpo", dpo={"loss": loss, **settings})
    found = build_loss(config)(model, batch_of(known) if record.reference else build_batch(preference_rows(raw_rows())))
    found.loss_sum.backward()
    ours = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    losses, rewards, log_probs = [], [], []
    for (prompt, *both), theirs in zip(pairs, known, strict=True):
        policy = [log_probability(model, prompt, one) for one in both]
        log_probs.append([one.item() for one in policy])
        lengths = [len(one) if record.per_token else 1 for one in both]
        policy = [one / length for one, length in zip(policy, lengths, strict=True)]
        theirs = [one / length * record.reference for one, length in zip(theirs, lengths, strict=True)]
        losses.append(formula(policy, theirs, *([beta] if formula in (sigmoid, squared, odds) else [])))
        rewards.append([beta * (one.item() - other) for one, other in zip(policy, theirs, strict=True)])
    torch.stack(losses).sum().backward()
    assert found.loss_sum.item() == pytest.approx(sum(losses).item(), rel=1e-11)
    plain = build_loss(ObjectiveConfig(kind="dpo", dpo={"loss": loss, **settings} | {"label_smoothing": 0.0}))
    batch = batch_of(known) if record.reference else build_batch(preference_rows(raw_rows()))
    assert found.nll_sum.item() == pytest.approx(plain(model, batch).loss_sum.item(), rel=1e-11)
    num_correct = sum(chosen > rejected for chosen, rejected in rewards)
    assert found.num_correct.item() == num_correct
    chosen, rejected = np.array(rewards).sum(axis=0)
    shown = [chosen - rejected, chosen, rejected, num_correct, *np.array(log_probs).sum(axis=0)]
    assert found.shown_M.tolist() == pytest.approx(shown, rel=1e-9)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-8, atol=1e-11, msg=name)


def test_the_odds_of_an_answer_that_is_certain_are_finite():
    scores = torch.tensor([[0.0, -1.0], [-1.0, 0.0]], dtype=torch.float64, requires_grad=True)
    odds_loss(scores, beta=0.1).loss_A.sum().backward()
    assert scores.grad.isfinite().all()


def test_without_a_reference_the_loss_shows_the_log_probabilities_of_the_answers():
    model = build(1)
    batch = build_batch(preference_rows(raw_rows()))
    found = ModelLoss(model, build_loss(ObjectiveConfig(kind="dpo"))).evaluate(batch)
    answers = [(prompt, one) for row in PAIRS for prompt, *both in row for one in both]
    expected = [log_probability(model, *answer).item() for answer in answers]
    assert found[2:].tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
def test_the_sums_of_rows_are_those_of_the_rows_alone(name):
    loss = ModelLoss(build(1), build_loss(ObjectiveConfig(kind="dpo", dpo={"loss": name})))
    reference = np.random.default_rng(0).normal(-9, 3, (3, 2))
    by_row = loss.evaluate_rows(batch_of(reference))
    alone = [loss.evaluate(batch_of(reference, select_rows(raw_rows(), np.arange(3) == row))) for row in range(3)]
    torch.testing.assert_close(by_row, torch.stack(alone)[:, :2])
    assert by_row[2].tolist() == [0, 0]


def test_a_table_finds_what_it_was_built_from_and_refuses_the_rest(tmp_path):
    made = preference_rows(raw_rows())
    values = np.arange(6.0).reshape(3, 2)
    path = tmp_path / "reference.safetensors"
    path.write_bytes(build_table([*made.pairs.keys_A, made.pairs.keys_A[0]], [*values, [9.0, 9.0]]).dump())
    np.testing.assert_array_equal(read_table(path).find(made.pairs.keys_A[::-1]), values[::-1])
    few = build_table(made.pairs.keys_A[:2], values[:2])
    for table in (few, ReferenceTable(few.keys[:0], few.values[:0])):
        with pytest.raises(DataError, match="a pair of answers that the run did not begin with"):
            add_reference(preference_rows, table)(raw_rows())
    path.write_bytes(b"no safetensors")
    with pytest.raises(DataError, match=r"cannot be read.*or train a new run"):
        read_table(path)


def test_a_dataset_that_ends_has_rows_without_pairs():
    made = add_reference(preference_rows, None)(raw_rows([[], []]))
    assert made.num_targets() == 0 and made.pairs.reference_A2.shape == (0, 2)
    model = build(1)
    found = build_loss(ObjectiveConfig(kind="dpo"))(model, build_batch(made))
    found.loss_sum.backward()
    assert found.loss_sum.item() == 0 and made.num_tokens() == 0
