"""Input files as listed, their cut into parts, and the parts of each machine.

    InputFile    one file: path, size, version, format, input
    Slice        a run of its bytes
    InputPart    slices that one process reads in order and writes to shards of its own
    plan_parts   [InputFile] -> [InputPart], by sizes alone, independent of the number of processes

No file is opened here. Listing is in `inputs/`, reading in `readers/`.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from pretrain.errors import ConfigError
from pretrain.utils.remote import is_remote, without_secrets

MIN_PART_BYTES = 2 * 2**20
MAX_PART_BYTES = 256 * 2**20
PARTS_WANTED = 64


@dataclass(frozen=True, slots=True)
class InputFile:
    """One input file as it was when listed."""

    path: str  # or URL
    size: int  # as stored
    # Detects a change, with `size`: nanoseconds of the last change of a local file, the entity tag (or
    # its substitute) of a remote one. No spaces.
    version: str
    input: int = 0  # number of its input
    format: str = "text"  # key of `FORMATS`
    compression: str = ""  # `gzip`, `zstd` or none
    is_cuttable: bool = False  # slices of it may begin inside
    pair: "InputFile | None" = None  # paired with this one line by line

    @property
    def num_bytes(self) -> int:
        """Size as stored, its pair's included."""
        return self.size + (self.pair.size if self.pair else 0)

    @property
    def shown(self) -> str:
        """Path for messages and records, without secrets of a URL."""
        return without_secrets(self.path)

    @property
    def is_remote(self) -> bool:
        """True for a file that is read over a network."""
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
        return self.stop - self.start + self.file.num_bytes - self.file.size


@dataclass(frozen=True, slots=True)
class InputPart:
    """A unit of work: slices that one process reads in order and writes to shards of its own."""

    number: int
    slices: tuple[Slice, ...]
    input_bytes: int  # of all parts

    @property
    def name(self) -> str:
        """Stem of the part's files."""
        return f"part-{self.number:05d}"

    @property
    def num_bytes(self) -> int:
        """Size as stored."""
        return sum(piece.num_bytes for piece in self.slices)


# Called with the input bytes and documents since the last call, several times a second; may raise
# to stop.
Report = Callable[[int, int], None]
# Does one part.
Work = Callable[[InputPart, Report], None]


def plan_part_bytes(files: Iterable[InputFile]) -> int:
    """Returns the size of a part: a 64th of the input, from 2 to 256 MiB."""
    total = sum(file.num_bytes for file in files)
    return min(max(total // PARTS_WANTED, MIN_PART_BYTES), MAX_PART_BYTES)


def plan_parts(files: Iterable[InputFile], part_bytes: int) -> list[InputPart]:
    """Cuts the input into parts of about `part_bytes`, in order, by the listed sizes alone.

    Cuts are by bytes; the reader moves them to the next line or row group.
    """
    parts: list[InputPart] = []
    pending: list[Slice] = []
    room = part_bytes
    slices = list(_slices(files, part_bytes))
    input_bytes = sum(piece.num_bytes for piece in slices)
    for piece in slices:
        pending.append(piece)
        room -= piece.num_bytes
        if room <= 0:
            parts.append(InputPart(len(parts), tuple(pending), input_bytes))
            pending = []
            room = part_bytes
    if pending:
        parts.append(InputPart(len(parts), tuple(pending), input_bytes))
    return parts


def _slices(files: Iterable[InputFile], part_bytes: int) -> Iterator[Slice]:
    for file in files:
        step = part_bytes if file.is_cuttable else file.size
        # An empty file is one slice, too: its reader may refuse it.
        for start in range(0, file.size, step) if file.size else (0,):
            yield Slice(file, start, min(start + step, file.size))


@dataclass(frozen=True, slots=True)
class Share:
    """The parts of one of several machines, by `--part number/of`: one of every `of`.

    The first share makes the files that all depend on: tokenizer, labels and duplicates.
    """

    number: int = 1
    of: int = 1

    @property
    def is_whole(self) -> bool:
        """True for a single share."""
        return self.of == 1

    @property
    def is_first(self) -> bool:
        """True for the share that the others wait for."""
        return self.number == 1

    def own(self, parts: Sequence[InputPart]) -> list[InputPart]:
        """Returns the parts of this share, in order."""
        return [part for part in parts if part.number % self.of == self.number - 1]

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"


WHOLE = Share()


def parse_share(text: str) -> Share:
    """Reads `i/n` with 1 <= i <= n. Raises: ConfigError."""
    match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text, re.ASCII)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise ConfigError(
            f"part={text!r} is not a part",
            fix="use i/n with 1 <= i <= n, such as 1/4",
        )
    return Share(int(match[1]), int(match[2]))
