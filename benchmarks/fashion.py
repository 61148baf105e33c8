"""Writes the 70,000 images of Fashion-MNIST as PNG files of 28 x 28 pixels, a folder for each class.

apt-get install dataset-fashion-mnist
python -m benchmarks.fashion fashion
"""

import gzip
import sys
from pathlib import Path

import numpy as np

FOLDER = Path("/usr/share/datasets/fashion-mnist")
"""Place of the Debian package."""
CLASSES = ("t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot")


def read_idx(path: Path, header: int) -> np.ndarray:
    """Reads the bytes of a file of MNIST's format after its header."""
    return np.frombuffer(gzip.decompress(path.read_bytes())[header:], np.uint8)


def write_fashion(out: Path, folder: Path = FOLDER) -> int:
    """Writes OUT/train/boot/00042.png ... and OUT/test; returns the number of images. Costs a minute."""
    from PIL import Image

    total = 0
    for split, stem in (("train", "train"), ("test", "t10k")):
        labels = read_idx(folder / f"{stem}-labels-idx1-ubyte.gz", 8)
        images = read_idx(folder / f"{stem}-images-idx3-ubyte.gz", 16).reshape(len(labels), 28, 28)
        for name in CLASSES:
            (out / split / name).mkdir(parents=True, exist_ok=True)
        for number, (pixels, label) in enumerate(zip(images, labels.tolist(), strict=True)):
            Image.fromarray(pixels).save(out / split / CLASSES[label] / f"{number:05d}.png")
        total += len(labels)
    return total


if __name__ == "__main__":
    print(f"{sys.argv[1]}: {write_fashion(Path(sys.argv[1]), *map(Path, sys.argv[2:]))} images")
