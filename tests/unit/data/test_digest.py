"""The digest of a step: equal for every cut into ranks, different for every other set or order of samples."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretrain.data.loader import digest_rows, hash_pixels, join64, split64
from pretrain.utils.rng import mix64

ids = st.lists(st.integers(0, 2**62), min_size=1, max_size=24)


def digest(samples: list[int], first_row: int = 0) -> int:
    return digest_rows(np.array(samples, dtype=np.int64), np.arange(first_row, first_row + len(samples)))


@given(ids, st.data())
def test_any_cut_into_ranks_gives_the_digest_of_the_whole(samples, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(samples)), max_size=4)))
    pieces = zip([0, *cuts], [*cuts, len(samples)], strict=True)
    halves = [split64(digest(samples[low:high], low)) for low, high in pieces]
    assert join64(sum(high for high, _ in halves), sum(low for _, low in halves)) == digest(samples)


@given(st.lists(st.integers(0, 2**62), min_size=2, max_size=24, unique=True), st.data())
def test_swapping_replacing_or_dropping_a_row_changes_the_digest(samples, data):
    first, second = data.draw(st.lists(st.integers(0, len(samples) - 1), min_size=2, max_size=2, unique=True))
    swapped = list(samples)
    swapped[first], swapped[second] = samples[second], samples[first]
    replaced = list(samples)
    replaced[first] = samples[second]
    assert digest(samples) not in (digest(swapped), digest(replaced), digest(samples[:-1]))


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=100))
def test_halves_add_exactly_in_float64(digests):
    halves = np.array([split64(value) for value in digests], dtype=np.float64).sum(axis=0)
    assert join64(*halves.tolist()) == sum(digests) % 2**64


def test_halves_of_two_million_ranks_still_add_exactly():
    high, low = split64(2**64 - 1)
    assert join64(high * 2**21, low * 2**21) == (2**64 - 1) * 2**21 % 2**64


def test_the_digest_never_changes_between_releases():
    assert mix64(np.arange(1, dtype=np.uint64))[0] == 0xE220A8397B1DCDAF  # first output of splitmix64 seeded with 0
    assert digest([5, 3, 2**40]) == 0xA2DD69BDAAD35755
    assert hash_pixels(np.arange(27, dtype=np.uint8).reshape(1, 3, 3, 3)).tolist() == [-4897847674309648071]


@pytest.mark.parametrize("shape", [(3, 5, 7), (1, 2, 2), (3, 8, 8)])
def test_every_byte_and_its_place_enter_the_hash_of_an_image(shape):
    images = np.random.default_rng(0).integers(0, 255, (2, *shape), dtype=np.uint8)
    first, second = hash_pixels(images).tolist()
    assert first != second and hash_pixels(images[1:]).tolist() == [second]
    changed = set()
    for place in range(images[0].size):
        other = images[:1].copy()
        other.reshape(-1)[place] += 1
        changed.add(hash_pixels(other).item())
    assert len(changed | {first}) == images[0].size + 1
    mirrored = images[:1, :, :, ::-1]
    assert hash_pixels(mirrored).item() != first
    assert hash_pixels(mirrored[..., ::-1]).item() == first  # by the pixels, not by their place in memory
