"""Progress of a command that reads a shard folder: a bar on a terminal, nothing elsewhere."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from pretrain.utils.log import stderr_console

Tick = Callable[[int], None]
"""Called with the amount of work done since the last call, from any thread."""

StartPhase = Callable[[str, int], Tick]
"""Begins a phase of the work (what is done, how much there is of it) and returns its tick."""


def no_progress(phase: str, total: int) -> Tick:
    """Shows nothing."""
    return lambda amount: None


def share_of(total: int, num_parts: int, number: int) -> int:
    """Returns how much of `total` part `number` of so many equal parts is; the parts add up to it."""
    return total * (number + 1) // num_parts - total * number // num_parts


@contextlib.contextmanager
def show_progress() -> Iterator[StartPhase]:
    """Gives a function that draws one bar a phase on stderr, where that is a terminal; bars vanish at the end."""
    console = stderr_console()
    if not console.is_terminal:
        yield no_progress
        return
    from rich import progress

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.TaskProgressColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=console, transient=True) as bar:
        yield lambda phase, total: _ticker(bar, phase, total)


def _ticker(bar: Any, phase: str, total: int) -> Tick:
    task = bar.add_task(phase, total=total)
    lock = threading.Lock()

    def tick(amount: int) -> None:
        with lock:
            bar.advance(task, amount)

    return tick
