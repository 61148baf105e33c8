"""Tables of a report, and the pieces of HTML that pages are made of.

Every text of a run is escaped here: it may contain anything.
"""

import math
from collections.abc import Callable, Collection, Sequence
from html import escape
from typing import Any

import numpy as np

from pretrain.report.charts import instant
from pretrain.report.evaluations import ORDER, Evaluation
from pretrain.report.metric_columns import NO_POINTS
from pretrain.report.panels import color_of
from pretrain.report.run_data import RunData, target_unit
from pretrain.run.folder import RECOVERY
from pretrain.run.rank_notes import RANKS, describe_notes
from pretrain.run.recovery import describe_recovery
from pretrain.utils.units import count, percent, size, span

_VALIDATION = {
    "val_loss": "loss",
    "val_perplexity": "perplexity",
    "val_bits_per_byte": "bits per byte",
    "val_accuracy": "accuracy",
    "val_tokens": "targets",
    "val_labels": "labels",
    "val_answers": "answers",
    "val_pairs": "pairs",
    "val_rewards/margins": "reward margin",
}
MAX_ROWS = 200  # of a table, which says so where there are more
MAX_OPEN_ROWS = 12
LONG_CHARACTERS = 48  # cells of more break into lines

_Cells = Sequence[Sequence[Any]]


class Html(str):
    """Text that is HTML already."""


def cell(value: Any) -> str:
    """Returns a cell with an escaped value; None is an empty one."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"<td class=number>{escape(figure(value))}</td>"
    text = "" if value is None else str(value)
    return f"<td{_long(text)}>{escape(text)}</td>"


def _long(text: str) -> str:
    return " class=long" if len(text) > LONG_CHARACTERS else ""


def figure(value: float) -> str:
    """Returns a number with five significant digits."""
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if 1e5 <= abs(value) < 1e15 else f"{value:.5g}"


def table(heads: Sequence[str], rows: _Cells) -> str:
    """Returns a table that scrolls where it is too wide. A value of type Html is a cell already."""
    cells = [[value if isinstance(value, Html) else cell(value) for value in row] for row in rows]
    head = ""
    for place, text in enumerate(heads):
        is_numeric = any(row[place].startswith("<td class=number") for row in cells)
        head += f"<th{' class=number' if is_numeric else ''}>{escape(text)}</th>"
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in cells)
    content = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    return f'<div class="scroll"><table>{content}</table></div>'


def swatch(color: str, dash: str = "solid") -> str:
    """Returns a short piece of line in a colour and a line style of CSS."""
    return f'<i class="swatch" style="border-top-style: {dash}; border-color: {escape(color)}"></i>'


def without_empty(heads: Sequence[str], rows: _Cells) -> tuple[list[str], list[list[Any]]]:
    """Returns heads and rows without the columns that hold None only."""
    shown = [place for place in range(len(heads)) if any(row[place] is not None for row in rows)]
    return [heads[place] for place in shown], [[row[place] for place in shown] for row in rows]


def pick(total: int, most: int, keep: Collection[int] = ()) -> list[int]:
    """Returns up to `most` places, evenly from first to last, and the ones in `keep`."""
    if total <= most:
        return list(range(total))
    return sorted({round(number * (total - 1) / (most - 1)) for number in range(most)} | set(keep))


def folded(heads: Sequence[str], rows: _Cells, keep: Collection[int] = (), *, is_newest_first: bool = False) -> str:
    """Returns a table of a few rows and of up to `MAX_ROWS` behind a fold.

    They are an even choice with those at `keep`, or the first ones.
    """

    def choose(most: int) -> list[int]:
        return list(range(min(most, len(rows)))) if is_newest_first else pick(len(rows), most, keep)

    few = table(heads, [rows[place] for place in choose(MAX_OPEN_ROWS)])
    if len(rows) <= MAX_OPEN_ROWS:
        return few
    places = choose(MAX_ROWS)
    part = f"the newest {len(places)} of" if is_newest_first else f"{len(places)} of"
    whole = table(heads, [rows[place] for place in places])
    return few + fold(f"{'all' if len(places) == len(rows) else part} {len(rows):,} rows", whole)


def fold(title: str, content: str, is_open: bool = False) -> str:
    """Returns HTML behind a title that opens it."""
    summary = f"<summary>{escape(title)}</summary>"
    return f"<details{' open' if is_open else ''}>{summary}{content}</details>"


def section(title: str, *content: str) -> str:
    """Returns a section with a heading; nothing where all content, which is HTML, is empty."""
    return f"<section><h2>{escape(title)}</h2>{''.join(content)}</section>" if any(content) else ""


def summarize(run: RunData) -> dict[str, Any]:
    """Returns the figures of a run for the summary and for JSON; None where unknown."""
    counted = [start for start in run.starts if not start.get("is_refused")] or run.starts
    last = counted[-1] if counted else {}
    num_recoveries = sum(bool(start.get(RECOVERY)) for start in run.starts)
    loss = run.metrics["loss"].values[-1].item() if "loss" in run.metrics else math.nan
    evaluated = run.finite("val_loss")
    best = evaluated.values.argmin() if len(evaluated.values) else None
    medians: dict[str, float | None] = {}
    for name in ("tokens_per_s", "mfu", "data_wait"):
        values = run.finite(name).values
        middle = len(values) // 2
        medians[f"median_{name}"] = np.partition(values, middle)[middle].item() if len(values) else None
    return {
        "name": run.label,
        "path": str(run.path),
        "id": run.record["id"],
        "state": run.state,
        "reason": last.get("reason"),
        "steps": run.last_step,
        "total_steps": run.config.get("train.steps"),
        "tokens": int(run.course.tokens[-1]),
        "hours_in_loop": round(float(run.course.hours[-1]), 4),
        "starts": len(run.starts) - num_recoveries,
        "recoveries": num_recoveries,
        "empty_steps": int(run.finite("empty_steps").values.max(initial=0)),
        "loss": None if math.isnan(loss) else loss,
        "best_val_loss": None if best is None else evaluated.values[best].item(),
        "best_val_step": None if best is None else int(evaluated.steps[best]),
        **medians,
        "peak_memory_bytes": run.finite("memory_bytes").values.max(initial=0).item() or None,
        "parameters": run.parameters,
        "checkpoints": len(run.checkpoints),
        "evaluations": len(run.evaluations),
        "notes": run.notes,
    }


def named(number: int, run: RunData) -> str:
    """Returns a run's colour and name."""
    return f"{swatch(color_of(number))} {escape(run.label)}"


def name_cell(number: int, run: RunData) -> Html:
    """Returns a cell with a run's colour and name."""
    return Html(f'<td{_long(run.label)} title="{escape(str(run.path))}">{named(number, run)}</td>')


def summary_table(runs: Sequence[RunData]) -> str:
    """Returns a row for each run with the figures that are compared first."""
    heads = ("run", "state", "steps", target_unit(runs), "in the loop", "starts", "recoveries", "empty steps",
             "loss", "best validation", "tokens/s", "MFU", "data wait", "memory", "parameters")  # fmt: skip
    rows = []
    for number, run in enumerate(runs):
        s = summarize(run)
        steps = f"{s['steps']:,}"
        if isinstance(s["total_steps"], int):
            steps += f" of {s['total_steps']:,}"
        loss = "not finite" if s["loss"] is None and "loss" in run.metrics else s["loss"]
        best = None
        if s["best_val_loss"] is not None:
            best = f"{figure(s['best_val_loss'])} at {s['best_val_step']:,}"
        rows.append([
            name_cell(number, run), s["state"], steps, count(s["tokens"]), span(s["hours_in_loop"] * 3600), s["starts"],
            s["recoveries"] or None, s["empty_steps"] or None, loss, best,
            _known(s["median_tokens_per_s"], count), _known(s["median_mfu"], percent),
            _known(s["median_data_wait"], percent), _known(s["peak_memory_bytes"], size), _known(run.parameters, count),
        ])  # fmt: skip
    return table(*without_empty(heads, rows))


def _known(value: float | None, form: Callable[[float], str]) -> str | None:
    return None if value is None else form(value)


def _end_of(start: dict[str, Any]) -> str | None:
    reason = start.get("reason")
    if not reason and start.get("exit_code") is None:
        lost = "no end recorded: killed, node lost, or disk full"
        reason = "running" if start.get("is_at_work") else lost
    return reason or None


def starts_table(run: RunData) -> str:
    """Returns every start of a run, with its Slurm job where there is one."""
    rows = []
    for number, start in enumerate(run.starts, start=1):
        begin, end = instant(start.get("started")), instant(start.get("ended"))
        lasted = None
        if begin is not None and end is not None:
            seconds = (end - begin).total_seconds()
            lasted = span(seconds) if seconds >= 1 else "under 1 s"  # run.json has whole seconds
        restart = start.get("restart")
        job = f"{start.get('job') or ''}{f', restart {restart}' if restart else ''}"
        nodes = ", ".join(str(node) for node in start.get("nodes") or [])
        rows.append([
            number, job or None, str(start.get("started") or ""), lasted, nodes, start.get("world_size"),
            start.get("from_step"), describe_recovery(start.get(RECOVERY)) or None,
            "; ".join(describe_notes(start.get(RANKS))) or None, start.get("exit_code"), _end_of(start),
        ])  # fmt: skip
    heads = ("start", "Slurm job", "began", "lasted", "nodes", "ranks", "from step", "recovery",
             "slow or growing ranks", "exit code", "how it ended")  # fmt: skip
    return table(*without_empty(heads, rows))


def rollbacks_table(run: RunData) -> str:
    """Returns the rollbacks of a run; empty where there was none."""
    rows = []
    for entry in run.record.get("rollbacks") or []:
        if isinstance(entry, dict):
            first, end = entry.get("first"), entry.get("end")
            num_samples = end - first if isinstance(first, int) and isinstance(end, int) else None
            cause = "automatic, after a spike" if entry.get("automatic") else "pretrain rollback"
            rows.append([entry.get("at"), entry.get("to"), cause, num_samples])
    return table(("rolled back at", "to step", "how", "samples left out"), rows) if rows else ""


def evaluation_table(runs: Sequence[RunData]) -> str:
    """Returns what each evaluation found, the best of a run marked; empty where there was none."""
    names = {name for run in runs for name in run.metrics if name.startswith("val_")}
    shown = [*(name for name in _VALIDATION if name in names), *sorted(names - _VALIDATION.keys())]
    rows: list[list[Any]] = []
    keep: list[int] = []
    for number, run in enumerate(runs):
        columns = {name: run.metrics.get(name, NO_POINTS).by_step() for name in shown}
        best = summarize(run)["best_val_step"]
        for step in run.metrics.get("val_loss", NO_POINTS).steps.tolist():
            mark: Any = int(step)
            if step == best:
                keep.append(len(rows))
                mark = Html(f'<td class="number best">best {int(step):,}</td>')
            tokens = count(run.course.tokens_at(step)) if len(run.course.steps) > 1 else None
            values = [_evaluated(name, columns[name].get(step)) for name in shown]
            rows.append([name_cell(number, run), mark, tokens, *values])
    titles = [_VALIDATION.get(name, name.removeprefix("val_")) for name in shown]
    return folded(["run", "step", target_unit(runs), *titles], rows, keep) if rows else ""


def _evaluated(name: str, value: float | None) -> Any:
    if value is None:
        return None
    if math.isnan(value):
        return "not finite"
    if name == "val_accuracy":
        return f"{100 * value:.2f}%"
    return int(value) if name in ("val_tokens", "val_labels") else value


def evaluations_tables(runs: Sequence[RunData]) -> str:
    """Returns a table for each kind of evaluation, the newest first; empty where no run has any."""
    entries = [(evaluation, number) for number, run in enumerate(runs) for evaluation in run.evaluations]
    # Of one second too, the last that was kept comes first.
    entries = sorted(entries, key=lambda entry: entry[0].at)[::-1]
    rows: dict[str, list[dict[str, Any]]] = {title: [] for title in ORDER}
    for evaluation, number in entries:
        run = runs[number]
        first = {"run": name_cell(number, run), "step": _step_cell(evaluation, run)}
        first["at, UTC"] = evaluation.at.replace("T", " ")[:16]
        for row in evaluation.rows:
            rows[row.table].append({**first, "data": row.data, **row.cells})
    parts = [_evaluations_of(title, cells) for title, cells in rows.items() if cells]
    signatures = dict.fromkeys(entry for evaluation, _ in entries for entry in evaluation.signatures.items())
    parts += [f"<p class=note>{escape(metric)}: {escape(text)}</p>" for metric, text in signatures]
    if entries:
        brackets = "after a score its 95% interval, after data the beginning of its sha256"
        parts.append(f"<p class=note>In brackets: {brackets}.</p>")
    return "".join(parts)


def _evaluations_of(title: str, rows: Sequence[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(head for row in rows for head in row))
    cells = without_empty(names, [[row.get(name) for name in names] for row in rows])
    return f"<h3>{escape(title)}, by pretrain evaluate</h3>{folded(*cells, is_newest_first=True)}"


def _step_cell(found: Evaluation, run: RunData) -> Any:
    """Returns the step, marked if its checkpoint is gone or was written again with other weights."""
    on_disk = next((saved.manifest for saved in run.checkpoints if saved.step == found.step), None)
    if on_disk is None:
        return Html(f"<td class=number>{found.step:,}, not on disk</td>")
    if on_disk != found.manifest:
        return Html(f'<td class="number differs">{found.step:,}, other weights</td>')
    return found.step
