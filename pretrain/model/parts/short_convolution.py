"""Short causal convolution of each channel, which starts anew at each document of a row."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from pretrain.model.kv_cache import LayerCache


class ShortConvolution(nn.Module):
    """Causal convolution of each channel over the last `kernel` tokens of a document.

    `weight` [channels, kernel] has the present token last.
    """

    def __init__(self, channels: int, kernel: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, kernel))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None

    def forward(
        self,
        taps_BSC: Tensor,
        documents_BS: Tensor | None,
        choose: Callable[[Tensor], Tensor] = lambda whole: whole,
    ) -> Tensor:
        """Mixes T tokens behind `kernel - 1` earlier ones, [B, kernel - 1 + T, channels].

        `choose` returns what is of these channels, of all.
        """
        kernel = self.weight.shape[1]
        length = taps_BSC.shape[1] - kernel + 1
        weight_CK = choose(self.weight).to(taps_BSC.dtype)
        sum_BTC = taps_BSC[:, kernel - 1 :] * weight_CK[:, -1]
        present_BT = None if documents_BS is None else documents_BS[:, kernel - 1 :]
        for place in range(kernel - 1):
            earlier_BTC = taps_BSC[:, place : place + length] * weight_CK[:, place]
            if documents_BS is not None:
                is_same_BT = documents_BS[:, place : place + length] == present_BT
                earlier_BTC = earlier_BTC * is_same_BT[..., None]
            sum_BTC = sum_BTC + earlier_BTC
        return sum_BTC if self.bias is None else sum_BTC + choose(self.bias).to(sum_BTC.dtype)


def behind_taps(x_BTC: Tensor, kernel: int, cache: LayerCache | None) -> Tensor:
    """Returns T tokens behind the `kernel - 1` before them, [B, kernel - 1 + T, channels].

    They are the last of the state in a cache, and zeros where there is none yet.
    """
    if cache is None or cache.state is None:
        return pad(x_BTC, (0, 0, kernel - 1, 0))
    return torch.cat((cache.state[-1], x_BTC), dim=1)


def draw_filter(weight: Tensor, generator: torch.Generator) -> None:
    """Draws a filter as torch draws one of a channel: uniform, by the number of taps."""
    bound = weight.shape[1] ** -0.5
    weight.uniform_(-bound, bound, generator=generator)
