"""Documents and chunks of a row for mixers with a state, and the initial values of their decays."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from pretrain.model.kv_cache import CachePlace

OUTSIDE = -1
"""Document of the tokens before a row, which are zeros."""


def prepare_documents(
    documents_BT: Tensor | None, cached_BS: Tensor | None, kernel: int, place: CachePlace
) -> Tensor | None:
    """Returns documents of `kernel - 1` tokens and of the T behind them, [B, kernel - 1 + T].

    Args:
        documents_BT: Documents as in `Batch`. None: a row is one.
        cached_BS: Documents of all cached tokens, these included. None: there is no cache.
        kernel: Tokens that a convolution reads.
        place: Place of the tokens in the cache.
    """
    if documents_BT is None:
        return None
    if cached_BS is None:
        return pad(documents_BT, (kernel - 1, 0), value=OUTSIDE)
    before_P = torch.arange(1 - kernel, 0, device=documents_BT.device)
    before_P = before_P + (place.offset if place.position_1 is None else place.position_1)
    # Before the first token there are zeros, of any document.
    before_BP = cached_BS.index_select(1, before_P.clamp(min=0))
    return torch.cat((before_BP, documents_BT), dim=1)


def split_chunks(x_BTN: Tensor, chunk: int) -> Tensor:
    """Returns [B, N, C, L] or [B, N, C, L, H], lengthened by zeros, which change no state."""
    more = -x_BTN.shape[1] % chunk
    if more:
        x_BTN = pad(x_BTN, (0, 0) * (x_BTN.dim() - 2) + (0, more))
    return x_BTN.transpose(1, 2).contiguous().unflatten(2, (-1, chunk))


def _chunk_documents(
    documents_BT: Tensor, before_B1: Tensor | None, chunk: int
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns documents of tokens, [B, 1, C, L], and of the state before each chunk, [B, 1, C, 1]."""
    more = -documents_BT.shape[1] % chunk
    if more:  # the last document continues, and its state with it
        documents_BT = torch.cat((documents_BT, documents_BT[:, -1:].expand(-1, more)), dim=1)
    documents = documents_BT.unflatten(1, (-1, chunk))
    if before_B1 is None:
        before_B1 = documents_BT[:, :1]
    before = torch.cat((before_B1, documents[:, :-1, -1]), dim=1)
    return documents[:, None], before[:, None, :, None]


class ChunkDecays(NamedTuple):
    """Decays within chunks of L tokens, zero between documents.

    Attributes:
        pairs: From a token's write to a later one's reading, [B, N, C, L, L].
        reads: From the state before a chunk to a token, [B, N, C, L, 1].
        writes: From a token to the state after its chunk, [B, N, C, L, 1].
        remains: From the state before a chunk to the one after it, [B, N, C, 1, 1].
    """

    pairs: Tensor
    reads: Tensor
    writes: Tensor
    remains: Tensor


class _PairDecays(torch.autograd.Function):
    """Decays between the tokens of a chunk, whose gradients are summed in float64.

    The gradient of a sum of decays is the difference of two sums that nearly cancel. The matrix that
    is kept has the precision of `like`.
    """

    @staticmethod
    def forward(ctx: Any, total: Tensor, allowed: Tensor, like: Tensor) -> Tensor:
        """Returns [B, N, C, L, L] of sums of logarithms, [B, N, C, L] in float64, zero where not allowed."""
        pairs = total[..., :, None] - total[..., None, :]
        pairs = pairs.masked_fill_(~allowed, -math.inf).exp_().to(like.dtype)
        ctx.save_for_backward(pairs)
        return pairs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Returns the gradient of the sums."""
        (pairs,) = ctx.saved_tensors
        (gradient,) = gradients
        product = gradient * pairs
        return product.sum(-1, dtype=torch.float64) - product.sum(-2, dtype=torch.float64), None, None


def decay_chunks(
    log_decay: Tensor, documents_BT: Tensor | None, before_B1: Tensor | None
) -> ChunkDecays:  # fmt: skip
    """Sums the logarithms of decays, [B, N, C, L], within chunks and documents.

    They stay logarithms until they are differences within a document, so that none overflows. Sums
    are in float64, also those of the backward pass; decays have the precision of `log_decay`.

    Args:
        log_decay: Decay before each token.
        documents_BT: Document of each token, before they were lengthened. None: one a row.
        before_B1: Document of the state before the row. None: that of its first token.
    """
    chunk = log_decay.shape[-1]
    total = log_decay.cumsum(dim=-1, dtype=torch.float64)
    allowed = torch.ones(chunk, chunk, dtype=torch.bool, device=total.device).tril()
    reads = total.to(log_decay.dtype).exp()[..., None]
    writes = (total[..., -1:] - total).to(log_decay.dtype).exp()[..., None]
    remains = total[..., -1].to(log_decay.dtype).exp()[..., None, None]
    if documents_BT is not None:
        documents, before = _chunk_documents(documents_BT, before_B1, chunk)
        allowed = allowed & (documents[..., :, None] == documents[..., None, :])
        continues = documents == before
        reads = reads * continues[..., None]
        writes = writes * (documents == documents[..., -1:])[..., None]
        remains = remains * continues[..., -1, None, None]
    pairs: Tensor = _PairDecays.apply(total, allowed, log_decay)
    return ChunkDecays(pairs, reads, writes, remains)


def draw_decay(weight: Tensor, generator: torch.Generator) -> None:
    """Draws logarithms of A, which is uniform in 0 to 16 (Gated DeltaNet, as released)."""
    weight.uniform_(0.0, 16.0, generator=generator).clamp_(min=1e-6).log_()


def draw_step(weight: Tensor, generator: torch.Generator) -> None:
    """Draws biases whose softplus are steps of 0.001 to 0.1, uniform in their logarithm."""
    step = weight.uniform_(math.log(1e-3), math.log(1e-1), generator=generator).exp_()
    weight.copy_(step + torch.log(-torch.expm1(-step)))


def draw_ones(weight: Tensor, generator: torch.Generator) -> None:
    """Fills a weight of a norm or of a sum with 1, also where the stack's own norms begin at 0."""
    weight.fill_(1.0)
