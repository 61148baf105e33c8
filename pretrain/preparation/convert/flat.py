"""nanoGPT, llm.c, modded-nanogpt, OLMo and Dolma: one array of tokens a file.

    nanoGPT              .bin: uint16 from the first byte on; the end-of-document token closes a document
    llm.c, modded        .bin: 256 int32 of header (magic, version, number of tokens), then uint16 or uint32;
                         the end-of-document token opens a document
    OLMo, Dolma          .npy without a header (numpy memmaps), or true .npy files; the end-of-document
                         token closes a document. A file without a header has the smaller of uint16
                         and uint32 that fits the vocabulary, as in OLMo-core.

Layouts as written by nanoGPT's data/*/prepare.py and llm.c's dev/data/data_common.py, and as read
by OLMo-core's data/utils.py.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from pretrain.errors import DataError
from pretrain.preparation.convert.token_file import (
    TOKEN_DTYPES,
    ReadOptions,
    TokenArray,
    find_cuts,
    find_files,
    open_named,
    read_head,
)
from pretrain.preparation.input_parts import InputFile
from pretrain.preparation.inputs.local_files import stat_local
from pretrain.tokenizer.roles import token_dtype

PROBE_TOKENS = 4096
# Fewer are no evidence of a dtype.
MIN_PROBE_HALVES = 64
HEADER_BYTES = 1024
DTYPE_OF_MAGIC = {(20240520, 1): "uint16", (20240801, 7): "uint32"}
EVALUATION_MAGIC = 20240522
NPY_MAGIC = b"\x93NUMPY"


def open_nanogpt(sources: Sequence[str], options: ReadOptions) -> list[TokenArray]:
    """Opens the `.bin` files that `sources` name. Raises: DataError."""
    return [_open_bin(stat_local(path), options) for path in find_files(sources, ".bin")]


def open_olmo(sources: Sequence[str], options: ReadOptions) -> list[TokenArray]:
    """Opens the `.npy` files that `sources` name. Raises: DataError."""
    return [_open_npy(stat_local(path), options) for path in find_files(sources, ".npy")]


def _open_bin(file: InputFile, options: ReadOptions) -> TokenArray:
    head = read_head(file.path, HEADER_BYTES)
    magic = int.from_bytes(head[:4], "little")
    if magic == EVALUATION_MAGIC:
        raise DataError(
            "holds questions of an evaluation, not text",
            where=file.path,
            fix="leave the file out",
        )
    if magic not in {versions for versions, _ in DTYPE_OF_MAGIC}:
        return _open_bare(file, "uint16", options)
    if len(head) < HEADER_BYTES:
        raise DataError(
            f"truncated: its header has {len(head)} of {HEADER_BYTES} bytes",
            where=file.path,
            fix="copy it again",
        )
    _, version, num_tokens = np.frombuffer(head, "<i4")[:3].tolist()
    dtype = DTYPE_OF_MAGIC.get((magic, version))
    if dtype is None:
        versions = ", ".join(f"version {v} of magic {m}" for m, v in DTYPE_OF_MAGIC)
        raise DataError(
            f"version {version} of magic {magic} is not known",
            where=file.path,
            fix=f"give one of {versions}",
        )
    _check_header(file, dtype, HEADER_BYTES, num_tokens, options)
    return _open_array(file, dtype, options, offset=HEADER_BYTES, at_start=True)


def _open_npy(file: InputFile, options: ReadOptions) -> TokenArray:
    if read_head(file.path, len(NPY_MAGIC)) != NPY_MAGIC:
        return _open_bare(file, token_dtype(options.vocab_size), options)
    readers = {1: np.lib.format.read_array_header_1_0, 2: np.lib.format.read_array_header_2_0}
    try:
        with open_named(file.path) as stream:
            major, _ = np.lib.format.read_magic(stream)
            shape, _, dtype = readers[major](stream)
            offset = stream.tell()
    except (ValueError, KeyError) as error:
        raise DataError(
            f"its header cannot be read: {error}",
            where=file.path,
            fix="copy it again",
        ) from None
    if len(shape) != 1:
        raise DataError(
            f"its array has the shape {shape}",
            where=file.path,
            fix="give arrays with one axis",
        )
    if dtype.name not in TOKEN_DTYPES or dtype != dtype.newbyteorder("<"):
        raise DataError(
            f"its array is of {dtype.str}, which is not one of tokens",
            where=file.path,
            fix=f"give little-endian arrays of {', '.join(TOKEN_DTYPES)}",
        )
    _check_header(file, dtype.name, offset, shape[0], options)
    return _open_array(file, dtype.name, options, offset=offset)


def _check_header(file: InputFile, dtype: str, offset: int, num_tokens: int, options: ReadOptions) -> None:
    """Compares a header with the options and with the size of the file. Raises: DataError."""
    options.check_dtype(dtype, file.path)
    expected = offset + num_tokens * np.dtype(dtype).itemsize
    if file.size != expected:
        raise DataError(
            f"has {file.size} bytes, but {num_tokens} tokens as its header says are {expected}",
            where=file.path,
            fix="copy the file again",
        )


def _open_bare(file: InputFile, dtype: str, options: ReadOptions) -> TokenArray:
    """Returns the array of a file without a header, by default of `dtype`. Raises: DataError.

    Tokens of 32 bits that are read as uint16 are all in the vocabulary, every second one being the
    zero of the upper half; such a file is refused, unless --dtype is given.
    """
    if options.dtype is None and dtype == "uint16":
        data = read_head(file.path, 2 * PROBE_TOKENS)
        halves = np.frombuffer(data[: len(data) // 4 * 4], "<u2")
        largest_upper = (options.vocab_size - 1) >> 16
        is_wide = (halves[1::2] <= largest_upper).all() and (halves[0::2] > largest_upper).any()
        if len(halves) >= MIN_PROBE_HALVES and is_wide:
            raise DataError(
                "its tokens look 32 bits wide: the upper half of every one is empty",
                where=file.path,
                fix="give --dtype uint32, or --dtype uint16 if that is what they are",
            )
    return _open_array(file, options.dtype or dtype, options)


def _open_array(
    file: InputFile, dtype: str, options: ReadOptions, offset: int = 0, at_start: bool = False
) -> TokenArray:
    """Returns the array after a header of `offset` bytes; `at_start`: a document begins with its token."""
    file_dtype = np.dtype(dtype).newbyteorder("<")
    num_bytes = file.size - offset
    if num_bytes % file_dtype.itemsize:
        raise DataError(
            f"truncated, or not of {dtype}: its {num_bytes} bytes of tokens are no whole number of them",
            where=file.path,
            fix="copy the file again, or give the --dtype of its tokens",
        )
    return TokenArray(
        file=replace(file, is_cuttable=True),
        dtype=file_dtype,
        options=options,
        cuts=partial(find_cuts, eos_id=options.eos_id, at_start=at_start),
        offset=offset,
        # A token that closes a document comes before the next one, which may be in another slice.
        lookback=0 if at_start else 1,
    )
