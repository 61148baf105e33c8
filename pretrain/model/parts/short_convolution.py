"""Short causal convolution of each channel, which starts anew at each document of a row."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from pretrain.model.kv_cache import LayerCache


class _Convolve(torch.autograd.Function):
    """Sum of products of tokens and weights, in memory of its own: autograd would make copies for each tap."""

    @staticmethod
    def forward(ctx: Any, x_BSC: Tensor, weight_CK: Tensor, documents_BS: Tensor | None, length: int) -> Tensor:
        """Returns [B, T, channels]; `length` is T, of which the S tokens are the last."""
        ctx.save_for_backward(x_BSC, weight_CK, documents_BS)
        ctx.length = length
        sum_BTC = x_BSC[:, x_BSC.shape[1] - length :] * weight_CK[:, -1]
        for tap in _earlier(documents_BS, weight_CK.shape[1], x_BSC.shape[1], length):
            read_BtC = _mask(x_BSC[:, tap.read], tap.is_same_BT1)
            sum_BTC[:, tap.write].addcmul_(read_BtC, weight_CK[:, tap.place])
        return sum_BTC

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Returns gradients of tokens and weights."""
        x_BSC, weight_CK, documents_BS = ctx.saved_tensors
        (gradient_BTC,) = gradients
        start = x_BSC.shape[1] - ctx.length
        present_BTC = gradient_BTC * weight_CK[:, -1]
        of_x_BSC = pad(present_BTC, (0, 0, start, 0)) if start else present_BTC
        of_weights_CK = torch.empty_like(weight_CK)
        of_weights_CK[:, -1] = (gradient_BTC * x_BSC[:, start:]).sum(dim=(0, 1))
        for tap in _earlier(documents_BS, weight_CK.shape[1], x_BSC.shape[1], ctx.length):
            here_BtC = _mask(gradient_BTC[:, tap.write], tap.is_same_BT1)
            of_x_BSC[:, tap.read].addcmul_(here_BtC, weight_CK[:, tap.place])
            of_weights_CK[:, tap.place] = (here_BtC * x_BSC[:, tap.read]).sum(dim=(0, 1))
        return of_x_BSC, of_weights_CK, None, None


class _Tap(NamedTuple):
    """A tap before the present token: tokens that it reads, for which ones, and where these are of one document."""

    place: int
    read: slice
    write: slice
    is_same_BT1: Tensor | None


def _earlier(documents_BS: Tensor | None, kernel: int, tokens: int, length: int) -> Iterator[_Tap]:
    for place in range(kernel - 1):
        distance = kernel - 1 - place
        # Tokens before the first one are zeros.
        first = min(max(0, distance - (tokens - length)), length)
        is_same_BT1 = None
        if documents_BS is not None:
            earlier_BT = documents_BS[:, place + first : place + length]
            is_same_BT1 = (earlier_BT == documents_BS[:, kernel - 1 + first :])[..., None]
        end = max(tokens - distance, 0)
        yield _Tap(place, slice(end - (length - first), end), slice(first, length), is_same_BT1)


def _mask(x_BTC: Tensor, is_same_BT1: Tensor | None) -> Tensor:
    return x_BTC if is_same_BT1 is None else x_BTC * is_same_BT1


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
        x_BSC: Tensor,
        documents_BS: Tensor | None,
        length: int,
        choose: Callable[[Tensor], Tensor] = lambda whole: whole,
    ) -> Tensor:
        """Mixes the last T of S tokens, `length`, with those before them.

        Args:
            x_BSC: These tokens, behind none or `kernel - 1` earlier ones (`behind_taps`).
            documents_BS: Documents of `kernel - 1` tokens and of the T behind them. None: one a row.
            length: T.
            choose: Returns what is of these channels, of all.
        """
        weight_CK = choose(self.weight).to(x_BSC.dtype)
        sum_BTC: Tensor = _Convolve.apply(x_BSC, weight_CK, documents_BS, length)
        return sum_BTC if self.bias is None else sum_BTC + choose(self.bias).to(sum_BTC.dtype)


def behind_taps(x_BTC: Tensor, kernel: int, cache: LayerCache | None) -> Tensor:
    """Returns T tokens behind the `kernel - 1` before them, [B, kernel - 1 + T, channels].

    They are the last of the state in a cache, and zeros where there is none yet. Without a cache: T tokens.
    """
    if cache is None:
        return x_BTC
    if cache.state is None:
        return pad(x_BTC, (0, 0, kernel - 1, 0))
    return torch.cat((cache.state[-1], x_BTC), dim=1)


def draw_filter(weight: Tensor, generator: torch.Generator) -> None:
    """Draws a filter as torch draws one of a channel: uniform, by the number of taps."""
    bound = weight.shape[1] ** -0.5
    weight.uniform_(-bound, bound, generator=generator)
