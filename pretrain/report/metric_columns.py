"""Columns of the rows of a run: 8 bytes a number, since a run of months has a million rows.

    read_batches(path, notes)     ->  rows as they are in the file, without damaged ones
    read_tables(path, notes)      ->  the numbers of the rows that have the same keys, as arrays
    split_metrics(tables, names)  ->  steps and values of each metric

A lower step takes back the rows from it on.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pretrain.utils.safe_read import MAX_INT, open_file, parse_json, read_blocks

_HUGE = 2.0**1000  # and more counts as not finite: a larger int is no float
_ABSENT = np.inf  # in a column: text, say


class Points(NamedTuple):
    """A metric over steps; float64 [rows] each, nan where a row has null or no finite value."""

    steps: np.ndarray
    values: np.ndarray

    def finite(self) -> "Points":
        """Returns the points with a finite value."""
        return self.where(np.isfinite(self.values))

    def by_step(self) -> dict[float, float]:
        """Returns the values by step, the last of each."""
        return dict(zip(self.steps.tolist(), self.values.tolist(), strict=True))

    def where(self, mask: np.ndarray) -> "Points":
        """Returns the points that a mask, bool [rows], selects; itself if it selects all."""
        return self if mask.all() else Points(self.steps[mask], self.values[mask])


NO_POINTS = Points(np.empty(0), np.empty(0))


class MetricTable(NamedTuple):
    """Rows that have the same keys; arrays are [rows], in the order of the file."""

    numbers: np.ndarray  # int32, among all rows of the file
    columns: dict[str, np.ndarray]  # float64 by key; `step` is one of them, and never falls

    @property
    def steps(self) -> np.ndarray:
        """Steps of the rows."""
        return self.columns["step"]


def read_batches(path: Path, notes: list[str]) -> Iterator[list[dict[str, Any]]]:
    """Yields the rows of a file of JSON lines, some at a time; none without a file.

    Damaged lines are left out and counted in a note. A last line without an end is not written yet.
    """
    damaged = 0
    try:
        with open_file(path) as file:
            for block in read_blocks(file):
                lines = block.split(b"\n")
                lines.pop()
                rows = _rows_of(lines)
                damaged += len(lines) - len(rows)
                yield rows
    except FileNotFoundError:
        pass
    except OSError as error:
        notes.append(f"{path.name} cannot be read: {error.strerror}")
    if damaged:
        notes.append(f"{path.name}: {damaged:,} damaged lines are left out")


def _rows_of(lines: Sequence[bytes]) -> list[dict[str, Any]]:
    """Returns the rows of lines: as one text, in half of the time, unless one is damaged."""
    with suppress(ValueError):
        rows: list[Any] = parse_json(b"[" + b",".join(lines) + b"]")
        if len(rows) == len(lines) and all(map(_is_row, rows)):
            return rows
    rows = []
    for line in lines:
        with suppress(ValueError):
            rows.append(parse_json(line))
    return list(filter(_is_row, rows))


def _is_row(value: Any) -> bool:
    """Returns whether a value is an object with a step."""
    step = value.get("step") if type(value) is dict else None
    return type(step) is int and -MAX_INT <= step <= MAX_INT


def note_taken_back(path: Path, num_rows: int, notes: list[str]) -> None:
    """Notes rows that were taken back, if any."""
    if num_rows:
        notes.append(f"{path.name}: {num_rows:,} rows of steps that were done again are left out")


def read_tables(path: Path, notes: list[str]) -> list[MetricTable]:
    """Returns the rows of a file as tables, in the order of their first rows."""
    columns = MetricColumns()
    for rows in read_batches(path, notes):
        columns.add(rows)
    note_taken_back(path, columns.num_taken_back, notes)
    return columns.tables()


class MetricColumns:
    """Columns that grow, by the keys of their rows."""

    def __init__(self) -> None:
        self.num_taken_back = 0
        self._last_step = -MAX_INT
        self._num_rows = 0
        self._numbers: dict[tuple[str, ...], array[int]] = {}
        self._columns: dict[tuple[str, ...], list[array[float]]] = {}

    def add(self, rows: Sequence[dict[str, Any]]) -> None:
        """Takes rows; one of a lower step than the last takes back those from it on."""
        begin = 0
        for place, row in enumerate(rows):
            if row["step"] < self._last_step:
                self._append(rows[begin:place])
                self._take_back(row["step"])
                begin = place
            self._last_step = row["step"]
        self._append(rows[begin:])

    def _append(self, rows: Sequence[dict[str, Any]]) -> None:
        alike: dict[tuple[str, ...], list[int]] = {}
        for place, row in enumerate(rows):
            alike.setdefault(tuple(row), []).append(place)
        for names, places in alike.items():
            if names not in self._columns:
                self._numbers[names] = array("i")
                self._columns[names] = [array("d") for _ in names]
            numbers = (self._num_rows + place for place in places)
            self._numbers[names].extend(numbers)
            by_row = (rows[place].values() for place in places)
            values = zip(*by_row, strict=True)
            for column, part in zip(self._columns[names], values, strict=True):
                column.frombytes(_numbers_of(part).tobytes())
        self._num_rows += len(rows)

    def _take_back(self, step: int) -> None:
        for names, columns in self._columns.items():
            steps = columns[names.index("step")]
            while steps and steps[-1] >= step:
                self._numbers[names].pop()
                for column in columns:
                    column.pop()
                self.num_taken_back += 1

    def tables(self) -> list[MetricTable]:
        """Returns the rows so far, in the order of their first ones."""
        tables = []
        for names, columns in self._columns.items():
            if self._numbers[names]:
                arrays = map(np.frombuffer, columns)
                numbers = np.frombuffer(self._numbers[names], dtype=np.int32)
                tables.append(MetricTable(numbers, dict(zip(names, arrays, strict=True))))
        return sorted(tables, key=lambda table: table.numbers[0])


def _numbers_of(values: Sequence[Any]) -> np.ndarray:
    """Returns values as float64: nan for null and not finite, `_ABSENT` for no number."""
    if set(map(type, values)) == {float}:
        numbers = np.array(values)
        numbers[~(np.abs(numbers) < _HUGE)] = np.nan
        return numbers
    return np.array([_number(value) for value in values])


def _number(value: Any) -> float:
    if type(value) in (int, float):
        return float(value) if abs(value) < _HUGE else np.nan
    return np.nan if value is None else _ABSENT


def split_metrics(tables: Sequence[MetricTable], names: Iterable[str]) -> dict[str, Points]:
    """Returns the points of each of the metrics, which some rows have, unless it is never a number.

    Takes the columns out of the tables, so that they are in memory once.
    """
    metrics = {}
    merged: dict[tuple[int, ...], tuple[np.ndarray, np.ndarray]] = {}  # order and steps, by tables
    for name in names:
        places = tuple(place for place, table in enumerate(tables) if name in table.columns)
        holders = [tables[place] for place in places]
        columns = [table.columns.pop(name) for table in holders]
        if len(columns) == 1:
            points = Points(holders[0].steps, columns[0])
        else:
            if places not in merged:
                numbers = np.concatenate([table.numbers for table in holders])
                steps = np.concatenate([table.steps for table in holders])
                order = np.argsort(numbers, kind="stable")
                merged[places] = order, steps[order]
            order, steps = merged[places]
            points = Points(steps, np.concatenate(columns)[order])
        points = points.where(points.values != _ABSENT)
        if len(points.steps):
            metrics[name] = points
    return metrics
