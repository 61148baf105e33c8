"""Short gated convolution, in the place of attention: x -> input -> a, b, c; b times conv(a times c) -> output.

Liquid AI 2025 (LFM 2). It starts anew at each document of a row; all that it keeps of the tokens before
are the last ones.
"""

from typing import ClassVar

from torch import Tensor, nn

from pretrain.config.model import StackConfig
from pretrain.model.parts.attention import AttentionContext, AttentionOutput
from pretrain.model.parts.short_convolution import ShortConvolution, behind_taps, draw_filter


class GatedConvolution(nn.Module):
    """Convolution of each channel between two gates.

    The rows of `input.weight` are those of the gate before the convolution, the one behind it, and
    of its input.

    Attributes:
        fused: Rows of each matrix of the parameters that are several.
        draws: Initial values (`Mixer`).
    """

    draws: ClassVar = {"convolution.weight": draw_filter}

    def __init__(self, config: StackConfig) -> None:
        super().__init__()
        sizes = config.convolution.sizes(config.width, config.heads)
        self.kernel = sizes.kernel
        self.fused = {"input": (config.width,) * 3}
        self.input = nn.Linear(config.width, 3 * config.width, bias=sizes.bias)
        self.convolution = ShortConvolution(config.width, sizes.kernel, bias=sizes.bias)
        self.output = nn.Linear(config.width, config.width, bias=sizes.bias)

    def forward(self, x_BTD: Tensor, context: AttentionContext) -> AttentionOutput:
        """Mixes tokens of a document; `context.prepared` are documents of `prepare_documents`."""
        before_BTD, behind_BTD, read_BTD = self.input(x_BTD).chunk(3, dim=-1)
        taps_BSD = behind_taps(before_BTD * read_BTD, self.kernel, context.cache)
        if context.cache is not None:
            context.cache.replace_state(x_BTD.shape[1], taps_BSD[:, 1 - self.kernel :])
        mixed_BTD = self.convolution(taps_BSD, context.prepared)
        return AttentionOutput(self.output(behind_BTD * mixed_BTD))
