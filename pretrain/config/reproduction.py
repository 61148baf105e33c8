"""Published results that a command reproduces: the records of `configs/reproduce`, one a file.

needs, steps   ->  commands with the paths of the user   (cli/wish_commands/reproduce.py)
figure         ->  a number in a file that they write, less another one where it is a difference
expected       ->  verdict; `measured` are the rows so far
"""

import math
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from pretrain.config.base import Conflicts, Section
from pretrain.config.load import parse_section, read_located
from pretrain.config.recipes import builtin_configs
from pretrain.errors import DataError
from pretrain.utils.safe_read import MAX_RECORD_BYTES, parse_json, read_bounded

FOLDER = "reproduce"


class FigurePlace(Section):
    """A number in a file of JSON, or in the last line of a file of lines that has it."""

    file: str
    key: str
    """Keys on the way to it, separated by `/`; an item of a list by its number."""

    def read(self) -> float:
        """Returns the number. Raises: DataError: It is not there."""
        path = Path(self.file)
        try:
            content = read_bounded(path, MAX_RECORD_BYTES)
            texts = content.splitlines() if path.suffix == ".jsonl" else [content]
            rows = map(parse_json, texts)
            values = [value for row in rows if (value := _value_at(row, self.key)) is not None]
            return float(values[-1])
        except (OSError, ValueError, TypeError, IndexError):
            text = f"no {self.key} is there"
            raise DataError(text, where=self.file, fix="see the output of the steps") from None


def _value_at(value: Any, key: str) -> Any:
    for part in key.split("/"):
        if isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            value = value.get(part) if isinstance(value, dict) else None
    return value


class PublishedFigure(Section):
    """The figure that is compared, with its unit in the name."""

    name: str
    value: FigurePlace
    less: FigurePlace | None = None
    """Place of a number that is subtracted. None: nothing."""

    def read(self) -> float:
        """Returns the figure. Raises: DataError."""
        return self.value.read() - (0.0 if self.less is None else self.less.read())


class Measurement(Section):
    """A figure that was measured: when, where, and by which commit or words on the conditions."""

    value: float
    at: str = Field(pattern=r"^\d{4}-\d{2}-\d{2}$")
    where: str
    note: str = ""


class Reproduction(Section):
    """A published result, and the way to it."""

    title: str
    published: str
    """Result and its source."""
    machine: Literal["cpu", "gpu"] = "cpu"
    cost: str
    """CPU time, or that of a GPU."""
    needs: dict[str, str] = Field(default_factory=dict)
    """Files and folders that the user has, with the place where to get each."""
    steps: list[str]
    """Command lines; {NAME} is the path of a need. Those of `python -m benchmarks` need a clone."""
    lacking: str = ""
    """Reason why no steps lead there yet. Empty: they do."""
    figure: PublishedFigure
    expected: list[float] = Field(min_length=2, max_length=2)
    """Interval of the figure, within which the result is reproduced."""
    measured: list[Measurement] = Field(default_factory=list)
    """Rows by date, the last one last; the bad ones too."""

    def state(self) -> tuple[str, str]:
        """Returns the verdict on the last row, and the row in words."""
        low, high = self.expected
        interval = f"expected {low:g} to {high:g}"
        if not self.measured:
            return self.lacking or "not measured", f"{self.figure.name}, {interval}"
        last = self.measured[-1]
        note = f" ({last.note})" if last.note else ""
        row = f"{self.figure.name} {last.value:g}, {interval}, {last.at}, {last.where}{note}"
        return self.verdict(last.value), row

    def verdict(self, value: float) -> str:
        """Returns the word for a figure."""
        low, high = self.expected
        return "reproduced" if low <= value <= high else "MISSED"

    @property
    def needs_clone(self) -> bool:
        """True where a step is a script of the repository."""
        return any(step.startswith("python ") for step in self.steps)

    def _conflicts(self) -> Conflicts:
        if not all(map(math.isfinite, self.expected)) or self.expected[0] > self.expected[1]:
            yield f"expected={list(self.expected)} is no interval"
        if bool(self.steps) == bool(self.lacking):
            yield "needs steps or lacking, and not both"


def load_reproductions() -> dict[str, Reproduction]:
    """Returns all of them by name. Raises: ConfigError."""
    folder = builtin_configs() / FOLDER
    return {path.stem: load_reproduction(path) for path in sorted(folder.glob("*.yaml"))}


def load_reproduction(path: Path) -> Reproduction:
    """Reads a record. Raises: ConfigError."""
    return parse_section(Reproduction, read_located(path, []), str(path))
