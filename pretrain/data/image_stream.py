"""Rows of images by number: views for training by position, and for evaluation in order.

    position  --SampleOrder, T = 1-->  sample j = (epoch j div N, place j mod N)  -->  shard, image
    file      --image_view.py, augment.py: a function of (seed, j)-->  uint8 [C, Y, X]
    mixup, cutmix: the images at positions 2 n and 2 n + 1 are each other's second image
    captions       tokens of a row, padded; images with a label have it at the first of theirs

N is the number of images. As the samples of text do, those of images differ from epoch to epoch, so
that numbers drawn by (seed, sample) do. Nothing depends on ranks, workers or restarts. Not here:
normalisation, which the model does on its device, and labels of the head.
"""

from bisect import bisect_right
from functools import lru_cache
from pathlib import Path

import numpy as np

from pretrain.config.data import ImagesConfig
from pretrain.config.model import ImageSize
from pretrain.data.augment import draw_mix, erase, mix_pixels, rand_augment
from pretrain.data.bin_stream import EPOCHS_KEPT
from pretrain.data.damage import DamagePolicy
from pretrain.data.image_view import center_view, draw_numbers, draw_view, render
from pretrain.data.lookahead import Layout, Lookahead, layout_of
from pretrain.data.order import SampleOrder, shard_order
from pretrain.errors import DataError
from pretrain.rows import IGNORE_INDEX, TokenRows
from pretrain.shards.index import DataIndex
from pretrain.shards.reader import ShardSet
from pretrain.shards.store import ShardStore
from pretrain.utils.image_file import ImageFile

_Drawn = tuple[int, list[float]]  # a sample of training, and the numbers of its view


class ImageStream:
    """The images of one split; arguments and order as of `TokenStream`, with T = 1.

    `image` is the input of the model, and a row has `seq_len` positions. Raises: DataError: There
    is no such split; or images are smaller than the crop, or captions longer than a row, where
    sizes are known without a download.
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
        self._captioned = index.layout.captions
        self._sizes = np.array([shard.num_tokens for shard in self.split.shards], dtype=np.int64)
        self._room = 0 if config.crop == "center" or split != "train" else 2 * config.padding
        self._crops_as_is = config.resize == 0 and (config.crop != "random_resized" or split != "train")
        if self._crops_as_is and not (self._damage.skips or store.fetches):
            self._check_sizes()
        if self._captioned and not (self._damage.skips or store.fetches):
            for number in range(len(self._sizes)):
                self._check_captions(number)
        self._epoch_layout = lru_cache(EPOCHS_KEPT)(self._build_epoch_layout)
        self._fixed_layout = layout_of(self._sizes, np.arange(len(self._sizes)))

    def read(self, positions: range) -> TokenRows:
        """Reads the samples at some positions. Raises: DataError, naming shard and image."""
        if self._lookahead is not None and positions:
            self._lookahead.follow(self.order, self._epoch_layout, positions.start, overlap=0)
        if not (self._config.mixup or self._config.cutmix):
            return self._read(positions).finish()
        first = positions.start % 2
        rows = self._read(range(positions.start - first, positions.stop + positions.stop % 2))
        rows.mix(self._config, self.order.seed)
        return rows.finish(first, len(positions))

    def _read(self, positions: range) -> "_ImageRows":
        samples = self.order.samples(positions)
        rows = _ImageRows(samples, self._image, self.seq_len)
        numbers = draw_numbers(self._config, self.order.seed, samples)
        for row, sample in enumerate(samples.tolist()):
            epoch, place = divmod(sample, self.split.num_tokens)
            drawn = sample, numbers[row]
            try:
                self._fill(rows, row, self._epoch_layout(epoch), place, drawn)
            except DataError as error:
                self._damage.skip(error, self._shards, sample)
        return rows

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
        rows = _ImageRows(np.array(windows, dtype=np.int64), self._image, self.seq_len)
        for row, place in enumerate(windows):
            if place >= num_images:
                break
            try:
                self._fill(rows, row, self._fixed_layout, place, None)
            except DataError as error:
                self._damage.skip(error, self._shards, place)
        return rows.finish()

    def _fill(self, rows: "_ImageRows", row: int, layout: Layout, place: int, drawn: _Drawn | None) -> None:
        shards, starts = layout
        slot = bisect_right(starts, place) - 1
        reader = self._reader(shards[slot])
        number = place - starts[slot]
        content, label = reader.image(number)
        try:
            pixels = self._see(ImageFile(content, reader.name), drawn)
        except DataError as error:
            where = f"{reader.name}, {reader.image_name(number)}"
            raise DataError(error.what, where=where, fix=error.fix) from None
        if self._captioned:
            if self._shards.store.fetches:
                self._check_captions(shards[slot])
            tokens = self._shards.captions(shards[slot]).slice(number, number + 1).values
            rows.put_caption(row, pixels, tokens)
        else:
            rows.put(row, pixels, label)

    def _see(self, file: ImageFile, drawn: _Drawn | None) -> np.ndarray:
        channels, side = self._image
        width, height = file.width, file.height
        config, seed = self._config, self.order.seed
        if self._crops_as_is and min(width, height) + self._room < side:
            raise self._too_small(width, height, "")
        if drawn is None:
            view = center_view(config, width, height, side)
            return render(file, view, channels, side, config.interpolation)
        sample, numbers = drawn
        view = draw_view(config, width, height, side, numbers)
        pixels = render(file, view, channels, side, config.interpolation)
        return erase(rand_augment(pixels, config, seed, sample), config, seed, sample)

    def _check_sizes(self) -> None:
        for number, shard in enumerate(self.split.shards):
            sizes = self._shards.sizes(number)
            small = np.flatnonzero(sizes.min(axis=1) + self._room < self._image.side)
            if len(small):
                where = f"{shard.name}, {self._shards.reader(number).image_name(int(small[0]))}"
                width, height = sizes[small[0]].tolist()
                raise self._too_small(width, height, where)

    def _check_captions(self, number: int) -> None:
        """Checks that the captions of a shard fit a row. Raises: DataError."""
        lengths = self._shards.captions(number).lengths
        if int(lengths.max()) > self.seq_len:
            place = int(lengths.argmax())
            reader = self._shards.reader(number)
            problem = f"a caption of {lengths[place]} tokens, its end included,"
            problem += f" exceeds batch.seq_len={self.seq_len}"
            fix = f"use batch.seq_len={lengths[place]}, or shorten it"
            raise DataError(problem, where=f"{reader.name}, {reader.image_name(place)}", fix=fix)

    def _too_small(self, width: int, height: int, where: str) -> DataError:
        side = self._image.side
        text = f"{width} x {height} pixels are smaller than the crop of {side}, and data.images.resize=0"
        return DataError(text, where=where, fix="leave data.images.resize out, or remove the image")

    def _build_epoch_layout(self, epoch: int) -> Layout:
        return layout_of(self._sizes, shard_order(len(self._sizes), self.order.seed, epoch))


class _ImageRows:
    """Rows of a batch; those that are not filled are padding, without a label."""

    def __init__(self, samples: np.ndarray, image: ImageSize, seq_len: int) -> None:
        self._samples = samples
        self._pixels = np.zeros((len(samples), image.channels, image.side, image.side), dtype=np.uint8)
        self._labels = np.full((len(samples), seq_len + 1), IGNORE_INDEX, dtype=np.int16)
        self._num_tokens = np.zeros(len(samples), dtype=np.int64)
        self._captions: np.ndarray | None = None
        self._mixed: np.ndarray | None = None

    def put(self, row: int, pixels: np.ndarray, label: int) -> None:
        self._pixels[row] = pixels
        self._labels[row, 0] = label
        self._num_tokens[row] = self._labels.shape[1]

    def put_caption(self, row: int, pixels: np.ndarray, tokens: np.ndarray) -> None:
        if self._captions is None:
            self._captions = np.zeros(self._labels.shape, dtype=tokens.dtype)
        self._pixels[row] = pixels
        self._captions[row, : len(tokens)] = tokens
        self._num_tokens[row] = len(tokens)

    def mix(self, config: ImagesConfig, seed: int) -> None:
        """Mixes neighbours, of an even number of rows; one without a neighbour stays."""
        pixels, labels = self._pixels.copy(), self._labels[:, 0].copy()
        self._mixed = np.stack([labels, np.zeros_like(labels)], axis=1).astype(np.float32)
        for row, sample in enumerate(self._samples.tolist()):
            mix = draw_mix(config, pixels.shape[-1], seed, sample)
            other = row ^ 1
            if mix is None or not (self._num_tokens[row] and self._num_tokens[other]):
                continue
            self._pixels[row] = mix_pixels(pixels[row], pixels[other], mix)
            # The label with the larger share first: it is the one that is right.
            is_less = mix.share > 0.5
            self._labels[row, 0] = labels[other if is_less else row]
            self._mixed[row] = labels[row if is_less else other], min(mix.share, 1 - mix.share)

    def finish(self, first: int = 0, count: int | None = None) -> TokenRows:
        """Returns some rows. None: all."""
        chosen = slice(first, None if count is None else first + count)
        labels, num_tokens = self._labels[chosen], self._num_tokens[chosen]
        tokens = np.zeros(labels.shape, dtype=np.uint16)
        if self._captions is not None:
            tokens = self._captions[chosen]
        return TokenRows(
            tokens_BT=tokens,
            starts=np.flatnonzero(num_tokens) * labels.shape[1],
            num_tokens_B=None if self._captions is None and num_tokens.all() else num_tokens,
            sample_ids_B=self._samples[chosen],
            labels_BT=labels,
            pixels_BCYX=self._pixels[chosen],
            mixed_B2=None if self._mixed is None else self._mixed[chosen],
        )
