"""Agreement of the ranks that their files have every parameter whole.

A layout, the parameters in a rank's file, grows with the parameters, and a vote about it must not
grow with ranks times parameters: at ZeRO 3 each rank has a piece of all.

    FileLayout     of one rank; a `LayoutVote` has its digest
    AgreedLayouts  of all ranks: each different one travels once, and none while all are as before
"""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from pretrain import dist
from pretrain.errors import CheckpointError
from pretrain.utils.safe_read import parse_json

Shapes = dict[str, list[int]]


class FileLayout(NamedTuple):
    """Parameters of which a rank's file has pieces."""

    shapes: Shapes
    num_weights: dict[str, int]  # elements of each one's weight that are there
    moments: list[str]

    def encode(self) -> bytes:
        """Returns it as bytes that are the same for equal layouts."""
        return json.dumps(self, sort_keys=True, separators=(",", ":")).encode()


class LayoutVote(NamedTuple):
    """Layout of a rank's file, as the others hear of it."""

    digest: str
    num_bytes: int  # of the layout
    agreed: str  # digest of all layouts of the last save

    @staticmethod
    def on(content: bytes, agreed: str) -> "LayoutVote":
        """Returns the vote on an encoded layout."""
        return LayoutVote(hashlib.sha256(content).hexdigest(), len(content), agreed)


@dataclass(slots=True)
class AgreedLayouts:
    """Layouts that the ranks have agreed on."""

    shapes: Shapes = field(default_factory=dict)  # in the last checkpoint, saved or loaded
    moments: list[str] = field(default_factory=list)
    agreed: str = ""  # digest of all layouts of the last save; empty: there was none

    def load(self, shapes: Shapes) -> None:
        """Takes the shapes of a checkpoint that is loaded: the next save must have the same."""
        self.shapes = shapes
        self.agreed = ""

    def agree(self, votes: Sequence[LayoutVote], rank: int, content: bytes) -> None:
        """Checks that the files of all ranks are a whole model. Collective.

        `content` is the encoded layout of this rank.

        Raises:
            CheckpointError: A parameter is incomplete, has two shapes, or another than before; on
                every rank.
        """
        digests = [vote.digest for vote in votes]
        agreed = hashlib.sha256("".join(digests).encode()).hexdigest()
        if all(vote.agreed == agreed for vote in votes):
            return
        first: dict[str, int] = {}
        for place, digest in enumerate(digests):
            first.setdefault(digest, place)
        sizes = [vote.num_bytes * (first[vote.digest] == place) for place, vote in enumerate(votes)]
        ends = list(accumulate(sizes))
        mine = content if sizes[rank] else b""
        together = dist.join_bytes(mine, ends[rank] - len(mine), ends[-1])
        counts = Counter(digests)
        layouts = []
        for digest, place in first.items():
            encoded = together[ends[place] - sizes[place] : ends[place]]
            layouts.append((FileLayout(*parse_json(encoded)), counts[digest]))
        self.shapes = check_complete(layouts, self.shapes)
        self.moments = sorted({kind for layout, _ in layouts for kind in layout.moments})
        self.agreed = agreed


def check_complete(layouts: Iterable[tuple[FileLayout, int]], previous: Shapes) -> Shapes:
    """Returns the shape of every parameter, where the files of all ranks are a whole model.

    `layouts`: each different one, and the number of ranks that have it. `previous`: shapes in the
    last checkpoint, if any.

    Raises:
        CheckpointError: A parameter is incomplete, has two shapes, or another than before.
    """
    shapes: Shapes = {}
    sizes = Counter[str]()
    for layout, num_ranks in layouts:
        for name, shape in layout.shapes.items():
            _check_same(name, shapes.setdefault(name, shape), shape, "on another rank")
        for name, number in layout.num_weights.items():
            sizes[name] += number * num_ranks
    for name, shape in shapes.items():
        if sizes[name] != math.prod(shape):
            elements = f"{math.prod(shape):,} elements, and the ranks have {sizes[name]:,} of it"
            raise _refusal(f"{name} has {elements}")
    if previous:
        for name in sorted({*previous, *shapes}):
            _check_same(name, previous.get(name), shapes.get(name), "now")
    return shapes


def _check_same(name: str, expected: list[int] | None, shape: list[int] | None, where: str) -> None:
    if expected != shape:
        shown = ["no such parameter" if values is None else f"shape {values}" for values in (expected, shape)]
        raise _refusal(f"{name} has {shown[0]} in the save, {shown[1]} {where}")


def _refusal(what: str) -> CheckpointError:
    return CheckpointError(
        f"checkpoint not saved: {what}", fix="the checkpoints before it are good; report this as a bug"
    )
