"""Sequence parallelism: R ranks share the rows of a batch (Jacobs et al. 2023, DeepSpeed-Ulysses).

    norms, products, experts, loss      all heads of T / R columns (`types.Columns`)
        | exchange of queries, keys and values: parts of the heads, from each part of the columns
        v
    `attend` of any backend             N / R heads of all T columns, the mask of whole rows
        | exchange of the result: parts of the columns, from each part of the heads
        v
    norms, products, experts, loss      all heads of T / R columns

Layers in the place of attention exchange in their own way (`parts/mixer_layer.py`). Everything else
works on one token, so no other layer knows of it. Ranks need as many query heads
each. Key-value heads that several ranks read are sent to each of them. The gradient of an exchange
is an exchange: summed over all ranks, gradients of the parts are those of whole rows.

Not here: the cut of a batch (`data/loader.py`), and the sum over ranks (`engine/`).
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from pretrain.config.model.parts.attention import copies_of_heads
from pretrain.dist import World
from pretrain.errors import ConfigError
from pretrain.model.backends.backend import AttentionBackend, DistanceBias, MaskSize, cast_inputs
from pretrain.model.parts.attention import CrossAttention, SelfAttention
from pretrain.model.parts.latent_attention import LatentAttention
from pretrain.model.parts.mixer_layer import MixerLayer, exchange
from pretrain.model.stack import Stack
from pretrain.types import AttentionMask, Columns


def _to_heads(parts: tuple[Tensor, ...], group: Any) -> tuple[Tensor, ...]:
    """Exchanges [B, t, heads, H] of these columns for [B, T, heads / R, H] of all."""
    ranks = group.size()
    sent_BtRMH = torch.cat([x.unflatten(2, (ranks, -1)) for x in parts], dim=3)
    found_RBtMH = exchange(sent_BtRMH.permute(2, 0, 1, 3, 4), group)
    heads = [x.shape[2] // ranks for x in parts]
    return found_RBtMH.transpose(0, 1).flatten(1, 2).split(heads, dim=2)


def _to_columns(x_BTMH: Tensor, group: Any) -> Tensor:
    """Exchanges [B, T, N / R, H] of these heads for [B, t, N, H] of all."""
    found_RBtMH = exchange(x_BTMH.unflatten(1, (group.size(), -1)).transpose(0, 1), group)
    return found_RBtMH.permute(1, 2, 0, 3, 4).flatten(2, 3)


@dataclass(frozen=True, slots=True)
class SharedMask:
    """A prepared mask of whole rows, for queries and keys of which each rank has some columns."""

    inner: Any


class SharedAttention:
    """An attention backend for columns of rows that ranks share, and for whole rows as before.

    Args:
        inner: Backend of a rank.
        group: Ranks that exchange heads for columns. None: there are none.
        heads: Part of the heads of the model that this rank has, of those that share matrices.
    """

    def __init__(self, inner: AttentionBackend, group: Any, heads: Columns) -> None:
        self.inner = inner
        self._group = group
        self._heads = heads

    def prepare(self, mask: AttentionMask, size: MaskSize, bias: DistanceBias | None = None) -> Any:
        """Prepares the mask of whole rows for the heads of this rank."""
        if bias is not None and self._heads.ranks > 1:
            bias = DistanceBias(bias.values_NR.chunk(self._heads.ranks)[self._heads.rank])
        if mask.columns is None:
            return self.inner.prepare(mask, size, bias)
        whole = replace(mask, columns=None)
        if self._group is None:
            return self.inner.prepare(whole, size, bias)
        if bias is not None:
            bias = DistanceBias(bias.values_NR.chunk(self._group.size())[self._group.rank()])
        return SharedMask(self.inner.prepare(whole, size, bias))

    def attend(
        self,
        q_BTNH: Tensor,
        k_BSKH: Tensor,
        v_BSKH: Tensor,
        prepared: Any,
        *,
        dropout: float = 0.0,
        scale: float | None = None,
        sinks_N: Tensor | None = None,
    ) -> Tensor:
        """Attends between two exchanges, or three of cross attention. Collective for columns."""
        options: dict[str, Any] = {"dropout": dropout, "scale": scale}
        if sinks_N is not None and self._heads.ranks > 1:
            sinks_N = sinks_N.chunk(self._heads.ranks)[self._heads.rank]
        if not isinstance(prepared, SharedMask):
            return self.inner.attend(q_BTNH, k_BSKH, v_BSKH, prepared, sinks_N=sinks_N, **options)
        if sinks_N is not None:
            options["sinks_N"] = sinks_N.chunk(self._group.size())[self._group.rank()]
        heads = (q_BTNH.shape[2], k_BSKH.shape[2])
        copies = copies_of_heads(*heads, self._group.size())
        q, k, v = cast_inputs(q_BTNH, k_BSKH, v_BSKH)
        if copies > 1:
            k, v = (x.repeat_interleave(copies, dim=2) for x in (k, v))
        if q.shape[1] == k.shape[1]:
            q, k, v = _to_heads((q, k, v), self._group)
        else:
            (q,), (k, v) = _to_heads((q,), self._group), _to_heads((k, v), self._group)
        mixed_BTMH = self.inner.attend(q, k, v, prepared.inner, **options)
        return _to_columns(mixed_BTMH, self._group).to(q_BTNH.dtype)


def share_rows(model: nn.Module, world: World, timeout_s: int) -> None:
    """Makes a built model attend over columns, where ranks share rows. Collective among these.

    `timeout_s` is that of their process group.

    Raises:
        ConfigError: Rotary frequencies follow the length of a document, of which a rank has a part.
    """
    if world.row_ranks == 1:
        return
    group = world.sequence_group(timeout_s) if world.sequence > 1 else None
    heads = Columns(world.rank % world.tensor, world.tensor)
    for module in model.modules():
        if isinstance(module, Stack) and module.follows_length:
            text = "rope_scaling of kind dynamic and longrope needs whole documents, of which ranks have parts"
            raise ConfigError(text, fix="use parallel.sequence=1 and parallel.tensor=1")
        if isinstance(module, Stack | SelfAttention | LatentAttention | CrossAttention):
            module.backend = SharedAttention(module.backend, group, heads)
        elif isinstance(module, MixerLayer):
            module.group = group
        if isinstance(module, Stack) and module.cross_backend is not None:
            module.cross_backend = SharedAttention(module.cross_backend, group, heads)
