"""Attention maps of a model's heads, from one forward with the reference kernel.

    record_attention -> an AttentionMap a layer and kind -> choose_heads -> summarize_head

The kernels that models train with never have all weights; `eager` has, and replaces them here. The
attention of a recurrent model (Bahdanau et al. 2015, Luong et al. 2015) is one cross map of one
head. Pictures are in `figure.py`, and the way from text to a batch is in `terminal.py`.
"""

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pretrain.errors import ConfigError
from pretrain.model import LanguageModel, Recurrent, Transformer
from pretrain.model.backends.backend import AttentionNeeds
from pretrain.model.backends.eager import EagerAttention, EagerMask
from pretrain.types import Batch

KINDS = ("self", "cross", "encoder", "decoder")
"""Values of `--kind`: every self-attention, the cross attention, or self-attention of one stack."""


@dataclass(frozen=True, slots=True)
class AttentionMap:
    """The weights of one attention layer for one row of text."""

    stack: str  # of the layer and its queries: `encoder` or `decoder`
    kind: str  # `self`, or `cross`: the keys are the encoder's
    layer: int  # from 0
    # fp32, on the CPU; each row of each head sums to 1, or with a sink to what that leaves
    weights_NTS: Tensor
    allowed_TS: Tensor  # bool; False where the mask forbids the pair, and so the weight is 0

    @property
    def names(self) -> set[str]:
        """Those of `KINDS` that the map is of."""
        return {"self", self.stack} if self.kind == "self" else {"cross"}


@dataclass(frozen=True, slots=True)
class HeadMap:
    """One head of an `AttentionMap`."""

    stack: str
    kind: str
    layer: int
    head: int  # from 0
    weights_TS: Tensor
    allowed_TS: Tensor


class _Recorder(EagerAttention):
    """`eager`, which adds a map to `maps` at each call."""

    def __init__(self, maps: list[AttentionMap], stack: str, kind: str, layer: int) -> None:
        super().__init__(AttentionNeeds(device=torch.device("cpu")))
        self._maps = maps
        self._place = (stack, kind, layer)

    def attend(
        self,
        q_BTNH: Tensor,
        k_BSKH: Tensor,
        v_BSKH: Tensor,
        prepared: EagerMask,
        *,
        dropout: float = 0.0,
        scale: float | None = None,
        sinks_N: Tensor | None = None,
    ) -> Tensor:
        """Attends, and records the weights of the one row."""
        weights_BNTS = self.weights(q_BTNH, k_BSKH, prepared, scale=scale, sinks_N=sinks_N)
        weights_NTS = weights_BNTS[0].float().cpu()
        allowed_TS = torch.ones_like(weights_NTS[0], dtype=torch.bool)
        if prepared.allowed is not None:
            # Broadcastable to [1, N, T, S], and the same for all heads.
            allowed_TS = prepared.allowed.cpu().expand(1, 1, *allowed_TS.shape)[0, 0]
        self._maps.append(AttentionMap(*self._place, weights_NTS, allowed_TS))
        options: dict[str, Any] = {"dropout": dropout, "scale": scale, "sinks_N": sinks_N}
        return super().attend(q_BTNH, k_BSKH, v_BSKH, prepared, **options)


def _put_recorders(model: Transformer, maps: list[AttentionMap], undo: ExitStack) -> None:
    """Replaces the backends of layers, and of stacks, which prepare masks, until `undo` closes."""

    def put(owner: Any, name: str, recorder: _Recorder) -> None:
        undo.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, recorder)

    for stack_name, stack in (("encoder", model.encoder), ("decoder", model.decoder)):
        if stack is None:
            continue
        for layer, block in enumerate(stack.blocks):
            put(block.attention, "backend", _Recorder(maps, stack_name, "self", layer))
            if block.cross is not None:
                put(block.cross, "backend", _Recorder(maps, stack_name, "cross", layer))
        put(stack, "backend", stack.blocks[0].attention.backend)
        if stack.cross_backend is not None:
            put(stack, "cross_backend", stack.blocks[0].cross.backend)


@torch.no_grad()
def record_attention(model: LanguageModel, batch: Batch) -> list[AttentionMap]:
    """Returns the maps of a batch of one row, on the model's device, in the order of the forward.

    Raises: ConfigError: A recurrent model without attention, or layers without it.
    """
    assert batch.tokens_BT.shape[0] == 1, "one row at a time"
    maps: list[AttentionMap] = []
    with ExitStack() as undo:
        undo.callback(model.train, model.training)
        model.eval()
        if isinstance(model, Recurrent):
            return [_record_alignment(model, batch, undo)]
        if mixers := "".join(stack.without_maps for stack in model.stacks):
            raise ConfigError(
                f"layers of {mixers} have no weights to draw",
                fix="give a model with attention in each layer",
            )
        _put_recorders(model, maps, undo)
        model(batch, logits=False)
    return maps


def _record_alignment(model: Recurrent, batch: Batch, undo: ExitStack) -> AttentionMap:
    """Returns the map of a recurrent decoder, which aligns all target tokens at once or one a step."""
    decoder, steps = model.decoder, []
    if decoder.score is None:
        raise ConfigError(
            "a recurrent model without attention has no weights to draw",
            fix="give one with model.attention=bahdanau or luong, or a Transformer",
        )
    align = decoder.align

    def record(states_BTD: Tensor, keys_BSD: Tensor, visible_BTS: Tensor | None) -> Tensor:
        steps.append(align(states_BTD, keys_BSD, visible_BTS))
        return steps[-1]

    undo.callback(delattr, decoder, "align")  # the method of the class is behind it
    decoder.align = record  # type: ignore[method-assign]
    model(batch, logits=False)
    weights_1TS = torch.cat(steps, dim=1).float().cpu()
    return AttentionMap("decoder", "cross", 0, weights_1TS, torch.ones_like(weights_1TS[0], dtype=torch.bool))


def choose_heads(
    maps: Sequence[AttentionMap],
    kind: str | None,
    layers: Sequence[int] | None,
    heads: Sequence[int] | None,
    most: int | None = None,
) -> list[list[HeadMap]]:
    """Returns the requested heads, one list a layer, in the order of the forward.

    Args:
        maps: From `record_attention`.
        kind: One of `KINDS`; None: `cross` where there is any, else `self`.
        layers: Ascending numbers; None: all.
        heads: Ascending numbers; None: all.
        most: Where numbers are None: so many at most, evenly spread. None: no limit.

    Raises:
        ConfigError: The model has no such kind, layer or head.
    """
    present = {name for each in maps for name in each.names}
    if kind is None:
        kind = "cross" if "cross" in present else "self"
    chosen = [each for each in maps if kind in each.names]
    if not chosen:
        raise ConfigError(
            f"--kind {kind}: the model has no such attention",
            fix=f"use {' or '.join(name for name in KINDS if name in present)}",
        )
    wanted = _choose_numbers(layers, 1 + max(each.layer for each in chosen), "layer", most)
    rows = []
    for each in chosen:
        if each.layer in wanted:
            numbers = _choose_numbers(heads, len(each.weights_NTS), "head", most)
            weights_NTS = each.weights_NTS
            place = (each.stack, each.kind, each.layer)
            rows.append([HeadMap(*place, number, weights_NTS[number], each.allowed_TS) for number in numbers])
    return rows


def _choose_numbers(numbers: Sequence[int] | None, count: int, name: str, most: int | None) -> Sequence[int]:
    """Returns the requested numbers. Raises: ConfigError: One is not below `count`."""
    if numbers is None:
        return spread(count, count if most is None else most)
    if max(numbers) >= count:
        raise ConfigError(f"--{name} {max(numbers)}: there are {count}", fix=f"use 0 to {count - 1}")
    return numbers


def spread(count: int, most: int) -> list[int]:
    """Returns at most `most` numbers below `count`, evenly spread, from the first to the last."""
    if count <= most:
        return list(range(count))
    return [number * (count - 1) // max(1, most - 1) for number in range(most)]


def parse_numbers(text: str, name: str) -> list[int] | None:
    """Returns the numbers of a text such as `0,3`, upwards; None for `all`. Raises: ConfigError."""
    if text == "all":
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and part.isascii() for part in parts):
        raise ConfigError(
            f"--{name} {text!r} is neither `all` nor numbers",
            fix=f"use --{name} 0 or --{name} 0,1",
        )
    return sorted({int(part) for part in parts})


def summarize_head(head: HeadMap, keys: Sequence[str]) -> dict[str, Any]:
    """Returns the summary of a head for JSON; `keys` has the token of each key.

    `entropy_bits` is the mean over queries of -sum(w log2 w): 0 where each query reads one key,
    log2(S) where all read all keys alike. `strongest_key` has the largest mean weight over queries.
    """
    weights_TS = head.weights_TS.double()
    entropies_T = -torch.xlogy(weights_TS, weights_TS).sum(dim=-1) / math.log(2)
    mean_S = weights_TS.mean(dim=0)
    best = int(mean_S.argmax())
    strongest = {"index": best, "token": keys[best], "mean_weight": round(float(mean_S[best]), 4)}
    return {
        "stack": head.stack,
        "kind": head.kind,
        "layer": head.layer,
        "head": head.head,
        "entropy_bits": round(float(entropies_T.mean()), 4),
        "strongest_key": strongest,
    }
