"""A copy of training state in host memory, in buffers that every save uses again.

    reserve(n)     ->  allocates, in a thread
    take(tensors)  ->  on a CPU a thread copies, beside the next passes; on CUDA the copies are
                       queued along with the step, to pinned memory; neither is waited for
    hold()         ->  later work (the next update) runs after the copies: of the stream on CUDA
    ready()        ->  returns when the copies are done; for the thread that reads them
    parts(i)       ->  the values of tensor i, as numpy arrays; content() has the bytes of all

Buffers are cut in blocks, because pinned memory comes in powers of two: one buffer could cost twice
the state. A thread writes and checks the copy while training continues.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pretrain.checkpoint.fragments import piece_key, write_pieces
from pretrain.checkpoint.layouts import FileLayout
from pretrain.errors import CheckpointError
from pretrain.types import FragmentStore
from pretrain.utils.io import FileRecord

BLOCK = 2**24
"""Elements of a block: 64 MiB."""


class HostCopy:
    """A copy of the same tensors, save after save. Not for two saves at once."""

    def __init__(self, block: int = BLOCK) -> None:
        self._block = block
        self._buffers: list[Tensor] = []
        self._places: list[tuple[int, int]] = []
        self._sources: Sequence[Tensor] = ()
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None
        self._reservation: Future[None] | None = None
        self._copying: Future[None] | None = None

    @property
    def num_bytes(self) -> int:
        """Size of the last copy."""
        return sum(4 * length for _, length in self._places)

    def reserve(self, num_elements: int, *, pinned: bool) -> None:
        """Allocates buffers in a thread: page-locking 13 GB takes seconds, which the first `take` would wait."""
        self._reservation = _in_thread(partial(self._allocate, num_elements, pinned=pinned))

    def take(self, tensors: Sequence[Tensor]) -> None:
        """Begins to copy 1-D fp32 tensors. They may be changed after `hold`."""
        assert all(tensor.dtype == torch.float32 and tensor.dim() == 1 for tensor in tensors)
        on_cuda = any(tensor.is_cuda for tensor in tensors)
        reservation, self._reservation = self._reservation, None
        if reservation is not None:
            reservation.result()
        self._finish_copying()  # of a save that failed before it was read
        lengths = [tensor.numel() for tensor in tensors]
        self._allocate(sum(lengths), pinned=on_cuda)
        self._places = list(zip(accumulate(lengths, initial=0), lengths, strict=False))
        if not on_cuda:
            self._copying = _in_thread(partial(self._copy, tensors))
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream()
            self._copied = torch.cuda.Event()
        assert self._copied is not None
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._copy(tensors)
            self._copied.record(self._stream)
        self._sources = tensors  # their memory must not be given to others before it is read

    def _allocate(self, num_elements: int, *, pinned: bool) -> None:
        sizes = [min(self._block, num_elements - start) for start in range(0, num_elements, self._block)]
        if any(buffer.is_pinned() != pinned for buffer in self._buffers[:1]):
            self._buffers = []
        pairs = zip(self._buffers, sizes, strict=False)
        self._buffers = [buffer for buffer, size in pairs if buffer.numel() == size]
        for size in sizes[len(self._buffers) :]:
            self._buffers.append(torch.empty(size, dtype=torch.float32, pin_memory=pinned))

    @torch.no_grad()
    def _copy(self, tensors: Sequence[Tensor]) -> None:
        for (start, _), tensor in zip(self._places, tensors, strict=True):
            done = 0
            for part in self._cut(start, tensor.numel()):
                part.copy_(tensor[done : done + part.numel()], non_blocking=True)
                done += part.numel()

    def _cut(self, start: int, length: int) -> Iterator[Tensor]:
        while length:
            number, offset = divmod(start, self._block)
            part = self._buffers[number][offset : offset + length]
            yield part
            start += part.numel()
            length -= part.numel()

    def hold(self) -> None:
        """Waits for copies on a CPU; on a GPU makes later work of the current stream wait for them."""
        self._finish_copying()
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def ready(self) -> None:
        """Returns when everything is copied."""
        self._finish_copying()
        if self._copied is not None:
            self._copied.synchronize()
            self._sources = ()

    def _finish_copying(self) -> None:
        copying = self._copying
        if copying is not None:
            copying.result()
            self._copying = None

    def parts(self, number: int) -> Iterator[np.ndarray]:
        """Yields the values of a tensor by its number, in order: views, valid until `take`."""
        for part in self._cut(*self._places[number]):
            yield part.numpy()

    def content(self) -> Iterator[memoryview]:
        """Yields the bytes of all tensors, one after another."""
        for buffer in self._buffers:
            yield memoryview(buffer.numpy())


def _in_thread(work: Callable[[], None]) -> Future[None]:
    executor = ThreadPoolExecutor(1, thread_name_prefix="host-copy")
    future = executor.submit(work)
    executor.shutdown(wait=False)
    return future


class Snapshot:
    """This rank's fragments of a store as they are now; copied when `host.ready` returns."""

    def __init__(self, store: FragmentStore, host: HostCopy) -> None:
        self._host = host
        shapes: dict[str, list[int]] = {}
        num_weights: dict[str, int] = {}
        self._keys: list[str] = []
        tensors: list[Tensor] = []
        kinds: set[str] = set()
        for fragment in store.owned_fragments():
            shapes[fragment.name] = list(fragment.shape)
            for kind, tensor in fragment.tensors.items():
                kinds.add(kind)
                self._keys.append(piece_key(fragment, kind))
                tensors.append(tensor.detach())
            if "weight" in fragment.tensors:
                num_weights[fragment.name] = num_weights.get(fragment.name, 0) + fragment.length
        self.layout = FileLayout(shapes, num_weights, sorted(kinds - {"weight"}))
        self.scalars = store.scalars()  # state that is no tensor
        self._lengths = [tensor.numel() for tensor in tensors]
        host.take(tensors)

    @property
    def num_bytes(self) -> int:
        """Size of its tensors."""
        return self._host.num_bytes

    def write(self, path: Path, *, over: bool = False) -> FileRecord:
        """Checks that all values are finite, and writes them, in a pass each.

        Raises:
            CheckpointError: A value is not finite; its parameter is named.
            DiskError: The disk refused.
        """
        self._host.ready()
        for number, key in enumerate(self._keys):
            if not all(_is_finite(part) for part in self._host.parts(number)):
                raise CheckpointError(
                    f"{key.partition('@')[0]} has a value that is not finite",
                    where=path.parent.name,
                    fix="the checkpoints before it are good: lower optim.lr or roll back",
                )
        pieces = list(zip(self._keys, self._lengths, strict=True))
        return write_pieces(path, pieces, self._host.content(), over=over)


def _is_finite(values: np.ndarray) -> bool:
    """Takes one pass where all is finite, as the sum then is; large values may overflow it."""
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(np.add.reduce(values)) or np.isfinite(values).all())
