"""RandAugment, erasing, mixup and cutmix: against Pillow and numpy, and their distributions."""

import math

import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageOps
from scipy.stats import kstest

from pretrain.config.data import ImagesConfig, RandAugmentConfig
from pretrain.data.augment import (
    Mix,
    draw_mix,
    erase,
    mix_pixels,
    operations,
    rand_augment,
    symmetric_beta,
)
from pretrain.utils.rng import draw_uniform
from tests.helpers.images import noise

SIDE = 24
NEAREST = Image.Resampling.NEAREST


def affine(image, matrix):
    return image.transform(image.size, Image.Transform.AFFINE, matrix, NEAREST, fillcolor=0)


# What torchvision does at magnitude 9 of 30 bins, written out: its table, and its calls of Pillow.
REFERENCES = {
    "identity": lambda image: image,
    "shear_x": lambda image: affine(image, (1, 0.09, 0, 0, 1, 0)),
    "shear_y": lambda image: affine(image, (1, 0, 0, 0.09, 1, 0)),
    "translate_x": lambda image: affine(image, (1, 0, int(150 / 331 * SIDE * 0.3), 0, 1, 0)),
    "translate_y": lambda image: affine(image, (1, 0, 0, 0, 1, int(150 / 331 * SIDE * 0.3))),
    "rotate": lambda image: image.rotate(9, NEAREST, fillcolor=0),
    "brightness": lambda image: ImageEnhance.Brightness(image).enhance(1.27),
    "color": lambda image: ImageEnhance.Color(image).enhance(1.27),
    "contrast": lambda image: ImageEnhance.Contrast(image).enhance(1.27),
    "sharpness": lambda image: ImageEnhance.Sharpness(image).enhance(1.27),
    "posterize": lambda image: ImageOps.posterize(image, 7),
    "solarize": lambda image: Image.eval(image, lambda value: value if value < 178.5 else 255 - value),
    "autocontrast": lambda image: ImageOps.autocontrast(image),
    "equalize": lambda image: ImageOps.equalize(image),
}


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("name", REFERENCES)
def test_an_operation_is_that_of_torchvision_by_pillow(name, mode):
    image = Image.fromarray(noise(SIDE, SIDE) // 2 + 90).convert(mode)
    found = operations()[name](image, 0.3)
    assert (found.mode, found.size) == (mode, image.size)
    assert np.array_equal(np.asarray(found), np.asarray(REFERENCES[name](image)))
    if name not in ("identity", "color"):  # grey has no color
        assert not np.array_equal(np.asarray(found), np.asarray(image))


def test_the_sign_turns_an_operation_around():
    image = Image.fromarray(noise(SIDE, SIDE))
    for name in ("shear_x", "translate_y", "rotate", "brightness"):
        there, back = (np.asarray(operations()[name](image, sign)) for sign in (0.5, -0.5))
        assert not np.array_equal(there, back)


def augmented(count, magnitude, sample):
    config = ImagesConfig(randaugment=RandAugmentConfig(operations=count, magnitude=magnitude))
    pixels = rand_augment(noise(SIDE, SIDE).transpose(2, 0, 1), config, 1, sample)
    return pixels.transpose(1, 2, 0).tobytes()


def test_operations_are_a_function_of_seed_and_sample():
    found = [augmented(2, 9, sample) for sample in range(60)]
    assert found == [augmented(2, 9, sample) for sample in range(60)]
    assert len(set(found)) > 40  # 14 operations, twice, some with a sign
    assert augmented(0, 9, 3) == Image.fromarray(noise(SIDE, SIDE)).tobytes()
    every = {name for name in operations() if name != "identity"}
    image = Image.fromarray(noise(SIDE, SIDE))
    single = {operations()[name](image, sign * 0.3).tobytes() for name in every for sign in (1, -1)}
    assert {augmented(1, 9, sample) for sample in range(600)} == single | {image.tobytes()}


def test_erasing_fills_one_rectangle_of_the_published_size_with_noise():
    black = np.zeros((3, 40, 30), np.uint8)
    erased = [erase(black, ImagesConfig(erase=0.5), 1, sample) for sample in range(400)]
    touched = [image for image in erased if image.any()]
    assert 0.4 < len(touched) / 400 < 0.6
    for image in touched:
        rows, columns = np.nonzero(image.any(axis=0))
        area = (np.ptp(rows) + 1) * (np.ptp(columns) + 1) / 1200
        assert 0.01 < area < 0.36  # 2% to 33%, and whole pixels
    values = np.concatenate([image[image > 0] for image in touched])
    assert kstest(values, "uniform", args=(0, 256)).statistic < 0.02
    assert not black.any()


@pytest.mark.parametrize("alpha", [0.2, 0.8, 1.0, 3.0])
def test_shares_are_those_of_a_beta_distribution(alpha):
    numbers = draw_uniform("test", 1, np.arange(4000), 2).tolist()
    found = [symmetric_beta(alpha, *pair) for pair in numbers]
    assert kstest(found, "beta", args=(alpha, alpha)).pvalue > 0.01
    assert all(0 <= symmetric_beta(alpha, first, 0.3) <= 1 for first in (0.0, 1 - 2**-53))


def test_mixup_blends_and_cutmix_pastes():
    first, second = noise(8, 8).transpose(2, 0, 1), noise(8, 8, seed=1).transpose(2, 0, 1)
    mixed = mix_pixels(first, second, Mix(0.25))
    assert np.abs(mixed - (0.75 * first + 0.25 * second)).max() <= 0.5 + 1e-3
    cut = mix_pixels(first, second, Mix(6 / 64, (1, 2, 4, 4)))
    inside = np.zeros((3, 8, 8), bool)
    inside[:, 2:4, 1:4] = True
    assert np.array_equal(cut, np.where(inside, second, first))


def test_the_box_of_cutmix_has_its_share_and_both_are_drawn_alike():
    mixes = [draw_mix(ImagesConfig(mixup=0.8, cutmix=1.0), 20, 1, sample) for sample in range(2000)]
    boxes = [mix for mix in mixes if mix.box]
    assert 0.45 < len(boxes) / 2000 < 0.55
    for share, (left, top, right, bottom) in boxes:
        assert 0 <= left <= right <= 20 and 0 <= top <= bottom <= 20
        assert math.isclose(share, (right - left) * (bottom - top) / 400)
    assert all(mix.box for mix in [draw_mix(ImagesConfig(cutmix=1.0), 20, 1, sample) for sample in range(50)])
    assert not any(mix.box for mix in [draw_mix(ImagesConfig(mixup=1.0), 20, 1, sample) for sample in range(50)])
    assert draw_mix(ImagesConfig(), 20, 1, 1) is None
