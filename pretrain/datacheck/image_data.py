"""Data of images under `pretrain data`: a contact sheet, statistics, and the check of every file.

    show    rows, as augmented  ->  ImagesReport  ->  a PNG of all, with labels or captions; --json
    stats   headers             ->  images of each class, lengths of captions, sizes, formats, modes
    verify  every byte          ->  CRC32 of images, SHA-256 of tars, sizes, labels; pixels if asked

Not here: configs and rows of them (show.py).
"""

import io
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from pretrain.data.order import SampleOrder
from pretrain.datacheck.reading import Order
from pretrain.datacheck.shard_files import FIX, MAX_THREADS, Tick, check_hash, raise_all, shard_totals
from pretrain.datacheck.stats_text import print_table
from pretrain.errors import ConfigError, DataError
from pretrain.rows import TokenRows
from pretrain.shards.index import DataIndex
from pretrain.shards.reader import ShardSet
from pretrain.shards.store import ShardStore
from pretrain.utils.image_file import SUFFIXES, ImageFile
from pretrain.utils.io import make_dir, write_file
from pretrain.utils.log import printable
from pretrain.utils.units import plural

ROWS = 32
"""Images of a sheet, where no number is given."""
LEAST_CELL = 96
"""Least side of an image on a sheet, in pixels: smaller ones are enlarged by a whole number."""
CAPTION = 26
GAP = 6
MAX_CLASSES = 20
"""Classes that are printed; of more, the largest."""
FOLDER_MODEL: dict[str, Any] = {"preset": "vit-tiny", "input": {"image": 96, "size": 16}}
"""A model whose input stands for that of a run, for a folder without a config."""
FOLDER_POSITIONS = 37
CAPTIONS_MODEL: dict[str, Any] = FOLDER_MODEL | {"preset": "vit_gpt2-tiny"}
LINE = 12
"""Height of a line under an image."""


@dataclass(frozen=True, slots=True)
class ImagesReport:
    """Images of `name` as a model reads them, from a position of a split on."""

    name: str
    split: str
    position: int
    rows: TokenRows
    labels: tuple[str, ...]
    captions: list[str] | None = None  # of captioned images

    def facts(self) -> dict[str, Any]:
        """Returns the output of `--json`."""
        rows = [{"position": place, **row} for place, row in enumerate(self._rows(), self.position)]
        return {"kind": "images", "path": self.name, "split": self.split, "rows": rows}

    def _rows(self) -> Iterator[dict[str, Any]]:
        rows = self.rows
        if self.captions is not None:
            for sample, caption in zip(rows.sample_ids_B.tolist(), self.captions, strict=True):
                yield {"sample": sample, "caption": caption}
            return
        assert rows.labels_BT is not None
        for place, label in enumerate(rows.labels_BT[:, 0].tolist()):
            shares = {}
            if label >= 0:
                shares[self.labels[label]] = 1.0
                second, share = (0, 0.0) if rows.mixed_B2 is None else rows.mixed_B2[place].tolist()
                if share:
                    other = self.labels[int(second)]
                    shares[self.labels[label]] -= share
                    shares[other] = shares.get(other, 0.0) + share
            yield {"sample": int(rows.sample_ids_B[place]), "labels": shares}

    def write(self, path: Path) -> str:
        """Writes the contact sheet; returns a line about it. Raises: ConfigError, DiskError."""
        from PIL import Image, ImageDraw, ImageFont

        if path.suffix.lower() != ".png":
            raise ConfigError(f"--output {path.name}: a contact sheet is a .png", fix="name it so")
        pixels = self.rows.pixels_BCYX
        assert pixels is not None and len(pixels)
        side = pixels.shape[-1]
        cell = side * math.ceil(LEAST_CELL / side)
        columns = math.ceil(math.sqrt(len(pixels)))
        lines = -(-len(pixels) // columns)
        below = CAPTION if self.captions is None else CAPTION + 2 * LINE
        size = (columns * (cell + GAP) + GAP, lines * (cell + below + GAP) + GAP)
        sheet = Image.new("RGB", size, "white")
        draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=10)
        for place, (image, row) in enumerate(zip(pixels, self._rows(), strict=True)):
            down, across = divmod(place, columns)
            left, top = GAP + across * (cell + GAP), GAP + down * (cell + below + GAP)
            seen = Image.fromarray(image[0] if len(image) == 1 else image.transpose(1, 2, 0))
            sheet.paste(seen.resize((cell, cell), Image.Resampling.NEAREST), (left, top))
            names = [f"{printable(name)} {share:.0%}" if share < 1 else printable(name)
                     for name, share in row.get("labels", {}).items()]  # fmt: skip
            if row.get("caption"):
                widest = partial(draw.textlength, font=font)
                names = wrap_words(printable(row["caption"]), cell, widest)[: below // LINE]
            for line, text in enumerate(names or ["cannot be read"]):
                while draw.textlength(text, font) > cell:
                    text = text[:-4] + "..." if len(text) > 4 else ""
                draw.text((left, top + cell + LINE * line), text, "black", font)
        out = io.BytesIO()
        sheet.save(out, "PNG")
        make_dir(path.parent)
        write_file(path, out.getvalue())
        title = f"{plural(len(pixels), 'image')} of {self.split} from position {self.position}"
        return f"{path}: {title}, {side} x {side} pixels, as the model reads them"


def wrap_words(text: str, width: float, length_of: Callable[[str], float]) -> list[str]:
    """Cuts a text between words into lines of at most `width`, a longer word alone in its line."""
    lines: list[str] = []
    for word in text.split():
        if lines and length_of(f"{lines[-1]} {word}") <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def decode_captions(rows: TokenRows, tokenizer: Tokenizer) -> list[str]:
    """Returns the text of each row; empty for an image that could not be read."""
    assert rows.num_tokens_B is not None, "rows of captions are padded"
    pairs = zip(rows.tokens_BT.tolist(), rows.num_tokens_B.tolist(), strict=True)
    return tokenizer.decode_batch([tokens[:length] for tokens, length in pairs])


def longest_caption(store: ShardStore, index: DataIndex) -> int:
    """Returns the most tokens of a caption of a folder, its end included. Raises: DataError."""
    sets = [ShardSet(store, index, name) for name in index.splits]
    return max(int(shards.captions(place).lengths.max()) for shards in sets for place in range(len(shards)))


def count_images(store: ShardStore, index: DataIndex, tick: Tick) -> dict[str, Any]:
    """Reads the headers of all images; returns the facts of each split. Raises: DataError."""
    totals = {}
    for name, split in index.splits.items():
        shards = ShardSet(store, index, name)
        with ThreadPoolExecutor(min(os.cpu_count() or 1, MAX_THREADS)) as pool:
            counts = list(pool.map(partial(_count_shard, shards, tick), range(len(shards))))
        labels = sum((labels for labels, _, _ in counts), Counter[int]())
        kinds = sum((kinds for _, kinds, _ in counts), Counter[tuple[str, str]]())
        sizes = np.concatenate([sizes for _, _, sizes in counts])
        quantiles = np.quantile(sizes, (0.0, 0.5, 1.0), axis=0, method="lower")
        captions = _count_captions(shards) if index.has_tokenizer else {}
        totals[name] = {"images": split.num_documents} | shard_totals(split) | captions
        totals[name] |= {
            "classes": {label: labels[number] for number, label in enumerate(index.labels)},
            "sizes": {
                side: dict(zip(("min", "median", "max"), values, strict=True))
                for side, values in zip(("width", "height"), quantiles.T.tolist(), strict=True)
            },
            "kinds": {f"{suffix} {mode}": count for (suffix, mode), count in kinds.most_common()},
        }
    return totals


def _count_captions(shards: ShardSet) -> dict[str, Any]:
    lengths = np.concatenate([shards.captions(place).lengths for place in range(len(shards))])
    least, median, most = np.quantile(lengths, (0.0, 0.5, 1.0), method="lower").tolist()
    return {"captions": {"tokens": int(lengths.sum()), "min": least, "median": median, "max": most}}


def _count_shard(shards: ShardSet, tick: Tick, place: int) -> tuple[Counter[int], Counter[tuple[str, str]], np.ndarray]:
    """Returns the images of a shard by label, by format and mode, and their sizes, int64 [N, 2]."""
    labels, kinds = Counter[int](), Counter[tuple[str, str]]()
    sizes = []
    for file, label in _files(shards, place):
        labels[label] += 1
        kinds[file.suffix, file.mode] += 1
        sizes.append((file.width, file.height))
    tick(shards.split.shards[place].num_bytes)
    return labels, kinds, np.array(sizes)


def _files(shards: ShardSet, place: int) -> Iterator[tuple[ImageFile, int]]:
    """Yields the images of a shard, headers read, and their labels. Raises: DataError."""
    reader = shards.reader(place)
    for number in range(shards.split.shards[place].num_members):
        content, label = reader.image(number)
        yield ImageFile(content, f"{reader.name}, {reader.image_name(number)}"), label


def print_image_stats(facts: dict[str, Any]) -> None:
    """Prints the output of `count_data` of images, split by split."""
    classes = facts["splits"]["train"]["classes"]
    title = f"images of {plural(len(classes), 'class')}"
    if "vocab_size" in facts:
        title = f"captioned images, {facts['vocab_size']:,} tokens in the vocabulary"
    print(f"{facts['path']}: {title}")
    for name, split in facts["splits"].items():
        print(f"\n{name}: {plural(split['images'], 'image')}, {plural(split['shards'], 'shard')}")
        sizes = split["sizes"].items()
        rows = [(side, *(f"{value:,}" for value in values.values())) for side, values in sizes]
        print_table(("pixels", "min", "median", "max"), rows, left=0)
        kinds = [(kind, f"{count:,}") for kind, count in split["kinds"].items()]
        print_table(("format, mode", "images"), kinds, left=0)
        if captions := split.get("captions"):
            cells = tuple(f"{captions[key]:,}" for key in ("min", "median", "max", "tokens"))
            print_table(("captions", "min", "median", "max", "all"), [("tokens", *cells)], left=0)
            continue
        classes = sorted(split["classes"].items(), key=lambda item: -item[1])
        shown = [(printable(label), f"{count:,}") for label, count in classes[:MAX_CLASSES]]
        print_table(("class", "images"), shown, left=0)
        if len(classes) > MAX_CLASSES:
            print(f"and {len(classes) - MAX_CLASSES} more classes, the smallest of {classes[-1][1]:,}")


def verify_images(store: ShardStore, index: DataIndex, order: Order, tick: Tick, *, decode: bool) -> dict[str, Any]:
    """Checks every byte, size and label, and that the order has each image once. Raises: DataError.

    `decode`: every image is decoded too. `tick` is called with the bytes that were read.
    """
    sets = [ShardSet(store, index, name) for name in index.splits]
    places = [(shards, number) for shards in sets for number in range(len(shards))]
    with ThreadPoolExecutor(min(os.cpu_count() or 1, MAX_THREADS)) as pool:
        errors = list(pool.map(lambda place: _check_shard(place[0], place[1], tick, decode=decode), places))
    raise_all([error for error in errors if error is not None])
    num_images = index.split("train").num_documents
    cut = {"lanes": order.lanes, "block_samples": order.block_samples}
    samples = SampleOrder(num_images, 1, seed=order.seed, **cut).samples(range(num_images))
    if not np.array_equal(np.sort(samples), np.arange(num_images)):
        raise DataError("an epoch does not have every image once", where="train", fix="report this")
    return {
        "images": sum(split.num_documents for split in index.splits.values()),
        "decoded": decode,
        "webdataset_samples": sum(_check_with_webdataset(shards) for shards in sets),
    }


def _check_shard(shards: ShardSet, place: int, tick: Tick, *, decode: bool) -> DataError | None:
    """Returns the first damage of a shard."""
    shard = shards.split.shards[place]
    try:
        lengths = shards.lengths(place)
        if shard.captions is not None:
            check_captions(shards, place)
        sizes = shards.sizes(place)
        for number, (file, label) in enumerate(_files(shards, place)):
            if label >= len(shards.index.labels) and not shards.index.has_tokenizer:
                raise DataError(
                    f"image {number} has label {label} of {len(shards.index.labels)}",
                    where=shard.name,
                    fix=FIX,
                )
            if lengths[number] != 1 or (file.width, file.height) != tuple(sizes[number].tolist()):
                raise DataError(
                    f"the size of image {number} is not that of the file",
                    where=shard.lengths.name,
                    fix=FIX,
                )
            if decode:
                file.decode(channels=3)
            tick(shard.num_bytes / shard.num_members)
        check_hash(shards.folder, shard, tick)
    except DataError as error:
        return error
    return None


def check_captions(shards: ShardSet, place: int) -> None:
    """Checks the tokens of the captions of a shard. Raises: DataError."""
    shard, captions = shards.split.shards[place], shards.captions(place)
    assert shard.captions is not None, "a shard of captions"
    if int(captions.values.max()) >= shards.index.vocab_size:
        raise DataError(
            f"has token {captions.values.max()}, the vocabulary has {shards.index.vocab_size}",
            where=shard.captions.name,
            fix=FIX,
        )


def _check_with_webdataset(shards: ShardSet) -> int:
    """Compares the first shard with what webdataset reads; returns the number of samples."""
    import webdataset  # imports torch where it is installed: seconds

    reader, num_samples = shards.reader(0), 0
    urls = [str((shards.folder / shards.split.shards[0].name).absolute())]
    wanted = shards.split.shards[0].num_members
    # Samples, and the end of a damaged tar, may have been left out (`on_error` of prepare).
    options = {"shardshuffle": False, "empty_check": False, "handler": webdataset.ignore_and_stop}
    for sample in webdataset.WebDataset(urls, **options):
        images = [value for kind, value in sample.items() if f".{kind}" in SUFFIXES]
        if num_samples < wanted and images == [bytes(reader.image(num_samples)[0])]:
            num_samples += 1
    if num_samples < wanted:
        raise DataError(
            f"webdataset reads another image in sample {num_samples}",
            where=reader.name,
            fix=FIX,
        )
    return num_samples


def print_image_proof(proof: dict[str, Any]) -> None:
    """Prints the output of `verify_images`."""
    totals = ", ".join(plural(proof[f"{noun}s"], noun) for noun in ("shard", "image", "byte"))
    decoded = ", and every image decodes" if proof["decoded"] else ""
    print(f"{proof['path']}: {totals}: sizes, CRC32 and sha256 are those of the index{decoded}")
    alike = f"{proof['webdataset_samples']:,} images of the first shard of each split alike"
    print(f"webdataset reads the {alike}")
    print("exactly once: yes")
