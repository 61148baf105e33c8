"""Small images for tests: folders of classes that can be told apart, and files of every kind."""

import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from pretrain.config.load import short_prepare
from pretrain.preparation.prepare import prepare
from pretrain.shards.index import DataIndex

COLORS = {"red": (220, 30, 30), "green": (30, 200, 30), "blue": (30, 30, 220)}


def encode(pixels: np.ndarray, format: str = "PNG", mode: str | None = None, **options: Any) -> bytes:
    """Returns an image file of pixels [Y, X] or [Y, X, 3], converted to `mode` before."""
    image = Image.fromarray(pixels)
    out = io.BytesIO()
    (image if mode is None else image.convert(mode)).save(out, format, **options)
    return out.getvalue()


def noise(height: int, width: int, seed: int = 0, channels: int = 3) -> np.ndarray:
    """Returns random pixels, uint8 [Y, X, C], or [Y, X] for one channel."""
    shape = (height, width, channels) if channels > 1 else (height, width)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def write_colors(folder: Path, each: int = 8, side: int = 16) -> Path:
    """Writes `each` noisy images of every color, FOLDER/red/000.png ...; returns the folder."""
    for place, (name, color) in enumerate(COLORS.items()):
        (folder / name).mkdir(parents=True)
        for number in range(each):
            pixels = noise(side, side, seed=1000 * place + number) // 4 + np.array(color, np.uint8) // 2
            (folder / name / f"{number:03d}.png").write_bytes(encode(pixels.astype(np.uint8)))
    return folder


def prepare_colors(folder: Path, each: int = 8, side: int = 16, **options: Any) -> tuple[Path, DataIndex]:
    """Prepares such images; returns the shard folder and its index."""
    write_colors(folder / "photos", each, side)
    config = short_prepare(folder / "data", [str(folder / "photos")], kind="images", **{"split": "hash:0.25"} | options)
    index = prepare(config, processes=1)
    assert index is not None
    return folder / "data", index
