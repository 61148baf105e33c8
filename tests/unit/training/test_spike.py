"""What is a spike: far above the last losses, judged by numbers that other spikes hardly move."""

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretrain.training.guard import SpikeDetector

LOSSES = st.lists(st.floats(-1e6, 1e6), min_size=4, max_size=40)


def noisy(count: int, level: float = 3.0) -> list[float]:
    """Losses around a level, one in a thousand parts of it apart or ten."""
    rng = random.Random(5)
    return [rng.gauss(level, 0.01 * level) for _ in range(count)]


@given(LOSSES, st.floats(-1e7, 1e7))
def test_a_deviation_is_that_of_the_definition(losses, loss):
    detector = SpikeDetector(8, 6.0)
    for value in losses:
        detector.add(value)
    kept = losses[-8:]
    median = statistics.median(kept)
    sigma = max(1.4826 * statistics.median(abs(value - median) for value in kept), 1e-3 * abs(median), 1e-30)
    assert detector.losses == tuple(kept)
    assert detector.deviation(loss) == pytest.approx(max(0.0, (loss - median) / sigma), rel=1e-12)
    assert detector.is_spike(loss) == (detector.deviation(loss) > 6.0)


def test_a_spike_is_told_also_behind_another_and_a_fall_is_none():
    detector = SpikeDetector(128, 8.0, noisy(128))
    for loss in (9.0, 8.0, 7.0, 30.0):
        assert detector.is_spike(loss)
        detector.add(loss)
    assert not any(detector.is_spike(loss) for loss in (0.0, 1.0, 3.0, 3.1))


def test_there_is_no_spike_before_half_of_the_window_is_known():
    detector = SpikeDetector(10, 8.0, noisy(4))
    assert not detector.is_spike(100.0)
    detector.add(3.0)
    assert detector.is_spike(100.0)


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_no_spike_and_never_enters(loss):
    detector = SpikeDetector(16, 8.0, noisy(16))
    before = detector.losses
    assert not detector.is_spike(loss)
    detector.add(loss)
    assert detector.losses == before
    assert detector.is_spike(100.0)


def test_a_loss_that_stays_high_is_the_new_level_once_half_of_the_window_has_it():
    detector, spikes = SpikeDetector(16, 8.0, noisy(16)), 0
    for loss in noisy(16, level=6.0):
        spikes += detector.is_spike(loss)
        detector.add(loss)
    assert 7 <= spikes <= 9


def test_equal_losses_do_not_make_a_spike_of_the_next_digit():
    detector = SpikeDetector(16, 8.0, [2.0] * 16)
    assert not detector.is_spike(2.01)
    assert detector.is_spike(2.02)


def test_a_detector_that_is_made_of_what_another_remembers_goes_on_as_that_one():
    losses = noisy(60)
    whole = SpikeDetector(32, 8.0)
    for number, loss in enumerate(losses):
        resumed = SpikeDetector(32, 8.0, whole.losses)
        assert resumed.deviation(5.0) == whole.deviation(5.0), number
        whole.add(loss)
    whole.forget()
    assert whole.losses == ()
    assert not whole.is_spike(1e9)
