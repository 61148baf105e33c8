"""Calls over a network whose failures are to be those of a disk: tried again, and one clear OSError in the end."""

import errno
import logging
from collections.abc import Callable
from typing import TypeVar

from pretrain.prepare.inputs.urls import shown
from pretrain.utils.remote import Attempts, Failure, Waits, describe, failure_of, is_of_network

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
    attempts = Attempts(WAITS)
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
