"""Losses of single rows, and the bootstrap over them."""

import math

import numpy as np
import pytest
import torch

from pretrain.config.engine import PLAIN_ENGINE
from pretrain.config.model import ModelConfig
from pretrain.config.objective import ObjectiveConfig
from pretrain.config.presets import expand_preset
from pretrain.errors import DataError
from pretrain.evaluation.row_loss import ModelLoss, RowSums, compare_rows, evaluate_loss, sum_rows
from pretrain.generation.constraints import Constraints
from pretrain.generation.sampling import generate
from pretrain.model import build_model
from pretrain.model.build import init_weights
from pretrain.objective import build_loss
from pretrain.types import IGNORE_INDEX, Batch
from tests.unit.generation.models import tiny_model


def batch_of(rows, *, length=12, places=False, seed=0):
    """Rows of two documents each, some targets without a loss; the last row has none."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 61, (rows, length), generator=generator)
    targets = torch.randint(0, 61, (rows, length), generator=generator)
    targets[torch.rand(targets.shape, generator=generator) < 0.4] = IGNORE_INDEX
    targets[-1] = IGNORE_INDEX
    documents = (torch.arange(length) >= 5).int().expand(rows, -1).contiguous()
    positions = torch.cat((torch.arange(5), torch.arange(length - 5))).expand(rows, -1).contiguous()
    found = (targets.flatten() != IGNORE_INDEX).nonzero()[:, 0] if places else None
    return Batch(tokens, targets, positions_BT=positions, documents_BT=documents, target_positions_P=found)


def by_hand(model, batch):
    """The sums of each row, in float64, from all logits."""
    with torch.no_grad():
        logits = model.double()(batch).logits_BTV[..., :61]
    log_probs = logits.log_softmax(dim=-1)
    rows = []
    for row, targets in enumerate(batch.targets_BT):
        places = (targets != IGNORE_INDEX).nonzero()[:, 0]
        nll = -sum(float(log_probs[row, place, targets[place]]) for place in places)
        rows.append((nll, sum(int(logits[row, place].argmax() == targets[place]) for place in places)))
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize("places", [False, True])
def test_rows_have_the_sums_of_a_plain_softmax_in_float64(places):
    batch = batch_of(4, places=places)
    engine = ModelLoss(tiny_model(), build_loss(ObjectiveConfig(label_smoothing=0.1)))
    found = engine.evaluate_rows(batch)
    expected = by_hand(tiny_model(), batch)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)  # fp32 logits of up to 40
    assert torch.equal(found[:, 1], expected[:, 1])
    torch.testing.assert_close(found.sum(dim=0), engine.evaluate(batch), rtol=1e-6, atol=0)


def test_rows_add_up_to_the_loss_of_all_batches():
    batches = [batch_of(4, seed=seed) for seed in range(3)]
    engine = ModelLoss(tiny_model(), build_loss(ObjectiveConfig()))
    sums = sum_rows(engine, batches)
    whole = evaluate_loss(engine, batches, lambda: False)
    assert len(sums.counts) == 9  # a row of each batch has no target
    assert sums.report.num_targets == whole.num_targets == sum(batch.num_targets() for batch in batches)
    assert sums.report.num_correct == whole.num_correct
    assert sums.report.loss == pytest.approx(whole.loss, rel=1e-6)


def random_sums(shift, *, rows=400, seed=0):
    """A baseline, and a model whose loss is less by `shift` a token on average; noise of 0.1 a row."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(5, 50, rows).astype(float)
    first = counts * rng.normal(3, 0.5, rows)
    second = first + counts * (rng.normal(0, 0.1, rows) - shift)
    return RowSums(first, np.zeros(rows), counts), RowSums(second, np.zeros(rows), counts)


def test_the_interval_is_that_of_the_normal_approximation():
    baseline, model = random_sums(0.02)
    found = compare_rows(baseline, model, 4000)["loss"]
    difference, counts = model.nll - baseline.nll, baseline.counts
    mean = difference.sum() / counts.sum()
    error = math.sqrt(((difference - mean * counts) ** 2).sum()) / counts.sum()
    assert found.value == pytest.approx(mean, rel=1e-12)
    # 4,000 draws give the ends of the interval within a twentieth of its width.
    assert found.low == pytest.approx(mean - 1.96 * error, abs=0.2 * error)
    assert found.high == pytest.approx(mean + 1.96 * error, abs=0.2 * error)
    assert (found.num_units, found.unit, found.resamples) == (400, "rows", 4000)


def test_a_difference_is_told_from_chance():
    assert compare_rows(*random_sums(0.05), 1000)["loss"].p_value < 0.002
    by_chance = [compare_rows(*random_sums(0.0, seed=seed), 200)["loss"].p_value for seed in range(40)]
    # Uniform, if there is no difference: 2 of 40 are expected below 0.05, and 20 below 0.5.
    assert sum(p < 0.05 for p in by_chance) <= 6
    assert 10 <= sum(p < 0.5 for p in by_chance) <= 30


def test_the_same_draws_come_again():
    assert compare_rows(*random_sums(0.01), 150) == compare_rows(*random_sums(0.01), 150)


def test_a_model_does_not_differ_from_itself():
    baseline, _ = random_sums(0.0)
    for found in compare_rows(baseline, baseline, 100).values():
        assert (found.value, found.low, found.high, found.p_value) == (0.0, 0.0, 0.0, 1.0)


def test_the_share_of_right_answers_is_compared_over_the_same_rows():
    rng = np.random.default_rng(3)
    counts = rng.integers(5, 50, 300).astype(float)
    first = np.floor(counts * rng.uniform(0.2, 0.6, 300))
    second = np.minimum(first + rng.integers(0, 3, 300), counts)
    found = compare_rows(RowSums(counts, first, counts), RowSums(counts, second, counts), 500)["accuracy"]
    assert found.value == pytest.approx((second - first).sum() / counts.sum(), rel=1e-12)
    assert 0 < found.low < found.value < found.high and found.p_value < 0.01


def test_a_few_rows_are_refused():
    with pytest.raises(DataError, match="4 units are too few to tell a difference from chance; use more data"):
        compare_rows(*random_sums(0.1, rows=4), 100)


def test_an_exact_caption_is_what_greedy_decoding_writes():
    values = {
        "preset": "vit_gpt2-tiny",
        "vocab_size": 50,
        "special_tokens": {"start": 1},
        "init_std": 0.2,
    }
    config = ModelConfig.model_validate(expand_preset(values))
    model = build_model(config, PLAIN_ENGINE, torch.device("cpu")).eval()
    init_weights(model, config, seed=3)
    pixels = torch.randint(0, 256, (3, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([one.tokens for one in generate(model, list(pixels), Constraints(6))])
    targets[1, 3] = (targets[1, 3] + 1) % 50
    inputs = torch.cat((torch.ones(3, 1, dtype=torch.int64), targets[:, :-1]), dim=1)
    sums = sum_rows(ModelLoss(model, build_loss(ObjectiveConfig())), [Batch(inputs, targets, pixels_BCYX=pixels)])
    assert sums.exact.tolist() == [1, 0, 1]
