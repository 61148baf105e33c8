"""The last line of a terminal: the phase of a command and the time in it, then the bar of a run.

    show_phase("importing torch")                     a line of the log; on a terminal  | importing torch 0:03
    status_line().advance(52, 120, describe)                      52/120 ----------      2:11 loss 5.1234 ...
    status_line().close()                             the last state of a bar stays, a phase disappears
    with transient_bar() as bar: ...                  a bar of another command, instead of it

A thread keeps the time moving while the main thread imports or computes. Log lines appear above it
(`pretrain.utils.log`). There is no status line where stderr is no terminal, or a notebook's.
"""

import contextlib
import functools
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from pretrain.utils.units import clock_time

_REFRESHES_PER_S = 4
_LEAST_BAR = 10
# Room for the ^C ^C that a terminal echoes there: in the next line, they would leave the bar twice.
_ECHO_ROOM = 5

_log = logging.getLogger(__name__)


@functools.cache
def stderr_console() -> Any:
    """Returns the one `rich.console.Console` on stderr: log lines stay above the status line or a bar."""
    from rich.console import Console

    return Console(stderr=True, force_terminal=False if in_notebook() else None)


def has_terminal() -> bool:
    """Returns whether stderr is a terminal to rich, which is imported only where it might be."""
    is_forced = os.environ.keys() & {"FORCE_COLOR", "TTY_COMPATIBLE"}
    return bool((is_forced or sys.stderr.isatty()) and stderr_console().is_terminal)


def in_notebook() -> bool:
    """Returns whether a kernel of Jupyter has started this: its cell keeps every frame of a bar."""
    return "JPY_PARENT_PID" in os.environ


def show_phase(text: str) -> None:
    """Says what the process does from now on, to all handlers of `setup_logging`."""
    _log.info(text, extra={"is_phase": True})


class StatusLine:
    """The last line of the terminal on stderr; methods of it do nothing where that is none."""

    def __init__(self) -> None:
        self._live: Any = None
        self._phase = ""
        self._since = 0.0
        self._done, self._total = 0, 0
        self._label = ""
        self._begun = 0.0
        self._describe: Callable[[int], str] | None = None

    def enter(self, phase: str) -> None:
        """Shows a phase, beside the bar if there is one."""
        self._phase, self._since = phase, time.monotonic()
        self._refresh()

    def advance(self, done: int, total: int, describe: Callable[[int], str] | None = None, label: str = "") -> None:
        """Moves the bar, and begins it. `describe(width)` gives the text behind it; None: as it was.

        Costs a microsecond, and a millisecond with a new text, which is shown at once.
        """
        self._begun = self._begun if self._total else time.monotonic()
        self._done, self._total = done, total
        self._label = label or f"{done}/{total}"
        self._describe, self._phase = describe or self._describe, ""
        if describe or self._live is None:
            self._refresh()

    def close(self) -> None:
        """Ends the line; the last state of a bar stays on the screen. Idempotent."""
        if self._live is not None:
            self._live.transient = not self._total
            self._phase = ""
            self._live.stop()
            self._live = None
        self._total = 0
        self._describe = None

    def _refresh(self) -> None:
        if self._live is not None:
            self._live.refresh()
        elif has_terminal():
            self._start()

    def _start(self) -> None:
        from rich.live import Live

        self._live = Live(
            get_renderable=self._render,
            console=stderr_console(),
            refresh_per_second=_REFRESHES_PER_S,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start(refresh=True)
        stderr_console().show_cursor()  # a process that is killed could not bring it back

    def _render(self) -> Any:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        now = time.monotonic()
        room = stderr_console().width - _ECHO_ROOM
        phase = f"{self._phase} {clock_time(now - self._since)}" if self._phase else ""
        if not self._total:
            turning = "|/-\\"[int(now * _REFRESHES_PER_S) % 4]
            return Text(f"{turning} {phase}"[:room], no_wrap=True)
        end = clock_time(now - self._begun)
        width = room - len(self._label) - len(end) - _LEAST_BAR - 3
        text = phase or (self._describe(width) if self._describe else "")
        line = Table.grid(padding=(0, 1))
        bar = ProgressBar(self._total, self._done, width=_LEAST_BAR + max(0, width - len(text)))
        line.add_row(self._label, bar, end, Text(text[: max(0, width)], no_wrap=True))
        return line


@functools.cache
def status_line() -> StatusLine:
    """Returns the status line of this process."""
    return StatusLine()


@contextlib.contextmanager
def transient_bar(amount: str = "{task.percentage:>3.0f}%") -> Iterator[Any]:
    """Draws a progress bar on stderr that disappears at the end; none where that is no terminal.

    Yields a `rich.progress.Progress`, whose tasks any thread may advance. `amount` is the text
    after the bar, a format string over `task`: `{task.completed}/{task.total}`.
    """
    from rich import progress

    status_line().close()
    console = stderr_console()
    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.TextColumn(amount),
        progress.TimeRemainingColumn(),
    )
    is_shown = bool(console.is_terminal)
    with progress.Progress(*columns, console=console, transient=True, disable=not is_shown) as bar:
        yield bar
