"""Tasks of lm-eval-harness: a model of ours on tasks from files or of the harness, and beside another model.

names -> tasks of --task-path, or the harness's own -> HarnessModel answers -> the harness scores -> TaskReport
"""

import contextlib
import hashlib
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.artifact.open import open_artifact
from pretrain.errors import ConfigError, DataError
from pretrain.evaluate.bootstrap import RESAMPLES, Difference, compare_means
from pretrain.evaluate.distributed import current, open_together
from pretrain.evaluate.evaluation_log import Data, Subject, find_subject
from pretrain.evaluate.translation_metrics import import_extra


@dataclass(frozen=True, slots=True)
class TaskChoice:
    """What the command line says of tasks.

    Attributes:
        names: Tasks, groups or tags.
        path: Folder of task files (YAML). None: the harness's own tasks only.
        num_fewshot: Examples before a question. None: what the task says.
        limit: Only the first documents of each task.
        batch_tokens: Tokens that are read together.
    """

    names: tuple[str, ...]
    path: Path | None = None
    num_fewshot: int | None = None
    limit: int | None = None
    batch_tokens: int = 8192


@dataclass(frozen=True, slots=True)
class TaskScore:
    """One metric of one task.

    Attributes:
        task: Name of the task or group.
        metric: Name in the harness, with its filter after a comma: `acc,none`.
        value: The score.
        stderr: Standard error; None: not available.
        baseline: Score of the baseline.
        difference: The model's score less the baseline's; None where the score is no mean over documents.
    """

    task: str
    metric: str
    value: float
    stderr: float | None
    baseline: float | None = None
    difference: Difference | None = None


@dataclass(frozen=True, slots=True)
class TaskReport:
    """Scores of all tasks.

    Attributes:
        model: Path as given on the command line.
        baseline: Path of the baseline; None: no comparison.
        harness: Version of the harness.
        scores: In the order of the harness.
        num_documents: Number of documents of each task.
        data: The documents of each task.
        subject: The checkpoint; None: the model is no run's.
    """

    model: str
    baseline: str | None
    harness: str
    scores: list[TaskScore]
    num_documents: dict[str, int] = field(default_factory=dict)
    data: list[Data] = field(default_factory=list)
    subject: Subject | None = None

    def facts(self) -> dict[str, Any]:
        """Returns plain values."""
        named = {"kind": "tasks", "model": self.model, "lm_eval": self.harness, "documents": self.num_documents}
        if self.baseline is not None:
            named["baseline"] = self.baseline
        return {**named, "scores": [asdict(score) for score in self.scores]}

    def lines(self) -> list[str]:
        """Returns what is printed."""
        lines = [f"{self.model}: lm-eval-harness {self.harness}"]
        for score in self.scores:
            error = "" if score.stderr is None else f" +- {score.stderr:.4f}"
            lines.append(f"  {score.task:<20} {score.metric:<24} {score.value:.4f}{error}")
            if score.baseline is not None:
                comparison = (
                    "no mean over documents: not compared" if score.difference is None else score.difference.line()
                )
                lines.append(f"  {'':<20} against {self.baseline}: {score.baseline:.4f}, {comparison}")
        return lines


def evaluate_tasks(
    model: Path, choice: TaskChoice, *, other: Path | None = None, resamples: int = RESAMPLES, device: str = "cpu"
) -> TaskReport:
    """Measures a decoder on tasks. Collective; ranks other than 0 return no scores.

    Args:
        model: A run, a checkpoint, a model folder or a Hugging Face folder.
        choice: Which tasks.
        other: The baseline to compare with.
        resamples: Bootstrap resamples.
        device: Device as in `open_artifact`.

    Raises:
        LaunchError: The harness is not installed.
        ConfigError: No such task, or the model cannot do it.
        DataError: The documents of a task cannot be loaded.
    """
    import_extra("lm_eval", "--tasks are run by lm-eval-harness")
    importlib.import_module("datasets").disable_progress_bars()
    harness = version("lm_eval")
    names = None if other is None else str(other)
    # Refused before a model is loaded; and loaded anew for each: tasks keep the answers.
    _load(choice)
    described = [open_together(path) for path in (model, *([] if other is None else [other]))]
    subject = find_subject(described[0])
    found = [_run(one.path, choice, resamples, device) for one in described]
    if current()[0] != 0:
        return TaskReport(str(model), names, harness, [])
    mine, its = found[0], found[1] if other is not None else None
    counts = {task: count["effective"] for task, count in mine["n-samples"].items()}
    scores = list(_scores(mine, its, resamples))
    return TaskReport(str(model), names, harness, scores, counts, _documents(mine, choice), subject)


def _documents(results: Any, choice: TaskChoice) -> list[Data]:
    """Returns which documents each task has asked about, in their order."""
    place = None if choice.path is None else str(choice.path)
    found = []
    for task, samples in results["samples"].items():
        # A document is there once for each filter.
        by_id = {sample["doc_id"]: str(sample["doc_hash"]) for sample in samples}
        hashes = "\n".join(by_id[number] for number in sorted(by_id))
        found.append(Data(task, place, hashlib.sha256(hashes.encode()).hexdigest()))
    return found


def _load(choice: TaskChoice) -> Any:
    """Returns the harness's manager of tasks, which knows those asked for. Raises: ConfigError, DataError."""
    if choice.path is not None and not choice.path.is_dir():
        raise ConfigError("no such folder", where=f"--task-path {choice.path}", fix="give the folder of task files")
    manager = importlib.import_module("lm_eval.tasks").TaskManager
    found = None if choice.path is None else manager(include_path=str(choice.path), include_defaults=False)
    if found is None or _unknown(found, choice.names):
        # Thousands of files are read: only where they are asked for.
        found = manager(include_path=None if choice.path is None else str(choice.path))
    if unknown := _unknown(found, choice.names):
        raise ConfigError(f"there is no task {unknown[0]!r}", where="--tasks", fix="give --task-path, or another name")
    try:
        found.load(list(choice.names))
    except Exception as error:  # the harness and its loaders raise nearly anything
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise DataError(
            f"cannot be loaded: {type(error).__name__}: {reason}",
            where=f"--tasks {','.join(choice.names)}",
            fix="correct the task's file, or fetch its documents",
        ) from None
    return found


def _unknown(manager: Any, names: Sequence[str]) -> list[str]:
    return [name for name in names if name not in manager.task_index]


def _run(path: Path, choice: TaskChoice, resamples: int, device: str) -> Any:
    """Returns what the harness says of a model; None on ranks other than 0."""
    harness_model = importlib.import_module("pretrain.evaluate.harness_model").HarnessModel
    model, manager = harness_model(open_artifact(path, device), choice.batch_tokens), _load(choice)
    with _quiet():
        return importlib.import_module("lm_eval").simple_evaluate(
            model=model,
            tasks=list(choice.names),
            task_manager=manager,
            num_fewshot=choice.num_fewshot,
            limit=choice.limit,
            bootstrap_iters=resamples,
            log_samples=True,
        )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Drops what the harness writes to stderr, bars and what git says of a folder that is none; not on a terminal."""
    if sys.stderr.isatty():
        yield
        return
    sys.stderr.flush()
    saved, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        sys.stderr.flush()
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nowhere)


def _scores(mine: Any, its: Any, resamples: int) -> list[TaskScore]:
    """Returns every score of a model, beside a baseline's."""
    found = []
    tables = [{**results["results"], **results.get("groups", {})} for results in (mine, its) if results is not None]
    for task, values in tables[0].items():
        for metric, value in values.items():
            name, _, chain = metric.partition(",")
            if not chain or name.endswith("_stderr") or not isinstance(value, int | float):
                continue
            stderr = values.get(f"{name}_stderr,{chain}")
            score = TaskScore(task, metric, float(value), float(stderr) if isinstance(stderr, int | float) else None)
            if its is not None:
                baseline = float(tables[1][task][metric])
                score = TaskScore(
                    task, metric, score.value, score.stderr, baseline, _difference(mine, its, task, metric, resamples)
                )
            found.append(score)
    return found


def _difference(mine: Any, its: Any, task: str, metric: str, resamples: int) -> Difference | None:
    """Compares two models over a task's documents; None where the score is no mean over them."""
    columns = []
    for results in (mine, its):
        values = _per_document(results, task, metric)
        if values is None or not np.isclose(values.mean(), results["results"][task][metric], rtol=1e-9, atol=1e-12):
            return None
        columns.append(values)
    return compare_means(columns[1], columns[0], np.ones(len(columns[0])), resamples, "documents")


def _per_document(results: Any, task: str, metric: str) -> np.ndarray | None:
    """Returns a metric of each document, in order; None where it is no number."""
    name, _, chain = metric.partition(",")
    samples = [sample for sample in results["samples"].get(task, ()) if sample["filter"] == chain]
    values = [sample.get(name) for sample in sorted(samples, key=lambda sample: sample["doc_id"])]
    if not values or not all(isinstance(value, bool | int | float | np.number) for value in values):
        return None
    return np.array(values, dtype=np.float64)
