"""What a drill says while it goes on: a bar in a terminal, plain lines anywhere else; all of it on stderr."""

import contextlib
from collections.abc import Iterator
from typing import Any

from pretrain.utils.log import stderr_console


class Progress:
    """Lines, and the bar of what is being done."""

    def __init__(self, console: Any, bar: Any) -> None:
        self._console, self._bar = console, bar
        self._task: Any = None

    def say(self, text: str) -> None:
        """Prints a line, above the bar."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def begin(self, what: str, total: int) -> None:
        """Shows how far `what` is, from now on."""
        if self._bar is not None:
            if self._task is not None:
                self._bar.remove_task(self._task)
            self._task = self._bar.add_task(what, total=total)

    def reach(self, done: int) -> None:
        """So much is done."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done)


@contextlib.contextmanager
def show_progress() -> Iterator[Progress]:
    """Gives a progress whose bar vanishes at the end."""
    console = stderr_console()
    if not console.is_terminal:
        yield Progress(console, None)
        return
    from rich import progress

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
    )
    with progress.Progress(*columns, console=console, transient=True) as bar:
        yield Progress(console, bar)
