"""Short gated convolution (Liquid AI 2025, LFM 2): no state but the last tokens."""

from typing import Annotated, NamedTuple

from pydantic import Field

from pretrain.config.base import OnResume
from pretrain.kinds.mixer import Mixer, MixerSection


class ConvolutionSizes(NamedTuple):
    """Values of a layer."""

    kernel: int
    bias: bool

    def of_rank(self, ranks: int) -> "ConvolutionSizes":
        """Returns the sizes of a part of the channels: the same."""
        return self


class ConvolutionConfig(MixerSection):
    """Sizes of the layers of short gated convolutions (Liquid AI 2025, LFM 2), as wide as the stack."""

    kernel: Annotated[int, OnResume.NEVER] = Field(default=3, ge=2, le=64)
    """Tokens that the convolution reads, with the present one."""
    bias: Annotated[bool, OnResume.NEVER] = False
    """Bias terms in both projections and in the convolution."""

    def sizes(self, width: int, heads: int) -> ConvolutionSizes:
        """Returns the sizes in a stack."""
        return ConvolutionSizes(self.kernel, self.bias)

    def divisible(self, width: int, heads: int, *, matrices: bool) -> dict[str, int]:
        """Returns the channels."""
        return {"width": width}

    def describe(self, width: int, heads: int) -> str:
        """Returns the layer in words."""
        return f"gated convolutions of {self.kernel} tokens"


CONVOLUTION = Mixer(
    layer="pretrain.model.parts.gated_convolution:GatedConvolution",
    counts="pretrain.config.model.mixers.gated_convolution",
    section=ConvolutionConfig,
)
