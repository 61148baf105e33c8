"""Writes the 1,797 digits of scikit-learn as PNG files of 8 x 8 pixels, a folder for each digit.

python -m benchmarks.digits digits      in a clone; needs scikit-learn, which is in the extra `dev`
"""

import sys
from pathlib import Path


def write_digits(folder: Path) -> int:
    """Writes FOLDER/7/0042.png ...; returns the number of images. Costs half a second."""
    from PIL import Image

    try:
        from sklearn.datasets import load_digits
    except ImportError:
        sys.exit("error: the digits come with scikit-learn, which is not installed; python -m pip install scikit-learn")

    found = load_digits()
    for number, (pixels, digit) in enumerate(zip(found.images, found.target.tolist(), strict=True)):
        place = folder / str(digit)
        place.mkdir(parents=True, exist_ok=True)
        # Their values are 0 to 16.
        Image.fromarray((pixels * 255 / 16).round().astype("uint8")).save(place / f"{number:04d}.png")
    return len(found.target)


if __name__ == "__main__":
    print(f"{sys.argv[1]}: {write_digits(Path(sys.argv[1]))} images")
