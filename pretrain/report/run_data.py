"""Data of a run for its report: everything in its folder, as plain values. Imports no torch.

    run.json, config.yaml        identity, versions, attempts, config
    metrics.jsonl                rows in order of steps, without steps that were trained again
    samples.jsonl                generated texts
    attention/step-00001000.png  pictures of attention: the newest
    evaluations.jsonl            results of `pretrain evaluate`
    checkpoints/*/manifest.json  checkpoints on disk, number of parameters

A run may be running, cut short or damaged: unreadable parts are left out with a note. Not here: the
starts of a run, of which its Slurm jobs have records too (launch/pretrain_launch/runs.py).
"""

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any

from pretrain.checkpoint.format import MANIFEST, list_checkpoints, load_manifest, step_of
from pretrain.config.yaml_nodes import read_yaml
from pretrain.errors import CheckpointError, ConfigError
from pretrain.kinds.objectives import TARGET_COUNTS
from pretrain.report.evaluations import Evaluation, read_evaluations
from pretrain.report.metric_columns import NO_POINTS, Points, note_taken_back, read_batches, read_tables, split_metrics
from pretrain.report.series import ProgressCurve, make_course
from pretrain.run.folder import RunDir
from pretrain.tracking.picture_files import ATTENTION, list_pictures
from pretrain.utils.safe_read import MAX_RECORD_BYTES, open_file, read_bounded

SAMPLES = "samples.jsonl"
MAX_PICTURE_BYTES = 4 * 2**20
MAX_METRICS = 1000
"""Most curves of a run: each is a picture of the page."""
_NOT_DRAWN = ("step", "eta_s")
_PNG = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A checkpoint that is on disk."""

    step: int
    tokens: int  # trained on by then
    num_bytes: int
    at: datetime  # time of its manifest, UTC
    written_by: str  # engine and ranks
    manifest: str  # sha256 of its manifest


@dataclass(frozen=True, slots=True)
class RunData:
    """One run. Lists are in order, oldest first."""

    path: Path
    label: str  # name in the report
    record: dict[str, Any]  # run.json
    config: dict[str, Any]  # config.yaml by dotted key
    config_text: str  # empty where there is none
    metrics: dict[str, Points]  # by name
    last_step: int
    course: ProgressCurve
    samples: list[tuple[int, list[tuple[str, str]]]]  # a step, and (prompt, text) pairs
    attention: tuple[int, bytes] | None  # step and PNG of the newest picture
    evaluations: list[Evaluation]
    starts: list[dict[str, Any]]  # as `pretrain_launch.runs` merges them
    state: str  # as `pretrain runs` has it
    checkpoints: list[SavedCheckpoint]
    parameters: int | None  # None without a checkpoint
    notes: list[str]  # parts that could not be read

    def finite(self, name: str) -> Points:
        """Returns the points where a metric is finite."""
        return self.metrics.get(name, NO_POINTS).finite()


def target_unit(runs: Sequence[RunData]) -> str:
    """Returns the word for what runs are trained on: tokens, labels, pairs, or several."""
    counts = [[name for name in TARGET_COUNTS if name in run.metrics] for run in runs]
    units = {names[0] if names else "tokens" for names in counts}
    return units.pop() if len(units) == 1 else "targets"


def read_run_data(path: Path, label: str, starts: Sequence[dict[str, Any]], state: str) -> RunData:
    """Reads a run folder. Raises: ConfigError: There is no run, or its record is damaged."""
    run, notes = RunDir(path), list[str]()
    record = run.read_record()
    text, config = _read_config(run.config, notes)
    checkpoints, parameters = _read_checkpoints(run, notes)
    tables = read_tables(run.metrics, notes)
    resumed = [one["from_step"] for one in record["attempts"] if one.get("from_step")]
    course = make_course(tables, resumed)
    names = list(dict.fromkeys(name for table in tables for name in table.columns))
    if len(names) > MAX_METRICS:
        notes.append(f"metrics.jsonl: all but the first {MAX_METRICS:,} metrics are left out")
    return RunData(
        path=path,
        label=label,
        record=record,
        config=config,
        config_text=text,
        metrics=split_metrics(tables, [name for name in names[:MAX_METRICS] if name not in _NOT_DRAWN]),
        last_step=int(max((table.steps[-1] for table in tables), default=0)),
        course=course,
        samples=_read_samples(path / SAMPLES, notes),
        attention=_read_attention(path / ATTENTION, notes),
        evaluations=read_evaluations(run.evaluations, notes),
        starts=list(starts),
        state=state,
        checkpoints=checkpoints,
        parameters=parameters,
        notes=notes,
    )


def read_records(paths: Sequence[Path]) -> tuple[dict[Path, dict[str, Any]], list[str]]:
    """Returns run.json by folder, and a note for each run that is left out, as its record is damaged.

    Raises: ConfigError: There is no run at a path, or no record of any can be read.
    """
    records: dict[Path, dict[str, Any]] = {}
    notes: list[str] = []
    for path in paths:
        try:
            records[path] = RunDir(path).read_record()
        except ConfigError as error:
            if not RunDir(path).exists() or len(notes) + 1 == len(paths):
                raise
            notes.append(f"{path} is left out: {error.what}")
    return records, notes


def label_runs(names: Sequence[str], paths: Sequence[Path]) -> list[str]:
    """Returns names of runs in the report: with the path where two are the same, and a number."""
    labels: list[str] = []
    seen = Counter[str]()
    for name, path in zip(names, paths, strict=True):
        label = name if names.count(name) == 1 else f"{name} ({path})"
        seen[label] += 1
        labels.append(label if seen[label] == 1 else f"{label} {seen[label]}")
    return labels


def flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted key, value) of nested dicts, and of lists of dicts by number."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from flatten(item, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for place, item in enumerate(value):
            yield from flatten(item, f"{prefix}[{place}]")
    else:
        yield prefix, value


def _read_config(path: Path, notes: list[str]) -> tuple[str, dict[str, Any]]:
    try:
        values = read_yaml(path).values
        return read_bounded(path, MAX_RECORD_BYTES).decode(), dict(flatten(values))
    except (OSError, ConfigError) as error:
        notes.append(f"config.yaml cannot be read: {error}")
        return "", {}


def read_lines(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """Returns the rows of a file of JSON lines in order of `step`; none without a file.

    A lower step takes back the rows from it on. A last line without an end is still being written.
    """
    rows: list[dict[str, Any]] = []
    taken_back = 0
    for row in chain.from_iterable(read_batches(path, notes)):
        if rows and row["step"] < rows[-1]["step"]:
            while rows and rows[-1]["step"] >= row["step"]:
                rows.pop()
                taken_back += 1
        rows.append(row)
    note_taken_back(path, taken_back, notes)
    return rows


def _read_samples(path: Path, notes: list[str]) -> list[tuple[int, list[tuple[str, str]]]]:
    samples = []
    for row in read_lines(path, notes):
        entries = row.get("samples")
        pairs = [
            (str(entry.get("prompt", "")), str(entry.get("text", "")))
            for entry in (entries if isinstance(entries, list) else [])
            if isinstance(entry, dict)
        ]
        if pairs:
            samples.append((row["step"], pairs))
    return samples


def _read_attention(folder: Path, notes: list[str]) -> tuple[int, bytes] | None:
    pictures = list_pictures(folder)
    if not pictures:
        return None
    step, path = pictures[-1]
    try:
        with open_file(path) as file:
            png = file.read(MAX_PICTURE_BYTES + 1)
    except OSError as error:
        notes.append(f"{path.name}: {error.strerror}")
        return None
    if len(png) > MAX_PICTURE_BYTES or not png.startswith(_PNG):
        notes.append(f"{path.name}: no PNG of at most {MAX_PICTURE_BYTES >> 20} MiB")
        return None
    return step, png


def _read_checkpoints(run: RunDir, notes: list[str]) -> tuple[list[SavedCheckpoint], int | None]:
    checkpoints: list[SavedCheckpoint] = []
    parameters = None
    for path in list_checkpoints(run.checkpoints):
        try:
            manifest = load_manifest(path)
            saved = SavedCheckpoint(
                step=int(step_of(path) or 0),
                tokens=int(manifest.state.get("tokens", 0)),
                num_bytes=sum(record.num_bytes for record in manifest.files),
                at=datetime.fromtimestamp((path / MANIFEST).stat().st_mtime, UTC),
                written_by=str(manifest.topology.get("engine", manifest.topology)),
                manifest=hashlib.sha256((path / MANIFEST).read_bytes()).hexdigest(),
            )
        except (CheckpointError, OSError) as error:
            if path.exists():  # else the run removed it meanwhile
                notes.append(f"{path.name}: {getattr(error, 'what', error)}")
            continue
        checkpoints.append(saved)
        parameters = sum(math.prod(shape) for shape in manifest.shapes.values())
    return checkpoints, parameters
