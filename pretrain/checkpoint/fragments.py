"""Fragments on disk: one safetensors file a rank, read back by range under any topology.

A tensor of the file is a 1-D fp32 piece named `<parameter>/<kind>@<offset>`, kind being `weight` or
a moment. Loading builds a table of pieces, of as many files as have the ranges that this rank
needs, and copies these.
Columns of a matrix, of ranks that share it, are `<parameter>/<kind>@<offset>+<run>:<stride>`: the
first `run` elements of every `stride`, from `offset` on.
"""

import errno
import json
import os
import resource
import struct
import weakref
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from pretrain.errors import CheckpointError
from pretrain.parts import Stripes
from pretrain.types import Fragment
from pretrain.utils.io import FileRecord, write_chunks
from pretrain.utils.safe_read import open_regular, parse_json

_MAX_HEADER_BYTES = 100 * 1024 * 1024


def piece_key(fragment: Fragment, kind: str) -> str:
    """Returns the name of a piece in a file."""
    columns = "" if fragment.stripes is None else "+{}:{}".format(*fragment.stripes)
    return f"{fragment.name}/{kind}@{fragment.offset}{columns}"


def write_fragments(path: Path, fragments: Iterable[Fragment]) -> FileRecord:
    """Writes fragments to a safetensors file, copied to the host one by one and never gathered.

    Returns size and CRCs of the intended content. Raises: DiskError.
    """
    pieces = [
        (piece_key(fragment, kind), tensor) for fragment in fragments for kind, tensor in fragment.tensors.items()
    ]
    assert all(tensor.dtype == torch.float32 and tensor.dim() == 1 for _, tensor in pieces)
    parts = (memoryview(tensor.detach().cpu().contiguous().numpy()) for _, tensor in pieces if tensor.numel())
    return write_pieces(path, [(key, tensor.numel()) for key, tensor in pieces], parts)


def write_pieces(
    path: Path, pieces: list[tuple[str, int]], parts: Iterable[memoryview], *, over: bool = False
) -> FileRecord:
    """Writes a safetensors file of 1-D fp32 tensors; see `write_fragments`.

    Args:
        path: The file.
        pieces: Name and elements of each tensor, in order.
        parts: Their bytes, one after another, cut anywhere; none is empty.
        over: The file is there, and its pages are used again.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for key, length in pieces:
        start, end = end, end + length * 4
        header[key] = {"dtype": "F32", "shape": [length], "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    chunks = chain([memoryview(struct.pack("<Q", len(text)) + text)], parts)
    return write_chunks(path, chunks, over=over)


class _Piece(NamedTuple):
    offset: int
    length: int
    path: Path
    descriptor: int
    byte_offset: int
    stripes: Stripes | None = None


class _Box(NamedTuple):
    """Rows and columns of a matrix; its elements begin at `start` of a piece, row by row."""

    start: int
    rows: range
    columns: range

    def places(self, rows: range, columns: range) -> tuple[int, slice]:
        width = len(self.columns)
        first = columns.start - self.columns.start
        return self.start + (rows.start - self.rows.start) * width, slice(first, first + len(columns))


def _boxes(offset: int, length: int, stripes: Stripes | None, stride: int) -> Iterator[_Box]:
    """Yields a piece as boxes of a matrix with `stride` columns."""
    row, column = divmod(offset, stride)
    if stripes is not None:
        yield _Box(0, range(row, row + length // stripes.run), range(column, column + stripes.run))
        return
    done = 0
    while done < length:
        row, column = divmod(offset + done, stride)
        rows = 1 if column else max(1, (length - done) // stride)
        columns = range(column, min(stride, column + length - done))
        yield _Box(done, range(row, row + rows), columns)
        done += rows * len(columns)


class FragmentReader:
    """Fragments in the files of a checkpoint, by parameter and kind. Raises: CheckpointError.

    Each file is opened at once, and stays open: the run may remove the checkpoint while it is read.
    Headers are parsed from a place of the files on, nearest first, as ranges are asked for: in the
    topology of the save, a rank needs one of them.

    Args:
        paths: The files, by rank.
        place: Share of the files before the one that this process needs first; None: parse all now.
    """

    def __init__(self, paths: Iterable[Path], place: float | None = None) -> None:
        self._pieces: dict[tuple[str, str], list[_Piece]] = {}
        # A file a rank may be more than the soft limit, 1024 in most places.
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        files: list[tuple[Path, int]] = []
        for path in paths:
            with _parse_errors(path):
                files.append((path, open_regular(path)))
                weakref.finalize(self, os.close, files[-1][1])
        first = round((place or 0) * len(files))
        order = sorted(range(len(files)), key=lambda number: abs(number - first))
        self._unparsed = deque(files[number] for number in order)
        while place is None and self._unparsed:
            self._parse_next()

    def _parse_next(self) -> None:
        path, descriptor = self._unparsed.popleft()
        with _parse_errors(path):
            for key, piece in _read_header(path, descriptor):
                insort(self._pieces.setdefault(key, []), piece)  # by offset

    def has(self, name: str, kind: str) -> bool:
        """Returns whether there is a piece of this kind of a parameter."""
        while (name, kind) not in self._pieces and self._unparsed:
            self._parse_next()
        return (name, kind) in self._pieces

    def _find(self, key: tuple[str, str], part: range, stripes: Stripes | None) -> list[_Piece]:
        """Returns pieces by offset, as many as have a part of a parameter, or all of it."""
        while self._unparsed and not _have(self._pieces.get(key, []), part, stripes):
            self._parse_next()
        return self._pieces.get(key, [])

    def read_into(self, name: str, kind: str, offset: int, out: torch.Tensor, stripes: Stripes | None = None) -> None:
        """Fills `out` (1-D fp32) with values of a kind from `offset`. Raises: CheckpointError.

        `stripes` are the elements after the first; None: one after another.
        """
        pieces = self._find((name, kind), range(offset, offset + out.numel()), stripes)
        strides = [one.stride for one in (stripes, *(piece.stripes for piece in pieces)) if one]
        if strides:
            where = f"{name}/{kind}"
            _read_columns(where, pieces, strides[0], list(_boxes(offset, out.numel(), stripes, strides[0])), out)
            return
        done = 0
        total = out.numel()
        number = bisect_right(pieces, offset, key=lambda piece: piece.offset) - 1
        while done < total:
            piece = pieces[number] if 0 <= number < len(pieces) else None
            skip = offset + done - piece.offset if piece else 0
            if piece is None or not 0 <= skip < piece.length:
                raise CheckpointError(f"{name}/{kind} lacks element {offset + done}", fix="use another checkpoint")
            take = min(piece.length - skip, total - done)
            values = np.empty(take, dtype="<f4")
            _read_piece(piece, skip, values.data.cast("B"))
            out[done : done + take].copy_(torch.from_numpy(values))
            done += take
            number += 1


def _have(pieces: list[_Piece], part: range, stripes: Stripes | None) -> bool:
    """Returns whether pieces, by offset, have a part of a parameter: columns only as saved."""
    if stripes or any(piece.stripes for piece in pieces):
        mine = part.start, len(part), stripes
        return any((piece.offset, piece.length, piece.stripes) == mine for piece in pieces)
    end = part.start
    for piece in pieces:
        if piece.offset <= end:
            end = max(end, piece.offset + piece.length)
    return end >= part.stop


def _read_columns(where: str, pieces: list[_Piece], stride: int, wanted: list[_Box], out: torch.Tensor) -> None:
    """Fills boxes of `out` from pieces of a matrix that are columns, or are to be cut into such."""
    missing = out.numel()
    for piece in pieces:
        for there in _boxes(piece.offset, piece.length, piece.stripes, stride):
            for here in wanted:
                rows, columns = (_common(*sides) for sides in zip(here[1:], there[1:], strict=True))
                if not rows or not columns:
                    continue
                skip, taken = there.places(rows, columns)
                start, filled = here.places(rows, columns)
                values = np.empty((len(rows), len(there.columns)), dtype="<f4")
                _read_piece(piece, skip, values.data.cast("B"))
                target = out[start : start + len(rows) * len(here.columns)].view(len(rows), -1)
                target[:, filled] = torch.from_numpy(values[:, taken]).to(out.device)
                missing -= len(rows) * len(columns)
    if missing:
        raise CheckpointError(f"{where} lacks {missing} elements", fix="use another checkpoint")


def _common(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))


def _read_piece(piece: _Piece, skip: int, out: memoryview) -> None:
    place = piece.byte_offset + 4 * skip
    while out:
        try:
            count = os.preadv(piece.descriptor, [out], place)  # at most 2 GiB at once
        except OSError as error:
            raise CheckpointError(
                f"cannot be read: {error.strerror}", where=str(piece.path), fix="see to the disk, or use another one"
            ) from error
        if not count:
            raise CheckpointError(f"{piece.path.name} is cut short", where=str(piece.path), fix="use another one")
        out = out[count:]
        place += count


@contextmanager
def _parse_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, LookupError, TypeError, AttributeError, struct.error) as error:
        is_limit = isinstance(error, OSError) and error.errno == errno.EMFILE
        fix = "raise ulimit -n: every file of a checkpoint is open at once" if is_limit else "use another checkpoint"
        raise CheckpointError(f"cannot be parsed: {error}", where=str(path), fix=fix) from None


def _read_header(path: Path, descriptor: int) -> Iterator[tuple[tuple[str, str], _Piece]]:
    (size,) = struct.unpack("<Q", os.pread(descriptor, 8, 0))
    if size > _MAX_HEADER_BYTES:
        raise ValueError(f"header of {size} bytes")
    header = parse_json(os.pread(descriptor, size, 8))
    header.pop("__metadata__", None)
    for key, entry in header.items():
        name, _, rest = key.rpartition("/")
        kind, _, place = rest.partition("@")
        offset, _, columns = place.partition("+")
        stripes = Stripes(*map(int, columns.split(":"))) if columns else None
        start, end = entry["data_offsets"]
        if entry["dtype"] != "F32" or start < 0 or [end - start] != [4 * length for length in entry["shape"]]:
            raise ValueError(f"{key} is not a 1-D fp32 tensor")
        length = (end - start) // 4
        if stripes and (not 0 < stripes.run < stripes.stride or length % stripes.run):
            raise ValueError(f"{key} is not of whole columns")
        yield (name, kind), _Piece(int(offset), length, path, descriptor, 8 + size + start, stripes)
