"""The key-value cache of incremental decoding: one preallocated pair of tensors a layer."""

import torch
from torch import Tensor


class LayerCache:
    """Keys and values of the positions that one layer's self-attention has seen, at most `capacity`, and of the source.

    Storage is allocated at the first append, in the dtype and on the device of what is appended. Not for training:
    appending writes in place.

    Attributes:
        cross: Keys and values of cross attention, [B, S, K, H] each, set at the first step; None without an encoder.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity, self.length = capacity, 0
        self.cross: tuple[Tensor, Tensor] | None = None
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def append(self, k_BTKH: Tensor, v_BTKH: Tensor) -> tuple[Tensor, Tensor]:
        """Adds T positions and returns views of all keys and values so far, [B, S, K, H]."""
        rows, added, heads, width = k_BTKH.shape
        if self._keys is None or self._values is None:
            shape = (rows, self.capacity, heads, width)
            self._keys = torch.empty(shape, dtype=k_BTKH.dtype, device=k_BTKH.device)
            self._values = torch.empty_like(self._keys)
        start, self.length = self.length, self.length + added
        assert self.length <= self.capacity, f"cache of {self.capacity} positions asked to hold {self.length}"
        self._keys[:, start : self.length] = k_BTKH
        self._values[:, start : self.length] = v_BTKH
        return self._keys[:, : self.length], self._values[:, : self.length]

    def select(self, rows_B: Tensor) -> None:
        """Keeps the given rows, in their order; a row may come several times."""
        if self._keys is not None and self._values is not None:
            self._keys, self._values = (self._selected(held, rows_B) for held in (self._keys, self._values))
        if self.cross is not None:
            self.cross = (self.cross[0][rows_B], self.cross[1][rows_B])

    def _selected(self, held_BSKH: Tensor, rows_B: Tensor) -> Tensor:
        """Copies only what is filled: the room for positions to come costs nothing until they come."""
        selected = held_BSKH.new_empty((len(rows_B), *held_BSKH.shape[1:]))
        selected[:, : self.length] = held_BSKH[rows_B, : self.length]
        return selected


class KVCache:
    """The caches of a stack's layers.

    Costs `2 x layers x rows x capacity x K x H` elements once filled to any length.

    Attributes:
        layers: One cache a block.
        documents_BS: Document numbers of the positions held, where prompts are padded; None: all are of one document.
    """

    def __init__(self, layers: int, capacity: int) -> None:
        self.layers = [LayerCache(capacity) for _ in range(layers)]
        self.documents_BS: Tensor | None = None

    @property
    def length(self) -> int:
        """Positions held so far: that of the next token."""
        return self.layers[0].length

    def append_documents(self, documents_BT: Tensor) -> Tensor:
        """Adds the document numbers of T positions, and returns those of all, [B, S]."""
        held = self.documents_BS
        self.documents_BS = documents_BT if held is None else torch.cat((held, documents_BT), dim=1)
        return self.documents_BS

    def select(self, rows_B: Tensor) -> None:
        """Keeps the given rows of every layer, in their order: what a beam search does after each step."""
        for layer in self.layers:
            layer.select(rows_B)
        if self.documents_BS is not None:
            self.documents_BS = self.documents_BS[rows_B]
