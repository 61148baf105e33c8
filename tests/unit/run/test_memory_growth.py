"""Growth of memory over steps: leaks, and what is none."""

import math
import mmap
import random

import pytest

from pretrain.run.memory_growth import MOST_SAMPLES, MemoryGrowth, own_bytes

MIB = 2**20


def grown(num_steps: int, bytes_at, every: int = 1) -> MemoryGrowth:
    """Samples of so many steps."""
    random.seed(1)
    growth = MemoryGrowth()
    for step in range(0, num_steps, every):
        if growth.is_due(step):
            growth.add(step, int(bytes_at(step)))
    return growth


@pytest.mark.parametrize("num_steps", [40, 500, 20_000])
def test_growth_that_goes_on_is_measured(num_steps):
    noisy = grown(num_steps, lambda step: 900 * MIB + step * MIB + random.choice((0, 0, 0.02)) * num_steps * MIB)
    assert noisy.bytes_a_step == pytest.approx(MIB, rel=0.1)


def test_growth_that_ends_or_comes_and_goes_is_none():
    for bytes_at in (
        lambda step: 900 * MIB,
        lambda step: 900 * MIB + 300 * MIB * (1 - math.exp(-step / 60)),  # caches that fill
        lambda step: 900 * MIB + 50 * MIB * math.sin(step / 30),
        lambda step: 900 * MIB + random.randrange(100) * MIB,
        lambda step: 900 * MIB - step * MIB // 8,
    ):
        for num_steps in (20, 400, 3000):
            assert grown(num_steps, bytes_at).bytes_a_step == 0


def test_samples_stay_few_and_cover_the_run():
    growth = grown(100_000, lambda step: step)
    assert not growth.is_due(99_999) and len(growth._samples) < MOST_SAMPLES
    assert growth._samples[-1][0] - growth._samples[0][0] > 90_000


def test_a_leak_is_one_that_this_run_will_meet_and_that_was_seen_for_a_tenth_of_its_time():
    growth = grown(100, lambda step: step * MIB)
    assert growth.is_leak(900, 5000)
    assert not growth.is_leak(900, 800), "the run ends before"
    assert not growth.is_leak(2000, 5000), "a start may do that"


def test_own_bytes_are_those_that_this_process_has_allocated():
    before = own_bytes()
    # New memory: malloc may serve what this process has freed before.
    with mmap.mmap(-1, 32 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as held:
        held.write(b"x" * len(held))
        assert 0.9 * len(held) < own_bytes() - before < 2 * len(held)
