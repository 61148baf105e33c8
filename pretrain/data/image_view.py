"""The part of an image that the model sees: a function of (seed, sample), and of the file.

    file  --Pillow-->  size  --draw_view: a function of (seed, sample)-->  View: size, box, mirror
          --Pillow: decode, crop, mirror; torch: resize-->  uint8 [C, Y, X]

Sizes and boxes are whole pixels, and centres those of torchvision. Not here: changes of pixels
(augment.py).
"""

import math
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch.nn.functional import interpolate

from pretrain.config.data import ImagesConfig
from pretrain.config.model import ImageSize
from pretrain.data.augment import ATTEMPTS
from pretrain.errors import DataError
from pretrain.utils.image_file import ImageFile
from pretrain.utils.rng import draw_uniform

if TYPE_CHECKING:
    from PIL.Image import Image


class View(NamedTuple):
    """The part of an image that is seen.

    Attributes:
        resized: Width and height that the image is resized to first. None: as it is.
        box: Left, top, right and bottom of the part, in pixels of the resized image; it may reach
            beyond the image, which is black there. It is resized to the input of the model.
        mirrored: Left and right are exchanged.
    """

    resized: tuple[int, int] | None
    box: tuple[int, int, int, int]
    mirrored: bool = False

    def shrink(self, width: int, side: int) -> float:
        """Returns the factor by which an image of a width may be decoded smaller without a loss."""
        if self.resized is not None:
            return width / self.resized[0]
        left, top, right, bottom = self.box
        return min(right - left, bottom - top) / side


def center_view(config: ImagesConfig, width: int, height: int, side: int) -> View:
    """Returns the centre square, after the shorter side was resized to `config.resize`."""
    resized = _resized(config, width, height, side)
    width, height = resized or (width, height)
    left, top = (width - side) // 2, (height - side) // 2
    return View(resized, (left, top, left + side, top + side))


def draw_numbers(config: ImagesConfig, seed: int, samples: np.ndarray) -> list[list[float]]:
    """Draws the numbers of the views of training samples, int64 [B]: pure in its arguments."""
    count = {"center": 1, "random": 3, "random_resized": 1 + 4 * ATTEMPTS}[config.crop]
    numbers: list[list[float]] = draw_uniform("image", seed, samples, count).tolist()
    return numbers


def draw_view(config: ImagesConfig, width: int, height: int, side: int, numbers: list[float]) -> View:
    """Returns the view of a training sample that its numbers stand for (`draw_numbers`)."""
    mirrored = numbers[0] < config.flip
    if config.crop == "random_resized":
        view = _random_resized(config, width, height, numbers[1:])
    elif config.crop == "random":
        view = _random_place(config, width, height, side, numbers[1:])
    else:
        view = center_view(config, width, height, side)
    return view._replace(mirrored=mirrored)


def _resized(config: ImagesConfig, width: int, height: int, side: int) -> tuple[int, int] | None:
    if config.resize == 0:
        return None
    shorter, longer = min(width, height), max(width, height)
    least = config.resize or side
    # Rounded down, as torchvision does.
    most = max(least, least * longer // shorter)
    return (least, most) if width <= height else (most, least)


def _random_resized(config: ImagesConfig, width: int, height: int, numbers: list[float]) -> View:
    """A share of the area, a ratio by its logarithm, a place (Szegedy et al. 2015, 6)."""
    low, high = (math.log(ratio) for ratio in config.ratio)
    for attempt in range(ATTEMPTS):
        area, shape, across, down = numbers[4 * attempt : 4 * attempt + 4]
        area = width * height * (config.scale[0] + area * (config.scale[1] - config.scale[0]))
        ratio = math.exp(low + shape * (high - low))
        box_width, box_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < box_width <= width and 0 < box_height <= height:
            left, top = int(across * (width - box_width + 1)), int(down * (height - box_height + 1))
            return View(None, (left, top, left + box_width, top + box_height))
    # The largest part of the centre whose ratio is allowed.
    ratio = min(max(width / height, config.ratio[0]), config.ratio[1])
    box_width, box_height = min(width, round(height * ratio)), min(height, round(width / ratio))
    left, top = (width - box_width) // 2, (height - box_height) // 2
    return View(None, (left, top, left + box_width, top + box_height))


def _random_place(config: ImagesConfig, width: int, height: int, side: int, numbers: list[float]) -> View:
    resized = _resized(config, width, height, side)
    rooms = (length + 2 * config.padding - side + 1 for length in resized or (width, height))
    places = zip(numbers[:2], rooms, strict=True)
    left, top = (int(number * room) - config.padding for number, room in places)
    return View(resized, (left, top, left + side, top + side))


def render(file: ImageFile, view: View, channels: int, side: int, interpolation: str) -> np.ndarray:
    """Decodes what a view shows, uint8 [channels, side, side]. Raises: DataError."""
    image = file.decode(channels, view.shrink(file.width, side))
    box = view.box
    if view.resized not in (None, image.size):
        pixels = _window(resize(_pixels_of(image), view.resized, interpolation), box)
        return pixels[:, :, ::-1] if view.mirrored else pixels
    if view.resized is None and image.width != file.width:
        # Decoded smaller than it is: the box is in pixels of the whole.
        across, down = image.width / file.width, image.height / file.height
        left, right = (round(edge * across) for edge in box[::2])
        top, bottom = (round(edge * down) for edge in box[1::2])
        box = (left, top, right, bottom)
    return crop_and_resize(image, box, view.mirrored, side, interpolation)


def crop_and_resize(
    image: "Image",
    box: tuple[int, int, int, int],
    mirrored: bool,
    side: int,
    interpolation: str,
) -> np.ndarray:
    """Returns a part of an image, resized to a square; uint8 [C, side, side]."""
    from PIL.Image import Transpose

    # Cropped and mirrored first: the part is mostly smaller than what it is resized to.
    image = image.crop(box)
    if mirrored:
        image = image.transpose(Transpose.FLIP_LEFT_RIGHT)
    return resize(_pixels_of(image), (side, side), interpolation)


def resize(pixels: np.ndarray, size: tuple[int, int], interpolation: str) -> np.ndarray:
    """Resizes pixels, uint8 [C, Y, X], to a width and height, with antialiasing.

    By the integer arithmetic of torch, which has the filters of Pillow: one image takes a third of
    Pillow's time, and is the same with and without AVX2.
    """
    width, height = size
    if pixels.shape[1:] == (height, width):
        return pixels
    batch = torch.from_numpy(pixels)[None]
    return interpolate(batch, (height, width), mode=interpolation, antialias=True)[0].numpy()


def _window(pixels: np.ndarray, box: tuple[int, int, int, int]) -> np.ndarray:
    left, top, right, bottom = box
    channels, height, width = pixels.shape
    part = np.zeros((channels, bottom - top, right - left), dtype=np.uint8)
    rows, columns = slice(max(top, 0), min(bottom, height)), slice(max(left, 0), min(right, width))
    seen = pixels[:, rows, columns]
    part[:, rows.start - top : rows.stop - top, columns.start - left : columns.stop - left] = seen
    return part


def _pixels_of(image: "Image") -> np.ndarray:
    """Returns the pixels of an image of mode L or RGB, uint8 [C, Y, X]; no others share them."""
    pixels = np.array(image, dtype=np.uint8)  # a copy: torch asks for pixels that may be written
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def read_view(path: Path, image: ImageSize, config: ImagesConfig) -> np.ndarray:
    """Returns what evaluations see of a file, uint8 [C, Y, X]. Raises: DataError."""
    try:
        content = path.read_bytes()
    except OSError as error:
        problem = f"cannot be read: {error.strerror or error}"
        raise DataError(problem, where=f"--image {path}", fix="give an image file") from None
    file = ImageFile(content, str(path))
    view = center_view(config, file.width, file.height, image.side)
    return render(file, view, image.channels, image.side, config.interpolation)
