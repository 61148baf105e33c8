"""Writes images of one or two shapes, 32 x 32 pixels, each with a caption beside it.

python -m benchmarks.shapes shapes      in a clone; 00000.png, 00000.txt, ...
python -m benchmarks.shapes shapes 500  fewer than 12,000

A caption says all of an image but the places and sizes in pixels: "a large red circle above a small
blue cross". The n-th image is a function of n.
"""

import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw

SIDE = 32
IMAGES = 12_000
COLORS = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (50, 80, 230),
    "yellow": (235, 210, 40),
    "purple": (150, 60, 190),
    "white": (245, 245, 245),
}
SHAPES = ("circle", "square", "triangle", "cross")
RADII = {"small": (3, 4), "large": (6, 7)}
"""Least and largest radius in pixels."""


def draw_shape(draw: "ImageDraw", shape: str, color: str, place: tuple[int, int], radius: int) -> None:
    """Draws a shape around a place."""
    x, y = place
    box = (x - radius, y - radius, x + radius, y + radius)
    fill = COLORS[color]
    if shape == "circle":
        draw.ellipse(box, fill)
    elif shape == "square":
        draw.rectangle(box, fill)
    elif shape == "triangle":
        draw.polygon([(x, y - radius), (x - radius, y + radius), (x + radius, y + radius)], fill)
    else:
        arm = max(1, radius // 3)
        draw.rectangle((x - radius, y - arm, x + radius, y + arm), fill)
        draw.rectangle((x - arm, y - radius, x + arm, y + radius), fill)


def draw_scene(draw: "ImageDraw", number: int) -> str:
    """Draws the shapes of an image; returns its caption."""
    numbers = random.Random(number)
    relation = numbers.choice(("", "above", "left of"))
    half = SIDE // 2
    aligned = numbers.randint(8, SIDE - 9)
    names = []
    for second in range(2 if relation else 1):
        size, color, shape = (numbers.choice(list(choices)) for choices in (RADII, COLORS, SHAPES))
        radius = numbers.randint(*RADII[size])
        # Each in its half of the image, one below or beside the other: another relation would be wrong.
        along = numbers.randint(radius, half - 1 - radius) + half * second
        across = aligned + numbers.randint(-1, 1)
        draw_shape(draw, shape, color, (along, across) if relation == "left of" else (across, along), radius)
        names.append(f"a {size} {color} {shape}")
    return f" {relation} ".join(names)


def write_shapes(folder: Path, count: int = IMAGES) -> int:
    """Writes FOLDER/00042.png and .txt ...; returns the number of images. Costs seconds."""
    from PIL import Image, ImageDraw

    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        image = Image.new("RGB", (SIDE, SIDE), (0, 0, 0))
        caption = draw_scene(ImageDraw.Draw(image), number)
        image.save(folder / f"{number:05d}.png")
        (folder / f"{number:05d}.txt").write_text(f"{caption}\n")
    return count


if __name__ == "__main__":
    print(f"{sys.argv[1]}: {write_shapes(Path(sys.argv[1]), *map(int, sys.argv[2:3]))} images with captions")
