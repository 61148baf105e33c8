"""OLMo and Dolma: `.npy` files that are an array without a header (numpy memmaps), or, accepted too, true `.npy` files.

The end-of-document token closes a document. A file without a header does not say its dtype: it is taken for the
smaller of uint16 and uint32 that holds the vocabulary, as OLMo-core does. Layout as read by its data/utils.py.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pretrain.errors import DataError
from pretrain.prepare.convert.files import find_files
from pretrain.prepare.convert.flat import FlatFile, open_flat, refuse_wider
from pretrain.prepare.convert.token_file import TOKEN_DTYPES, ReadOptions, naming
from pretrain.prepare.inputs.local import stat_local
from pretrain.prepare.sources import InputFile
from pretrain.tokenizer import token_dtype

MAGIC = b"\x93NUMPY"


def open_olmo(sources: Sequence[str], options: ReadOptions) -> list[FlatFile]:
    """Opens the `.npy` files that `sources` name. Raises: DataError."""
    return [_open(stat_local(path), options) for path in find_files(sources, ".npy")]


def _open(file: InputFile, options: ReadOptions) -> FlatFile:
    path = Path(file.path)
    with naming(path), path.open("rb") as stream:
        has_header = stream.read(len(MAGIC)) == MAGIC
    if has_header:
        return _open_npy(file, options)
    dtype = options.dtype or token_dtype(options.vocab_size)
    if options.dtype is None and dtype == "uint16":
        refuse_wider(file, options)
    return open_flat(file, dtype, options)


def _open_npy(file: InputFile, options: ReadOptions) -> FlatFile:
    path = Path(file.path)
    read_header = {1: np.lib.format.read_array_header_1_0, 2: np.lib.format.read_array_header_2_0}
    try:
        with naming(path), path.open("rb") as stream:
            major, _ = np.lib.format.read_magic(stream)
            shape, _, dtype = read_header[major](stream)
            offset = stream.tell()
    except (ValueError, KeyError) as error:
        raise DataError(f"its header cannot be read: {error}", where=file.path, fix="copy it again") from None
    if len(shape) != 1:
        raise DataError(f"its array has the shape {shape}", where=file.path, fix="give arrays with one axis")
    if dtype.name not in TOKEN_DTYPES or dtype != dtype.newbyteorder("<"):
        raise DataError(
            f"its array is of {dtype.str}, which is not one of tokens",
            where=file.path,
            fix=f"give little-endian arrays of {', '.join(TOKEN_DTYPES)}",
        )
    if options.dtype not in (None, dtype.name):
        raise DataError(
            f"its header says {dtype.name}, not {options.dtype}", where=file.path, fix="leave the dtype out"
        )
    expected = offset + shape[0] * dtype.itemsize
    if file.size != expected:
        what = f"has {file.size} bytes, but {shape[0]} tokens as its header says are {expected}"
        raise DataError(what, where=file.path, fix="copy the file again")
    return open_flat(file, dtype.name, options, offset=offset)
