"""Texts of a test set: one a line, plain or gzip."""

import gzip
import zlib
from pathlib import Path

from pretrain.errors import ConfigError, DataError
from pretrain.utils.io import write_file


def read_texts(file: Path) -> list[str]:
    """Returns the lines of a UTF-8 file, empty ones too, without what ends them.

    Only line feeds divide lines: a text may hold the other characters that Unicode takes for the end of one.

    Raises:
        ConfigError: It cannot be read.
        DataError: It is empty, damaged, or not UTF-8; names the line.
    """
    try:
        content = file.read_bytes()
        if file.suffix == ".gz":
            content = gzip.decompress(content)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"truncated or damaged gzip: {error}", where=str(file), fix="copy it again") from None
    except OSError as error:
        raise ConfigError(f"cannot read it: {error.strerror}", where=str(file), fix="check the path") from None
    lines = content.removesuffix(b"\n").split(b"\n") if content else []
    if not lines:
        raise DataError("holds no line", where=str(file), fix="give one text a line")
    return [_decode(line, file, number) for number, line in enumerate(lines, start=1)]


def _decode(line: bytes, file: Path, number: int) -> str:
    try:
        return line.decode("utf-8-sig" if number == 1 else "utf-8").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise DataError(
            f"not UTF-8: byte {line[error.start]:#04x}", where=f"{file}:{number}", fix="convert it"
        ) from None


def read_parallel(source: Path, reference: Path) -> tuple[list[str], list[str]]:
    """Returns sources and references. Raises: as `read_texts`; DataError where they are not as many."""
    sources, references = read_texts(source), read_texts(reference)
    if len(sources) != len(references):
        raise DataError(
            f"has {len(references)} lines, {source} has {len(sources)}",
            where=str(reference),
            fix="give files whose lines belong together",
        )
    return sources, references


def write_texts(file: Path, texts: list[str]) -> None:
    """Writes one text a line; line breaks within one become spaces. Raises: DiskError."""
    lines = (" ".join(text.splitlines()) for text in texts)
    write_file(file, "".join(f"{line}\n" for line in lines).encode("utf-8", errors="replace"))
