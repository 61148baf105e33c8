"""`model.input` -- images as the input of a stack, cut into patches (Dosovitskiy et al. 2021, ViT).

    image [C, Y, X], uint8  -->  (pixel / 255 - mean) / std  -->  patches [T', C P P]
                            -->  embedding.projection
                            -->  class token, registers, patches: T vectors

T = `positions` is the length of every row: `batch.seq_len` and `model.max_seq_len`.
"""

from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from pretrain.config.base import MAX_SIDE, Conflicts, OnResume, Section


class ImageSize(NamedTuple):
    """Size of the images that a model reads: channels, and the side of the square in pixels."""

    channels: int
    side: int


class PatchesConfig(Section):
    """Input of image patches in place of token ids."""

    kind: Annotated[Literal["patches"], OnResume.NEVER] = "patches"
    """`patches`: squares of an image, each projected to the width of the stack by one matrix."""
    image: Annotated[int, OnResume.NEVER] = Field(ge=1, le=MAX_SIDE)
    """Side of the square image in pixels; data are resized or cropped to it (`data.images`)."""
    size: Annotated[int, OnResume.NEVER] = Field(ge=1, le=MAX_SIDE)
    """Side P of a patch in pixels, a divisor of `image`."""
    channels: Annotated[Literal[1, 3], OnResume.NEVER] = 3
    """Channels C of a pixel: 3 for RGB, 1 for grey levels."""
    class_token: Annotated[bool, OnResume.NEVER] = True
    """Learned vector before the patches, whose last hidden state stands for the image. False: use
    `head.mean`."""
    registers: Annotated[int, OnResume.NEVER] = Field(default=0, ge=0, le=MAX_SIDE)
    """Number of further learned vectors before the patches (Darcet et al. 2024)."""
    mean: Annotated[list[float], OnResume.ALLOW] = Field(default=[0.5], min_length=1)
    """Subtracted from pixels between 0 and 1; one for all channels, or one each."""
    std: Annotated[list[float], OnResume.ALLOW] = Field(default=[0.5], min_length=1)
    """Divisor of pixels after that; one for all channels, or one each."""

    @property
    def image_size(self) -> ImageSize:
        """Channels and side of the image."""
        return ImageSize(self.channels, self.image)

    @property
    def grid(self) -> int:
        """Patches on a side of the image."""
        return self.image // self.size

    @property
    def patch_values(self) -> int:
        """Values of a patch, C P P."""
        return self.channels * self.size**2

    @property
    def num_before(self) -> int:
        """Vectors before the patches: class token and registers."""
        return int(self.class_token) + self.registers

    @property
    def positions(self) -> int:
        """Length T of a row: class token, registers and patches."""
        return self.num_before + self.grid**2

    def describe(self) -> str:
        """Returns the parts of `positions`: `64 patches and a class token`."""
        parts = [f"{self.grid**2} patches"]
        parts += ["a class token"] if self.class_token else []
        parts += [f"{self.registers} registers"] if self.registers else []
        return " and ".join(parts)

    def _conflicts(self) -> Conflicts:
        if self.image % self.size:
            yield f"image={self.image} must be a multiple of size={self.size}, the side of a patch"
        for name in ("mean", "std"):
            count = len(getattr(self, name))
            if count not in (1, self.channels):
                yield f"{name} has {count} values", f"give one, or one for each of channels={self.channels}"
        if not all(value > 0 for value in self.std):
            yield f"std={self.std} must be positive"
