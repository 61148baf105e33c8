"""Remote files over http(s), s3, gs and the hub: sizes, bytes from any offset, retries, redaction.

    stat_url(url)                       size and version
    open_url(url, start, stop)          a stream of bytes; http(s) by urllib, others by fsspec
    call_remote(url, call)              `call`, retried while its failure may pass
    without_secrets(url)                the URL for messages and records

Credentials, endpoints and proxies come from the environment of each system: AWS_* and ~/.aws,
Google's application default credentials, HF_TOKEN and HF_ENDPOINT, HTTPS_PROXY and ~/.netrc,
FSSPEC_S3 and the like.
"""

import base64
import enum
import errno
import logging
import random
import re
import string
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar
from urllib.parse import quote, unquote, urlsplit

from pretrain.errors import DataError, LaunchError, install_fix
from pretrain.utils.log import netrc_login

SCHEMES = ("http", "https", "s3", "gs")
INPUT_SCHEMES = (*SCHEMES, "hf")
"""Those of the inputs of `prepare`; shards are not read from the hub."""
# Limit of one connection attempt or one read.
TIMEOUT_S = 30.0
# Most bytes that one read of http returns.
PIECE_BYTES = 2**18
POLL_S = 0.1

_PASSING_STATUS = (408, 425, 429)
_LASTING_ERRNO = (errno.EINVAL, errno.EPERM, errno.ENOSYS, errno.ENAMETOOLONG, getattr(errno, "EREMCHG", None))
_NETWORK_PACKAGES = (
    *("http", "aiohttp", "aiobotocore", "botocore", "s3fs", "gcsfs", "google", "requests", "urllib3"),
    *("huggingface_hub", "httpx", "httpx2", "httpcore", "httpcore2"),
)
_FORBIDDEN_NAMES = ("ProfileNotFound", "InvalidAccessKeyId")
_ABSENT = (404, 410)
_RANGE = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18}|\*)")
_VERSION_KEYS = ("generation", "ETag", "etag", "Last-Modified", "LastModified", "updated", "blob_id")

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


def is_remote(path: str) -> bool:
    """Returns whether `path` is a URL that is read over a network."""
    return path.startswith(tuple(f"{scheme}://" for scheme in INPUT_SCHEMES))


def without_secrets(url: str) -> str:
    """Returns a URL without user, password and query; names on s3 and gs may have `?`."""
    if "://" not in url:
        return url
    scheme, _, rest = url.partition("://")
    if scheme not in ("s3", "gs"):
        rest = re.split(r"[?#]", rest, maxsplit=1)[0]
    place, slash, name = rest.partition("/")
    return f"{scheme}://{place.rpartition('@')[2]}{slash}{name}"


def check_no_secrets(url: str) -> None:
    """Checks that an address of data has no credentials: configs and logs repeat it."""
    parts = urlsplit(url) if "://" in url else None
    if parts is not None and ("@" in parts.netloc or parts.query or parts.fragment):
        raise DataError(
            "an address of data has no user, password, query or fragment",
            where=without_secrets(f"{parts.scheme}://{parts.netloc}{parts.path}"),
            fix="give credentials in the environment (~/.netrc, AWS_ACCESS_KEY_ID, GOOGLE_APPLICATION_CREDENTIALS)",
        )


class Failure(enum.Enum):
    """Kind of a failed call."""

    PASSING = "a broken connection, or a server that is away or overloaded: the next attempt may do"
    MISSING = "there is no such file"
    FORBIDDEN = "no credentials, or none that suffice"
    REFUSED = "the request is wrong"


class AbandonedError(Exception):
    """The work is no longer wanted."""


@dataclass(frozen=True, slots=True)
class Waits:
    """Retry policy: exponential backoff with jitter, anew after each answer."""

    first_s: float = 0.5
    longest_s: float = 20.0
    total_s: float = 300.0  # time without an answer after which the call has failed


def failure_of(error: BaseException) -> Failure:
    """Returns the kind of failure of an exception of a network."""
    status = _status(error)
    name = type(error).__name__
    if isinstance(error, FileNotFoundError) or status in _ABSENT:
        return Failure.MISSING
    lacks_credentials = "Credentials" in name or name in _FORBIDDEN_NAMES
    if isinstance(error, PermissionError) or status in (401, 403) or lacks_credentials:
        return Failure.FORBIDDEN
    # 3xx: a redirect that the client has not followed, to itself or to a scheme such as file:.
    is_wrong = status is not None and 300 <= status < 500 and status not in _PASSING_STATUS
    # urllib's reason is a text where it cannot ask an address (ftp:), and another error else.
    is_refused = isinstance(error, urllib.error.URLError) and isinstance(error.reason, str) and status is None
    if is_wrong or is_refused or (isinstance(error, OSError) and error.errno in _LASTING_ERRNO):
        return Failure.REFUSED
    return Failure.PASSING


def describe(error: BaseException) -> str:
    """Returns one line of an error, without user, password and query of any URL in it."""
    status = _status(error)
    attribute = "strerror" if status is None else "message"
    text = str(getattr(error, attribute, None) or getattr(error, "reason", None) or error)
    text = re.sub(r"\?\S+", "?...", re.sub(r"//[^/@\s]*@", "//", " ".join(text.split())))
    if status is not None:
        return f"the server answers {status} {text or type(error).__name__}"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _status(error: BaseException) -> int | None:
    """Returns the HTTP status of an error that is an answer of a server."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore's
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    else:
        status = getattr(error, "status", None) or getattr(error, "code", None)
        status = status or getattr(response, "status_code", None)
    return int(status) if str(status).isdecimal() else None


class RemoteAttempts:
    """The attempts at one remote file: the failures that end them, and the waits in between."""

    def __init__(self, url: str, waits: Waits, abandoned: Callable[[], bool] = lambda: False) -> None:
        self._shown = without_secrets(url)
        self._waits = waits
        self._abandoned = abandoned
        self.succeed()

    def succeed(self) -> None:
        """Resets the waits after an answer."""
        self._since = time.monotonic()
        self._wait_s = self._waits.first_s

    def explain(self, error: Exception) -> str:
        """Returns the reason of a failure that may pass; raises any other one.

        Raises:
            FileNotFoundError: There is no such file.
            PermissionError: No credentials, or insufficient ones.
            OSError: Another refusal. All have errno, strerror and, as filename, the redacted URL.
        """
        packages = {base.__module__.partition(".")[0] for base in type(error).__mro__}
        if not isinstance(error, OSError) and packages.isdisjoint(_NETWORK_PACKAGES):
            raise error
        failure = failure_of(error)
        if failure is Failure.MISSING:
            raise FileNotFoundError(errno.ENOENT, "no such file", self._shown) from error
        if failure is Failure.FORBIDDEN:
            raise PermissionError(errno.EACCES, describe(error), self._shown) from error
        if failure is Failure.REFUSED:
            raise OSError(errno.EINVAL, describe(error), self._shown) from error
        return describe(error)

    def wait(self, reason: str) -> None:
        """Waits before the next attempt. Raises: OSError (EIO), where there is none; AbandonedError."""
        # Jitter, so that the nodes of a job do not come back in step.
        until = time.monotonic() + self._wait_s * random.uniform(0.5, 1)
        if until > self._since + self._waits.total_s:
            text = f"{reason}, and no answer for {self._waits.total_s:g} s"
            raise OSError(errno.EIO, text, self._shown)
        self._wait_s = min(2 * self._wait_s, self._waits.longest_s)
        while (left_s := until - time.monotonic()) > 0:
            if self._abandoned():
                raise AbandonedError
            time.sleep(min(left_s, POLL_S))


def call_remote(url: str, call: Callable[[], _T], waits: Waits, abandoned: Callable[[], bool] = lambda: False) -> _T:
    """Returns the result of `call`, retried by `waits`. Raises: as `RemoteAttempts`."""
    attempts = RemoteAttempts(url, waits, abandoned)
    while True:
        try:
            return call()
        except Exception as error:
            reason = attempts.explain(error)
        _log.warning("%s: %s; trying again", without_secrets(url), reason)
        attempts.wait(reason)


# From here on one attempt each: failures are those of the clients, which `RemoteAttempts` explains.


class RemoteStream:
    """Bytes of a remote file from some offset; `position` is the next byte's, `num_bytes` the size.

    Without `has_range` the server sends the whole file, and the bytes before `start` are dropped.
    """

    def __init__(
        self, source: Any, read: Callable[[int], bytes], num_bytes: int | None, start: int, range_end: int | None
    ) -> None:
        self._source = source
        self._read = read
        self._start = start
        self._end = num_bytes if range_end is None else range_end
        self.num_bytes = num_bytes
        self.has_range = range_end is not None
        self.position = start if self.has_range else 0

    def read(self, num_bytes: int) -> bytes:
        """Returns up to `num_bytes`, none at the end. Raises: ConnectionError: broken off."""
        while self.position < self._start:
            if not self._next(self._start - self.position):
                return b""
        return self._next(num_bytes)

    def skip_to(self, offset: int) -> bool:
        """Returns whether the next read begins at `offset`; without ranges, bytes are dropped."""
        if self.position > offset or (self.has_range and self.position < offset):
            return False
        self._start = offset
        return self._end is None or offset < self._end

    def close(self) -> None:
        """Ends the connection."""
        with suppress(Exception):  # it may be broken already
            self._source.close()

    def _next(self, num_bytes: int) -> bytes:
        piece = self._read(num_bytes)
        if not piece and self._end is not None and self.position < self._end:
            raise ConnectionResetError(
                errno.ECONNRESET,
                f"broken off after {self.position} of {self._end} bytes",
            )
        self.position += len(piece)
        return piece


def open_url(url: str, start: int = 0, stop: int | None = None, size: int | None = None) -> RemoteStream:
    """Opens a remote file at byte `start`.

    `stop` ends the range that http asks for (None: the file's end), while s3 and gs ask for each
    read; a known `size` saves s3 and gs a request.
    """
    if not url.startswith("http"):
        # No cache: every read is one request for exactly its bytes.
        file = filesystem(url).open(url, "rb", cache_type="none", size=size)
        file.seek(start)
        return RemoteStream(file, file.read, file.size, start, file.size)
    last = "" if stop is None else stop - 1
    headers = {} if stop is None and not start else {"Range": f"bytes={start}-{last}"}
    response = _request(url, "GET", headers)
    range_end = None
    num_bytes = _content_length(response)
    if response.status == 206:
        place = _RANGE.fullmatch(response.headers.get("Content-Range", ""))
        if place is None or int(place[1]) != start:
            response.close()
            raise ConnectionError("the server answers with another range than the one asked for")
        range_end = int(place[2]) + 1
        num_bytes = None if place[3] == "*" else int(place[3])

    def read(num_bytes: int) -> bytes:
        return response.read1(min(num_bytes, PIECE_BYTES))

    return RemoteStream(response, read, num_bytes, start, range_end)


def stat_url(url: str) -> dict[str, Any]:
    """Returns type, size (None: unknown) and version keys of a file, as fsspec names them."""
    if not url.startswith("http"):
        return filesystem(url).info(url)
    try:
        response = _request(url, "HEAD", {})
    except urllib.error.HTTPError as error:
        if failure_of(error) in (Failure.PASSING, Failure.MISSING):
            raise
        response = None
    if response is None or _content_length(response) is None:
        response = _request(url, "GET", {})  # a server that knows no HEAD
    response.close()
    versions = {key: response.headers.get(key) for key in ("ETag", "Last-Modified")}
    return {"type": "file", "size": _content_length(response), **versions}


def version_of(facts: Mapping[str, Any]) -> str:
    """Returns the version of a file, which changes with its bytes; "-" if there is none."""
    return next((str(facts[key]) for key in _VERSION_KEYS if facts.get(key)), "-")


def filesystem(url: str) -> Any:
    """Returns the fsspec file system of a URL. Raises: LaunchError: no package for it."""
    import fsspec

    scheme = url.partition("://")[0]
    try:
        # A listing that is remembered would hide that a file has changed.
        return fsspec.filesystem(scheme, use_listings_cache=False)
    except ImportError as error:
        raise LaunchError(
            f"{scheme}:// needs a package that is not installed ({error})",
            where=without_secrets(url),
            fix=install_fix("cloud"),
        ) from None


@cache
def _opener() -> urllib.request.OpenerDirector:
    # build_opener would add file:, ftp: and data: to the targets of redirects.
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler,
        urllib.request.HTTPHandler,
        urllib.request.HTTPSHandler,
        urllib.request.HTTPRedirectHandler,
        urllib.request.HTTPErrorProcessor,
        urllib.request.HTTPDefaultErrorHandler,
        urllib.request.UnknownHandler,
    ):
        opener.add_handler(handler())
    return opener


def _request(url: str, method: str, headers: dict[str, str]) -> Any:
    """Sends one request; credentials of the URL or of netrc do not follow a redirect."""
    parts = urlsplit(url)
    user_info, _, place = parts.netloc.rpartition("@")
    # A signed URL is sent as it is written.
    target = quote(parts._replace(netloc=place, fragment="").geturl(), safe=string.punctuation)
    # The bytes must be those that are stored.
    request = urllib.request.Request(target, headers={"Accept-Encoding": "identity"} | headers, method=method)
    user, _, password = user_info.partition(":")
    login = (unquote(user), unquote(password)) if user_info else netrc_login(parts.hostname or "")
    if login is not None:
        token = base64.b64encode(":".join(login).encode()).decode()
        request.add_unredirected_header("Authorization", f"Basic {token}")
    try:
        return _opener().open(request, timeout=TIMEOUT_S)
    except urllib.error.HTTPError as error:
        error.close()
        raise


def _content_length(response: Any) -> int | None:
    length = response.headers.get("Content-Length", "")
    return int(length) if re.fullmatch("[0-9]{1,18}", length) else None
