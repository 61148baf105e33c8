"""Short gated convolution, in the place of attention: x -> input -> a, b, c; b times conv(a times c) -> output.

Liquid AI 2025 (LFM 2). It starts anew at each document of a row; all that it keeps of the tokens before
are the last ones.
"""

from functools import partial
from typing import ClassVar

from torch import Tensor, nn

from pretrain.config.model import StackConfig
from pretrain.model.parts.attention import AttentionContext, AttentionOutput
from pretrain.model.parts.mixer_layer import MixerLayer
from pretrain.model.parts.short_convolution import ShortConvolution, behind_taps, draw_filter


class GatedConvolution(MixerLayer):
    """Convolution of each channel, a head of its own, between two gates.

    The rows of `input.weight` are those of the gate before the convolution, the one behind it, and
    of its input.
    """

    draws: ClassVar = {"convolution.weight": draw_filter}

    def __init__(self, config: StackConfig) -> None:
        sizes = config.convolution.sizes(config.width, config.heads)
        super().__init__(sizes)
        self.fused = {"input": (config.width,) * 3}
        self.input = nn.Linear(config.width, 3 * config.width, bias=sizes.bias)
        self.convolution = ShortConvolution(config.width, sizes.kernel, bias=sizes.bias)
        self.output = nn.Linear(config.width, config.width, bias=sizes.bias)

    def forward(self, x_BTD: Tensor, context: AttentionContext) -> AttentionOutput:
        """Mixes tokens of a document; `context.prepared` are documents of `prepare_documents`."""
        kernel = self.sizes.kernel
        before_BTD, behind_BTD, read_BTD = self.input(self.gather(x_BTD)).chunk(3, dim=-1)
        mixed_BTD = before_BTD * read_BTD
        shares_rows = self.ranks(context) > 1
        if shares_rows:
            mixed_BTD = self.to_heads(mixed_BTD, mixed_BTD.shape[-1:])
        taps_BSD = behind_taps(mixed_BTD, kernel, context.cache)
        if context.cache is not None:
            context.cache.replace_state(mixed_BTD.shape[1], taps_BSD[:, 1 - kernel :])
        choose = partial(self.of_heads, context=context)
        mixed_BTD = self.convolution(taps_BSD, context.prepared, mixed_BTD.shape[1], choose)
        if shares_rows:
            mixed_BTD = self.to_columns(mixed_BTD)
        return AttentionOutput(self.output(behind_BTD * mixed_BTD))
