"""Prometheus: the last row as a text file for the textfile collector of node_exporter.

`FOLDER/pretrain_ID.prom` is replaced with each row, so that the collector reads a whole one.
`pretrain_active` is 0 after the end of the run. The file stays, with the last values.

    pretrain_loss{id="0123abcd",run="mine"} 2.5
    pretrain_grad_norm{id="0123abcd",part="decoder_03",run="mine"} 0.1
"""

import math
import re
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from pretrain.config.tracking import TrackingConfig
from pretrain.tracking.tracker import Identity, Tracker
from pretrain.utils.io import make_dir, write_file

_NO_NAME = re.compile(r"[^a-zA-Z0-9_]")
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


class PrometheusFile(Tracker):
    """The newest value of each metric, as a gauge."""

    name: ClassVar[str] = "prometheus"

    def __init__(self, run_dir: Path, config: TrackingConfig, identity: Identity) -> None:
        assert config.prometheus is not None
        self._path = Path(config.prometheus) / f"pretrain_{identity.id}.prom"
        self._labels = {"id": identity.id, "run": identity.name}
        self.modes = [""]
        self._values: dict[str, float] = {}

    def open(self, mode: str, facts: Mapping[str, object]) -> None:
        """Writes the file without metrics, so that a folder that cannot be written is seen now."""
        make_dir(self._path.parent)
        self._values["active"] = 1.0
        self._write()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes the file with the values of a row in place of earlier ones."""
        self._values |= {**metrics, "step": float(step), "row_time_seconds": time.time()}
        self._write()

    def close(self, *, is_failing: bool) -> None:
        """Marks the run as ended."""
        self._values["active"] = 0.0
        self._write()

    def _write(self) -> None:
        families: dict[str, list[str]] = defaultdict(list)
        for metric, value in self._values.items():
            base, _, part = metric.partition("/")
            name = "pretrain_" + _NO_NAME.sub("_", base)
            labels = self._labels | ({"part": part} if part else {})
            # A name that had to be changed may be that of another metric.
            labels |= {"metric": base} if name != f"pretrain_{base}" else {}
            pairs = (f'{key}="{text.translate(_ESCAPES)}"' for key, text in sorted(labels.items()))
            shown = ",".join(pairs)
            families[name].append(f"{name}{{{shown}}} {_number(value)}\n")
        head = "# HELP {0} Of a training run, docs/observability.md\n# TYPE {0} gauge\n"
        text = "".join(head.format(name) + "".join(lines) for name, lines in families.items())
        write_file(self._path, text.encode())


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(float(value))
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
