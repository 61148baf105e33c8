"""Tables on a terminal, in a pipe, and on a terminal that is too narrow: never cut."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


def print_whole(table: "Table") -> None:
    """Prints a table to standard output as wide as it is; what exceeds the terminal, the terminal wraps."""
    from rich.console import Console
    from rich.measure import Measurement

    console = Console()
    needed = Measurement.get(console, console.options.update(width=1000), table).maximum
    console.width = max(console.width, needed) if console.is_terminal else needed
    with console.capture() as printed:
        console.print(table, soft_wrap=True)
    # A box has blank lines where it has no edges.
    print("\n".join(line.rstrip() for line in printed.get().splitlines() if line.strip()))
