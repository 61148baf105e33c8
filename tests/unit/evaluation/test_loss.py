"""The mean over all targets, whatever the batches; an evaluation that is given up says nothing."""

import math

import pytest
import torch

from pretrain.evaluation.row_loss import LossReport, evaluate_loss, pool
from pretrain.types import IGNORE_INDEX, Batch


class Told:
    """Stands for an engine: the loss of a batch is the sum of its targets, all of them right."""

    device = torch.device("cpu")

    def __init__(self):
        self.num_read = 0

    def evaluate(self, batch):
        self.num_read += 1
        targets = batch.targets_BT[batch.targets_BT != IGNORE_INDEX]
        return torch.tensor([float(targets.sum()), float(len(targets))], dtype=torch.float64)


def batches(count):
    """Batches of very different numbers of targets, some of none."""
    for number in range(count):
        targets = torch.full((2, 5), number)
        targets.view(-1)[number % 11 :] = IGNORE_INDEX
        yield Batch(torch.zeros_like(targets), targets)


def test_the_mean_is_over_targets_not_over_batches():
    found = evaluate_loss(Told(), batches(40), lambda: False)
    counts = [number % 11 for number in range(40)]
    assert found.num_targets == found.num_correct == sum(counts)
    total = sum(number * count for number, count in enumerate(counts))
    assert found.loss == pytest.approx(total / sum(counts), rel=1e-15)
    assert found.accuracy == 1


def test_an_evaluation_that_is_asked_to_stop_reads_no_further():
    engine, asked = Told(), []

    def should_stop():
        asked.append(engine.num_read)
        return len(asked) == 2

    assert evaluate_loss(engine, batches(100), should_stop) is None
    assert asked == [15, 31], "now and then, at the same batches on every rank: the question is collective"
    assert engine.num_read == 31


def test_texts_are_pooled_by_targets_and_their_bits_by_bytes():
    short, long = LossReport(2.0, 10, 4), LossReport(3.0, 30, 6)
    whole, bits = pool([short, long], [0.5, 0.25])  # 20 bytes and 120
    assert whole == LossReport(110 / 40, 40, 10)
    assert bits == pytest.approx(110 / math.log(2) / 140, rel=1e-12)
    assert pool([short], [0.5])[1] == pytest.approx(short.bits_per_byte(0.5), rel=1e-12)


def test_bits_by_bytes_are_not_told_where_a_text_has_none():
    reports = [LossReport(2.0, 10, 4), LossReport(3.0, 30, 6)]
    assert pool(reports, [0.5, 0.0]) == (LossReport(110 / 40, 40, 10), None)
    assert pool([LossReport(0.0, 0, 0)], [0.5]) == (LossReport(0.0, 0, 0), None)
    whole, bits = pool([*reports, LossReport(0.0, 0, 0)], [0.5, 0.25, 0.1])
    assert whole.num_targets == 40 and bits == pytest.approx(110 / math.log(2) / 140, rel=1e-12)
