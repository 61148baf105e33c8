"""Activation offload: between forward and backward pass, saved tensors of blocks are in host memory.

    forward     block i runs; storages that it saved are copied to the host while block i + 1 runs,
                and are freed on the device when it has run
    backward    the first read of what block i saved starts the copies back of block i - 1

The last block stays on the device: its backward pass comes first. Copies run on a stream of their
own, with pinned memory; streams wait for events, the host for nothing. On a CPU the same steps run
with ordinary memory and without streams, which gains nothing but tests.

Hooks see what autograd saves: with a checkpointed block its input, with a compiled one what the
graph saves. Not what uncompiled `selective` keeps, which autograd does not hold.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

SMALLEST_BYTES = 4096
"""Smaller storages stay on the device."""


@dataclass(eq=False)
class _Saved:
    """A storage as bytes: on the device, on the host, or on both."""

    device: Tensor | None
    host: Tensor | None = None


@dataclass(eq=False)
class _BlockSaves:
    """What one block saved; `previous` until its copies back have started."""

    previous: "_BlockSaves | None"
    saved: list[_Saved] = field(default_factory=list)
    event: torch.cuda.Event | None = None  # after its last copies
    is_back: bool = False


class _View(NamedTuple):
    """A saved tensor as a view of its storage."""

    saved: _Saved
    dtype: torch.dtype
    place: tuple[int, torch.Size, tuple[int, ...]]  # offset, size and stride in elements


class ActivationOffload:
    """Saved tensors of a stack's blocks; one forward pass and its backward pass at a time."""

    def __init__(self, device: torch.device, layers: int) -> None:
        self._device = device
        self._last_block = layers - 1
        self._stream: torch.cuda.Stream | None = None
        # Host buffers by size. The stream's order makes one free for a copy as soon as the copy out
        # of it has started.
        self._buffers: dict[int, list[Tensor]] = {}
        self._previous: _BlockSaves | None = None
        # A storage is copied once, though a block saves several views of it, and blocks share tables. Weak references
        # as keys: an address is not used again before they are gone.
        self._known: dict[StorageWeakRef, _Saved] = {}

    @contextmanager
    def block(self, number: int) -> Iterator[None]:
        """Context of the forward pass of block `number`, in ascending order."""
        if number == 0:
            self._previous = None
            self._known = {}
        if self._stream is None and self._device.type == "cuda":
            self._stream = torch.cuda.Stream(self._device)
        block = _BlockSaves(self._previous)
        stays = number == self._last_block
        with saved_tensors_hooks(partial(self._pack, block, stays), self._unpack):
            yield
        self._copy_to_host(block)
        if block.previous is not None:
            self._free_on_device(block.previous)
        # What the last block's graph does not refer to is freed with the graph.
        self._previous = None if stays else block
        self._known = {} if stays else self._known

    def _pack(self, block: _BlockSaves, stays: bool, tensor: Tensor) -> tuple[_BlockSaves, Tensor | _View]:
        # Weights live on the device anyway, and ZeRO stage 3 exchanges their storage.
        is_weight = type(tensor) is not Tensor or isinstance(tensor._base, nn.Parameter)
        if stays or is_weight or tensor.device.type != self._device.type:
            return block, tensor
        storage = tensor.untyped_storage()
        if storage.nbytes() < SMALLEST_BYTES:
            return block, tensor
        key = StorageWeakRef(storage)
        saved = self._known.get(key)
        if saved is None:
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            saved = self._known[key] = _Saved(whole)
        if saved not in block.saved:
            block.saved.append(saved)
        return block, _View(saved, tensor.dtype, (tensor.storage_offset(), tensor.size(), tensor.stride()))

    def _unpack(self, packed: tuple[_BlockSaves, Tensor | _View]) -> Tensor:
        block, place = packed
        if not block.is_back:
            self._copy_to_device(block)
            if block.event is not None:
                torch.cuda.current_stream(self._device).wait_event(block.event)
            block.is_back = True
            # From here on each storage is freed with the last tensor that needs it.
            block.saved = []
            if block.previous is not None:
                self._copy_to_device(block.previous)
                block.previous = None
        if isinstance(place, Tensor):
            return place
        assert place.saved.device is not None
        empty = torch.empty(0, dtype=place.dtype, device=self._device)
        return empty.set_(place.saved.device.untyped_storage(), *place.place)

    def _copy_to_host(self, block: _BlockSaves) -> None:
        new = [saved for saved in block.saved if saved.host is None]
        if not new:
            return
        with self._copies(block):
            for saved in new:
                assert saved.device is not None
                size = saved.device.numel()
                free = self._buffers.setdefault(size, [])
                pinned = self._stream is not None
                saved.host = free.pop() if free else torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
                saved.host.copy_(saved.device, non_blocking=True)

    def _free_on_device(self, block: _BlockSaves) -> None:
        if block.event is not None:
            # What the allocator gives this memory to runs later on the same stream.
            torch.cuda.current_stream(self._device).wait_event(block.event)
        for saved in block.saved:
            saved.device = None

    def _copy_to_device(self, block: _BlockSaves) -> None:
        away = [saved for saved in block.saved if saved.device is None]
        if not away:
            return
        for saved in away:
            # Allocated outside of the copies' stream: only there could their memory be used again.
            saved.device = torch.empty_like(saved.host, device=self._device)
        with self._copies(block):
            for saved in away:
                assert saved.device is not None and saved.host is not None
                saved.device.copy_(saved.host, non_blocking=True)
                self._buffers[saved.host.numel()].append(saved.host)
                saved.host = None

    @contextmanager
    def _copies(self, block: _BlockSaves) -> Iterator[None]:
        """Copies that run after all that the current stream has been given, followed by an event."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield
        block.event = self._stream.record_event()
