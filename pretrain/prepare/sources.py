"""Input files as they were listed, and their cut into parts.

    InputFile    one file: where it is, how large, which version of it, how documents lie in it, of which input
    Slice        a run of its bytes
    Part         slices that one process reads in order and turns into shards of its own
    plan_parts   [InputFile] -> [Part], by sizes alone, so that any number of processes shares the same parts out

Nothing is opened here. Which files an input names is inputs/listing.py; reading them is readers/.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pretrain.prepare.inputs.urls import is_remote, shown

MIN_PART_BYTES = 2 * 2**20
MAX_PART_BYTES = 256 * 2**20
PARTS_WANTED = 64


@dataclass(frozen=True, slots=True)
class InputFile:
    """One input file as it was when listed.

    Attributes:
        path: As the user's input leads to it; a URL where it is remote.
        size: Bytes, as stored.
        version: With `size`, how a change is noticed: nanoseconds of the last change of a local file, the entity tag
            (or what the server has instead) of a remote one. No spaces.
        input: Which of the inputs it belongs to, from 0.
        format: How documents lie in it: a key of `READERS`.
        compression: `gzip`, `zstd` or none.
        is_cuttable: Slices of it may begin inside.
        pair: The file whose n-th line belongs to the n-th line of this one.
    """

    path: str
    size: int
    version: str
    input: int = 0
    format: str = "text"
    compression: str = ""
    is_cuttable: bool = False
    pair: "InputFile | None" = None

    @property
    def num_bytes(self) -> int:
        """Size as stored, its pair's included."""
        return self.size + (self.pair.size if self.pair else 0)

    @property
    def shown(self) -> str:
        """The path for messages and records: without what may be a secret in a URL."""
        return shown(self.path)

    @property
    def is_remote(self) -> bool:
        """It is read over a network."""
        return is_remote(self.path)


@dataclass(frozen=True, slots=True)
class Slice:
    """Bytes [start, stop) of a file: the lines, or row groups, whose first byte lies there."""

    file: InputFile
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        """Size as stored, its pair's included."""
        return self.stop - self.start + (self.file.pair.size if self.file.pair else 0)


@dataclass(frozen=True, slots=True)
class Part:
    """A unit of work: slices that one process reads in order and turns into shards of its own."""

    number: int
    slices: tuple[Slice, ...]

    @property
    def name(self) -> str:
        """Stem of the part's files."""
        return f"part-{self.number:05d}"

    @property
    def num_bytes(self) -> int:
        """Size as stored."""
        return sum(piece.num_bytes for piece in self.slices)


def plan_part_bytes(files: Iterable[InputFile]) -> int:
    """Returns the size of a part: a 64th of the input, from 2 to 256 MiB."""
    total = sum(file.num_bytes for file in files)
    return min(max(total // PARTS_WANTED, MIN_PART_BYTES), MAX_PART_BYTES)


def plan_parts(files: Iterable[InputFile], part_bytes: int) -> list[Part]:
    """Cuts the input into parts of about `part_bytes`, in order. A pure function of the listing.

    A file that is cuttable is cut by bytes; which line or row group a cut falls in is settled when it is read.
    """
    parts: list[Part] = []
    pending: list[Slice] = []
    room = part_bytes
    for piece in _slices(files, part_bytes):
        pending.append(piece)
        room -= piece.num_bytes
        if room <= 0:
            parts.append(Part(len(parts), tuple(pending)))
            pending, room = [], part_bytes
    if pending:
        parts.append(Part(len(parts), tuple(pending)))
    return parts


def _slices(files: Iterable[InputFile], part_bytes: int) -> Iterator[Slice]:
    for file in files:
        if file.is_cuttable and file.size > part_bytes:
            starts = range(0, file.size, part_bytes)
            yield from (Slice(file, start, min(start + part_bytes, file.size)) for start in starts)
        else:
            yield Slice(file, 0, file.size)
