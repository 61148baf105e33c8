"""Calls over a network: tried again while the failure may pass, and one clear error in the end.

The packages below fail in their own ways; told apart here are what passes (a broken connection, a server that is away
or overloaded) and what does not (no such file, no permission, a request that is wrong).
"""

import errno
import logging
import re
import time
from collections.abc import Callable
from typing import TypeVar

from pretrain.data.inputs.urls import shown

RETRY_DELAYS_S = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
"""A server may be away for half a minute."""

_PASSING_STATUS = (408, 425, 429)
_LASTING_ERRNO = (errno.EINVAL, errno.EPERM, errno.ENOSYS, errno.ENAMETOOLONG, getattr(errno, "EREMCHG", None))
_NETWORK_PACKAGES = ("aiohttp", "aiobotocore", "botocore", "s3fs", "gcsfs", "google", "requests", "urllib3")

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


def call_remote(path: str, call: Callable[[], _T]) -> _T:
    """Returns what `call` returns, tried up to seven times.

    Raises:
        FileNotFoundError: There is no such file.
        PermissionError: No credentials, or none that suffice.
        OSError: Another refusal, or a failure that did not pass. Like the others it has errno, strerror and, as its
            filename, `path` without secrets.
    """
    for delay_s in (*RETRY_DELAYS_S, None):
        try:
            return call()
        except Exception as error:
            # fsspec's http says "not found" of any failure; what it was is the cause.
            cause = error.__cause__ if isinstance(error, FileNotFoundError) and error.__cause__ else error
            if not _is_of_network(cause):
                raise
            lasting = _lasting_error(cause, shown(path))
            if lasting is not None:
                raise lasting from error
            if delay_s is None:
                tries, seconds = len(RETRY_DELAYS_S) + 1, sum(RETRY_DELAYS_S)
                text = f"{_describe(cause)} (tried {tries} times in {seconds:g} s)"
                raise OSError(errno.EIO, text, shown(path)) from error
            _log.warning("%s: %s; trying again in %g s", shown(path), _describe(cause), delay_s)
        time.sleep(delay_s)
    raise AssertionError("the last try returns or raises")


def _is_of_network(error: BaseException) -> bool:
    """Whether an exception is one that a network brings about, not a mistake of ours."""
    packages = {base.__module__.partition(".")[0] for base in type(error).__mro__}
    return isinstance(error, OSError) or not packages.isdisjoint(_NETWORK_PACKAGES)


def _status(error: BaseException) -> int | None:
    """The HTTP status of an answer that is an error, if it is one."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore's
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    else:
        status = getattr(error, "status", None) or getattr(error, "code", None)
    return int(status) if str(status).isdecimal() else None


def _lasting_error(error: BaseException, path: str) -> OSError | None:
    """Returns the error to raise at once, or None where another try may do."""
    status = _status(error)
    if isinstance(error, FileNotFoundError) or status in (404, 410):
        return FileNotFoundError(errno.ENOENT, "no such file", path)
    if isinstance(error, PermissionError) or status in (401, 403) or "Credentials" in type(error).__name__:
        return PermissionError(errno.EACCES, _describe(error), path)
    is_wrong = status is not None and 400 <= status < 500 and status not in _PASSING_STATUS
    if is_wrong or (isinstance(error, OSError) and error.errno in _LASTING_ERRNO):
        return OSError(errno.EINVAL, _describe(error), path)
    return None


def _describe(error: BaseException) -> str:
    """One line, without the query of any URL in it, which may be a secret."""
    status = _status(error)
    if status is not None:
        return f"the server answers {status} {getattr(error, 'message', '') or type(error).__name__}"
    text = " ".join(str(getattr(error, "strerror", None) or error).split())
    return re.sub(r"\?\S+", "?...", f"{type(error).__name__}: {text}" if text else type(error).__name__)
