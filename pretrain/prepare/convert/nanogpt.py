"""nanoGPT, llm.c and modded-nanogpt: one `.bin` of tokens a file.

    nanoGPT              uint16 from the first byte on; the end-of-document token closes a document
    llm.c and kin        256 int32 of header (magic, version, number of tokens), then uint16 or uint32; the
                         end-of-document token opens a document

Layout as written by nanoGPT's data/*/prepare.py and llm.c's dev/data/data_common.py.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pretrain.errors import DataError
from pretrain.prepare.convert.files import find_files
from pretrain.prepare.convert.flat import FlatFile, open_flat, refuse_wider
from pretrain.prepare.convert.token_file import ReadOptions, naming
from pretrain.prepare.inputs.local import stat_local
from pretrain.prepare.sources import InputFile

HEADER_BYTES = 1024
DTYPE_OF_MAGIC = {(20240520, 1): "uint16", (20240801, 7): "uint32"}
MAGICS = {magic for magic, _ in DTYPE_OF_MAGIC}
EVALUATION_MAGIC = 20240522


def open_nanogpt(sources: Sequence[str], options: ReadOptions) -> list[FlatFile]:
    """Opens the `.bin` files that `sources` name. Raises: DataError."""
    return [_open(stat_local(path), options) for path in find_files(sources, ".bin")]


def _open(file: InputFile, options: ReadOptions) -> FlatFile:
    path = Path(file.path)
    with naming(path), path.open("rb") as stream:
        data = stream.read(HEADER_BYTES)
    magic = int.from_bytes(data[:4], "little")
    if magic == EVALUATION_MAGIC:
        raise DataError("holds questions of an evaluation, not text", where=file.path, fix="leave the file out")
    if magic in MAGICS:
        return _open_with_header(file, data, options)
    if options.dtype is None:
        refuse_wider(file, options)
    return open_flat(file, options.dtype or "uint16", options)


def _open_with_header(file: InputFile, data: bytes, options: ReadOptions) -> FlatFile:
    if len(data) < HEADER_BYTES:
        raise DataError(f"truncated: its header has {len(data)} of 1024 bytes", where=file.path, fix="copy it again")
    magic, version, num_tokens = np.frombuffer(data, "<i4")[:3].tolist()
    dtype = DTYPE_OF_MAGIC.get((magic, version))
    if dtype is None:
        known = ", ".join(f"version {v} of magic {m}" for m, v in DTYPE_OF_MAGIC)
        raise DataError(f"version {version} of magic {magic} is not known", where=file.path, fix=f"give one of {known}")
    if options.dtype not in (None, dtype):
        raise DataError(f"its header says {dtype}, not {options.dtype}", where=file.path, fix="leave the dtype out")
    expected = HEADER_BYTES + num_tokens * np.dtype(dtype).itemsize
    if file.size != expected:
        raise DataError(
            f"has {file.size} bytes, but {num_tokens} tokens as its header says are {expected}",
            where=file.path,
            fix="copy the file again",
        )
    return open_flat(file, dtype, options, offset=HEADER_BYTES, at_start=True)
