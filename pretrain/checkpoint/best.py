"""Which checkpoint is the best by a metric of validation: `checkpoints/best.json` names it, and retention keeps it.

    evaluated at a step  ->  its metric is noted  ->  the step is committed, and read back  ->  best.json

best.json is a mark, no promise: whoever follows it verifies the checkpoint that it names as any other.
"""

import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from pretrain.checkpoint.layout import MANIFEST, step_name, step_of
from pretrain.errors import DiskError
from pretrain.utils.io import write_json

log = logging.getLogger(__name__)

BEST = "best.json"
RISING = ("val_accuracy",)
"""Metrics of which more is better."""


@dataclass(frozen=True, slots=True)
class Best:
    """What best.json says.

    Attributes:
        metric: Of validation.
        value: Of the checkpoint.
        step: Names the checkpoint.
    """

    metric: str
    value: float
    step: int


def read_best(folder: Path) -> Best | None:
    """Returns what best.json says; None where there is none, it is damaged, or its checkpoint is gone or set aside.

    Args:
        folder: Of checkpoints.
    """
    try:
        raw = json.loads((folder / BEST).read_text(encoding="utf-8"))
        found = Best(str(raw["metric"]), float(raw["value"]), int(raw["step"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if (folder / step_name(found.step) / MANIFEST).is_file() else None


class BestKeeper:
    """Finds the best checkpoint of a folder; one process does.

    Args:
        folder: Of checkpoints.
        metric: As it is logged.
    """

    def __init__(self, folder: Path, metric: str) -> None:
        self._folder, self._metric = folder, metric
        self._values: dict[int, float] = {}

    def note(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Takes note of what an evaluation has found; without the metric, the step is not known to be good."""
        value = metrics.get(self._metric)
        self._values.pop(step, None)
        if value is not None and math.isfinite(value):
            self._values[step] = value

    def settle(self, found: list[Path], is_valid: Callable[[Path], bool]) -> Path | None:
        """Returns the best of some checkpoints, the earliest of equals, and writes best.json where it says another.

        Args:
            found: Committed checkpoints. Those that were not evaluated at their step take no part.
            is_valid: Whether one is good; asked from the best on, until one is.
        """
        paths = {step_of(path): path for path in found}
        known, marked = dict(self._values), read_best(self._folder)
        if marked is not None and marked.metric == self._metric:
            known.setdefault(marked.step, marked.value)
        sign = -1 if self._metric in RISING else 1
        for step in sorted(known.keys() & paths.keys(), key=lambda step: (sign * known[step], step)):
            if is_valid(paths[step]):
                self._mark(Best(self._metric, known[step], step), marked)
                return paths[step]
        return None

    def _mark(self, best: Best, marked: Best | None) -> None:
        """Writes best.json; where that fails, the checkpoint is kept no less, and it is only said."""
        if best == marked:
            return
        try:
            write_json(self._folder / BEST, asdict(best))
        except DiskError as error:
            log.warning("%s", error)
            return
        log.info("%s is the best so far: %s %.6g", step_name(best.step), best.metric, best.value)
