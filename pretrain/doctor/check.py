"""Checks, and the report of a host with its checks."""

import json
import socket
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from pretrain.errors import EXIT_OK, EXIT_UNAVAILABLE

Status = Literal["pass", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Check:
    """Result of one check.

    Attributes:
        name: Name of the check.
        status: `pass`; `warn`: it trains, but slower or with less safety than it could; `fail`: it will not train.
        detail: What was found, with its numbers.
        fix: Advice; empty if it passes.
        exit_code: Exit code of the command if it fails.
    """

    name: str
    status: Status
    detail: str
    fix: str = ""
    exit_code: int = EXIT_UNAVAILABLE


@dataclass(frozen=True, slots=True)
class Report:
    """Result of all checks of a host.

    Attributes:
        host: Host name.
        checks: Checks in the order of display.
        versions: Versions of packages, and a digest of our code.
    """

    host: str
    checks: list[Check]
    versions: dict[str, str]

    def facts(self) -> dict[str, Any]:
        """Returns JSON values."""
        return {**asdict(self), "exit_code": exit_code(self.checks)}


def this_host() -> str:
    """Returns the name of this machine."""
    return socket.gethostname()


def exit_code(checks: Iterable[Check]) -> int:
    """Returns the exit code of the first check that fails; 0 where none does."""
    return next((check.exit_code for check in checks if check.status == "fail"), EXIT_OK)


def report_of(facts: dict[str, Any]) -> Report:
    """Returns a report of its JSON values. Raises: TypeError, LookupError, AttributeError: the values are no report."""
    names = {field.name for field in fields(Check)}
    checks = [Check(**{key: one[key] for key in names & one.keys()}) for one in facts["checks"]]
    return Report(facts["host"], checks, dict(facts["versions"]))


def read_reports(text: str) -> list[Report]:
    """Reads reports, a line of JSON each, as `--quick --json` prints them; other lines are skipped."""
    found = []
    for line in text.splitlines():
        try:
            found.append(report_of(json.loads(line)))
        except (ValueError, TypeError, LookupError, AttributeError):
            continue
    return found


# The doctor's findings as a table for a terminal.


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
    """Escapes the markup of rich."""
    return text.replace("[", "\\[")
