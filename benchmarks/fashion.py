"""Writes the 70,000 images of Fashion-MNIST as PNG files of 28 x 28 pixels, a folder for each class.

apt-get install dataset-fashion-mnist
python -m benchmarks.fashion fashion     # --labels 0.01: 60 training images of each class
"""

import argparse
import gzip
from collections import Counter
from pathlib import Path

import numpy as np

FOLDER = Path("/usr/share/datasets/fashion-mnist")
"""Place of the Debian package."""
CLASSES = ("t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot")


def read_idx(path: Path, header: int) -> np.ndarray:
    """Reads the bytes of a file of MNIST's format after its header."""
    return np.frombuffer(gzip.decompress(path.read_bytes())[header:], np.uint8)


def write_fashion(out: Path, folder: Path = FOLDER, labels: float = 1.0) -> int:
    """Writes OUT/train/boot/00042.png ... and OUT/test; returns the number of images. Costs a minute.

    `labels` is the share of the training images of each class that is written, the first ones.
    """
    from PIL import Image

    total = 0
    for split, stem, share in (("train", "train", labels), ("test", "t10k", 1.0)):
        classes = read_idx(folder / f"{stem}-labels-idx1-ubyte.gz", 8)
        images = read_idx(folder / f"{stem}-images-idx3-ubyte.gz", 16).reshape(len(classes), 28, 28)
        most = round(share * len(classes) / len(CLASSES))
        written: Counter[int] = Counter()
        for name in CLASSES:
            (out / split / name).mkdir(parents=True, exist_ok=True)
        for number, (pixels, label) in enumerate(zip(images, classes.tolist(), strict=True)):
            if written[label] < most:
                Image.fromarray(pixels).save(out / split / CLASSES[label] / f"{number:05d}.png")
                written[label] += 1
        total += sum(written.values())
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER, help="place of the package's files")
    parser.add_argument("--labels", type=float, default=1.0, help="share of the training images of each class")
    options = parser.parse_args()
    print(f"{options.out}: {write_fashion(options.out, options.folder, options.labels)} images")


if __name__ == "__main__":
    main()
