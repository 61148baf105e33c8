"""Random numbers by purpose, seed and sample id: splitmix64 itself, uniform, independent, and a pure function."""

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretrain.utils.rng import draw_uniform, mix64

MASK = 2**64 - 1


def splitmix64(state: int, count: int) -> list[int]:
    """The generator as published, one number at a time (Steele et al. 2014; Vigna's C)."""
    found = []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & MASK
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        found.append(z ^ (z >> 31))
    return found


def draw_slowly(purpose: str, seed: int, sample_id: int, count: int) -> list[float]:
    digest = int.from_bytes(hashlib.blake2b(f"{purpose} {seed}".encode(), digest_size=8).digest(), "little")
    (scrambled,) = splitmix64(sample_id, 1)
    (key,) = splitmix64(scrambled ^ digest, 1)
    return [(bits >> 11) / 2**53 for bits in splitmix64(key, count)]


def test_the_generator_gives_its_published_numbers():
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert splitmix64(1234567, 4) == expected
    assert int(mix64(np.array([1234567], np.uint64))[0]) == expected[0]


@given(
    st.text(max_size=8),
    st.integers(0, 2**63 - 1),
    st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=4),
    st.integers(0, 9),
)
def test_arrays_hold_what_one_number_at_a_time_gives(purpose, seed, sample_ids, count):
    found = draw_uniform(purpose, seed, np.array(sample_ids, np.int64), count)
    assert found.dtype == np.float64 and found.shape == (len(sample_ids), count)
    assert found.tolist() == [draw_slowly(purpose, seed, number, count) for number in sample_ids]


def test_the_first_numbers_do_not_depend_on_how_many_are_drawn():
    ids = np.arange(50)
    assert np.array_equal(draw_uniform("a", 1, ids, 300)[:, :7], draw_uniform("a", 1, ids, 7))


def bins_of(numbers: np.ndarray, count: int = 64) -> np.ndarray:
    return np.bincount((numbers.ravel() * count).astype(np.int64), minlength=count)


def chi_square(observed: np.ndarray) -> float:
    """The statistic over equally likely cells, in standard deviations from its mean."""
    expected, cells = observed.sum() / observed.size, observed.size
    statistic = ((observed - expected) ** 2 / expected).sum()
    return float((statistic - (cells - 1)) / np.sqrt(2 * (cells - 1)))


@pytest.mark.parametrize("shape", [(2000, 200), (200_000, 2), (2, 200_000)], ids=str)
def test_numbers_are_uniform_along_rows_and_along_samples(shape):
    numbers = draw_uniform("masked", 7, np.arange(shape[0]), shape[1])
    assert numbers.min() >= 0 and numbers.max() < 1
    assert abs(chi_square(bins_of(numbers))) < 4
    assert abs(chi_square(bins_of(numbers[:, 0]))) < 4 or shape[0] < 100
    assert len(np.unique(numbers)) == numbers.size


@pytest.mark.parametrize(
    "other",
    [
        draw_uniform("masked fate", 7, np.arange(3000), 100),
        draw_uniform("masked", 8, np.arange(3000), 100),
        draw_uniform("masked", 7, np.arange(1, 3001), 100),
        np.roll(draw_uniform("masked", 7, np.arange(3000), 101), 1, axis=1)[:, :100],
    ],
    ids=["purpose", "seed", "sample", "place"],
)
def test_another_purpose_seed_sample_or_place_draws_independent_numbers(other):
    numbers = draw_uniform("masked", 7, np.arange(3000), 100)
    # Of independent pairs all cells of the square are equally likely.
    pairs = (numbers * 16).astype(np.int64) * 16 + (other * 16).astype(np.int64)
    assert abs(chi_square(np.bincount(pairs.ravel(), minlength=256))) < 4
    assert abs(np.corrcoef(numbers.ravel(), other.ravel())[0, 1]) < 4 / np.sqrt(numbers.size)
