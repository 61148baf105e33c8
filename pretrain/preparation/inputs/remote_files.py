"""Remote inputs: URLs of http(s); files, folders and globs of s3, gs and hf (see `utils.remote`)."""

import errno
import glob
import io
from collections.abc import Callable
from typing import Any, BinaryIO, cast
from urllib.parse import quote

from pretrain.errors import DataError
from pretrain.preparation.input_parts import InputFile
from pretrain.utils.remote import (
    RemoteStream,
    Waits,
    call_remote,
    filesystem,
    open_url,
    stat_url,
    version_of,
    without_secrets,
)

WAITS = Waits(first_s=0.5, longest_s=16.0, total_s=40.0)
BLOCK_BYTES = 8 * 2**20


def _call(url: str, call: Callable[[], Any]) -> Any:
    return call_remote(url, call, WAITS)


def call_hub(url: str, call: Callable[[], Any]) -> Any:
    """Returns the result of a call of the hub, retried. Raises: DataError, LaunchError."""
    try:
        return _call(url, call)
    except FileNotFoundError as error:
        raise DataError(
            "the hub has no such data set or revision, or it is private",
            where=url,
            fix="correct the name, or set HF_TOKEN",
        ) from error
    except OSError as error:
        raise _cannot_read(url, error) from error


def stat_remote(url: str) -> InputFile:
    """Looks up one file. Raises: DataError: of unknown size; OSError."""
    return _input_file(url, _call(url, lambda: stat_url(url)))


def find_remote(given: str) -> dict[str, InputFile]:
    """Returns the files that a URL names, by their URLs, sorted. Raises: DataError, LaunchError."""
    try:
        files = _find(given)
    except FileNotFoundError:
        named = "URL" if given.startswith("http") else "path"
        raise DataError(
            "no such file or folder",
            where=without_secrets(given),
            fix=f"correct the {named} (--input, or inputs.N.path of a config)",
        ) from None
    except OSError as error:
        raise _cannot_read(given, error) from error
    ordered = sorted(files, key=lambda url: url.split("/"))
    return {url: _input_file(url, files[url]) for url in ordered}


def _find(given: str) -> dict[str, dict[str, Any]]:
    try:
        info = _call(given, lambda: stat_url(given))
    except FileNotFoundError:
        if given.startswith("http") or not glob.has_magic(given):
            raise
        matches = _call(given, lambda: filesystem(given).glob(given, detail=True))
        # As on a disk, a wildcard stands for no hidden name.
        shown = [entry for name, entry in matches.items() if "/." in given or "/." not in name]
    else:
        if info["type"] != "directory":
            return {given: info}
        shown = [info]
    nested = [_below(given, one) if one["type"] == "directory" else [one] for one in shown]
    scheme = given.partition("://")[0]
    return {f"{scheme}://{entry['name']}": entry for group in nested for entry in group}


def _below(given: str, folder: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the entries below a folder, without hidden files and marks of folders."""
    root = folder["name"].rstrip("/") + "/"
    entries = _call(given, lambda: filesystem(given).find(root, detail=True))
    paths = {name: f"/{name.removeprefix(root)}" for name in entries}
    return [entries[name] for name, path in paths.items() if "/." not in path and path[-1] != "/"]


def serves_ranges(file: InputFile) -> bool:
    """Returns True if reading may begin inside a file; not every http server can. Raises: DataError."""
    if not file.path.startswith("http") or file.size < 2:
        return True

    def probe() -> bool:
        stream = open_url(file.path, 1, 2)
        stream.close()
        return stream.has_range

    try:
        return _call(file.path, probe)
    except OSError as error:
        raise _cannot_read(file.path, error) from error


def _cannot_read(url: str, error: OSError) -> DataError:
    return DataError(
        f"cannot be read: {error.strerror or error}",
        where=without_secrets(url),
        fix="fix the access problem and retry, or copy the files here first",
    )


def _input_file(url: str, info: dict[str, Any]) -> InputFile:
    if info["type"] == "directory":
        raise IsADirectoryError(url)
    if info["size"] is None:
        raise DataError(
            "the server does not say how large the file is",
            where=without_secrets(url),
            fix="download it, and give the copy",
        )
    return InputFile(url, info["size"], quote(version_of(info), safe=""))


class RemoteInputFile(io.RawIOBase):
    """A remote file as a file object: read forward in blocks, each retried where it breaks off.

    Where a server knows no ranges, it is one stream, opened anew to go back. Memory: one block.
    """

    def __init__(self, file: InputFile) -> None:
        self._file = file
        self._position = 0
        self._stream: RemoteStream | None = None

    def readable(self) -> bool:
        """Returns True."""
        return True

    def seekable(self) -> bool:
        """Returns True; seeking is slow where the server knows no ranges."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Moves; nothing is fetched before the next read."""
        bases = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.size}
        self._position = max(bases[whence] + offset, 0)
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Fills `buffer`, up to a block. Raises: OSError, as `call_remote` does."""
        start = self._position
        stop = min(start + min(len(buffer), BLOCK_BYTES), self._file.size)
        if start >= stop:
            return 0
        data = _call(self._file.path, lambda: self._fetch(start, stop))
        buffer[: len(data)] = data
        self._position = start + len(data)
        return len(data)

    def readall(self) -> bytes:
        """Reads the rest, a block at a time."""
        return b"".join(iter(lambda: self.read(BLOCK_BYTES), b""))

    def close(self) -> None:
        """Ends the connection."""
        self._drop()
        super().close()

    def _fetch(self, start: int, stop: int) -> bytes:
        """Returns the bytes [start, stop). Raises: the errors of the network."""
        if self._stream is None or not self._stream.skip_to(start):
            # Every http request is a connection: the second block in a row asks for the rest.
            is_sequential = self._stream is not None and self._stream.position == start
            self._drop()
            end = None if is_sequential else stop
            self._stream = open_url(self._file.path, start, end, self._file.size)
        data = bytearray()
        try:
            while len(data) < stop - start:
                piece = self._stream.read(stop - start - len(data))
                if not piece:
                    text = f"{len(data)} bytes came where {stop - start} were asked for"
                    raise ConnectionResetError(errno.ECONNRESET, text)
                data += piece
        except Exception:
            self._drop()
            raise
        return bytes(data)

    def _drop(self) -> None:
        if self._stream is not None:
            self._stream.close()
        self._stream = None


def open_remote(file: InputFile) -> BinaryIO:
    """Opens a remote file for reading, buffered by blocks."""
    buffer_bytes = min(BLOCK_BYTES, max(file.size, 1))
    return cast(BinaryIO, io.BufferedReader(RemoteInputFile(file), buffer_bytes))
