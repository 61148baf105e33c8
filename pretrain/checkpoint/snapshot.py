"""What a rank saves of a step, copied to host memory: written and checked by a thread while training goes on."""

from pathlib import Path

import numpy as np

from pretrain.checkpoint.fragments import piece_key, write_pieces
from pretrain.checkpoint.host_copy import HostCopy
from pretrain.errors import CheckpointError
from pretrain.types import FragmentStore
from pretrain.utils.checksum import FileRecord


class Snapshot:
    """This rank's fragments of a store as they are now.

    Args:
        store: Copied when this returns, or, on CUDA, when `host.ready` does.
        host: The buffers.

    Attributes:
        shapes: Shape of every parameter of which this rank has a piece, by name.
        moments: Names of the optimizer's moments.
        num_weights: Elements of each parameter's weight that are here.
        scalars: State that is no tensor.
    """

    def __init__(self, store: FragmentStore, host: HostCopy) -> None:
        self._host = host
        self.shapes: dict[str, list[int]] = {}
        self.num_weights: dict[str, int] = {}
        self._keys, tensors, kinds = [], [], set()
        for fragment in store.owned_fragments():
            self.shapes[fragment.name] = list(fragment.shape)
            for kind, tensor in fragment.tensors.items():
                kinds.add(kind)
                self._keys.append(piece_key(fragment.name, kind, fragment.offset))
                tensors.append(tensor.detach())
            if "weight" in fragment.tensors:
                self.num_weights[fragment.name] = self.num_weights.get(fragment.name, 0) + fragment.length
        self.moments = sorted(kinds - {"weight"})
        self.scalars = store.scalars()
        self._lengths = [tensor.numel() for tensor in tensors]
        host.take(tensors)

    @property
    def num_bytes(self) -> int:
        """Size of its tensors."""
        return self._host.num_bytes

    def write(self, path: Path) -> FileRecord:
        """Checks that all values are finite, and writes them. For a thread; one pass for the check, one for the CRCs.

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
        return write_pieces(path, list(zip(self._keys, self._lengths, strict=True)), self._host.content())


def _is_finite(values: np.ndarray) -> bool:
    """One pass where all is well: no infinity and no NaN leaves a sum finite. Large values may overflow it."""
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(np.add.reduce(values)) or np.isfinite(values).all())
