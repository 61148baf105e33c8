"""Tables of a report on the course of runs: summary, starts, rollbacks, evaluations."""

import math
import statistics
from collections.abc import Sequence
from html import escape
from typing import Any

from pretrain.errors import EXIT_OK, EXIT_RESUME_ME
from pretrain.report.evaluations import ORDER, Evaluation, evaluation_rows
from pretrain.report.html import LONG_CHARACTERS, Html, figure, folded, swatch, table, without_empty
from pretrain.report.panels import color_of
from pretrain.report.run_data import RunData
from pretrain.report.start_timeline import instant
from pretrain.utils.units import count, percent, size, span

_VALIDATION = {
    "val_loss": "loss",
    "val_perplexity": "perplexity",
    "val_bits_per_byte": "bits per byte",
    "val_accuracy": "accuracy",
    "val_tokens": "targets",
}
_STATES = {EXIT_OK: "done", EXIT_RESUME_ME: "stopped"}


def summarize(run: RunData) -> dict[str, Any]:
    """Returns the figures of a run for the summary and for JSON; None where unknown."""
    last = run.starts[-1] if run.starts else {}
    code = last.get("exit_code")
    losses, validation = run.finite("loss"), run.finite("val_loss")
    best = min(validation, key=lambda point: point[1], default=None)
    return {
        "name": run.label,
        "path": str(run.path),
        "id": run.record["id"],
        "state": "running or lost" if code is None else _STATES.get(code, "failed"),
        "reason": last.get("reason"),
        "steps": run.last_step,
        "total_steps": run.config.get("train.steps"),
        "tokens": int(run.course.tokens[-1]),
        "hours_in_loop": round(run.course.hours[-1], 4),
        "starts": len(run.starts),
        "loss": losses[-1][1] if losses else None,
        "best_val_loss": best[1] if best else None,
        "best_val_step": int(best[0]) if best else None,
        "median_tokens_per_s": _median(_values(run, "tokens_per_s")),
        "median_mfu": _median(_values(run, "mfu")),
        "median_data_wait": _median(_values(run, "data_wait")),
        "peak_memory_bytes": max(_values(run, "memory_bytes"), default=None),
        "parameters": run.parameters,
        "checkpoints": len(run.checkpoints),
        "evaluations": len(run.evaluations),
        "notes": run.notes,
    }


def _values(run: RunData, name: str) -> list[float]:
    return [value for _, value in run.finite(name)]


def _median(values: list[float]) -> float | None:
    return statistics.median_high(values) if values else None


def name_cell(number: int, run: RunData) -> Html:
    """Returns a cell with a run's colour and name."""
    kind = " class=long" if len(run.label) > LONG_CHARACTERS else ""
    return Html(f'<td{kind} title="{escape(str(run.path))}">{swatch(color_of(number))} {escape(run.label)}</td>')


def summary_table(runs: Sequence[RunData]) -> str:
    """Returns a row for each run with the figures that are compared first."""
    heads = ("run", "state", "steps", "tokens", "in the loop", "starts", "loss", "best validation", "tokens/s", "MFU",
             "data wait", "memory", "parameters")  # fmt: skip
    rows = []
    for number, run in enumerate(runs):
        s = summarize(run)
        steps = f"{s['steps']:,}" + (f" of {s['total_steps']:,}" if isinstance(s["total_steps"], int) else "")
        best = None if s["best_val_loss"] is None else f"{figure(s['best_val_loss'])} at {s['best_val_step']:,}"
        rows.append([
            name_cell(number, run), s["state"], steps, count(s["tokens"]), span(s["hours_in_loop"] * 3600), s["starts"],
            s["loss"], best, _known(s["median_tokens_per_s"], count), _known(s["median_mfu"], percent),
            _known(s["median_data_wait"], percent), _known(s["peak_memory_bytes"], size), _known(run.parameters, count),
        ])  # fmt: skip
    return table(*without_empty(heads, rows))


def _known(value: float | None, form: Any) -> str | None:
    return None if value is None else form(value)


def starts_table(run: RunData) -> str:
    """Returns every start of a run, with its Slurm job where there is one."""
    rows = []
    for number, start in enumerate(run.starts, start=1):
        begin, end = instant(start.get("started")), instant(start.get("ended"))
        lasted = None if begin is None or end is None else _lasted((end - begin).total_seconds())
        restart = start.get("restart")
        job = f"{start.get('job') or ''}{f', restart {restart}' if restart else ''}"
        nodes = ", ".join(str(node) for node in start.get("nodes") or [])
        rows.append([
            number, job or None, str(start.get("started") or ""), lasted, nodes, start.get("world_size"),
            start.get("from_step"), start.get("exit_code"),
            start.get("reason") or _open_reason(start, number == len(run.starts)),
        ])  # fmt: skip
    heads = ("start", "Slurm job", "began", "lasted", "nodes", "ranks", "from step", "exit code", "how it ended")
    return table(*without_empty(heads, rows))


def _open_reason(start: dict[str, Any], is_last: bool) -> str | None:
    """Returns the reason that stands for the missing one of a start without an end."""
    if start.get("exit_code") is not None:
        return None
    return "running, or killed" if is_last else "no end recorded: killed, or its node was lost"


def _lasted(seconds: float) -> str:
    return span(seconds) if seconds >= 1 else "under 1 s"  # run.json has whole seconds


def rollbacks_table(run: RunData) -> str:
    """Returns the rollbacks of a run; empty where there was none."""
    how = {True: "automatic, after a spike", False: "pretrain rollback"}
    rows = [
        [entry.get("at"), entry.get("to"), how[bool(entry.get("automatic"))], _samples(entry)]
        for entry in run.record.get("rollbacks") or []
        if isinstance(entry, dict)
    ]
    return table(("rolled back at", "to step", "how", "samples left out"), rows) if rows else ""


def _samples(entry: dict[str, Any]) -> int | None:
    first, end = entry.get("first"), entry.get("end")
    return end - first if isinstance(first, int) and isinstance(end, int) else None


def evaluation_table(runs: Sequence[RunData]) -> str:
    """Returns what each evaluation found, the best of a run marked; empty where there was none."""
    names = {name for run in runs for name in run.metrics if name.startswith("val_")}
    shown = [*(name for name in _VALIDATION if name in names), *sorted(names - _VALIDATION.keys())]
    rows: list[list[Any]] = []
    keep: list[int] = []
    for number, run in enumerate(runs):
        columns, best = {name: dict(run.metrics.get(name, [])) for name in shown}, summarize(run)["best_val_step"]
        for step, _ in run.metrics.get("val_loss", []):
            mark: Any = int(step)
            if step == best:
                keep.append(len(rows))
                mark = Html(f'<td class="number best">best {int(step):,}</td>')
            tokens = count(run.course.tokens_at(step)) if len(run.course.steps) > 1 else None
            values = [_evaluated(name, columns[name].get(step)) for name in shown]
            rows.append([name_cell(number, run), mark, tokens, *values])
    heads = ["run", "step", "tokens", *(_VALIDATION.get(name, name.removeprefix("val_")) for name in shown)]
    return folded(heads, rows, keep) if rows else ""


def _evaluated(name: str, value: float | None) -> Any:
    if value is None:
        return None
    if math.isnan(value):
        return "not finite"
    return int(value) if name == "val_tokens" else f"{100 * value:.2f}%" if name == "val_accuracy" else value


def evaluations_tables(runs: Sequence[RunData]) -> str:
    """Returns a table for each kind of evaluation, the newest first; empty where no run has any."""
    kept = [(found, number) for number, run in enumerate(runs) for found in run.evaluations]
    kept.sort(key=lambda entry: entry[0].at)
    kept.reverse()  # of one second too the last that was kept comes first
    parts = []
    for title in ORDER:
        rows = [
            {
                "run": name_cell(number, runs[number]),
                "step": _step_cell(found, runs[number]),
                "at, UTC": _minute(found.at),
                "data": row.data,
            }
            | row.cells
            for found, number in kept
            for row in found.rows
            if row.table == title
        ]
        if rows:
            parts.append(f"<h3>{escape(title)}, by pretrain evaluate</h3>{evaluation_rows(rows)}")
    signatures = dict.fromkeys(entry for found, _ in kept for entry in found.signatures.items())
    parts += [f"<p class=note>{escape(metric)}: {escape(text)}</p>" for metric, text in signatures]
    if kept:
        parts.append(
            "<p class=note>In brackets: after a score its 95% interval, after data the beginning of its sha256.</p>"
        )
    return "".join(parts)


def _minute(at: str) -> str:
    return at.replace("T", " ")[:16]


def _step_cell(found: Evaluation, run: RunData) -> Any:
    """Returns the step, marked if its checkpoint is gone or was written again with other weights."""
    on_disk = next((saved.manifest for saved in run.checkpoints if saved.step == found.step), None)
    if on_disk is None:
        return Html(f"<td class=number>{found.step:,}, not on disk</td>")
    if on_disk != found.manifest:
        return Html(f'<td class="number differs">{found.step:,}, other weights</td>')
    return found.step
