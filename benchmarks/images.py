"""Images per CPU second: our loader against plain webdataset over the same tars, in one run.

    python -m benchmarks.images [--quick] [--side 256] [--large] [--arms ours,ours_again,webdataset] [--rounds 25]

The benchmark makes JPEGs (smooth shapes and noise, quality 85) and writes them to webdataset tars. Every arm yields
each image of an epoch once, shuffled, in batches of 64 uint8 tensors [B, 3, 224, 224] with a random resized crop and a
mirror, bilinear with antialiasing, all decoded by Pillow. The page cache is warm, torch has one thread.

    ours               ImageStream and TrainLoader, `workers=0`; CRC32 of each file and a digest of all pixels
    ours_threads       the same by 2 threads
    ours_processes     two processes, one half of the steps each: what threads lose to the interpreter's lock
    webdataset         shuffle(1000), decode("pil"), resized by Pillow with the box as an argument, stacked once
    webdataset_torch   the same with our crop and resize: what is not due to them
    webdataset_floats  the same, normalized on the CPU to float32, as recipes by torchvision's ToTensor and Normalize do
    timm               its reader of webdataset, its transforms to uint8 and `fast_collate`, as ahead of its prefetcher
                       in DataLoader; skipped where timm is not installed
    webdataset_workers the plain one in its WebLoader with 2 worker processes, as its documentation has it
    ours_encoded, webdataset_encoded     files and labels, no decoding; 5 epochs, as a CRC32 is checked in the first

`--large`: photographs of 2048 x 1536 pixels, of which ours decodes a crop at 1/2, 1/4 or 1/8 where that suffices
(draft mode of libjpeg).
"""

import argparse
import importlib.util
import io
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch
import webdataset as wds
from PIL import Image
from torch import Tensor

from benchmarks.common import is_conclusive, measure, print_row, ratio
from pretrain.config.data import BatchPlan, ImagesConfig
from pretrain.config.model import ImageSize
from pretrain.data.image_stream import ImageStream
from pretrain.data.image_view import View, crop_and_resize, draw_numbers, draw_view
from pretrain.data.loader import TrainLoader
from pretrain.data.lookahead import layout_of
from pretrain.data.order import SampleOrder, shard_order
from pretrain.objective.masked import label_rows
from pretrain.shards.image_writer import EncodedImage, ImageShardWriter
from pretrain.shards.index import DataIndex, build_split
from pretrain.shards.reader import ShardSet

NUM_SHARDS = 4
BATCH = 64
EPOCHS = 5
"""Epochs without decoding."""
SIDE = 224
CONFIG = ImagesConfig(crop="random_resized", flip=0.5)
MEAN = np.float32([0.485, 0.456, 0.406])[:, None, None]
STD = np.float32([0.229, 0.224, 0.225])[:, None, None]
MUST = {"ours over webdataset": 1.3, "ours over timm": 1.3, "ours_encoded over webdataset_encoded": 10.0}
Batches = Iterator[Any]


def make_jpeg(number: int, width: int, height: int) -> bytes:
    """Returns a JPEG of smooth colors with some noise, 20 KB at 256 x 256 pixels."""
    rng = np.random.default_rng(number)
    coarse = rng.integers(0, 256, (12, 12, 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))
    noise = rng.integers(0, 24, (height, width, 1), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray((smooth // 8 * 7 + noise).astype(np.uint8)).save(out, "JPEG", quality=85)
    return out.getvalue()


def write_shards(folder: Path, num_images: int, width: int, height: int) -> DataIndex:
    """Writes NUM_SHARDS shards."""
    (folder / "train").mkdir()
    shards = []
    for number in range(NUM_SHARDS):
        writer = ImageShardWriter(folder / f"train/part-00000-{number:04d}.tar")
        for image in range(number, num_images, NUM_SHARDS):
            writer.add(EncodedImage(make_jpeg(image, width, height), "jpg", width, height, image % 1000))
        shards.append(writer.close())
    labels = tuple(map(str, range(1000)))
    return DataIndex("", 1, "uint16", 0, {"train": build_split(shards, 0)}, kind="images", labels=labels)


def read_ours(folder: Path, index: DataIndex, workers: int, first: int = 0, stride: int = 1) -> Batches:
    """Yields the batches of an epoch, every `stride`-th of them."""
    size = ImageSize(3, SIDE)
    stream = ImageStream(
        folder, index, "train", image=size, seq_len=2, config=CONFIG, seed=1, lanes=16, block_samples=256
    )
    plan = BatchPlan(rows=BATCH * stride, rows_per_rank=BATCH, micro=BATCH, accumulation=1)
    rows = partial(label_rows, document_mask=True)
    loader = TrainLoader(stream, rows, plan, rank=first, world_size=stride, workers=workers)
    for _ in range(index.split("train").num_documents // BATCH // stride):
        for batch in next(loader).micro_batches:
            yield batch.pixels_BCYX, batch.targets_BT[:, 0]
    loader.close()


def read_in_processes(folder: Path, index: DataIndex, count: int) -> None:
    """Reads an epoch in `count` processes, without sending the batches anywhere."""
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_drain_share, args=(folder, index, rank, count)) for rank in range(count)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0


def _drain_share(folder: Path, index: DataIndex, rank: int, count: int) -> None:
    for _ in read_ours(folder, index, 0, rank, count):
        pass


def read_encoded(folder: Path, index: DataIndex) -> Batches:
    """Yields the files and labels of an epoch in the order of training."""
    shards = ShardSet(folder, index, "train")
    sizes = np.array([shard.num_tokens for shard in shards.split.shards])
    order = SampleOrder(int(sizes.sum()), 1, seed=1, lanes=16, block_samples=256)
    places, starts = layout_of(sizes, shard_order(len(sizes), 1, 0))
    starts = np.array(starts)
    for start in range(0, EPOCHS * int(sizes.sum()) // BATCH * BATCH, BATCH):
        samples = order.samples(range(start, start + BATCH)) % order.num_tokens
        slots = np.searchsorted(starts, samples, side="right") - 1
        pairs = zip(slots.tolist(), (samples - starts[slots]).tolist(), strict=True)
        files = [shards.reader(places[slot]).image(number) for slot, number in pairs]
        yield [content for content, _ in files], torch.tensor([label for _, label in files])


def augment(image: Image.Image, number: int, by_torch: bool) -> np.ndarray:
    """Crops, resizes and mirrors a decoded image with numbers drawn as ours are; uint8 [C, Y, X]."""
    view: View = draw_view(CONFIG, *image.size, SIDE, draw_numbers(CONFIG, 1, np.array([number]))[0])
    if by_torch:
        return crop_and_resize(image, view.box, view.mirrored, SIDE, "bilinear")
    image = image.resize((SIDE, SIDE), Image.Resampling.BILINEAR, view.box)
    if view.mirrored:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return np.asarray(image).transpose(2, 0, 1)


def read_webdataset(names: list[str], floats: bool = False, by_torch: bool = False, workers: int = 0) -> Batches:
    """Yields the batches of an epoch by webdataset."""

    def prepare(sample: tuple[str, Image.Image, int]) -> tuple[np.ndarray, int]:
        pixels = augment(sample[1], int(sample[0]), by_torch)
        return (((pixels / np.float32(255)) - MEAN) / STD if floats else pixels), sample[2]

    def collate(samples: list[tuple[np.ndarray, int]]) -> tuple[Tensor, Tensor]:
        pixels = np.stack([pixels for pixels, _ in samples])
        return torch.from_numpy(pixels), torch.tensor([label for _, label in samples])

    samples = wds.WebDataset(names, shardshuffle=100).shuffle(1000).decode("pil").to_tuple("__key__", "jpg", "cls")
    batches = samples.map(prepare).batched(BATCH, collation_fn=collate, partial=False)
    yield from wds.WebLoader(batches, batch_size=None, num_workers=workers) if workers else batches


def read_timm(folder: Path, index: DataIndex) -> Batches:
    """Yields the batches of an epoch by timm's reader and transforms, as its prefetcher gets them."""
    from timm.data import create_dataset, create_transform
    from timm.data.loader import fast_collate

    count = index.split("train").num_documents
    split = f"part-00000-{{0000..{NUM_SHARDS - 1:04d}}}.tar|{count}"
    data = create_dataset("wds/", root=str(folder / "train"), split=split, is_training=True, batch_size=BATCH)
    options = {"hflip": 0.5, "color_jitter": None, "interpolation": "bilinear", "use_prefetcher": True}
    data.transform = create_transform(SIDE, is_training=True, **options)
    yield from torch.utils.data.DataLoader(data, BATCH, collate_fn=fast_collate, drop_last=True)


def read_webdataset_encoded(names: list[str]) -> Batches:
    """Yields the files and labels of an epoch by webdataset."""
    samples = wds.WebDataset(names, shardshuffle=100).shuffle(1000).to_tuple("jpg", "cls")
    for _ in range(EPOCHS):
        for batch in samples.batched(BATCH, collation_fn=list, partial=False):
            yield [content for content, _ in batch], torch.tensor([int(label) for _, label in batch])


def drain(read: Callable[[], Any]) -> None:
    """Reads an epoch."""
    for pixels, labels in read() or ():
        assert len(pixels) == len(labels) == BATCH


def build_arms(folder: Path, index: DataIndex) -> dict[str, Callable[[], Any]]:
    """Returns what reads an epoch of each arm."""
    names = [str(folder / shard.name) for shard in index.split("train").shards]
    arms = {
        "ours": partial(read_ours, folder, index, 0),
        "ours_again": partial(read_ours, folder, index, 0),
        "ours_threads": partial(read_ours, folder, index, 2),
        "ours_processes": partial(read_in_processes, folder, index, 2),
        "webdataset": partial(read_webdataset, names),
        "webdataset_workers": partial(read_webdataset, names, workers=2),
        "webdataset_floats": partial(read_webdataset, names, floats=True),
        "ours_encoded": partial(read_encoded, folder, index),
        "webdataset_torch": partial(read_webdataset, names, by_torch=True),
        "webdataset_encoded": partial(read_webdataset_encoded, names),
    }
    if importlib.util.find_spec("timm") is not None:
        arms["timm"] = partial(read_timm, folder, index)
    return arms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a minute")
    parser.add_argument("--side", type=int, default=256, help="width and height of the images")
    parser.add_argument(
        "--arms", type=lambda names: names.split(","), help="these alone; ours and ours_again among them"
    )
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--large", action="store_true", help="photographs, with and without draft mode")
    options = parser.parse_args()
    torch.set_num_threads(1)
    size = (2048, 1536) if options.large else (options.side, options.side)
    num_images, rounds = (512 if options.quick else 2048, 5 if options.quick else 9)
    num_images = num_images // 8 if options.large else num_images
    with tempfile.TemporaryDirectory() as name:
        index = write_shards(Path(name), num_images, *size)
        arms = {arm: partial(drain, read) for arm, read in build_arms(Path(name), index).items()}
        if options.large:
            arms = {arm: work for arm, work in arms.items() if arm in ("ours", "ours_again", "webdataset", "timm")}
        arms = {arm: work for arm, work in arms.items() if arm in (options.arms or arms)}
        for work in arms.values():
            work()  # imports, and the page cache
        timings = measure(arms, options.rounds or rounds)
    report(timings, num_images, size)


def report(timings: dict[str, Any], num_images: int, size: tuple[int, int]) -> None:
    """Prints rates, ratios, verdicts and the row."""
    counts = {arm: num_images * (EPOCHS if arm.endswith("_encoded") else 1) for arm in timings}
    rates = {arm: counts[arm] / float(np.median([run.cpu_s for run in runs])) for arm, runs in timings.items()}
    wall = {arm: counts[arm] / float(np.median([run.wall_s for run in runs])) for arm, runs in timings.items()}
    pairs = [("ours", "webdataset"), ("ours", "webdataset_floats"), ("ours_encoded", "webdataset_encoded")]
    pairs += [("ours", "timm"), ("ours", "webdataset_torch")]
    pairs += [("ours_threads", "webdataset_workers"), ("ours_threads", "ours"), ("ours_processes", "ours")]
    known = [(ours, peer) for ours, peer in pairs if {ours, peer} <= timings.keys()]
    ratios = {f"{ours} over {peer}": ratio(timings[peer], timings[ours]) for ours, peer in known}
    aa = ratio(timings["ours"], timings["ours_again"])
    for arm, rate in rates.items():
        print(f"{arm:20s} {rate:9.0f} images per CPU-second {wall[arm]:9.0f} images/s")
    for label, value in ratios.items():
        must = f"  must {MUST[label]:g}: {'holds' if value.low >= MUST[label] else 'missed'}" if label in MUST else ""
        print(f"{label:40s} {value}{must}")
    print(f"A/A {aa}{'' if is_conclusive(aa) else ', wider than 3%: inconclusive'}")
    figures = {
        "unit": "images per CPU-second",
        "pixels": size,
        "rates": {arm: round(rate, 1) for arm, rate in rates.items()},
        "rates_wall": {arm: round(rate, 1) for arm, rate in wall.items()},
        "ratios": {label: str(value) for label, value in ratios.items()},
        "aa": str(aa),
    }
    print_row("images", figures, ("numpy", "torch", "webdataset", "pillow", *(["timm"] if "timm" in timings else [])))


if __name__ == "__main__":
    main()
