"""The key-value cache of decoding."""

from typing import NamedTuple

import torch
from torch import Tensor

FEWEST_KEYS = 256
"""Fewest cached positions of a step of fixed shapes: fewer save no time, and cost captures."""


class CachePlace(NamedTuple):
    """Place of T new positions in a cache: the first of them, and the cached ones they read, S.

    `position_1`: the one new position on the device, int64 [1], in a step of fixed shapes: it is
    not `offset`, and cached positions after it are to be hidden.
    """

    offset: int
    keys: int
    position_1: Tensor | None = None


class LayerCache:
    """Keys and values of one layer, for at most `capacity` positions, and for the source.

    `cross` are keys and values of cross attention, [B, S, K, H] each, set at the first step; None
    without an encoder. `state` has what a layer with a state keeps in their place, [B, ...] each,
    at any number of positions; None before the first. Appending writes in place: not for
    training. `fixed`: of `KVCache.fix`.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self.fixed: CachePlace | None = None
        self.cross: tuple[Tensor, Tensor] | None = None
        self.state: tuple[Tensor, ...] | None = None
        self._past: list[Tensor] = []

    def append(self, *added: Tensor) -> list[Tensor]:
        """Adds keys and values of T positions; returns views of all so far, [B, S, K, H] each."""
        if self.fixed is not None and self.fixed.position_1 is not None:
            for past, x in zip(self._past, added, strict=True):
                past.index_copy_(1, self.fixed.position_1, x)
            return [past[:, : self.fixed.keys] for past in self._past]
        start = self.length
        self.length += added[0].shape[1]
        needed = f"cache of {self.capacity} positions is full: {self.length} needed"
        assert self.length <= self.capacity, needed
        if not self._past:
            # In the dtype and on the device of the first keys. Zeros: a hidden NaN would spread.
            self._past = [x.new_zeros(x.shape[0], self.capacity, *x.shape[2:]) for x in added]
        for past, x in zip(self._past, added, strict=True):
            past[:, start : self.length] = x
        return [past[:, : self.length] for past in self._past]

    def replace_state(self, length: int, *state: Tensor) -> None:
        """Replaces the state by the one after `length` more positions, in memory of a captured step."""
        if self.fixed is None or self.fixed.position_1 is None:
            self.length += length
        if self.state is None:
            self.state = state
        else:
            for past, x in zip(self.state, state, strict=True):
                past.copy_(x)

    def select(self, rows_B: Tensor) -> None:
        """Selects rows, in the given order; a row may occur several times."""
        for number, past in enumerate(self._past):
            selected = past[:, : self.length].index_select(0, rows_B)  # half the time of an index
            if len(rows_B) != len(past):
                past = self._past[number] = past.new_zeros((len(rows_B), *past.shape[1:]))
            past[:, : self.length] = selected
        if self.cross is not None:
            self.cross = (select_rows(self.cross[0], rows_B), select_rows(self.cross[1], rows_B))
        if self.state is not None:
            self.state = tuple(select_rows(x, rows_B) for x in self.state)


def select_rows(x: Tensor, rows_B: Tensor) -> Tensor:
    """Returns the given rows, in the memory of `x` if they are as many: a captured step reads them there."""
    selected = x.index_select(0, rows_B)
    return x.copy_(selected) if len(rows_B) == len(x) else selected


class KVCache:
    """The caches of a stack's layers; costs `2 x layers x rows x capacity x K x H` elements.

    Layers without heads have the document numbers of the cached positions, for padded prompts, and
    the tokens, for embeddings of n-grams.
    """

    def __init__(self, layers: int, capacity: int) -> None:
        self.capacity = capacity
        self.layers = [LayerCache(capacity) for _ in range(layers)]
        self._documents = LayerCache(capacity)
        self._tokens = LayerCache(capacity)
        self._all = (*self.layers, self._documents, self._tokens)
        self._position_1: Tensor | None = None

    @property
    def length(self) -> int:
        """Number of cached positions: the position of the next token."""
        return self.layers[0].length

    def place(self, queries: int) -> CachePlace:
        """Returns the place of the next positions."""
        return self.layers[0].fixed or CachePlace(self.length, self.length + queries)

    def append_documents(self, documents_BT: Tensor) -> Tensor:
        """Appends the document numbers of T positions, and returns all, [B, S]."""
        return self._documents.append(documents_BT)[0]

    def append_tokens(self, tokens_BT: Tensor) -> Tensor:
        """Appends the ids of T positions, and returns all, [B, S]."""
        return self._tokens.append(tokens_BT)[0]

    def fix(self, device: torch.device) -> int:
        """Fixes the shapes of the next step, of one token a row; returns the positions it reads.

        Such a step reads its position on the device, and has the same shapes up to the next power
        of two, so that it can be captured and replayed. `advance` follows it. For good: no other
        step comes after it. Under the backends `auto`, `sdpa` and `eager`.
        """
        keys = min(self.layers[0].capacity, max(FEWEST_KEYS, 1 << self.length.bit_length()))
        if self._position_1 is None:
            self._position_1 = torch.full((1,), self.length, device=device)
        for layer in self._all:
            layer.fixed = CachePlace(keys - 1, keys, self._position_1)
        return keys

    def advance(self) -> None:
        """Counts the token of a step of fixed shapes, on the device too."""
        assert self._position_1 is not None, "the step was fixed"
        self._position_1.add_(1)
        for layer in self._all:
            layer.length += 1

    def select(self, rows_B: Tensor) -> None:
        """Selects rows of every layer, in the given order, as after a step of a beam search."""
        for layer in self._all:
            layer.select(rows_B)
