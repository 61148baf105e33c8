"""Image files by Pillow: the header first, then pixels of 8 bits in grey or RGB, upright.

    bytes -> ImageFile: format, size, orientation, by the header; what is too large is refused here
          -> decode(shrink): pixels, of a JPEG at 1/2, 1/4 or 1/8 of its size where that suffices

Converted: palettes, CMYK, other colour spaces, 16 bits a pixel (the upper 8 are kept); transparency
is dropped. Refused by name: animations, 32 bits a pixel, formats outside of `FORMATS`. Pillow is
imported at the first image: text needs none.
"""

import io
from typing import TYPE_CHECKING

from pretrain.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = {
    "JPEG": "jpg",
    "MPO": "jpg",  # of some cameras; opened as a JPEG
    "PNG": "png",
    "WEBP": "webp",
    "BMP": "bmp",
    "GIF": "gif",
    "TIFF": "tif",
}
"""Formats of Pillow that are read, and the suffix of each; no format that runs another program."""

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
"""Endings of the names of files of these formats."""

MAX_PIXELS = 2**26
"""Most pixels of an image, 67 million: a few kilobytes can claim billions."""

MAX_SIDE = 2**16
"""Most rows, and columns, for each of which Pillow has a table."""

MAX_DECODED_BYTES = 2**28
"""Most memory of decoding; of a JPEG, as photographs are, which may be turned, twice as much."""

MAX_SCANNED_PIXELS = 2**31
"""Most pixels of all scans of a progressive JPEG, which may have thousands: seconds of decoding."""

# Bytes of a pixel in Pillow's memory, and what a decoder of a format holds besides.
_PIXEL_BYTES = {"1": 1, "L": 1, "P": 1, "I;16": 2, "I;16B": 2, "I;16L": 2}
_WIDEST = 4
_DECODER_BYTES = {"WEBP": 12}
_PROGRESSIVE_BYTES = 3
_START_OF_SCAN = b"\xff\xda"
_MODES = {1: "L", 3: "RGB"}
_ORIENTATION = 0x0112  # of EXIF; from 5 on, rows and columns are exchanged
_FIX = "remove it, or save it anew as JPEG or PNG"


class ImageFile:
    """An image whose header is read.

    Attributes:
        suffix: Usual suffix of its format, without a dot.
        mode: Mode of its pixels as stored, by Pillow's name.
        width: Columns of pixels, upright.
        height: Rows of pixels, upright.
    """

    def __init__(self, content: bytes | memoryview, where: str) -> None:
        """Reads the header. `where` names the image. Raises: DataError: No image, or too large."""
        import PIL.Image

        self._where = where
        try:
            formats = [name for name in FORMATS if name != "MPO"]
            self._image = PIL.Image.open(io.BytesIO(content), formats=formats)
            self._check_size(*self._image.size)
            # Not the method of PNG, which decodes all pixels for what may come after them.
            self._orientation = PIL.Image.Image.getexif(self._image).get(_ORIENTATION, 1)
            is_animated = self._image.format != "MPO" and getattr(self._image, "is_animated", False)
        except DataError:
            raise
        except PIL.Image.DecompressionBombError:
            raise self._too_large("a picture") from None  # Pillow's own limit is far above this one
        except Exception as error:  # decoders raise nearly anything on damaged bytes
            names = ", ".join(sorted(set(FORMATS.values())))
            raise self._unreadable(
                f"not an image in a format that is read ({names})",
                error,
            ) from None
        self.suffix = FORMATS[str(self._image.format)]
        self.mode = self._image.mode
        if is_animated:
            raise DataError(
                "an animation, of which no frame stands for all",
                where=where,
                fix="save one frame of it",
            )
        if self._image.mode in ("I", "F"):
            raise DataError(
                f"has 32 bits a pixel (mode {self._image.mode})",
                where=where,
                fix="save it with 8 or 16 bits",
            )
        self._check_cost(content)
        width, height = self._image.size
        is_turned = self._orientation in range(5, 9)
        self.width, self.height = (height, width) if is_turned else (width, height)

    def decode(self, channels: int, shrink: float = 1.0) -> "Image":
        """Returns the pixels, mode L (1 channel) or RGB (3), at least 1/shrink of the size.

        To be called once. Raises: DataError: The pixels are damaged.
        """
        from PIL import ImageOps

        image: Image = self._image
        try:
            if shrink >= 2:
                # Has an effect on JPEG alone: libjpeg scales within its inverse DCT.
                width, height = (int(side / shrink) + 1 for side in image.size)
                self._image.draft(image.mode, (width, height))
            image.load()
            if self._orientation != 1:
                image = ImageOps.exif_transpose(image)
            if image.mode.startswith("I;16"):
                image = image.point(lambda value: value / 256).convert("L")
            return image if image.mode == _MODES[channels] else image.convert(_MODES[channels])
        except Exception as error:
            raise self._unreadable("its pixels are damaged", error) from None

    def _check_size(self, width: int, height: int) -> None:
        if width * height > MAX_PIXELS:
            raise self._too_large(f"{width} x {height}")
        if max(width, height) > MAX_SIDE:
            raise self._too_large(f"{width} x {height}", f"{MAX_SIDE:,} pixels a side")

    def _check_cost(self, content: bytes | memoryview) -> None:
        """Refuses what takes too much memory or time to decode. Raises: DataError."""
        image = self._image
        per_pixel = _PIXEL_BYTES.get(image.mode, _WIDEST)
        pixel_bytes = per_pixel + _DECODER_BYTES.get(str(image.format), 0)
        pixel_bytes += per_pixel if self._orientation != 1 else 0  # the copy that is upright
        pixel_bytes += _WIDEST if image.mode != "RGB" else 0  # the converted copy
        pixels = image.size[0] * image.size[1]
        shown = f"{image.size[0]} x {image.size[1]}, mode {image.mode},"
        is_jpeg = image.format in ("JPEG", "MPO")
        if is_jpeg and image.info.get("progressive"):
            pixel_bytes += _PROGRESSIVE_BYTES
            if pixels * bytes(content).count(_START_OF_SCAN) > MAX_SCANNED_PIXELS:
                raise self._too_large(shown, f"{MAX_SCANNED_PIXELS:,} pixels in all its scans")
        limit = MAX_DECODED_BYTES * (2 if is_jpeg else 1)
        if pixels * pixel_bytes > limit:
            raise self._too_large(shown, f"{limit >> 20} MiB of memory")

    def _too_large(self, size: str, limit: str = f"{MAX_PIXELS:,} pixels") -> DataError:
        return DataError(
            f"{size} of more than {limit} is refused",
            where=self._where,
            fix="save it smaller, or remove it",
        )

    def _unreadable(self, what: str, error: Exception) -> DataError:
        import PIL

        # Pillow's own words for a file of no format name an object in memory.
        is_foreign = isinstance(error, PIL.UnidentifiedImageError)
        reason = "" if is_foreign else str(error).partition("\n")[0]
        if "MAX_TEXT" in reason:
            return DataError(
                "a limit of the decoder, no damage: more text beside the pixels than is read",
                where=self._where,
                fix="save it anew without its text chunks",
            )
        return DataError(f"{what}: {reason}" if reason else what, where=self._where, fix=_FIX)
