"""The key-value cache of incremental decoding: one preallocated pair of tensors a layer."""

import torch
from torch import Tensor


class LayerCache:
    """Keys and values of the positions that one attention layer has seen, at most `capacity`.

    Storage is allocated at the first append, in the dtype and on the device of what is appended. Not for training:
    appending writes in place.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity, self.length = capacity, 0
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


class KVCache:
    """The caches of a stack's layers.

    Costs `2 x layers x rows x capacity x K x H` elements once filled to any length.
    """

    def __init__(self, layers: int, capacity: int) -> None:
        self.layers = [LayerCache(capacity) for _ in range(layers)]

    @property
    def length(self) -> int:
        """Positions held so far: that of the next token."""
        return self.layers[0].length
