"""Runs of the arm `ranks`: started as tasks of a job, their ledgers compared, a row each."""

import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import ROOT
from benchmarks.gpu_bench import Bench
from benchmarks.gpu_job import Job, Pool
from benchmarks.gpu_layouts import CONFIG, FULL, TINY, references
from benchmarks.gpu_rank import Task
from benchmarks.gpu_runs import call
from pretrain.checkpoint.format import list_checkpoints, load_manifest
from pretrain.errors import EXIT_OK
from pretrain.run.folder import RunDir
from pretrain.tracking.audit import compare, read_audit
from pretrain.utils.jsonl import read_rows

TOLERANCE = {"fp32": (1e-4, 1e-3), "bf16": (1e-2, 3e-2)}
"""Largest relative difference of a loss and of a gradient norm. fp32: the order of sums. bf16: each value is rounded
by up to 2**-9, in other places than those of the reference, and a norm has the errors of a whole backward pass."""
TASK_S = 120.0
"""Longest time of a task, a start and a compilation included."""

Ended = Callable[[Task, int, dict[str, Any]], None]
Ledger = dict[str, Any]
"""JSON of a run: `rows` of its ledger, and `figures`, the losses of its last evaluation."""


class RankRuns:
    """Starts runs as ranks, and writes rows about them."""

    def __init__(self, bench: Bench, pool: Pool) -> None:
        self.bench, self.pool = bench, pool
        self.sizes = bench.pick(FULL, TINY)
        self.limit_s = bench.pick(TASK_S, 5 * TASK_S)
        self.path = bench.scratch / "rank-runs"
        self._config = bench.scratch / "ranks.yaml"

    def write_config(self) -> None:
        """Prepares the text, and writes the config that all runs share; runs of an earlier call are removed."""
        shutil.rmtree(self.path, ignore_errors=True)
        data = self.bench.scratch / "rank-text"
        if not (data / "index.json").exists():
            source = ["--input", str(ROOT / "docs"), "--vocab-size", "512", "--split", "tail:0.05"]
            call("pretrain", "prepare", "--output", str(data), *source)
        values = {"runs": self.path, "data": data, "device": self.bench.device.type, "steps": self.sizes.steps}
        self._config.write_text(CONFIG.format(**values))

    def overrides_of(self, reference: str) -> list[str]:
        """Returns the overrides of a model and recipe."""
        return references(self.sizes, str(self.path / "one-dense"))[reference]

    def task(self, run: str, overrides: list[str], **options: Any) -> Task:
        """Returns the training of a run; its folder is in `path`, or where an override puts it."""
        return Task(run, ["train", str(self._config), f"run.name={_slug(run)}", *overrides], **options)

    def folder(self, run: str) -> RunDir:
        """The folder of a run."""
        return RunDir(self.path / _slug(run))

    def run(self, job_name: str, ranks: int, tasks: list[Task], ended: Ended) -> None:
        """Runs tasks; one that fails ends its job, and the next begins another.

        `ended` is called with each task, its exit code, and figures: its seconds, or after a failure the last lines
        of rank 0 as `log`.
        """
        rest = list(tasks)
        while rest:
            with self.pool.take(job_name, ranks) as job:
                job.begin([asdict(task) for task in rest])
                code = EXIT_OK
                for row in self._rows_as_they_come(job):
                    code = row.pop("code")
                    ended(rest.pop(0), code, row if code == EXIT_OK else {"log": job.last_lines(0)})
                if rest and code == EXIT_OK:
                    # Killed, by the limit or by a signal, before it could write its row.
                    code = next((code for code in job.codes() if code), 1)
                    ended(rest.pop(0), code, {"log": job.last_lines(0)})

    def _rows_as_they_come(self, job: Job) -> Iterator[dict[str, Any]]:
        count = 0
        while True:
            rows = job.wait_for_row(count, self.limit_s)
            if len(rows) == count:
                return
            yield from rows[count:]
            count = len(rows)

    def write(self, case: str, ranks: int, *, held: bool | None, **figures: Any) -> None:
        """Writes the row of a case, which fails where it was not held; None: nothing is judged."""
        if held is False:
            self.bench.failed.append(case)
        shape = {"ranks": ranks, "backend": self.bench.pick("NCCL, one GPU", "gloo")}
        self.bench.write(case, shape, held=held, **figures)

    def write_failure(self, case: str, ranks: int, code: int | None, log: str) -> None:
        """Writes the row of a task that ended with an error."""
        self.write(case, ranks, held=False, error=f"exit code {code}", log=log)


def _slug(name: str) -> str:
    return re.sub("[^A-Za-z0-9]+", "-", name)


def read_ledger(run: RunDir) -> Ledger:
    """Returns the ledger of a run, and the losses of its last evaluation."""
    figures: dict[str, float] = {}
    for row in read_rows(run.metrics):
        figures |= {name: row[name] for name in ("val_loss", "val_ema_loss") if name in row}
    return {"rows": [asdict(row) for row in read_audit(run.audit)], "figures": figures}


def differences(reference: Ledger, ours: Ledger) -> dict[str, Any]:
    """Returns the largest relative difference of each figure of two runs, and whether their samples are the same."""
    pairs = list(zip(reference["rows"], ours["rows"], strict=False))
    apart: dict[str, Any] = {}
    for name in ("loss", "grad_norm"):
        values = [(float.fromhex(a[name]), float.fromhex(b[name])) for a, b in pairs if a[name] and b[name]]
        # Of numpy, whose maximum is nan where a value is. A value of 0 is one of the dry CUDA runtime.
        apart[name] = float(np.max([abs(a - b) / (abs(a) or 1.0) for a, b in values])) if values else None
    for name, value in reference["figures"].items():
        other = ours["figures"].get(name)
        apart[name] = None if other is None else abs(value - other) / abs(value)
    samples = [[(row["digest"], row["tokens"]) for row in one["rows"]] for one in (reference, ours)]
    return apart | {"steps": len(ours["rows"]), "same_samples": samples[0] == samples[1]}


def are_close(apart: dict[str, Any], precision: str = "fp32") -> bool:
    """Returns whether the differences of two runs are within the tolerance, over the same samples."""
    of_loss, of_norm = TOLERANCE[precision]
    for name in apart.keys() - {"steps", "same_samples"}:
        bound = of_norm if name == "grad_norm" else of_loss
        if apart[name] is None or not apart[name] <= bound:
            return False
    return apart["same_samples"] and apart["steps"] > 0


def first_difference(expected: RunDir, ours: RunDir) -> str | None:
    """Returns the first difference of two runs, in a bit of their ledgers or of their checkpoints; None: equal.

    A run that was stopped has a checkpoint of that step besides: those of the same steps are compared, the last ones
    at least.
    """
    seen = compare(expected.audit, ours.audit)
    if seen is not None:
        return str(seen)
    saved = [{folder.name: folder for folder in list_checkpoints(run.checkpoints)} for run in (expected, ours)]
    if max(saved[0]) != max(saved[1]):
        return f"the last checkpoints are {max(saved[0])} and {max(saved[1])}"
    for name in sorted(saved[0].keys() & saved[1].keys()):
        if _checksums(saved[0][name]) != _checksums(saved[1][name]):
            return f"the files of {name} differ"
    return None


def _checksums(checkpoint: Path) -> dict[str, list[int]]:
    records = load_manifest(checkpoint).files
    return {record.name: record.crc32s for record in records if record.name.endswith(".safetensors")}
