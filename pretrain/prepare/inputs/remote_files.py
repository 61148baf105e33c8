"""Calls over a network whose failures are to be those of a disk: tried again, and one clear OSError in the end."""

import errno
import glob
import io
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any, BinaryIO, TypeVar, cast
from urllib.parse import quote

from pretrain.errors import DataError
from pretrain.prepare.input_parts import InputFile, scheme_of, shown
from pretrain.prepare.inputs.local_files import KNOWN_SUFFIXES, Accepts, require
from pretrain.utils.retry import Failure, RetryTimer, Waits, describe, failure_of, is_of_network

WAITS = Waits(first_s=0.5, longest_s=16.0, total_s=40.0)

_T = TypeVar("_T")

_log = logging.getLogger(__name__)


def call_remote(path: str, call: Callable[[], _T]) -> _T:
    """Returns what `call` returns, tried as long as `WAITS` says.

    Raises:
        FileNotFoundError: There is no such file.
        PermissionError: No credentials, or none that suffice.
        OSError: Another refusal, or a failure that did not pass. Like the others it has errno, strerror and, as its
            filename, `path` without secrets.
    """
    attempts = RetryTimer(WAITS)
    while True:
        try:
            return call()
        except Exception as error:
            # fsspec's http says "not found" of any failure; what it was is the cause.
            cause = error.__cause__ if isinstance(error, FileNotFoundError) and error.__cause__ else error
            if not is_of_network(cause):
                raise
            failure = failure_of(cause)
            if failure is not Failure.PASSING:
                raise _lasting_error(failure, cause, shown(path)) from error
            _log.warning("%s: %s; trying again", shown(path), describe(cause))
            if not attempts.again():
                text = f"{describe(cause)}, and no answer for {WAITS.total_s:g} s"
                raise OSError(errno.EIO, text, shown(path)) from error


def _lasting_error(failure: Failure, error: BaseException, path: str) -> OSError:
    if failure is Failure.MISSING:
        return FileNotFoundError(errno.ENOENT, "no such file", path)
    if failure is Failure.FORBIDDEN:
        return PermissionError(errno.EACCES, describe(error), path)
    return OSError(errno.EINVAL, describe(error), path)


# Remote inputs, through fsspec: http(s) URLs one by one; files, folders and globs of s3 and gs.
#
# Credentials, endpoints and proxies are those that each system takes from its environment: AWS_*
# and ~/.aws, Google's application default credentials, HTTPS_PROXY and ~/.netrc; FSSPEC_S3 and the
# like for what fsspec alone knows.


_PACKAGES = {"http": "aiohttp", "https": "aiohttp", "s3": "s3fs", "gs": "gcsfs"}

_VERSION_KEYS = ("generation", "ETag", "etag", "Last-Modified", "LastModified", "updated")

CONNECT_TIMEOUT_S = 30

READ_TIMEOUT_S = 60


def filesystem(url: str) -> Any:
    """Returns the fsspec file system of a URL; the same object for the same scheme.

    Raises:
        LaunchError: The package that speaks the scheme is not installed.
    """
    scheme = scheme_of(url)
    require(_PACKAGES[scheme], "cloud", f"{scheme} URLs are read")
    import fsspec

    # A listing that is remembered would hide that a file has changed.
    options: dict[str, Any] = {"use_listings_cache": False}
    if scheme.startswith("http"):
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=READ_TIMEOUT_S)
        options["client_kwargs"] = {"trust_env": True, "timeout": timeout}
        # Bytes must be those that are stored, and a signed URL must be sent as it is written.
        options["headers"] = {"Accept-Encoding": "identity"}
        options["encoded"] = "%" in url
    return fsspec.filesystem(scheme, **options)


def stat_remote(url: str) -> InputFile:
    """Looks up one file.

    Raises:
        DataError: The server does not say how large it is.
        IsADirectoryError: It is a folder.
        OSError: As `call_remote` does.
    """
    return _input_file(url, call_remote(url, lambda: filesystem(url).info(url)))


def find_remote(given: str, accepts: Accepts) -> list[InputFile]:
    """Returns the files that a URL names, sorted.

    Raises:
        DataError: No such file, a file named in full that is not accepted, or a server that fails.
        LaunchError: The package that speaks the scheme is not installed.
    """
    try:
        return _find(given, accepts)
    except FileNotFoundError:
        fix = "correct the URL" if given.startswith("http") else "correct the path"
        raise DataError("no such file or folder", where=shown(given), fix=fix) from None
    except OSError as error:
        fix = "mend that, or copy the files here first"
        raise DataError(f"cannot be read: {error.strerror or error}", where=shown(given), fix=fix) from error


def serves_ranges(file: InputFile) -> bool:
    """Whether reading may begin inside; an http server need not be able to.

    Raises:
        DataError: The server fails.
    """
    if not file.path.startswith("http") or file.size < 2:
        return True

    def probe() -> bool:
        with filesystem(file.path).open(file.path, "rb", size=file.size, cache_type="none") as remote:
            remote.seek(1)
            try:
                return len(remote.read(1)) == 1
            except ValueError:  # what fsspec raises when the whole file comes back
                return False

    try:
        return call_remote(file.path, probe)
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", where=file.shown, fix="mend that") from error


def _find(given: str, accepts: Accepts) -> list[InputFile]:
    try:
        info = call_remote(given, lambda: filesystem(given).info(given))
    except FileNotFoundError:
        if given.startswith("http") or not glob.has_magic(given):
            raise
        found = call_remote(given, lambda: filesystem(given).glob(given, detail=True))
        # As on a disk, a wildcard stands for no hidden name.
        entries = [entry for name, entry in found.items() if "/." in given or "/." not in name]
        nested = [_below(given, entry) if entry["type"] == "directory" else [entry] for entry in entries]
        return _sorted(given, [entry for group in nested for entry in group], accepts)
    if info["type"] == "directory":
        return _sorted(given, _below(given, info), accepts)
    if not accepts(given):
        fix = f"give one of {KNOWN_SUFFIXES}, or say its format in a config"
        raise DataError("unsupported file type", where=shown(given), fix=fix)
    return [_input_file(given, info)]


def _below(given: str, folder: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns what is stored below a folder, but for hidden files and the empty objects that mark folders."""
    root = folder["name"].rstrip("/") + "/"
    found = call_remote(given, lambda: filesystem(given).find(root, detail=True))
    names = {name: name.removeprefix(root) for name in found}
    shown_names = [name for name, rest in names.items() if "/." not in f"/{rest}" and not f"/{rest}".endswith("/")]
    return [found[name] for name in shown_names]


def _sorted(given: str, entries: list[dict[str, Any]], accepts: Accepts) -> list[InputFile]:
    urls = {f"{scheme_of(given)}://{entry['name']}": entry for entry in entries}
    ordered = sorted((url for url in urls if accepts(url)), key=lambda url: url.split("/"))
    return [_input_file(url, urls[url]) for url in ordered]


def _input_file(url: str, info: dict[str, Any]) -> InputFile:
    if info["type"] == "directory":
        raise IsADirectoryError(url)
    if info["size"] is None:
        raise DataError(
            "the server does not say how large the file is", where=shown(url), fix="download it, and give the copy"
        )
    version = next((str(info[key]) for key in _VERSION_KEYS if info.get(key)), "-")
    return InputFile(url, info["size"], quote(version, safe=""))


# A remote file as a file object: read forward in blocks, each tried again, from where the last one
# ended.


BLOCK_BYTES = 8 * 2**20

SKIP_BYTES = 2**20


class RemoteInputFile(io.RawIOBase):
    """The bytes of a remote file, by range where the server can, else as one stream that is opened anew to go back.

    A server that dies is asked again for what is missing. Where it knows no ranges, that means from the beginning, and
    what was read before is thrown away. Memory: one block.
    """

    def __init__(self, file: InputFile) -> None:
        """Opens nothing yet."""
        self._file = file
        self._position = 0
        self._ranges: Any = None
        self._stream: Any = None
        self._stream_position = 0
        self._has_ranges = True

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is, if at a cost where the server knows no ranges."""
        return True

    def tell(self) -> int:
        """The position."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Moves; nothing is fetched before the next read."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.size}[whence]
        self._position = max(base + offset, 0)
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Fills `buffer`, up to a block. Raises: OSError, as `call_remote` does."""
        start = self._position
        stop = min(start + min(len(buffer), BLOCK_BYTES), self._file.size)
        if start >= stop:
            return 0
        data = call_remote(self._file.path, lambda: self._fetch(start, stop))
        buffer[: len(data)] = data
        self._position = start + len(data)
        return len(data)

    def readall(self) -> bytes:
        """Reads the rest, a block at a time."""
        blocks = []
        while block := self.read(BLOCK_BYTES):
            blocks.append(block)
        return b"".join(blocks)

    def close(self) -> None:
        """Lets go of the connection."""
        self._drop()
        super().close()

    def _fetch(self, start: int, stop: int) -> bytes:
        """Returns the bytes [start, stop). Raises whatever the network does."""
        try:
            data = self._fetch_range(start, stop) if self._has_ranges else self._fetch_stream(start, stop)
        except Exception:
            self._drop()
            raise
        if len(data) != stop - start:
            self._drop()
            raise ConnectionError(errno.ECONNRESET, f"{len(data)} bytes came where {stop - start} were asked for")
        return data

    def _fetch_range(self, start: int, stop: int) -> bytes:
        if self._ranges is None:
            path, size = self._file.path, self._file.size
            self._ranges = filesystem(path).open(path, "rb", size=size, cache_type="none")
        self._ranges.seek(start)
        try:
            return self._ranges.read(stop - start)
        except ValueError as error:
            # What fsspec raises when a server sends the whole file; others derive from it.
            if type(error) is not ValueError or not self._file.path.startswith("http"):
                raise
        self._drop()
        self._has_ranges = False
        return self._fetch_stream(start, stop)

    def _fetch_stream(self, start: int, stop: int) -> bytes:
        if self._stream is None or self._stream_position > start:
            self._drop()
            path, size = self._file.path, self._file.size
            self._stream = filesystem(path).open(path, "rb", size=size, block_size=0)
            self._stream_position = 0
        while self._stream_position < start and self._read_stream(min(start - self._stream_position, SKIP_BYTES)):
            pass
        pieces = []
        while self._stream_position < stop and (piece := self._read_stream(stop - self._stream_position)):
            pieces.append(piece)
        return b"".join(pieces)

    def _read_stream(self, num_bytes: int) -> bytes:
        data = self._stream.read(num_bytes)
        self._stream_position += len(data)
        return data

    def _drop(self) -> None:
        for remote in (self._ranges, self._stream):
            if remote is not None:
                with suppress(Exception):  # it is broken already, or finished with
                    remote.close()
        self._ranges = self._stream = None


def open_remote(file: InputFile) -> BinaryIO:
    """Opens a remote file for reading, buffered by blocks."""
    return cast(BinaryIO, io.BufferedReader(RemoteInputFile(file), min(BLOCK_BYTES, max(file.size, 1))))
