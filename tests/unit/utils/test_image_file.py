"""Image files of every kind become 8 bits of grey or RGB, upright; what cannot is refused by name."""

import io
import re
import struct
import zlib

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from pretrain.errors import DataError
from pretrain.utils import image_file
from pretrain.utils.image_file import MAX_PIXELS, ImageFile
from tests.helpers.images import encode, noise

PIXELS = noise(6, 10)
GREY = noise(6, 10, channels=1)


def read(content: bytes, channels: int = 3, shrink: float = 1.0) -> np.ndarray:
    return np.asarray(ImageFile(content, "a.png").decode(channels, shrink))


@pytest.mark.parametrize(("format", "suffix"), [("PNG", "png"), ("BMP", "bmp"), ("TIFF", "tif")])
def test_lossless_formats_keep_every_pixel(format, suffix):
    content = encode(PIXELS, format)
    file = ImageFile(content, "a")
    assert (file.suffix, file.width, file.height) == (suffix, 10, 6)
    assert np.array_equal(file.decode(3), PIXELS)


@pytest.mark.parametrize("format", ["JPEG", "WEBP"])
def test_lossy_formats_are_close(format):
    smooth = np.tile(np.linspace(0, 255, 16, dtype=np.uint8)[:, None, None], (1, 16, 3))
    assert np.abs(read(encode(smooth, format)).astype(int) - smooth).max() < 16


def test_grey_and_colors_are_converted_as_the_model_reads_them():
    assert read(encode(GREY)).shape == (6, 10, 3)
    assert np.array_equal(read(encode(GREY))[..., 1], GREY)
    assert read(encode(PIXELS), channels=1).shape == (6, 10)


@pytest.mark.parametrize(
    ("mode", "format"),
    [("P", "PNG"), ("RGBA", "PNG"), ("LA", "PNG"), ("1", "PNG"), ("P", "GIF"), ("CMYK", "TIFF"), ("CMYK", "JPEG")],
)
def test_other_modes_are_converted(mode, format):
    content = encode(PIXELS, format, mode)
    assert np.array_equal(read(content), np.asarray(Image.open(io.BytesIO(content)).convert("RGB")))


def test_of_sixteen_bits_the_upper_eight_are_kept():
    deep = GREY.astype(np.uint16) * 256 + 77
    assert np.array_equal(read(encode(deep), channels=1), GREY)


def test_colors_of_sixteen_bits_keep_the_upper_eight():
    deep = PIXELS.astype(np.uint16) * 256 + 77
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in deep)
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", 10, 6, 16, 2, 0, 0, 0)), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    named = [(name + body, len(body)) for name, body in chunks]
    parts = [struct.pack(">I", size) + chunk + struct.pack(">I", zlib.crc32(chunk)) for chunk, size in named]
    assert np.array_equal(read(b"\x89PNG\r\n\x1a\n" + b"".join(parts)), PIXELS)


TURNED = {
    1: lambda pixels: pixels,
    2: np.fliplr,
    3: lambda pixels: np.rot90(pixels, 2),
    4: np.flipud,
    5: lambda pixels: pixels.transpose(1, 0, 2),
    6: lambda pixels: np.rot90(pixels, -1),
    7: lambda pixels: np.rot90(pixels, 2).transpose(1, 0, 2),
    8: np.rot90,
}


@pytest.mark.parametrize("orientation", TURNED)
def test_orientation_is_applied(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = ImageFile(encode(PIXELS, "PNG", exif=exif), "a")
    expected = TURNED[orientation](PIXELS)
    assert (file.height, file.width) == expected.shape[:2]
    assert np.array_equal(file.decode(3), expected)


def test_a_large_jpeg_is_decoded_smaller_where_that_suffices():
    content = encode(np.full((256, 512, 3), 99, np.uint8), "JPEG")
    assert read(content).shape == (256, 512, 3)
    assert read(content, shrink=3.9).shape == (128, 256, 3)
    assert read(content, shrink=8).shape == (64, 128, 3)
    assert read(encode(PIXELS), shrink=3).shape == (6, 10, 3)


def claim(width: int, height: int, bits: int = 8, colors: int = 2) -> bytes:
    """A PNG of a few bytes whose header claims any size."""
    header = struct.pack(">IIBBBBB", width, height, bits, colors, 0, 0, 0)
    chunk = b"IHDR" + header
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk)) + b"\0\0\0\0IDAT"


def with_text() -> bytes:
    """A PNG with a text of megabytes beside its pixels."""
    facts = PngInfo()
    facts.add_text("prompt", "x" * 2**21, zip=True)
    return encode(noise(4, 4), "PNG", pnginfo=facts)


def frames(format: str) -> bytes:
    out = io.BytesIO()
    first, second = (Image.fromarray(noise(4, 4, seed)) for seed in (1, 2))
    first.save(out, format, save_all=True, append_images=[second])
    return out.getvalue()


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"no image", r"a\.png: not an image in a format that is read \(bmp, gif, .*\); remove it, or save it anew"),
        (claim(70_000, 1000), rf"a\.png: 70000 x 1000 of more than {MAX_PIXELS:,} pixels is refused; save it smaller"),
        (claim(1, 2**26), r"a\.png: 1 x 67108864 of more than 65,536 pixels a side is refused"),
        (claim(65_537, 1), r"a\.png: 65537 x 1 of more than 65,536 pixels a side"),
        (
            claim(8192, 8192, 16, 6),
            r"8192 x 8192, mode RGBA, of more than 256 MiB of memory is refused; save it smaller",
        ),
        (claim(90_000, 90_000), r"a\.png: a picture of more than [0-9,]+ pixels is refused"),
        (with_text(), r"a\.png: a limit of the decoder, no damage: more text beside the pixels than is read; save it"),
        (frames("GIF"), r"a\.png: an animation, of which no frame stands for all; save one frame"),
        (frames("PNG"), r"a\.png: an animation"),
        (frames("WEBP"), r"a\.png: an animation"),
        (frames("TIFF"), r"a\.png: an animation"),
        (encode(GREY.astype(np.int32), "TIFF"), r"a\.png: has 32 bits a pixel \(mode I\); save it with 8 or 16 bits"),
    ],
    ids=["text", "large", "high", "wide", "deep", "bomb", "text chunks", "gif", "apng", "webp", "tiff", "32 bits"],
)
def test_what_is_refused_by_the_header(content, message):
    with pytest.raises(DataError, match=message):
        ImageFile(content, "a.png")


SIDEWAYS = Image.Exif()
SIDEWAYS[0x0112] = 6


@pytest.mark.parametrize(
    ("format", "mode", "options", "pixel_bytes"),
    [
        ("PNG", "RGB", {}, 4),
        ("PNG", "RGBA", {}, 8),
        ("PNG", "P", {}, 5),
        ("PNG", "I;16", {}, 6),
        ("PNG", "RGB", {"exif": SIDEWAYS}, 8),
        ("PNG", "RGBA", {"exif": SIDEWAYS}, 12),
        ("WEBP", "RGB", {}, 16),
        ("TIFF", "CMYK", {}, 8),
        ("JPEG", "RGB", {"exif": SIDEWAYS}, 4),  # of twice the limit
        ("JPEG", "RGB", {"progressive": True, "exif": SIDEWAYS}, 5.5),
    ],
)
def test_memory_of_decoding_is_counted_by_the_header(monkeypatch, format, mode, options, pixel_bytes):
    out = io.BytesIO()
    Image.new(mode, (64, 32)).save(out, format, **options)
    monkeypatch.setattr(image_file, "MAX_DECODED_BYTES", int(64 * 32 * pixel_bytes))
    assert ImageFile(out.getvalue(), "a").decode(3).size in ((64, 32), (32, 64))
    monkeypatch.setattr(image_file, "MAX_DECODED_BYTES", int(64 * 32 * pixel_bytes) - 1)
    with pytest.raises(DataError, match=f"a: 64 x 32, mode {mode}, of more than 0 MiB of memory is refused"):
        ImageFile(out.getvalue(), "a")


def test_scans_of_a_progressive_image_are_counted():
    out = io.BytesIO()
    Image.new("RGB", (1024, 1024)).save(out, "JPEG", progressive=True)
    assert ImageFile(out.getvalue(), "a").width == 1024
    with pytest.raises(DataError, match="1024 x 1024, mode RGB, of more than 2,147,483,648 pixels in all its scans"):
        ImageFile(out.getvalue() + b"\xff\xda" * 2048, "a")


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "TIFF"])
def test_damaged_pixels_are_refused_in_one_line(format):
    content = encode(noise(64, 64), format)
    with pytest.raises(DataError, match=re.escape("a.png: ")) as caught:
        read(content[: len(content) // 2])
    assert "\n" not in str(caught.value)
