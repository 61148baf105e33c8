"""Rows of images by number: the views of training by position, and those of evaluation in order.

    position  --SampleOrder, T = 1-->  sample j = (epoch j div N, place j mod N)  -->  shard, image
    file      --Pillow-->  size  --draw_view: a function of (seed, j)-->  box, mirror
              --decode, crop, resize-->  uint8 [C, Y, X]

N is the number of images. As the samples of text do, those of images differ from epoch to epoch, so
that numbers drawn by (seed, sample) do. Nothing depends on ranks, workers or restarts. Not here:
normalisation, which the model does on its device, and labels of the head.
"""

import math
from bisect import bisect_right
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pretrain.config.data import ImagesConfig
from pretrain.config.model import ImageSize
from pretrain.data.bin_stream import EPOCHS_KEPT
from pretrain.data.damage import DamagePolicy
from pretrain.data.lookahead import Layout, Lookahead, layout_of
from pretrain.data.order import SampleOrder, shard_order
from pretrain.errors import DataError
from pretrain.rows import IGNORE_INDEX, TokenRows
from pretrain.shards.index import DataIndex
from pretrain.shards.reader import ShardSet
from pretrain.shards.store import ShardStore
from pretrain.utils.image_file import ImageFile
from pretrain.utils.rng import draw_uniform

ATTEMPTS = 10
"""Boxes that are drawn for a random resized crop before the centre is taken, as in torchvision."""


class View(NamedTuple):
    """The part of an image that is seen.

    Attributes:
        resized: Width and height that the image is resized to first. None: as it is.
        box: Left, top, right and bottom of the part, in pixels of the resized image; it may reach
            beyond the image, which is black there. It is resized to the input of the model.
        mirrored: Left and right are exchanged.
    """

    resized: tuple[int, int] | None
    box: tuple[float, float, float, float]
    mirrored: bool = False

    def shrink(self, width: int, side: int) -> float:
        """Returns the factor by which an image of a width may be decoded smaller without a loss."""
        if self.resized is not None:
            return width / self.resized[0]
        left, top, right, bottom = self.box
        return min(right - left, bottom - top) / side


def center_view(config: ImagesConfig, width: int, height: int, side: int) -> View:
    """Returns the centre square, after the shorter side was resized to `config.resize`."""
    # As a box of the image itself: one filter in place of two.
    shorter = min(width, height)
    edge = side if config.resize == 0 else side * shorter / (config.resize or side)
    left, top = (width - edge) / 2, (height - edge) / 2
    if config.resize == 0:
        left, top = left // 1, top // 1
    return View(None, (left, top, left + edge, top + edge))


def draw_view(config: ImagesConfig, width: int, height: int, side: int, seed: int, sample: int) -> View:
    """Draws the view of a training sample: a pure function of its arguments."""
    numbers = draw_uniform("image", seed, np.array([sample]), 1 + 4 * ATTEMPTS)[0].tolist()
    mirrored = numbers[0] < config.flip
    if config.crop == "random_resized":
        view = _random_resized(config, width, height, numbers[1:])
    elif config.crop == "random":
        view = _random_place(config, width, height, side, numbers[1:])
    else:
        view = center_view(config, width, height, side)
    return view._replace(mirrored=mirrored)


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
    resized = None
    if config.resize != 0:
        scale = (config.resize or side) / min(width, height)
        width, height = round(width * scale), round(height * scale)
        resized = (width, height)
    rooms = (length + 2 * config.padding - side + 1 for length in (width, height))
    places = zip(numbers[:2], rooms, strict=True)
    left, top = (int(number * room) - config.padding for number, room in places)
    return View(resized, (left, top, left + side, top + side))


class ImageStream:
    """The images of one split; arguments and order as of `TokenStream`, with T = 1.

    `image` is the input of the model, and a row has `seq_len` positions. Raises: DataError: There
    is no such split.
    """

    def __init__(
        self,
        folder: Path | ShardStore,
        index: DataIndex,
        split: str,
        *,
        image: ImageSize,
        seq_len: int,
        config: ImagesConfig,
        seed: int = 0,
        lanes: int = 1,
        block_samples: int = 1,
        damage: DamagePolicy | None = None,
    ) -> None:
        self._shards = ShardSet(folder, index, split)
        self.split = self._shards.split
        self.index = index
        self.seq_len = seq_len
        cut = {"lanes": lanes, "block_samples": block_samples}
        self.order = SampleOrder(self.split.num_tokens, 1, seed=seed, **cut)
        self._image = image
        self._config = config
        self._damage = damage or DamagePolicy()
        self._reader = self._damage.reader(self._shards)
        store = self._shards.store
        self._lookahead = Lookahead(store, self.split, split) if store.fetches else None
        self._sizes = np.array([shard.num_tokens for shard in self.split.shards], dtype=np.int64)
        self._epoch_layout = lru_cache(EPOCHS_KEPT)(self._build_epoch_layout)
        self._fixed_layout = layout_of(self._sizes, np.arange(len(self._sizes)))

    def read(self, positions: range) -> TokenRows:
        """Reads the samples at some positions. Raises: DataError, naming shard and image."""
        if self._lookahead is not None and positions:
            self._lookahead.follow(self.order, self._epoch_layout, positions.start, overlap=0)
        samples = self.order.samples(positions)
        rows = _ImageRows(len(samples), self._image, self.seq_len)
        for row, sample in enumerate(samples.tolist()):
            epoch, place = divmod(sample, self.split.num_tokens)
            try:
                self._fill(rows, row, self._epoch_layout(epoch), place, sample)
            except DataError as error:
                self._damage.skip(error, self._shards, sample)
        return rows.finish(samples)

    def num_windows(self, max_tokens: int | None = None) -> int:
        """Returns the images among the first `max_tokens` positions of the split, at least one."""
        num_images = self.split.num_tokens
        return num_images if max_tokens is None else min(num_images, -(-max_tokens // self.seq_len))

    def read_windows(self, windows: range, max_tokens: int | None = None) -> TokenRows:
        """Reads images of the fixed order; rows past the end are padding. Raises: DataError."""
        num_images = self.num_windows(max_tokens)
        if self._lookahead is not None and windows:
            span = (windows.start, windows.stop)
            self._lookahead.follow_fixed(self._fixed_layout, *span, num_images)
        rows = _ImageRows(len(windows), self._image, self.seq_len)
        for row, place in enumerate(windows):
            if place >= num_images:
                break
            try:
                self._fill(rows, row, self._fixed_layout, place, None)
            except DataError as error:
                self._damage.skip(error, self._shards, place)
        return rows.finish(np.array(windows, dtype=np.int64))

    def _fill(self, rows: "_ImageRows", row: int, layout: Layout, place: int, sample: int | None) -> None:
        """Decodes the image at a place of a layout; `sample` is that of training."""
        shards, starts = layout
        slot = bisect_right(starts, place) - 1
        reader = self._reader(shards[slot])
        number = place - starts[slot]
        content, label = reader.image(number)
        where = f"{reader.name}, image {number:08d}"
        rows.put(row, self._see(ImageFile(content, where), where, sample), label)

    def _see(self, file: ImageFile, where: str, sample: int | None) -> np.ndarray:
        """Returns the view of an image, uint8 [C, Y, X]. Raises: DataError."""
        channels, side = self._image
        width, height = file.width, file.height
        # Padding makes room of its own.
        config = self._config
        room = 2 * config.padding if sample is not None else 0
        is_resized = config.resize != 0 or (config.crop == "random_resized" and sample is not None)
        if not is_resized and min(width, height) + room < side:
            size = f"{width} x {height} pixels are smaller than the crop of {side}"
            fix = "leave data.images.resize out, or remove the image"
            raise DataError(f"{size}, and data.images.resize=0", where=where, fix=fix)
        if sample is None:
            view = center_view(config, width, height, side)
        else:
            view = draw_view(config, width, height, side, self.order.seed, sample)
        return render(file, view, channels, side, config.interpolation)

    def _build_epoch_layout(self, epoch: int) -> Layout:
        return layout_of(self._sizes, shard_order(len(self._sizes), self.order.seed, epoch))


def render(file: ImageFile, view: View, channels: int, side: int, interpolation: str) -> np.ndarray:
    """Decodes the part of an image that a view shows, uint8 [C, side, side]. Raises: DataError."""
    from PIL.Image import Resampling, Transpose

    image = file.decode(channels, view.shrink(file.width, side))
    filtered = {"bilinear": Resampling.BILINEAR, "bicubic": Resampling.BICUBIC}[interpolation]
    box = view.box
    if view.resized is not None:
        if image.size != view.resized:
            image = image.resize(view.resized, filtered)
    elif image.width != file.width:
        # Decoded smaller than it is: the box is in pixels of the whole.
        across, down = image.width / file.width, image.height / file.height
        box = (box[0] * across, box[1] * down, box[2] * across, box[3] * down)
    left, top, right, bottom = box
    if (right - left, bottom - top) == (side, side):
        image = image.crop((int(left), int(top), int(left) + side, int(top) + side))
    else:
        image = image.resize((side, side), filtered, box)
    if view.mirrored:
        image = image.transpose(Transpose.FLIP_LEFT_RIGHT)
    pixels = np.asarray(image, dtype=np.uint8)
    return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)


class _ImageRows:
    """Rows of a batch; those that are not filled are padding, without a label."""

    def __init__(self, num_rows: int, image: ImageSize, seq_len: int) -> None:
        self._pixels = np.zeros((num_rows, image.channels, image.side, image.side), dtype=np.uint8)
        self._labels = np.full((num_rows, seq_len + 1), IGNORE_INDEX, dtype=np.int16)
        self._num_tokens = np.zeros(num_rows, dtype=np.int64)

    def put(self, row: int, pixels: np.ndarray, label: int) -> None:
        """Fills a row."""
        self._pixels[row] = pixels
        self._labels[row, 0] = label
        self._num_tokens[row] = self._labels.shape[1]

    def finish(self, sample_ids: np.ndarray) -> TokenRows:
        """Returns the rows."""
        is_whole = bool(self._num_tokens.all())
        width = self._labels.shape[1]
        return TokenRows(
            tokens=np.zeros(self._labels.shape, dtype=np.uint16),
            starts=np.flatnonzero(self._num_tokens) * width,
            num_tokens=None if is_whole else self._num_tokens,
            sample_ids=sample_ids,
            labels=self._labels,
            pixels=self._pixels,
        )
