"""Augmentation of pixels beyond crop and flip: pure functions of (seed, sample) and images.

    crop, mirrored  --RandAugment, erase-->  uint8 [C, Y, X]  --mixup, cutmix-->  two labels

Random numbers are drawn by purpose (`utils/rng.py`), so that switching one augmentation on leaves
those of the others alone. The image that is mixed in is chosen by the stream (image_stream.py).
"""

import math
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pretrain.config.data import MAX_MAGNITUDE, ImagesConfig
from pretrain.utils.rng import draw_bytes, draw_uniform

if TYPE_CHECKING:
    from PIL.Image import Image

ATTEMPTS = 10
"""Boxes that are drawn before none, or the centre, is taken, as in torchvision."""
ERASED_AREA = (0.02, 1 / 3)
ERASED_RATIO = (0.3, 1 / 0.3)


Operation = Callable[["Image", float], "Image"]
"""Changes an image by a strength from -1 to 1; some have no sign, or no strength."""


@cache
def operations() -> dict[str, Operation]:
    """Returns the operations of RandAugment by Pillow, in the ranges of torchvision.

    What comes in from outside is black, and places are those of the nearest pixel.
    """
    from PIL import ImageEnhance, ImageOps
    from PIL.Image import Transform

    def move(image: "Image", row: tuple[float, float], column: tuple[float, float]) -> "Image":
        return image.transform(image.size, Transform.AFFINE, (1.0, *row, column[0], 1.0, column[1]))

    def enhance(kind: Callable[["Image"], Any]) -> Operation:
        return lambda image, strength: kind(image).enhance(1 + 0.9 * strength)

    return {
        "identity": lambda image, _: image,
        "shear_x": lambda image, strength: move(image, (0.3 * strength, 0), (0, 0)),
        "shear_y": lambda image, strength: move(image, (0, 0), (0.3 * strength, 0)),
        "translate_x": lambda image, strength: move(image, (0, int(150 / 331 * strength * image.width)), (0, 0)),
        "translate_y": lambda image, strength: move(image, (0, 0), (0, int(150 / 331 * strength * image.height))),
        "rotate": lambda image, strength: image.rotate(30 * strength),
        "brightness": enhance(ImageEnhance.Brightness),
        "color": enhance(ImageEnhance.Color),
        "contrast": enhance(ImageEnhance.Contrast),
        "sharpness": enhance(ImageEnhance.Sharpness),
        "posterize": lambda image, strength: ImageOps.posterize(image, 8 - round(4 * abs(strength))),
        "solarize": lambda image, strength: ImageOps.solarize(image, math.ceil(255 * (1 - abs(strength)))),
        "autocontrast": lambda image, _: ImageOps.autocontrast(image),
        "equalize": lambda image, _: ImageOps.equalize(image),
    }


def rand_augment(pixels: np.ndarray, config: ImagesConfig, seed: int, sample: int) -> np.ndarray:
    """Applies drawn operations one after another to uint8 [C, Y, X] (Cubuk et al. 2020, 3)."""
    count = config.randaugment.operations
    if not count:
        return pixels
    from PIL.Image import fromarray

    image = fromarray(pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0))
    numbers = draw_uniform("image operations", seed, np.array([sample]), 2 * count)[0].tolist()
    strength = config.randaugment.magnitude / MAX_MAGNITUDE
    choices = tuple(operations().values())
    for kind, sign in zip(numbers[::2], numbers[1::2], strict=True):
        image = choices[int(kind * len(choices))](image, -strength if sign < 0.5 else strength)
    changed = np.asarray(image, dtype=np.uint8)
    return changed[None] if changed.ndim == 2 else changed.transpose(2, 0, 1)


def erase(pixels: np.ndarray, config: ImagesConfig, seed: int, sample: int) -> np.ndarray:
    """Fills a rectangle of an image, uint8 [C, Y, X], with noise (Zhong et al. 2020, RE-R)."""
    if not config.erase:
        return pixels
    first, *numbers = draw_uniform("image erasing", seed, np.array([sample]), 1 + 4 * ATTEMPTS)[0].tolist()
    if first >= config.erase:
        return pixels
    channels, rows, columns = pixels.shape
    low, high = (math.log(ratio) for ratio in ERASED_RATIO)
    for attempt in range(ATTEMPTS):
        area, shape, across, down = numbers[4 * attempt : 4 * attempt + 4]
        area = rows * columns * (ERASED_AREA[0] + area * (ERASED_AREA[1] - ERASED_AREA[0]))
        ratio = math.exp(low + shape * (high - low))
        height, width = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < height < rows and 0 < width < columns:
            left, top = int(across * (columns - width + 1)), int(down * (rows - height + 1))
            noise = draw_bytes("image noise", seed, sample, channels * height * width)
            pixels = pixels.copy()
            pixels[:, top : top + height, left : left + width] = noise.reshape(channels, height, width)
            return pixels
    return pixels


class Mix(NamedTuple):
    """How a second image is mixed into one.

    Attributes:
        share: Weight of the second image, 0 to 1.
        box: Left, top, right, bottom of the part that is replaced (cutmix). None: all is blended.
    """

    share: float
    box: tuple[int, int, int, int] | None = None


def draw_mix(config: ImagesConfig, side: int, seed: int, sample: int) -> Mix | None:
    """Draws mixup (Zhang et al. 2018) or cutmix (Yun et al. 2019), of both either. None: none is on."""
    if not (config.mixup or config.cutmix):
        return None
    coin, *numbers, across, down = draw_uniform("image mix", seed, np.array([sample]), 5)[0].tolist()
    cuts = config.cutmix > 0 and (coin < 0.5 or not config.mixup)
    share = symmetric_beta(config.cutmix if cuts else config.mixup, *numbers)
    if not cuts:
        return Mix(share)
    half = math.sqrt(share) * side / 2
    left, right = (round(min(max(across * side + reach, 0), side)) for reach in (-half, half))
    top, bottom = (round(min(max(down * side + reach, 0), side)) for reach in (-half, half))
    return Mix((right - left) * (bottom - top) / side**2, (left, top, right, bottom))


def symmetric_beta(alpha: float, first: float, second: float) -> float:
    """Returns a number of Beta(alpha, alpha) from two uniform ones (Bailey 1994)."""
    power = (1 - first) ** (1 / alpha)
    square = math.cos(2 * math.pi * second) ** 2
    root = math.sqrt((1 - power) * square / (power + (1 - power) * square))
    return 0.5 * (1 + math.copysign(root, math.cos(2 * math.pi * second)))


def mix_pixels(first: np.ndarray, second: np.ndarray, mix: Mix) -> np.ndarray:
    """Mixes the second image into the first, uint8 [C, Y, X] all."""
    if mix.box is None:
        blended = first + np.float32(mix.share) * (second.astype(np.float32) - first)
        return np.rint(blended).astype(np.uint8)
    left, top, right, bottom = mix.box
    mixed = first.copy()
    mixed[:, top:bottom, left:right] = second[:, top:bottom, left:right]
    return mixed
