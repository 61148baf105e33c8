"""Runs as tables for a terminal: a line each (`pretrain runs`), or one with all its starts."""

from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pretrain.run.folder import RECOVERY
from pretrain.run.rank_notes import RANKS, describe_notes
from pretrain.run.recovery import describe_recovery
from pretrain.utils.log import printable
from pretrain.utils.units import clock_time, count, span
from pretrain_launch.runs import RunFacts, effective

MAX_STARTS = 200  # the newest ones are shown; a terminal takes seconds for thousands
WIDE = 110  # columns of a terminal from which on reasons stand in the table, not below it
_COLUMNS = ("state", "step", "loss", "tokens/s", "checkpoint", "job", "restarts")
_NEVER = {
    "PartitionConfig": " (the partition has or allows less than it asks for: it will not start)",
    "PartitionNodeLimit": " (it asks for more nodes than the partition has or allows, and will not start)",
    "PartitionTimeLimit": " (it asks for more time than the partition allows, and will not start)",
}
"""What Slurm's reasons for waiting mean for those that do not know them."""
_STYLES = {
    **dict.fromkeys(("running", "done"), "green"),
    **dict.fromkeys(("failed", "lost"), "bold red"),
    **dict.fromkeys(("cancelled", "stopped", "ending"), "yellow"),
    "queued": "cyan",
}


def show_runs(runs: list[RunFacts], folder: Path, console: Console) -> None:
    """Prints a line for each run."""
    is_wide = console.width >= WIDE
    gap = 2 if is_wide else 1
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, gap, 0, 0))
    cells = [_cells(run) for run in runs]
    widths = {name: max(len(name), *(len(row[number]) for row in cells)) for number, name in enumerate(_COLUMNS)}
    room = console.width - sum(widths.values()) - gap * (len(widths) + 1)
    names = [printable(str(run.path.relative_to(folder)) if run.path != folder else run.name) for run in runs]
    name_width = max(10, min(room - 24 * is_wide, max(map(len, names))))
    table.add_column("run", overflow="ellipsis", no_wrap=True, max_width=name_width)
    for name, width in widths.items():  # never cut
        table.add_column(name, justify=_justify(name), no_wrap=True, min_width=width)
    if is_wide:
        table.add_column("why", overflow="ellipsis", no_wrap=True, max_width=room - name_width)
    for name, run, (_, *row) in zip(names, runs, cells, strict=True):
        _add(table, name, _state(run), *row, *([_why(run)] if is_wide else []))
    console.print(table)
    if not is_wide:
        for name, run in zip(names, runs, strict=True):
            if why := _why(run):
                console.print(printable(f"{name}: {why}"), markup=False)


def _add(table: Table, *cells: str | Text) -> None:
    """Adds a row of texts of a run, which may hold anything."""
    table.add_row(*(Text(printable(cell)) if isinstance(cell, str) else cell for cell in cells))


def _justify(name: str) -> Literal["left", "right"]:
    return "left" if name in ("state", "job", "began") else "right"


def _cells(run: RunFacts) -> list[str]:
    """Returns the columns of a run."""
    checkpoint = ""
    if run.checkpoint_step is not None:
        checkpoint = f"{run.checkpoint_step}, {_short(run.checkpoint_age_s or 0)} ago"
    job = f"{run.job or ''}{f' +{len(run.queue) - 1}' * (len(run.queue) > 1)}"  # the rest of its chain
    return [run.state, _steps(run), _loss(run), _speed(run.tokens_per_s), checkpoint, job, str(run.restarts or "")]


def show_run(run: RunFacts, console: Console) -> None:
    """Prints all that is known of a run."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim", min_width=12)
    table.add_column(overflow="fold")
    for name, value in (*_progress_rows(run), *_job_rows(run)):
        _add(table, name, value)
    console.print(table)
    if not run.starts:
        return
    console.print()
    shown = list(enumerate(run.starts, start=1))[-MAX_STARTS:]
    if hidden := len(run.starts) - len(shown):
        console.print(f"the {hidden} starts before these: --json")
    console.print(_starts(shown))
    for number, start in shown:
        ended = start["reason"]
        if start["exit_code"] is None and not start["is_at_work"]:
            ended = "without a word: killed, node lost, or disk full"
        if recovery := describe_recovery(start[RECOVERY]):
            console.print(printable(f"start {number}: {recovery}"), markup=False)
        for note in describe_notes(start[RANKS]):
            console.print(printable(f"start {number}: {note}"), markup=False)
        if ended:
            console.print(printable(f"start {number}: {'refused: ' * start['is_refused']}{ended}"), markup=False)


def _progress_rows(run: RunFacts) -> Iterator[tuple[str, str | Text]]:
    yield "run", f"{run.name} in {run.path}"
    yield "state", _state(run)
    if why := _why(run):
        yield "", why
    yield "step", _steps(run)
    if run.loss is not None:
        speed = ""
        if run.images_per_s:
            speed = f", {_speed(run.images_per_s)} images/s"
        elif run.tokens_per_s:
            speed = f", {_speed(run.tokens_per_s)} tokens/s"
        yield "loss", f"{_loss(run)}{speed}"
    if run.checkpoint_step is not None:
        yield "checkpoint", f"step {run.checkpoint_step}, {span(run.checkpoint_age_s or 0)} ago"
    if run.recoveries:
        yield "recoveries", f"{run.recoveries} without a restart"
    if run.best is not None:
        yield "best", f"step {run.best['step']}, {run.best['metric']} {run.best['value']:.4f}"


def _job_rows(run: RunFacts) -> Iterator[tuple[str, str]]:
    for job in run.queue:
        nodes = f" on {job.nodes}" if job.nodes else ""
        yield "job", f"{job.element}: {job.state}{nodes}, {job.elapsed} of {job.limit}"
    if run.job and not run.queue:
        state = "not in the queue" if run.slurm_answers else "Slurm does not answer"
        yield "job", f"{run.job}: {state}"
    if run.limit_s and run.signal_s:
        yield "time limit", f"{clock_time(run.limit_s)} a job, saving {clock_time(run.signal_s)} before"
    if run.submitted:
        yield "submitted", f"{_minute(run.submitted)} UTC"
    if run.log:
        yield "log", run.log
    if run.owner:
        yield "at work", run.owner


def _starts(starts: list[tuple[int, dict[str, Any]]]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("start", "job", "began", "lasted", "ranks", "from", "code"):
        table.add_column(name, justify=_justify(name), no_wrap=True)
    table.add_column("nodes", overflow="fold")
    for number, start in starts:
        restart = f"+{start['restart']}" if start["restart"] else ""
        began = lasted = ""
        with suppress(TypeError, ValueError):
            began = _minute(start["started"])
            took = datetime.fromisoformat(start["ended"]) - datetime.fromisoformat(start["started"])
            lasted = _short(took.total_seconds())
        numbers = [start[name] for name in ("world_size", "from_step", "exit_code")]
        ranks, step, code = ("" if number is None else str(number) for number in numbers)
        nodes = ",".join(str(node) for node in start["nodes"] or [])
        job = f"{start['job'] or ''}{restart}"
        _add(table, str(number), job, began, lasted, ranks, step, code, nodes)
    return table


def _minute(time: str) -> str:
    """Returns an ISO time as `01-02 03:00`, UTC. Raises: TypeError, ValueError."""
    return datetime.fromisoformat(time).astimezone(UTC).strftime("%m-%d %H:%M")


def _state(run: RunFacts) -> Text:
    return Text(run.state, style=_STYLES.get(run.state, ""))


def _why(run: RunFacts) -> str:
    """Returns the reason of an end, and of a start that was refused since, or of waiting."""
    last = run.starts[-1] if run.is_over and run.starts else {}
    refusal = ""
    if last.get("is_refused") and last is not effective(run.starts)[-1]:
        refusal = f"job {last['job']} was refused, {last['exit_code']}: {last['reason']}"
    damage = f"damaged: {run.damage}" if run.damage else ""
    return "; ".join(filter(None, (damage, _outcome(run), refusal)))


def _outcome(run: RunFacts) -> str:
    """Returns the reason of an end, or of waiting."""
    if run.state == "queued" and run.queue:
        starts = run.queue[0].starts
        expected = f", may start {starts}" if starts not in ("", "N/A") else ""
        reason = run.queue[0].reason
        return f"waits: {reason}{_NEVER.get(reason, '')}{expected}"
    if run.state in ("failed", "stopped", "cancelled"):
        code = f"{run.exit_code}: " if run.exit_code else ""
        return f"{code}{run.reason or ''}"
    if run.state == "lost":
        if not run.step:
            said = f"; last output: {run.reason}" if run.reason else ""
            return f"killed before its first step was done, or never began{said}"
        return f"killed, node lost, or disk full, after step {run.step}: the same command continues it"
    return ""


def _steps(run: RunFacts) -> str:
    return f"{run.step}/{run.total_steps}" if run.total_steps else str(run.step)


def _loss(run: RunFacts) -> str:
    return "" if run.loss is None else f"{run.loss:.4g}"


def _speed(number: float | None) -> str:
    """Returns a speed as `count` does, but thousands as `4.27 k` below ten thousand too."""
    if number is None:
        return ""
    return f"{number / 1e3:.2f} k" if 1e3 <= number < 1e4 else count(number)


def _short(seconds: float) -> str:
    """Returns `45s`, `12m`, `5h`, `3d`."""
    for factor, unit in ((86_400, "d"), (3600, "h"), (60, "m")):
        if seconds >= 2 * factor:
            return f"{seconds / factor:.0f}{unit}"
    return f"{seconds:.0f}s"
