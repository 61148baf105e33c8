"""The pixels of a step: a function of seed and position, whatever ranks, workers and restarts there are."""

from functools import partial

import numpy as np
import pytest
from PIL import Image

from pretrain.config.data import BatchConfig, ImagesConfig, RandAugmentConfig, plan_batch
from pretrain.config.load import short_prepare
from pretrain.config.model import ImageSize
from pretrain.data.augment import draw_mix, mix_pixels
from pretrain.data.damage import DamagePolicy
from pretrain.data.image_stream import ImageStream
from pretrain.data.image_view import View, center_view, draw_numbers, draw_view, render, resize
from pretrain.data.loader import StepCounts, TrainLoader, ValidationLoader
from pretrain.errors import DataError
from pretrain.objective.masked import label_rows
from pretrain.preparation.prepare import prepare
from pretrain.rows import IGNORE_INDEX, merge_rows
from pretrain.utils.image_file import ImageFile
from tests.helpers.images import encode, noise, prepare_colors, write_colors

ALL = ImagesConfig(
    crop="random_resized",
    scale=[0.3, 1.0],
    flip=0.5,
    randaugment=RandAugmentConfig(operations=2),
    erase=0.5,
    mixup=0.8,
    cutmix=1.0,
)
MAKE = partial(label_rows, document_mask=True)
SEQ_LEN = 17
PLACES = np.array([0, 1, 4, 5, 2, 3])
"""Places of rows that were read in another order."""


@pytest.fixture(scope="module")
def colors(tmp_path_factory):
    return prepare_colors(tmp_path_factory.mktemp("colors"))


def stream_of(colors, config=ALL, split="train", side=8, **options):
    folder, index = colors
    options = {"seed": 5, "lanes": 3, "block_samples": 4} | options
    return ImageStream(folder, index, split, image=ImageSize(3, side), seq_len=SEQ_LEN, config=config, **options)


def steps(stream, num, *, ranks=1, workers=1, micro=2, first=0, rows=12):
    """The counters of `num` steps, summed over ranks, and the pixels of the global batches."""
    plan = plan_batch(BatchConfig(global_tokens=rows * SEQ_LEN, seq_len=SEQ_LEN, micro=micro), ranks)
    options = {"world_size": ranks, "workers": workers, "start_step": first, "start_position": first * rows}
    loaders = [TrainLoader(stream, MAKE, plan, rank=rank, **options) for rank in range(ranks)]
    found = []
    for _ in range(num):
        batches = [next(loader) for loader in loaders]
        pixels = np.concatenate([one.pixels_BCYX for batch in batches for one in batch.micro_batches])
        found.append((sum((batch.counts for batch in batches), StepCounts()), pixels))
    for loader in loaders:
        loader.close()
    return found


def test_pixels_do_not_depend_on_ranks_workers_micro_batches_or_restarts(colors):
    expected = steps(stream_of(colors), 4)
    assert all(counts.pixel_digest for counts, _ in expected)
    assert len({counts.pixel_digest for counts, _ in expected}) == 4
    changes = ({"ranks": 2}, {"ranks": 3, "workers": 0}, {"workers": 3, "micro": 6}, {"ranks": 4, "micro": 3})
    for change in (*changes, {"ranks": 2, "micro": 1}):
        for (counts, pixels), (ours, same) in zip(steps(stream_of(colors), 4, **change), expected, strict=True):
            assert counts == ours and np.array_equal(pixels, same)
    restarted = steps(stream_of(colors), 2, first=2, ranks=2)
    assert [counts for counts, _ in restarted] == [counts for counts, _ in expected[2:]]


def test_rows_around_skipped_positions_are_those_of_one_reading(colors):
    stream = stream_of(colors)
    whole = stream.read(range(6))
    merged = merge_rows([stream.read(range(2)), stream.read(range(4, 6)), stream.read(range(2, 4))], PLACES)
    for name in ("tokens_BT", "labels_BT", "pixels_BCYX", "mixed_B2", "sample_ids_B", "starts"):
        assert np.array_equal(getattr(merged, name), getattr(whole, name)), name


def test_another_seed_or_augmentation_is_another_digest(colors):
    digests = {
        steps(stream_of(colors, config, seed=seed), 1)[0][0].pixel_digest
        for seed in (5, 6)
        for config in (
            ALL,
            ALL.model_copy(update={"erase": 0.0}),
            ImagesConfig(crop="random", padding=2),
            ImagesConfig(),
        )
    }
    assert len(digests) == 8


@pytest.mark.parametrize("config", [ImagesConfig(mixup=0.4), ImagesConfig(cutmix=1.0)], ids=["mixup", "cutmix"])
def test_an_image_is_mixed_with_its_neighbour_in_the_order(colors, config):
    plain, mixed = stream_of(colors, ImagesConfig()).read(range(12)), stream_of(colors, config).read(range(12))
    for row, sample in enumerate(plain.sample_ids_B.tolist()):
        mix = draw_mix(config, 8, 5, sample)
        both = [int(plain.labels_BT[row, 0]), int(plain.labels_BT[row ^ 1, 0])]
        assert np.array_equal(
            mixed.pixels_BCYX[row], mix_pixels(plain.pixels_BCYX[row], plain.pixels_BCYX[row ^ 1], mix)
        )
        found = [int(mixed.labels_BT[row, 0]), int(mixed.mixed_B2[row, 0])]
        assert found == (both if mix.share <= 0.5 else both[::-1])
        assert mixed.mixed_B2[row, 1] == np.float32(min(mix.share, 1 - mix.share))
    # From an odd position on, and to one: the neighbour outside is read too.
    for part in (range(1, 4), range(3, 4), range(4, 7)):
        rows = stream_of(colors, config).read(part)
        assert np.array_equal(rows.pixels_BCYX, mixed.pixels_BCYX[part.start : part.stop])
        assert np.array_equal(rows.mixed_B2, mixed.mixed_B2[part.start : part.stop])
    made = MAKE(mixed)
    assert np.array_equal(made.mixed_P2, mixed.mixed_B2) and made.num_targets() == 12
    # Evaluations see whole images.
    assert stream_of(colors, config, split="validation").read_windows(range(2)).mixed_B2 is None


def test_an_epoch_has_every_image_once_and_the_next_other_views(colors):
    stream = stream_of(colors)
    size = stream.split.num_tokens
    first, second = stream.read(range(size)), stream.read(range(size, 2 * size))
    assert sorted(first.sample_ids_B) == list(range(size))
    assert sorted(second.sample_ids_B) == list(range(size, 2 * size))
    plain = stream_of(colors, ImagesConfig())
    views = [
        sorted(image.tobytes() for image in plain.read(range(n * size, n * size + size)).pixels_BCYX) for n in (0, 1)
    ]
    assert views[0] == views[1]
    assert not np.array_equal(first.pixels_BCYX, second.pixels_BCYX)


def test_the_label_is_at_the_first_position(colors):
    rows = stream_of(colors, ImagesConfig()).read(range(6))
    assert (rows.labels_BT[:, 1:] == IGNORE_INDEX).all()
    # The label is the color: the names are sorted, blue, green, red.
    strongest = rows.pixels_BCYX.mean(axis=(2, 3)).argmax(axis=1)
    assert [["red", "green", "blue"][one] for one in strongest] == [
        colors[1].labels[one] for one in rows.labels_BT[:, 0]
    ]


def test_evaluation_reads_every_image_once_and_pads(colors):
    stream = stream_of(colors, split="validation")
    count = stream.num_windows()
    assert count == stream.split.num_tokens
    loader = ValidationLoader(stream, MAKE, micro=4, rank=0, world_size=1)
    batches = list(loader)
    assert sum(batch.num_targets() for batch in batches) == count
    assert all(batch.pixels_BCYX.shape == (4, 3, 8, 8) for batch in batches)
    assert stream.num_windows(max_tokens=2 * SEQ_LEN) == 2
    # The same whatever the augmentation, and whatever the seed.
    other = stream_of(colors, ImagesConfig(), split="validation", seed=9)
    assert np.array_equal(stream.read_windows(range(3)).pixels_BCYX, other.read_windows(range(3)).pixels_BCYX)


def views(config, width, height, count):
    """The views of the first samples of a run of seed 1."""
    for numbers in draw_numbers(config, 1, np.arange(count)):
        yield draw_view(config, width, height, 8, numbers)


@pytest.mark.parametrize("size", [(30, 20), (20, 31), (8, 8), (5, 40)])
def test_a_random_resized_crop_lies_inside_within_its_bounds(size):
    width, height = size
    for view in views(ALL, width, height, 200):
        left, top, right, bottom = view.box
        assert 0 <= left < right <= width and 0 <= top < bottom <= height
        area, ratio = (right - left) * (bottom - top) / (width * height), (right - left) / (bottom - top)
        assert area <= 1 and 0.4 < ratio < 2.5  # bounds of the config, and whole pixels


def test_half_of_the_views_are_mirrored():
    flipped = [view.mirrored for view in views(ALL, 9, 9, 2000)]
    assert 0.45 < np.mean(flipped) < 0.55


def seen(pixels, view, side=8):
    found = render(ImageFile(encode(pixels), "a"), view, 3, side, "bilinear")
    return found.transpose(1, 2, 0)


def test_the_centre_is_cropped_after_resizing_to_the_shorter_side():
    pixels = noise(16, 24)
    assert np.array_equal(seen(pixels, center_view(ImagesConfig(resize=0), 24, 16, 8)), pixels[4:12, 8:16])
    half = np.asarray(Image.fromarray(pixels).resize((12, 8), Image.Resampling.BILINEAR))
    found = seen(pixels, center_view(ImagesConfig(), 24, 16, 8))
    assert np.abs(found.astype(int) - half[:, 2:10]).max() <= 1
    # The rest of a longer side is dropped, as torchvision does.
    assert center_view(ImagesConfig(), 25, 16, 8).resized == (12, 8)
    assert center_view(ImagesConfig(resize=12), 16, 39, 8) == ((12, 29), (2, 10, 10, 18), False)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [(8, 8), (60, 33), (33, 60), (100, 9)])
def test_resizing_has_the_filters_of_pillow(interpolation, channels, size):
    pixels = np.squeeze(noise(40, 50, channels=channels))
    filtered = Image.Resampling[interpolation.upper()]
    expected = np.asarray(Image.fromarray(pixels).resize(size, filtered)).astype(int)
    found = resize(pixels.reshape(40, 50, channels).transpose(2, 0, 1), size, interpolation)
    difference = found.transpose(1, 2, 0).reshape(expected.shape) - expected
    # Both have two passes of rounded integers, in another order.
    assert np.abs(difference).max() <= 2 and np.abs(difference).mean() < 0.3


def test_a_large_photograph_is_decoded_smaller_and_shows_the_same_part():
    smooth = Image.fromarray(noise(6, 8)).resize((800, 600), Image.Resampling.BICUBIC)
    content = encode(np.asarray(smooth), "JPEG")
    shown = [View(None, (101, 50, 703, 551)), View((20, 15), (3, 2, 19, 18)), View(None, (7, 9, 40, 45))]
    for view in shown:
        view = view._replace(mirrored=True)
        image = smooth if view.resized is None else smooth.resize(view.resized, Image.Resampling.BILINEAR)
        part = image.crop(view.box).resize((16, 16), Image.Resampling.BILINEAR)
        expected = np.asarray(part.transpose(Image.Transpose.FLIP_LEFT_RIGHT)).astype(int)
        found = render(ImageFile(content, "a"), view, 3, 16, "bilinear").transpose(1, 2, 0)
        assert np.abs(found - expected).mean() < 2  # of JPEG, and of half a pixel


def test_a_random_place_with_padding_is_a_window_of_the_padded_image():
    pixels = noise(8, 8)
    padded = np.pad(pixels, ((3, 3), (3, 3), (0, 0)))
    places = set()
    for view in views(ImagesConfig(crop="random", padding=3), 8, 8, 60):
        left, top = int(view.box[0]) + 3, int(view.box[1]) + 3
        assert np.array_equal(seen(pixels, view), padded[top : top + 8, left : left + 8])
        places.add((left, top))
    assert {left for left, _ in places} == {top for _, top in places} == set(range(7))


def test_a_mirrored_view_is_mirrored():
    pixels = noise(8, 8)
    view = center_view(ImagesConfig(), 8, 8, 8)
    assert np.array_equal(seen(pixels, view._replace(mirrored=True)), pixels[:, ::-1])


def test_an_image_smaller_than_the_crop_is_named_before_a_row_is_read(colors, tmp_path):
    message = r"train/part-.*\.tar, 0000.*\.png: 16 x 16 pixels are smaller than the crop of 20, and data\.images\."
    with pytest.raises(DataError, match=message):
        stream_of(colors, ImagesConfig(resize=0), side=20)
    # Padding makes room, in training; so does a size of its own.
    padded = ImagesConfig(resize=0, crop="random", padding=2)
    assert stream_of(colors, padded, side=20).read(range(1)).num_tokens_B is None
    with pytest.raises(DataError, match=r"validation/part-.*: 16 x 16 pixels are smaller"):
        stream_of(colors, padded, split="validation", side=20)
    assert stream_of(colors, ImagesConfig(resize=0, crop="random_resized"), side=20).read(range(1)).num_tokens_B is None
    # One of mixed sizes, met by a run that skips.
    write_colors(tmp_path / "photos")
    (tmp_path / "photos/red/000.png").write_bytes(encode(noise(9, 40)))
    index = prepare(
        short_prepare(tmp_path / "data", [str(tmp_path / "photos")], kind="images", split="hash:0"), processes=1
    )
    mixed = tmp_path / "data", index
    with pytest.raises(DataError, match="40 x 9 pixels are smaller than the crop of 10"):
        stream_of(mixed, ImagesConfig(resize=0), side=10)
    rows = stream_of(mixed, ImagesConfig(resize=0), side=10, damage=DamagePolicy("skip", 1)).read(range(24))
    assert (rows.num_tokens_B == 0).sum() == 1


def test_pixels_that_do_not_decode_are_damage_too(tmp_path, colors, monkeypatch):
    def fail(self, channels, shrink=1.0):
        raise DataError("its pixels are damaged", where=self._where, fix="remove it")

    monkeypatch.setattr(ImageFile, "decode", fail)
    with pytest.raises(DataError, match=r"train/part-.*\.tar, 0000.*\.png: its pixels are damaged; remove it"):
        stream_of(colors).read(range(1))
    rows = stream_of(colors, damage=DamagePolicy("skip", 12)).read(range(6))
    assert (rows.num_tokens_B == 0).all() and (rows.labels_BT == IGNORE_INDEX).all()


def test_a_damaged_image_is_skipped_on_every_rank_alike(tmp_path):
    folder, index = prepare_colors(tmp_path)
    shard = index.splits["train"].shards[0]
    content = bytearray((folder / shard.name).read_bytes())
    content[1600] ^= 255  # after the label and two headers
    (folder / shard.name).write_bytes(content)
    damaged = folder, index
    size = index.splits["train"].num_tokens
    with pytest.raises(DataError, match=r"train/part-00000-0000\.tar: 0000.*\.png is damaged"):
        stream_of(damaged).read(range(size))
    found = {}
    for ranks in (1, 2):
        damage = DamagePolicy("skip", 5)
        found[ranks] = [counts for counts, _ in steps(stream_of(damaged, damage=damage), 2, ranks=ranks)]
        assert damage.num_skipped_rows  # with those that were read ahead
    assert found[1] == found[2]
    assert sum(counts.num_skipped for counts in found[1]) >= 1
    assert sum(counts.num_targets + counts.num_skipped for counts in found[1]) == 24
    # The neighbour of the damaged one is not mixed, and has its own label whole.
    stream = stream_of(damaged, ImagesConfig(mixup=0.8), damage=DamagePolicy("skip", 5))
    rows = stream.read(range(size - size % 2))
    (lost,) = np.flatnonzero(rows.num_tokens_B == 0)
    other = lost ^ 1
    assert rows.mixed_B2[other].tolist() == [rows.labels_BT[other, 0], 0.0]
    made = MAKE(rows)
    assert len(made.mixed_P2) == len(made.target_positions_P) == len(rows.pixels_BCYX) - 1
