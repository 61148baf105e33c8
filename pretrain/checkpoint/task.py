"""Work beside the loop: a function in a thread of its own, and what it came to."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Result = TypeVar("Result")


class Task(Generic[Result]):
    """Runs `work` in a daemon thread, which must not call a collective.

    Args:
        work: Called once.
    """

    def __init__(self, work: Callable[[], Result]) -> None:
        self._work = work
        self._result: list[Result] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result.append(self._work())
        except BaseException as error:  # for whoever asks for the result
            self._error = error

    @property
    def is_done(self) -> bool:
        """Whether there is a result, or an error."""
        return not self._thread.is_alive()

    def wait(self, timeout_s: float | None = None) -> None:
        """Returns when it is done, or when the time is over. Signals are handled meanwhile."""
        self._thread.join(timeout_s)

    def result(self) -> Result:
        """Waits; returns what `work` returned, or raises what it raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._result[0]
