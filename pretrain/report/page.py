"""`pretrain report`: runs as one HTML file that needs no network and no script.

    label_runs, read_run_data  ->  choose_panels  ->  build_page  ->  write_report

Curves are SVG images inside the page. Its policy allows styles and images of its own, and nothing
else: text of a run that looks like a script is text, and could not run if it were not.
"""

import base64
import math
from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

from pretrain.report.charts import beyond, chart_style, draw_panel, draw_timeline
from pretrain.report.metric_columns import NO_POINTS
from pretrain.report.panels import Line, Panel, choose_panels, color_of
from pretrain.report.run_data import RunData, target_unit
from pretrain.report.tables import (
    Html,
    evaluation_table,
    evaluations_tables,
    figure,
    fold,
    folded,
    name_cell,
    named,
    pick,
    rollbacks_table,
    section,
    starts_table,
    summarize,
    summary_table,
    swatch,
    table,
    without_empty,
)
from pretrain.utils.io import make_dir, write_file
from pretrain.utils.units import count, size

MAX_SAMPLE_STEPS = 8
MAX_SAMPLE_CHARACTERS = 2000
_ABSENT = object()
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
_CURVES_NOTE = (
    '<p class="note">Where there are more rows than pixels they are grouped: the line is the mean, '
    "the band goes from the smallest to the largest value. Dotted lines are restarts.</p>"
)
_CLOCK_NOTE = (
    '<p class="note">Bars are starts: green done, orange stopped to be resumed, red failed, grey '
    "running or killed. Dotted lines are restarts, triangles checkpoints on disk. Rows have no time of "
    "their own: they are placed by the time of their steps, counted back from the end of a start.</p>"
)


def write_report(runs: Sequence[RunData], output: Path, left_out: Sequence[str] = ()) -> dict[str, Any]:
    """Writes the page, with notes on runs that are left out; returns its facts. Raises: DiskError."""
    page = build_page(runs, left_out).encode("utf-8", errors="replace")
    make_dir(output.parent)
    write_file(output, page)
    return {
        "kind": "report",
        "path": str(output),
        "bytes": len(page),
        "runs": [summarize(run) for run in runs],
        "left_out": list(left_out),
        "config_differs": differing_keys(runs),
    }


def build_page(runs: Sequence[RunData], left_out: Sequence[str] = ()) -> str:
    """Returns the page of one run or more, with notes on runs that are left out."""
    with chart_style():
        curves = [
            section(name, '<div class="grid">', *map(_figure, panels), "</div>")
            for name, panels in choose_panels(runs).items()
        ]
        clocks = [_clock(number, run) for number, run in enumerate(runs)]
    notes = [*left_out, *(f"{run.label}: {note}" for run in runs for note in run.notes)]
    keys = [
        f'<span class="run" title="{escape(str(run.path))}">{named(number, run)}</span>'
        for number, run in enumerate(runs)
    ]
    configs = [fold(f"config.yaml of {run.label}", f"<pre>{escape(run.config_text)}</pre>") for run in runs]
    title = f"Report: {', '.join(run.label for run in runs)}"
    heading = title if len(title) <= 120 else title[:117] + "..."
    made = datetime.now(UTC).isoformat(sep=" ", timespec="seconds")
    body = [
        f"<header><h1>{escape(heading)}</h1><p class=note>made {made}</p></header>",
        section(
            "Summary",
            summary_table(runs),
            f'<ul class="note">{"".join(f"<li>{escape(note)}</li>" for note in notes)}</ul>' if notes else "",
        ),
        f"<nav>{''.join(keys)}</nav>{_CURVES_NOTE}" if curves else "",
        *curves[:2],
        section("By the clock", _CLOCK_NOTE, *clocks),
        *curves[2:],
        section("Evaluation", evaluation_table(runs), evaluations_tables(runs)),
        section("Generated texts", *(samples_of(run) for run in runs)),
        section("Attention", *(attention_of(run) for run in runs)),
        section("Checkpoints", *(checkpoints_table(run, n) for n, run in enumerate(runs))),
        section("Config", config_diff(runs), *configs),
        section("Facts", facts_table(runs)),
    ]
    return html_page(title, "".join(body))


def html_page(title: str, body: str) -> str:
    """Returns a page with the style and the policy of reports; the title is text, the body HTML."""
    style = Path(__file__).with_suffix(".css").read_text(encoding="ascii")
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style}</style></head><body>{body}</body></html>\n"
    )


def _figure(panel: Panel) -> str:
    unit = f" <span>{escape(panel.unit)}</span>" if panel.unit else ""
    notes = []
    grouped = [line.curve for line in panel.lines if line.curve.is_grouped]
    if grouped:
        num_groups = max(len(curve.xs) for curve in grouped)
        notes.append(f"{max(curve.num_rows for curve in grouped):,} rows in {num_groups} groups")
    if outside := beyond(panel):
        notes.append(f"beyond the axis: from {figure(min(outside))} to {figure(max(outside))}")
    if num_lost := sum(line.curve.num_lost for line in panel.lines):
        notes.append(f"not finite, red on the axis: {num_lost:,}")
    note = f'<p class="note">{"; ".join(notes)}</p>' if notes else ""
    key = _key(panel.lines) if panel.has_key else ""
    caption = f"<figcaption>{escape(panel.title)}{unit}</figcaption>"
    return f"<figure>{caption}{draw_panel(panel)}{key}{note}</figure>"


def _key(lines: Sequence[Line]) -> str:
    compares = len({line.run for line in lines}) > 1
    entries = {line.key: swatch("#5c6875" if compares else line.color, line.dash) for line in lines}
    if len(entries) > 16:  # too many to name each
        first, *_, last = entries
        return f'<p class="key">{entries[first]} {escape(first)} to {entries[last]} {escape(last)}</p>'
    keys = [f"<span>{sign} {escape(key)}</span> " for key, sign in entries.items()]
    return f'<p class="key">{"".join(keys)}</p>'


def _clock(number: int, run: RunData) -> str:
    picture = draw_timeline(run, color_of(number))
    if picture:
        picture = f'<div class="scroll wide">{picture}</div>'
    head = f"<h3>{named(number, run)}</h3>"
    return f"{head}{picture}{starts_table(run)}{rollbacks_table(run)}"


def differing_keys(runs: Sequence[RunData]) -> dict[str, list[Any]]:
    """Returns {dotted key: value in each run} of the config's keys that differ; None where absent."""
    keys = dict.fromkeys(key for run in runs for key in run.config)
    differing = {}
    for key in keys:
        values = [run.config.get(key, _ABSENT) for run in runs]
        if any(type(value) is not type(values[0]) or value != values[0] for value in values[1:]):
            differing[key] = [None if value is _ABSENT else value for value in values]
    return differing


def config_diff(runs: Sequence[RunData]) -> str:
    """Returns the keys in which the configs of runs differ; empty for one run."""
    if len(runs) < 2:
        return ""
    keys = differing_keys(runs)
    if not keys:
        return "<p>The configs are the same.</p>"
    rows = [[key, *map(_plain, values)] for key, values in keys.items()]
    return table(["key", *(run.label for run in runs)], rows)


def _plain(value: Any) -> str:
    if value is None:
        return "not there"
    return str(value).lower() if isinstance(value, bool) else str(value)


def facts_table(runs: Sequence[RunData]) -> str:
    """Returns identity, engine, machine and versions, a column a run; rows that differ are marked."""
    columns = [_facts(run) for run in runs]
    rows = []
    for name in dict.fromkeys(name for facts in columns for name in facts):
        values = [facts.get(name) for facts in columns]
        is_other = name.startswith("version") and any(value != values[0] for value in values[1:])
        head = Html(f"<td{' class=differs' if is_other else ''}>{escape(name)}</td>")
        rows.append([head, *values])
    return table(["", *(run.label for run in runs)], rows)


def _facts(run: RunData) -> dict[str, Any]:
    last = run.record["attempts"][-1]
    newest = run.checkpoints[-1] if run.checkpoints else None
    facts = {
        "folder": str(run.path),
        "id": str(run.record["id"]),
        "created": str(run.record["created"]),
        "engine": last.get("engine"),
        "ranks": None if last.get("world_size") is None else str(last["world_size"]),
        "host of rank 0": last.get("host"),
        "parameters": None if run.parameters is None else f"{run.parameters:,}",
        "newest checkpoint": newest
        and f"step {newest.step:,}, {count(newest.tokens)} {target_unit([run])}, {size(newest.num_bytes)}",
        "data": run.config.get("data.path"),
    }
    facts |= {f"version of {name}": str(version) for name, version in (last.get("versions") or {}).items()}
    seen: dict[str, dict[str, None]] = {}  # versions of each package, in the order of the attempts
    for attempt in run.record["attempts"]:
        for name, version in (attempt.get("versions") or {}).items():
            seen.setdefault(name, {})[str(version)] = None
    changed = [f"{name} {' -> '.join(values)}" for name, values in seen.items() if len(values) > 1]
    facts["changed between starts"] = ", ".join(changed) or None
    return {name: value for name, value in facts.items() if value is not None}


def checkpoints_table(run: RunData, number: int) -> str:
    """Returns time, size and cost of every checkpoint of a run; empty where there is none."""
    names = ("checkpoint_step", "checkpoint_stall_s", "checkpoint_write_s")
    columns = (run.metrics.get(name, NO_POINTS).values.tolist() for name in names)
    # The three are in the same rows.
    times = {int(step): seconds for step, *seconds in zip(*columns, strict=False) if math.isfinite(step)}
    on_disk = {saved.step: saved for saved in run.checkpoints}
    rows = []
    for step in sorted(times.keys() | on_disk.keys()):
        saved = on_disk.get(step)
        rows.append([
            name_cell(number, run), step, saved and count(saved.tokens), saved and size(saved.num_bytes),
            saved.at.isoformat(sep=" ", timespec="seconds") if saved else "no longer on disk",
            *times.get(step, (None, None)), saved and saved.written_by,
        ])  # fmt: skip
    heads = (
        "run",
        "step",
        target_unit([run]),
        "size",
        "committed",
        "training waited, s",
        "until committed, s",
        "written by",
    )
    return folded(*without_empty(heads, rows)) if rows else ""


def samples_of(run: RunData) -> str:
    """Returns what a run has generated: its newest texts, and some of the earlier ones folded."""
    places = pick(len(run.samples), MAX_SAMPLE_STEPS)[::-1]
    parts = []
    for place in places:
        step, pairs = run.samples[place]
        texts = table(("prompt", "text"), [[_text(prompt), _text(text)] for prompt, text in pairs])
        is_newest = place == len(run.samples) - 1
        parts.append(fold(f"{run.label}, step {step:,}", texts, is_open=is_newest))
    if len(places) < len(run.samples):
        steps = f"{len(run.samples):,} steps with texts"
        parts.append(f"<p class=note>{len(places)} of {steps} are shown.</p>")
    return "".join(parts)


def attention_of(run: RunData) -> str:
    """Returns the newest picture of attention that a run has drawn; empty where there is none."""
    if run.attention is None:
        return ""
    step, png = run.attention
    source = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    head = f"<h3>{escape(run.label)}, step {step:,}</h3>"
    return f'{head}<img alt="maps of attention" src="{source}">'


def _text(text: str) -> Html:
    shown, rest = text[:MAX_SAMPLE_CHARACTERS], len(text) - MAX_SAMPLE_CHARACTERS
    more = f'<span class="note"> ... and {rest:,} characters more</span>' if rest > 0 else ""
    return Html(f'<td class="text"><bdi>{escape(shown)}</bdi>{more}</td>')
