"""The weights of one model as those of another: a larger vocabulary, another head; all else is the same or refused.

same name, same shape        as it is
embeddings, scores of ids    rows are added for new tokens: the mean of those that are there, so that a new token is
                             as likely as an average one (Hewitt 2021, "Initializing New Word Embeddings")
a head that is not the same  begins anew
"""

import hashlib
import math
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pretrain.config.recurrent import AnyModelConfig
from pretrain.errors import CheckpointError

if TYPE_CHECKING:
    from pretrain.artifact.what import What

HEAD_PARTS = ("head.", "pooler.")
SCORES = ("head.weight", "head.bias")
Shape = tuple[int, ...]


class Adapted:
    """What a model takes of another.

    Args:
        what: The other.
        model: `vocab_size` and labels are filled in.
        shapes: Of every parameter of the model.

    Attributes:
        what: The other.
        shapes: Of every parameter of the model.
        anew: Names of those that the other does not give.
        left: Shape of each parameter of the other that is not taken.
        num_added: Tokens that the other does not know.

    Raises:
        CheckpointError: A parameter outside of the head has another shape, or none.
    """

    def __init__(self, what: "What", model: AnyModelConfig, shapes: Mapping[str, Shape]) -> None:
        self.what, self.shapes = what, shapes
        theirs = what.config
        assert model.vocab_size is not None and theirs.vocab_size is not None
        self._old, self._new = theirs.vocab_size, model.vocab_size
        self.num_added = max(0, self._new - self._old)
        is_lm = model.head.kind == theirs.head.kind == "lm"
        self._tables = {"embedding.weight", *(SCORES if is_lm else ())}
        may_lack = HEAD_PARTS if model.head.kind == "labels" or model.head.kind != theirs.head.kind else ()
        same_scores = is_lm or (model.head.kind == theirs.head.kind and model.head.labels == theirs.head.labels)
        self.anew: set[str] = set()
        for name, shape in self.shapes.items():
            if self._fits(name, shape) and (name not in SCORES or same_scores):
                continue
            if not name.startswith(may_lack or ("\0",)):
                raise self._refusal(name, shape)
            self.anew.add(name)
        self.left = {n: shape for n, shape in what.shapes.items() if n not in self.shapes or n in self.anew}
        self._crcs: dict[str, int] = {}
        self._last: tuple[str, Tensor] | None = None

    def _fits(self, name: str, shape: Shape) -> bool:
        theirs = self.what.shapes.get(name)
        if theirs is not None and name in self._tables and self._new >= self._old:
            return theirs[1:] == shape[1:]
        return theirs == shape

    def _refusal(self, name: str, shape: Shape) -> CheckpointError:
        theirs = self.what.shapes.get(name)
        found = "no such parameter" if theirs is None else f"shape {list(theirs)}"
        return CheckpointError(
            f"{name} has shape {list(shape)} in this model, in the checkpoint {found}",
            where=str(self.what.path),
            fix="use the config that the checkpoint was trained with, or leave the keys of model out",
        )

    def __contains__(self, name: str) -> bool:
        return name in self.shapes and name not in self.anew

    def read(self, name: str) -> Tensor:
        """Returns one parameter, fp32, whole. Raises: CheckpointError."""
        weight, shape = self.what.read(name), self.shapes[name]
        if name in self._tables and (self.num_added or weight.shape != shape):
            weight = self._grow(weight, shape)
        self._crcs[name] = zlib.crc32(memoryview(weight.contiguous().view(-1).numpy()))
        return weight

    def read_part(self, name: str, offset: int, out: Tensor) -> None:
        """Fills a 1-D tensor with elements of a parameter, by ranges where it can. Raises: CheckpointError."""
        if self.what.read_part is not None and self.what.shapes[name] == self.shapes[name] and not self._grows(name):
            self.what.read_part(name, offset, out)
            return
        if self._last is None or self._last[0] != name:
            self._last = (name, self.read(name).view(-1))
        out.copy_(self._last[1][offset : offset + out.numel()])

    def _grows(self, name: str) -> bool:
        return bool(self.num_added) and name in self._tables

    def _grow(self, weight: Tensor, shape: Shape) -> Tensor:
        grown = torch.zeros(shape)
        known = weight[: self._old]
        grown[: self._old] = known
        if self.num_added:
            grown[self._old : self._new] = known.mean(dim=0, dtype=torch.float64).float()
        return grown

    def fingerprint(self) -> str:
        """Returns the identity of all that is taken; reads what was not read yet."""
        for name in self.shapes:
            if name in self and name not in self._crcs:
                self.read(name)
        text = "".join(f"{name} {self.shapes[name]} {self._crcs[name]}\n" for name in sorted(self._crcs))
        return hashlib.sha256(text.encode()).hexdigest()

    def describe(self) -> list[str]:
        """Returns what there is to say about it, a line each."""
        sizes = {name: math.prod(self.shapes[name]) for name in self.shapes if name in self}
        line = f"weights are those of {self.what.path}: {len(sizes)} parameters, {sum(sizes.values()):,} values"
        if self.anew:
            line = f"weights are those of {self.what.path}, but for these, which begin anew: " + _listed(
                {name: self.shapes[name] for name in self.anew}
            )
        lines = [line + (f"; left there: {_listed(self.left)}" if self.left else "")]
        if self.num_added:
            tables = ", ".join(sorted(self._tables & self.shapes.keys()))
            lines.append(f"{self.num_added} tokens are new to the model of {self._old:,}: their rows of {tables} are "
                         f"the mean of the others")  # fmt: skip
        return lines


def _listed(shapes: Mapping[str, Shape]) -> str:
    names = sorted(shapes)
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(f"{name} {list(shapes[name])}" for name in names[:8]) + more
