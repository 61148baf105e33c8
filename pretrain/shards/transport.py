"""Bytes of files that are elsewhere, from any byte on: http and https by the standard library, s3 and gs by fsspec.

    connect(url) -> Transport       open(name, start) -> Body: the file's whole size, and its pieces from `start`

One attempt an operation. What may pass is a `TransientError`, what will not is a `DataError`. Credentials come
from the environment (netrc for http, the usual variables and files of s3 and gs), never from the address.
Deliberately not here: attempts, hashes and files (download.py).
"""

import base64
import http.client
import netrc
import os
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pretrain.errors import DataError, LaunchError
from pretrain.shards.store import UnavailableError
from pretrain.utils.retry import Failure, describe, failure_of, is_of_network

SCHEMES = ("http", "https", "s3", "gs")
TIMEOUT_S = 30.0
"""Of one connection or one read; after that the server counts as gone."""

PIECE_BYTES = 2**18
RANGE_BYTES = 2**23
"""Bytes that one request of s3 or gs asks for."""


class TransientError(Exception):
    """A failure that may have passed at the next attempt: no connection, a broken one, a server in trouble."""


@dataclass(frozen=True, slots=True)
class Body:
    """The answer to one request.

    Attributes:
        num_bytes: Size of the whole file. None: the server does not say.
        pieces: Its bytes from the start that was asked for; may end early without an error.
    """

    num_bytes: int | None
    pieces: Iterator[bytes]


class Transport(Protocol):
    """Reads the files of one remote folder."""

    url: str
    """Of the folder, without a slash at the end."""

    def open(self, name: str, start: int) -> Body:
        """Asks for a file from byte `start` on. The pieces raise as this does.

        Raises:
            TransientError: See there.
            DataError: It is not there.
            UnavailableError: It is not for us.
        """

    def num_bytes(self, name: str) -> int | None:
        """Returns the size of a file. None: the server does not say. Raises as `open`."""


def connect(url: str) -> Transport:
    """Returns the transport of a remote folder. Makes no connection yet.

    Raises:
        DataError: An address of another scheme, or with credentials, a query or a fragment in it.
        LaunchError: The package that serves the scheme is not installed.
    """
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in SCHEMES or not parts.netloc:
        known = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        raise DataError("no such kind of address", where=_without_secrets(url), fix=f"use a folder, or one of {known}")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise DataError(
            "an address of data has no user, password, query or fragment",
            where=_without_secrets(url),
            fix="give credentials in the environment (~/.netrc, AWS_ACCESS_KEY_ID, GOOGLE_APPLICATION_CREDENTIALS)",
        )
    url = url.rstrip("/")
    return HttpTransport(url) if parts.scheme in ("http", "https") else ObjectTransport(url, parts.scheme)


def _without_secrets(url: str) -> str:
    return re.sub(r"//[^/@]*@", "//", url).partition("?")[0]


class HttpTransport:
    """http and https: one request a file, streamed. Follows redirects, HTTP_PROXY and the like."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._login = _netrc_login(urllib.parse.urlsplit(url).hostname or "")
        # build_opener would add file:, ftp: and data: to where a redirect may lead.
        self._opener = urllib.request.OpenerDirector()
        for handler in (
            urllib.request.ProxyHandler(),
            urllib.request.HTTPHandler(),
            urllib.request.HTTPSHandler(),
            urllib.request.HTTPRedirectHandler(),
            urllib.request.HTTPErrorProcessor(),
            urllib.request.HTTPDefaultErrorHandler(),
        ):
            self._opener.add_handler(handler)

    def open(self, name: str, start: int) -> Body:
        """As the protocol says; a server that ignores ranges is read from its first byte, and `start` bytes dropped."""
        response = self._request("GET", name, start)
        if isinstance(response, int):
            return Body(response, iter(()))
        place = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", ""))
        if response.status == 206 and place is not None and int(place[1]) == start:
            return Body(None if place[2] == "*" else int(place[2]), _pieces(response, 0))
        if response.status == 200:
            length = response.headers.get("Content-Length")
            return Body(None if length is None else int(length), _pieces(response, start))
        response.close()
        raise TransientError(f"HTTP {response.status} with another range than the one asked for")

    def num_bytes(self, name: str) -> int | None:
        """As the protocol says."""
        response = self._request("HEAD", name, 0)
        assert not isinstance(response, int)
        with response:
            length = response.headers.get("Content-Length")
        return None if length is None else int(length)

    def _request(self, method: str, name: str, start: int) -> Any:
        """Returns the response; the size of the file where it ends before `start`."""
        url = f"{self.url}/{urllib.parse.quote(name)}"
        headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={start}-"} if start else {})
        request = urllib.request.Request(url, headers=headers, method=method)
        if self._login is not None:
            request.add_unredirected_header("Authorization", self._login)
        try:
            return self._opener.open(request, timeout=TIMEOUT_S)
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == 416:
                total = error.headers.get("Content-Range", "").rpartition("/")[2]
                return int(total) if total.isdigit() else 0
            raise _failed(url, error, f"HTTP {error.code} {error.reason}") from None
        except urllib.error.URLError as error:
            raise TransientError(str(error.reason)) from None
        except (OSError, http.client.HTTPException) as error:
            raise TransientError(str(error) or type(error).__name__) from None


def _pieces(response: Any, skip: int) -> Iterator[bytes]:
    """Yields a response's bytes after the first `skip`; in their place come empty pieces."""
    with response:
        while True:
            try:
                piece = response.read1(PIECE_BYTES)
            except (OSError, http.client.HTTPException) as error:
                raise TransientError(str(error) or type(error).__name__) from None
            if not piece:
                return
            yield piece[skip:]
            skip = max(0, skip - len(piece))


def _netrc_login(host: str) -> str | None:
    """Returns the Authorization that the user's netrc file has for a host, or None."""
    path = os.environ.get("NETRC") or Path("~/.netrc").expanduser()
    try:
        entry = netrc.netrc(str(path)).authenticators(host)
    except (OSError, netrc.NetrcParseError, UnicodeDecodeError):
        return None
    return entry and "Basic " + base64.b64encode(f"{entry[0]}:{entry[2]}".encode()).decode()


class ObjectTransport:
    """s3 and gs, and whatever else fsspec reads by ranges: a request for every `RANGE_BYTES`."""

    def __init__(self, url: str, scheme: str) -> None:
        import fsspec

        self.url = url
        try:
            # No instance of another user of fsspec in this process, and no listing that may have aged.
            self._files = fsspec.filesystem(scheme, skip_instance_cache=True, use_listings_cache=False)
        except ImportError as error:
            raise LaunchError(
                f"{scheme}:// needs a package that is not installed ({error})",
                where=url,
                fix="pip install 'pretrain[cloud]'",
            ) from None

    def open(self, name: str, start: int) -> Body:
        """As the protocol says."""
        num_bytes = self.num_bytes(name)
        assert num_bytes is not None
        ends = (*range(start + RANGE_BYTES, num_bytes, RANGE_BYTES), num_bytes)
        starts = range(start, num_bytes, RANGE_BYTES)
        url = f"{self.url}/{name}"
        pieces = (self._call(self._files.cat_file, url, start=a, end=b) for a, b in zip(starts, ends, strict=False))
        return Body(num_bytes, pieces)

    def num_bytes(self, name: str) -> int:
        """As the protocol says."""
        return int(self._call(self._files.info, f"{self.url}/{name}")["size"])

    def _call(self, function: Any, url: str, **arguments: int) -> Any:
        try:
            return function(url, **arguments)
        except Exception as error:
            if not is_of_network(error):
                raise
            raise _failed(url, error, describe(error)) from None


def _failed(url: str, error: Exception, what: str) -> TransientError | DataError:
    """Returns the error to raise of an attempt."""
    failure = failure_of(error)
    if failure is Failure.PASSING:
        return TransientError(what)
    kind = DataError if failure is Failure.MISSING else UnavailableError
    return kind(f"cannot be fetched: {what}", where=url, fix="correct data.path, or give access to it")
