"""Calls over a network: whether a failure may pass, and the waits between attempts.

    failure_of(error)   what the packages that speak http, s3 and gs mean, each in its own way
    describe(error)     one line of it, without secrets
    Attempts            waits, longer each time, with jitter, until there has been no answer for too long

Deliberately not here: what is called, and the error that a user sees (inputs/retry.py, remote/).
"""

import enum
import errno
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass

POLL_S = 0.1

_PASSING_STATUS = (408, 425, 429)
_LASTING_ERRNO = (errno.EINVAL, errno.EPERM, errno.ENOSYS, errno.ENAMETOOLONG, getattr(errno, "EREMCHG", None))
_NETWORK_PACKAGES = ("aiohttp", "aiobotocore", "botocore", "s3fs", "gcsfs", "google", "requests", "urllib3")
_FORBIDDEN_NAMES = ("ProfileNotFound", "InvalidAccessKeyId")


class Failure(enum.Enum):
    """What a failed call says."""

    PASSING = "a broken connection, or a server that is away or overloaded: the next attempt may do"
    MISSING = "there is no such file"
    FORBIDDEN = "no credentials, or none that suffice"
    REFUSED = "the request is wrong"


class AbandonedError(Exception):
    """What was being done is no longer wanted."""


@dataclass(frozen=True, slots=True)
class Waits:
    """How long a server may be away.

    Attributes:
        first_s: Wait after the first failure; doubled with each one, until there is an answer again.
        longest_s: The longest wait.
        total_s: Given up after so long without an answer.
    """

    first_s: float = 0.5
    longest_s: float = 20.0
    total_s: float = 300.0


class RetryTimer:
    """Waits between attempts at one thing."""

    def __init__(self, waits: Waits, abandoned: Callable[[], bool] = lambda: False) -> None:
        self._waits, self._abandoned = waits, abandoned
        self.succeed()

    def succeed(self) -> None:
        """Starts to count anew: there was an answer."""
        self._since, self._wait_s = time.monotonic(), self._waits.first_s

    def again(self) -> bool:
        """Waits before the next attempt; returns whether there is one. Raises: AbandonedError."""
        # Jitter, so that the nodes of a job do not come back in step.
        until = time.monotonic() + self._wait_s * random.uniform(0.5, 1)
        if until > self._since + self._waits.total_s:
            return False
        self._wait_s = min(2 * self._wait_s, self._waits.longest_s)
        while (left_s := until - time.monotonic()) > 0:
            if self._abandoned():
                raise AbandonedError
            time.sleep(min(left_s, POLL_S))
        return True


def is_of_network(error: BaseException) -> bool:
    """Whether an exception is one that a network brings about, not a mistake of ours."""
    packages = {base.__module__.partition(".")[0] for base in type(error).__mro__}
    return isinstance(error, OSError) or not packages.isdisjoint(_NETWORK_PACKAGES)


def failure_of(error: BaseException) -> Failure:
    """Returns what an exception of a network means."""
    status, name = _status(error), type(error).__name__
    if isinstance(error, FileNotFoundError) or status in (404, 410):
        return Failure.MISSING
    if isinstance(error, PermissionError) or status in (401, 403) or "Credentials" in name or name in _FORBIDDEN_NAMES:
        return Failure.FORBIDDEN
    is_wrong = status is not None and 400 <= status < 500 and status not in _PASSING_STATUS
    if is_wrong or (isinstance(error, OSError) and error.errno in _LASTING_ERRNO):
        return Failure.REFUSED
    return Failure.PASSING


def describe(error: BaseException) -> str:
    """Returns one line, without the user, password and query of any URL in it, which may be secrets."""
    status = _status(error)
    if status is not None:
        return f"the server answers {status} {getattr(error, 'message', '') or type(error).__name__}"
    text = " ".join(str(getattr(error, "strerror", None) or error).split())
    text = re.sub(r"\?\S+", "?...", re.sub(r"//[^/@\s]*@", "//", text))
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _status(error: BaseException) -> int | None:
    """The HTTP status of an answer that is an error, if it is one."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore's
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    else:
        status = getattr(error, "status", None) or getattr(error, "code", None)
    return int(status) if str(status).isdecimal() else None
