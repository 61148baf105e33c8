"""Prompts from the command line, a file or standard input."""

import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from pretrain.errors import ConfigError, DataError

STDIN = "-"


def find_prompts(prompts: list[str], file: str | None) -> Iterator[str] | None:
    """Returns the prompts that were given, or None where none were.

    A file is opened at once and read as it is needed: one prompt a line, empty ones too. Standard input is read where
    it was asked for, or, with nothing else given, where something is piped or redirected into it.

    Args:
        prompts: Those on the command line.
        file: A path, or `-` for standard input.

    Raises:
        ConfigError: Both were given, there is no such file, or a prompt is not UTF-8.
    """
    if prompts and file is not None:
        raise ConfigError("--prompt and --file were both given", fix="give one of them")
    if prompts:
        return iter([_check_argument(prompt) for prompt in prompts])
    if file == STDIN or (file is None and _is_piped()):
        return _read_lines(sys.stdin.buffer, "standard input")
    if file is None:
        return None
    try:
        opened = Path(file).open("rb")  # noqa: SIM115 (closed by whom it is read)
    except OSError as error:
        raise ConfigError(f"cannot read it: {error.strerror}", where=file, fix="check the path of --file") from None
    return _read_lines(opened, file)


def _check_argument(prompt: str) -> str:
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise ConfigError("--prompt is not UTF-8", fix="put the text in a file, as UTF-8") from None
    return prompt


def _is_piped() -> bool:
    """Whether something else than a terminal or /dev/null feeds standard input."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError, AttributeError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)


def _read_lines(file: BinaryIO, name: str) -> Iterator[str]:
    with file:
        for number, line in enumerate(file, start=1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise DataError(
                    f"not UTF-8: byte {line[error.start]:#04x}", where=f"{name}:{number}", fix="convert it"
                ) from None
            yield text.rstrip("\r\n")
