"""The tables of a report that tell what runs are: config, machines, checkpoints, generated texts, attention."""

import base64
from collections.abc import Sequence
from html import escape
from typing import Any

from pretrain.report.html import Html, fold, folded, pick, table, without_empty
from pretrain.report.read import RunData
from pretrain.report.tables import name_cell
from pretrain.utils.units import count, size

MAX_SAMPLE_STEPS = 8
MAX_SAMPLE_CHARACTERS = 2000
_ABSENT = object()


def differing_keys(runs: Sequence[RunData]) -> dict[str, list[Any]]:
    """Returns {dotted key: value in each run} of the config's keys that are not the same in all; None where absent."""
    keys = dict.fromkeys(key for run in runs for key in run.config)
    found = {}
    for key in keys:
        values = [run.config.get(key, _ABSENT) for run in runs]
        if any(type(value) is not type(values[0]) or value != values[0] for value in values[1:]):
            found[key] = [None if value is _ABSENT else value for value in values]
    return found


def config_diff(runs: Sequence[RunData]) -> str:
    """Returns the keys in which the configs of runs differ; empty for one run."""
    if len(runs) < 2:
        return ""
    found = differing_keys(runs)
    if not found:
        return "<p>The configs are the same.</p>"
    rows = [[key, *("not there" if value is None else _plain(value) for value in found[key])] for key in found]
    return table(["key", *(run.label for run in runs)], rows)


def _plain(value: Any) -> str:
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value)


def configs(runs: Sequence[RunData]) -> str:
    """Returns the whole config of each run, folded."""
    return "".join(fold(f"config.yaml of {run.label}", f"<pre>{escape(run.config_text)}</pre>") for run in runs)


def facts_table(runs: Sequence[RunData]) -> str:
    """Returns identity, engine, machine and versions, a column for each run; rows that differ are marked."""
    columns = [_facts(run) for run in runs]
    rows = []
    for name in dict.fromkeys(name for facts in columns for name in facts):
        values = [facts.get(name) for facts in columns]
        is_other = name.startswith("version") and any(value != values[0] for value in values[1:])
        head = Html(f"<td{' class=differs' if is_other else ''}>{escape(name)}</td>")
        rows.append([head, *values])
    return table(["", *(run.label for run in runs)], rows)


def _facts(run: RunData) -> dict[str, Any]:
    last, newest = run.last_attempt, run.checkpoints[-1] if run.checkpoints else None
    versions = last.get("versions")
    facts = {
        "folder": str(run.path),
        "id": str(run.record["id"]),
        "created": str(run.record["created"]),
        "engine": last.get("engine"),
        "ranks": last.get("world_size"),
        "host of rank 0": last.get("host"),
        "parameters": None if run.parameters is None else f"{run.parameters:,}",
        "newest checkpoint": newest
        and f"step {newest.step:,}, {count(newest.tokens)} tokens, {size(newest.num_bytes)}",
        "data": run.config.get("data.path"),
    }
    facts |= {f"version of {name}": str(version) for name, version in (versions or {}).items()}
    changed = _changed_versions(run)
    return {name: value for name, value in facts.items() if value is not None} | (
        {"changed between starts": changed} if changed else {}
    )


def _changed_versions(run: RunData) -> str:
    """Returns which packages were not the same in every attempt."""
    seen: dict[str, list[str]] = {}
    for attempt in run.record["attempts"]:
        for name, version in (attempt.get("versions") or {}).items():
            versions = seen.setdefault(name, [])
            if str(version) not in versions:
                versions.append(str(version))
    return ", ".join(f"{name} {' -> '.join(versions)}" for name, versions in seen.items() if len(versions) > 1)


def checkpoints_table(run: RunData, number: int) -> str:
    """Returns every checkpoint that the run tells of: when, how large, how long it took; empty where there is none.

    Args:
        run: The run.
        number: Its place among the runs.
    """
    told = (run.metrics.get(name, []) for name in ("checkpoint_step", "checkpoint_stall_s", "checkpoint_write_s"))
    # The three are in the same rows.
    times = {int(step): (stall, write) for (_, step), (_, stall), (_, write) in zip(*told, strict=False)}
    on_disk = {saved.step: saved for saved in run.checkpoints}
    rows = []
    for step in sorted(times.keys() | on_disk.keys()):
        saved = on_disk.get(step)
        rows.append([
            name_cell(number, run), step, saved and count(saved.tokens), saved and size(saved.num_bytes),
            saved.at.isoformat(sep=" ", timespec="seconds") if saved else "no longer on disk",
            *times.get(step, (None, None)), saved and saved.written_by,
        ])  # fmt: skip
    heads = ("run", "step", "tokens", "size", "committed", "training waited, s", "until committed, s", "written by")
    return folded(*without_empty(heads, rows)) if rows else ""


def samples_of(run: RunData) -> str:
    """Returns what a run has generated: its newest texts, and some of the earlier ones folded."""
    places = pick(len(run.samples), MAX_SAMPLE_STEPS)[::-1]
    parts = []
    for place in places:
        step, pairs = run.samples[place]
        texts = table(("prompt", "text"), [[_text(prompt), _text(text)] for prompt, text in pairs])
        parts.append(fold(f"{run.label}, step {step:,}", texts, is_open=place == len(run.samples) - 1))
    if len(places) < len(run.samples):
        parts.append(f"<p class=note>{len(places)} of {len(run.samples):,} steps with texts are shown.</p>")
    return "".join(parts)


def attention_of(run: RunData) -> str:
    """Returns the newest picture of attention that a run has drawn; empty where there is none."""
    if run.attention is None:
        return ""
    step, png = run.attention
    source = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    return f'<h3>{escape(run.label)}, step {step:,}</h3><img alt="maps of attention" src="{source}">'


def _text(text: str) -> Html:
    shown, rest = text[:MAX_SAMPLE_CHARACTERS], len(text) - MAX_SAMPLE_CHARACTERS
    more = f'<span class="note"> ... and {rest:,} characters more</span>' if rest > 0 else ""
    return Html(f'<td class="text"><bdi>{escape(shown)}</bdi>{more}</td>')
