"""The doctor's findings as a table for a terminal."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from pretrain.doctor.check import Check

_STYLES = {"pass": "green", "warn": "yellow", "fail": "bold red"}


def show_checks(title: str, checks: Sequence[Check], console: Console) -> None:
    """Prints checks, a line each, and what to do about those that do not pass under them."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, show_header=False)
    table.add_column(min_width=4)
    table.add_column(min_width=16, overflow="fold")
    table.add_column(overflow="fold")
    for check in checks:
        table.add_row(f"[{_STYLES[check.status]}]{check.status}[/]", check.name, _plain(check.detail))
        if check.status != "pass" and check.fix:
            table.add_row("", "", f"[bold]fix:[/] {_plain(check.fix)}")
    console.print(table)
    count = {status: sum(check.status == status for check in checks) for status in _STYLES}
    console.print(f"{count['pass']} pass, {count['warn']} warn, {count['fail']} fail", highlight=False)


def _plain(text: str) -> str:
    """Takes the meaning of brackets away."""
    return text.replace("[", "\\[")
