"""Results of checks: the report of a host, as JSON and as a table for a terminal."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from pydantic import TypeAdapter

from pretrain.errors import EXIT_OK, EXIT_UNAVAILABLE
from pretrain.utils.units import listed

if TYPE_CHECKING:
    from rich.console import Console

Status = Literal["pass", "warn", "fail"]
MOST_HOSTS = 4


@dataclass(frozen=True, slots=True)
class Check:
    """Result of one check. `warn`: slower or less safe training; `fail`: no training."""

    name: str
    status: Status
    detail: str  # what was found, with its numbers
    fix: str = ""  # advice; empty if it passes
    exit_code: int = EXIT_UNAVAILABLE  # of the command, if the check fails


@dataclass(frozen=True, slots=True)
class Report:
    """All checks of a host in the order of display, and its versions (`versions.own_versions`)."""

    host: str
    checks: list[Check]
    versions: dict[str, str]

    def facts(self) -> dict[str, Any]:
        """Returns JSON values."""
        return {**asdict(self), "exit_code": exit_code(self.checks)}


def exit_code(checks: Iterable[Check]) -> int:
    """Returns the exit code of the first check that fails; 0 without a failure."""
    return next((check.exit_code for check in checks if check.status == "fail"), EXIT_OK)


def report_of(facts: dict[str, Any]) -> Report:
    """Returns the report of its JSON values. Raises: ValueError: the values are no report."""
    return TypeAdapter(Report).validate_python(facts)


def read_reports(text: str) -> list[Report]:
    """Reads reports, a line of JSON each, as `--quick --json` prints them; skips other lines."""
    adapter = TypeAdapter(Report)
    reports = []
    for line in text.splitlines():
        with suppress(ValueError):
            reports.append(adapter.validate_json(line))
    return reports


def merge_reports(reports: Sequence[Report]) -> list[Check]:
    """Merges the checks of several hosts; those that do not pass name their hosts."""
    merged: list[Check] = []
    for name in dict.fromkeys(check.name for report in reports for check in report.checks):
        entries = [(report.host, check) for report in reports for check in report.checks if check.name == name]
        bad: dict[Check, list[str]] = {}
        for host, check in entries:
            if check.status != "pass" and host not in bad.setdefault(check, []):
                bad[check].append(host)
        if not bad:
            host, first = entries[0]
            is_same = len({check.detail for _, check in entries}) == 1
            more = f"{host}: {first.detail}; {len(entries) - 1} more pass"
            merged.append(first if is_same else replace(first, detail=more))
        for check, hosts in bad.items():
            merged.append(replace(check, detail=f"{listed(hosts, MOST_HOSTS)}: {check.detail}"))
    return merged


_STYLES = {"pass": "green", "warn": "yellow", "fail": "bold red"}


def show_checks(title: str, checks: Sequence[Check], console: "Console") -> None:
    """Prints checks, a line each, with the advice below those that do not pass."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, show_header=False)
    table.add_column(min_width=4)
    table.add_column(min_width=16, overflow="fold")
    table.add_column(overflow="fold")
    for check in checks:
        status = f"[{_STYLES[check.status]}]{check.status}[/]"
        table.add_row(status, check.name, escape(check.detail))
        if check.status != "pass" and check.fix:
            table.add_row("", "", f"[bold]fix:[/] {escape(check.fix)}")
    console.print(table)
    statuses = [check.status for check in checks]
    counts = ", ".join(f"{statuses.count(status)} {status}" for status in ("pass", "warn", "fail"))
    console.print(counts, highlight=False)
