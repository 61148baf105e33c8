"""Reading of files that may be damaged, or made by others to do harm: bounded, and with two kinds of errors.

    open_regular    ->  a descriptor; a FIFO, which blocks, and a device, which never ends, are an OSError
    open_file       ->  the same as a file object
    read_bounded    ->  the content; a file above the limit is an OSError
    read_lines      ->  the lines of an open file; one above the limit is an OSError
    read_blocks     ->  the same, some at a time
    parse_json      ->  a value; anything wrong with the text is a ValueError, nesting without end too
    parse_json_at   ->  the same of the value that begins at a place of a text, and its end
    read_json       ->  both
    check_fields    ->  types of an object's known fields

All JSON of the project is read by these (`tests/repo/test_security.py`); callers catch OSError and
ValueError alone. Nesting has one limit, below what Python's stack has room for, so that code that
walks a value needs no care.
"""

import errno
import json
import os
import stat
import sys
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from pydantic_core import from_json

MAX_RECORD_BYTES = 64 * 2**20
"""Limit of a record of a run: a month of restarts has some megabytes."""

MAX_TOKENIZER_BYTES = 2**28
"""Limit of a file of a tokenizer: the largest have some 40 megabytes."""

MAX_LINE_BYTES = 16 * 2**20
"""Limit of a line of a record: a row of metrics has kilobytes, one of generated texts a megabyte."""

MAX_INT = 2**53
"""Largest whole number of a record: larger ones are no counts, and no floats either."""

MAX_NESTING = 200
"""Most levels of lists and objects of a JSON text."""

_BLOCK_BYTES = 2**17
_DECODER = json.JSONDecoder()


def open_regular(path: Path) -> int:
    """Opens a regular file for reading; returns its descriptor. Raises: OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return descriptor


def open_file(path: Path) -> BinaryIO:
    """Opens a regular file for reading. Raises: OSError."""
    return open(open_regular(path), "rb")


def read_bounded(path: Path, most_bytes: int) -> bytes:
    """Returns the content of a regular file. Raises: OSError."""
    with open_file(path) as file:
        if os.fstat(file.fileno()).st_size > most_bytes:
            raise OSError(errno.EFBIG, f"larger than {most_bytes:,} bytes", str(path))
        return file.read()


def read_lines(file: BinaryIO) -> Iterator[bytes]:
    """Yields the lines of an open file, each with its end. Raises: OSError."""
    while line := file.readline(MAX_LINE_BYTES + 1):
        if len(line) > MAX_LINE_BYTES:
            raise _too_long()
        yield line


def read_blocks(file: BinaryIO) -> Iterator[bytes]:
    """Yields the lines of an open file, many at a time. Raises: OSError, as `read_lines`."""
    while block := file.read(_BLOCK_BYTES):
        end = file.readline(MAX_LINE_BYTES + 1)
        if len(end) > MAX_LINE_BYTES:
            yield block[: block.rfind(b"\n") + 1]
            raise _too_long()
        yield block + end


def _too_long() -> OSError:
    return OSError(errno.EFBIG, f"a line of more than {MAX_LINE_BYTES:,} bytes")


def parse_json(text: str | bytes) -> Any:
    """Returns the value of a JSON text, of at most `MAX_NESTING` levels. Raises: ValueError.

    The parser of pydantic takes a quarter of the time. It refuses half of a surrogate pair, and
    deeper nesting: Python's own says whether a text that it refuses has a value, or why not.
    """
    try:
        return from_json(text)
    except ValueError:
        pass
    try:
        value = json.loads(text)
    except (RecursionError, ValueError) as error:
        raise _limit_of(error) from None
    if isinstance(text, str):
        _check_nesting(value, text.count("[") + text.count("{"))
    else:
        _check_nesting(value, text.count(b"[") + text.count(b"{"))
    return value


def parse_json_at(text: str, start: int) -> tuple[Any, int]:
    """Returns the value that begins at a character of a text, and its end. Raises: ValueError."""
    try:
        value, end = _DECODER.raw_decode(text, start)
    except (RecursionError, ValueError) as error:
        raise _limit_of(error) from None
    _check_nesting(value, text.count("[", start, end) + text.count("{", start, end))
    return value, end


def _check_nesting(value: Any, num_brackets: int) -> None:
    """Refuses more than `MAX_NESTING` levels, which take as many brackets. Raises: ValueError."""
    level = [value] if num_brackets > MAX_NESTING else []
    for _ in range(MAX_NESTING):
        if not level:
            return  # at once for the most records
        nested = [one for one in level if isinstance(one, dict | list)]
        inner = [one.values() if isinstance(one, dict) else one for one in nested]
        level = list(chain.from_iterable(inner))
    if any(isinstance(one, dict | list) for one in level):
        raise _too_deep()


def _limit_of(error: RecursionError | ValueError) -> ValueError:
    """Returns the error of a text, in plain words for a limit of Python."""
    if isinstance(error, RecursionError):
        return _too_deep()
    if type(error) is ValueError and "int_max_str_digits" in str(error):
        return ValueError(f"a whole number of more than {sys.get_int_max_str_digits():,} digits")
    return error


def _too_deep() -> ValueError:
    return ValueError(f"nested too deeply: more than {MAX_NESTING} levels")


def read_json(path: Path) -> Any:
    """Returns the value of a record of a run. Raises: OSError, ValueError."""
    return parse_json(read_bounded(path, MAX_RECORD_BYTES))


def check_fields(value: Any, types: Mapping[str, type]) -> dict[str, Any]:
    """Returns an object whose fields in `types` are absent, null or of their type. Raises: ValueError."""
    if not isinstance(value, dict):
        raise ValueError(f"{type(value).__name__} where an object is expected")
    for name, kind in types.items():
        field = value.get(name)
        if field is not None and type(field) is not kind:
            raise ValueError(f"{name} is of type {type(field).__name__}, not {kind.__name__}")
        if isinstance(field, int) and abs(field) > MAX_INT:
            raise ValueError(f"{name} has more than 53 bits")
    return value
