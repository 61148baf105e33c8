"""Tasks of lm-eval-harness, from files or of the harness, for a model of ours, alone or compared.

names -> tasks of --task-path, or the harness's own -> HarnessModel answers -> the harness scores
"""

import contextlib
import hashlib
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.artifact.open import Artifact, load_artifact
from pretrain.artifact.source import ModelSource
from pretrain.errors import ConfigError, DataError
from pretrain.evaluation.bootstrap import RESAMPLES, Difference, compare_means
from pretrain.evaluation.distributed import current, failing_together, open_together
from pretrain.evaluation.evaluation_log import Data, Subject, find_subject
from pretrain.evaluation.translation_metrics import import_extra


@dataclass(frozen=True, slots=True)
class TaskChoice:
    """Options of the command line for tasks."""

    names: tuple[str, ...]  # tasks, groups or tags
    path: Path | None = None  # folder of task files (YAML); None: those of the harness alone
    num_fewshot: int | None = None  # examples before a question; None: the task's default
    limit: int | None = None  # only the first documents of each task
    chat: bool = False  # questions are a user's turns, examples before them earlier ones
    batch_tokens: int = 8192


@dataclass(frozen=True, slots=True)
class TaskScore:
    """One metric of one task or group, compared with the score of a baseline if there is one."""

    task: str
    metric: str  # as in the harness, with its filter: `acc,none`
    value: float
    stderr: float | None
    baseline: float | None = None
    difference: Difference | None = None  # None: the score is no mean over documents


@dataclass(frozen=True, slots=True)
class TaskReport:
    """Scores of all tasks, in the order of the harness."""

    model: str
    baseline: str | None
    harness: str  # its version
    scores: list[TaskScore]
    num_documents: dict[str, int] = field(default_factory=dict)  # of each task
    data: list[Data] = field(default_factory=list)
    subject: Subject | None = None

    def facts(self) -> dict[str, Any]:
        """Returns plain values."""
        facts = {"kind": "tasks", "model": self.model, "lm_eval": self.harness, "documents": self.num_documents}
        baseline = {} if self.baseline is None else {"baseline": self.baseline}
        return facts | baseline | {"scores": [asdict(score) for score in self.scores]}

    def lines(self) -> list[str]:
        """Returns the lines of the report."""
        lines = [f"{self.model}: lm-eval-harness {self.harness}"]
        for score in self.scores:
            error = "" if score.stderr is None else f" +- {score.stderr:.4f}"
            lines.append(f"  {score.task:<20} {score.metric:<24} {score.value:.4f}{error}")
            if score.baseline is not None:
                difference = score.difference
                text = difference.line() if difference else "no mean over documents: not compared"
                lines.append(f"  {'':<20} against {self.baseline}: {score.baseline:.4f}, {text}")
        return lines


def evaluate_tasks(
    model: Path,
    choice: TaskChoice,
    *,
    other: Path | None = None,
    resamples: int = RESAMPLES,
    device: str = "cpu",
) -> TaskReport:
    """Measures a decoder on tasks. Collective; ranks other than 0 return no scores.

    `model` and `other`, the baseline, are runs, checkpoints, model folders or Hugging Face folders;
    `device` is that of `open_artifact`.

    Raises:
        LaunchError: The harness is not installed.
        ConfigError: No such task, or the model cannot do it.
        DataError: The documents of a task cannot be loaded.
    """
    _import_harness("--tasks")
    harness = version("lm_eval")
    names = None if other is None else str(other)
    # Unknown tasks are refused before a model is loaded.
    _load(choice)
    described = [open_together(path) for path in (model, *([] if other is None else [other]))]
    subject = find_subject(described[0])
    results = [_run(one, choice, resamples, device) for one in described]
    if current()[0] != 0:
        return TaskReport(str(model), names, harness, [])
    mine = results[0]
    theirs = results[1] if other is not None else None
    counts = {task: count["effective"] for task, count in mine["n-samples"].items()}
    place = None if choice.path is None else str(choice.path)
    data = []
    for task, samples in mine["samples"].items():
        # A document is there once for each filter.
        by_id = {sample["doc_id"]: str(sample["doc_hash"]) for sample in samples}
        hashes = "\n".join(by_id[number] for number in sorted(by_id))
        data.append(Data(task, place, hashlib.sha256(hashes.encode()).hexdigest()))
    scores = _scores(mine, theirs, resamples)
    return TaskReport(str(model), names, harness, scores, counts, data, subject)


def _import_harness(option: str) -> None:
    import_extra("lm_eval", f"{option} are run by lm-eval-harness")
    importlib.import_module("datasets").disable_progress_bars()


def check_tasks(choice: TaskChoice, key: str) -> None:
    """Checks that the tasks of a key of the config are known; loads none. Raises: ConfigError, LaunchError."""
    _import_harness(key)
    _find(choice, (f"{key}.names", f"{key}.path"))


def answer_tasks(artifact: Artifact, choice: TaskChoice, *, together: bool, go_on: Callable[[], None]) -> Any:
    """Returns the results of the harness for live weights; None on ranks other than 0. Collective.

    `together` and `go_on` are those of `HarnessModel`. Raises: ConfigError, DataError.
    """
    with failing_together():
        manager = _load(choice)
    return _answer(artifact, choice, manager, 0, together=together, go_on=go_on)


def list_scores(results: Any) -> list[tuple[str, str, float]]:
    """Returns task, metric and value of each score."""
    return [(score.task, score.metric, score.value) for score in _scores(results, None, 0)]


def _find(choice: TaskChoice, options: tuple[str, str]) -> Any:
    """Returns the harness's manager, which knows the tasks. Raises: ConfigError, naming an option."""
    place = None if choice.path is None else str(choice.path)
    if choice.path is not None and not choice.path.is_dir():
        raise ConfigError(
            "no such folder",
            where=f"{options[1]} {place}",
            fix="give the folder of task files",
        )
    build_manager = importlib.import_module("lm_eval.tasks").TaskManager
    manager = build_manager(include_path=place, include_defaults=False) if place else None
    if manager is None or any(name not in manager.task_index for name in choice.names):
        # Reads thousands of files: only where a name needs them.
        manager = build_manager(include_path=place)
    for name in choice.names:
        if name not in manager.task_index:
            raise ConfigError(
                f"there is no task {name!r}",
                where=options[0],
                fix=f"give {options[1]}, or another name",
            )
    return manager


def _load(choice: TaskChoice) -> Any:
    manager = _find(choice, ("--tasks", "--task-path"))
    try:
        manager.load(list(choice.names))
    except Exception as error:  # the harness and its loaders raise nearly anything
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = f"{type(error).__name__}: {(lines or [type(error).__name__])[0]}"
        raise DataError(
            f"cannot be loaded: {reason}",
            where=f"--tasks {','.join(choice.names)}",
            fix="correct the task's file, or fetch its documents",
        ) from None
    return manager


def _run(source: ModelSource, choice: TaskChoice, resamples: int, device: str) -> Any:
    # Loaded anew for each model: tasks keep the answers.
    return _answer(load_artifact(source, device), choice, _load(choice), resamples)


def _answer(artifact: Artifact, choice: TaskChoice, manager: Any, resamples: int, **options: Any) -> Any:
    harness_model = importlib.import_module("pretrain.evaluation.harness_model").HarnessModel
    model = harness_model(artifact, choice.batch_tokens, chat=choice.chat, **options)
    with _quiet():
        return importlib.import_module("lm_eval").simple_evaluate(
            model=model,
            tasks=list(choice.names),
            task_manager=manager,
            num_fewshot=choice.num_fewshot,
            limit=choice.limit,
            bootstrap_iters=resamples,
            log_samples=True,
            apply_chat_template=choice.chat,
            fewshot_as_multiturn=choice.chat,
        )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Drops the harness's output on stderr, such as bars and messages of git; not on a terminal."""
    if sys.stderr.isatty():
        yield
        return
    sys.stderr.flush()
    saved = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        sys.stderr.flush()
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nowhere)


def _scores(mine: Any, theirs: Any, resamples: int) -> list[TaskScore]:
    scores = []
    for task, values in _table(mine).items():
        for metric, value in values.items():
            name, _, chain = metric.partition(",")
            if not chain or name.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = values.get(f"{name}_stderr,{chain}")
            stderr = float(error) if isinstance(error, int | float) else None
            baseline = difference = None
            if theirs is not None:
                baseline = float(_table(theirs)[task][metric])
                difference = _difference(mine, theirs, task, metric, resamples)
            scores.append(TaskScore(task, metric, float(value), stderr, baseline, difference))
    return scores


def _table(results: Any) -> dict[str, dict[str, Any]]:
    return {**results["results"], **results.get("groups", {})}


def _difference(mine: Any, theirs: Any, task: str, metric: str, resamples: int) -> Difference | None:
    """Compares two models over a task's documents; None where the score is no mean over them."""
    name, _, chain = metric.partition(",")
    columns = []
    for results in (mine, theirs):
        samples = [sample for sample in results["samples"].get(task, ()) if sample["filter"] == chain]
        samples.sort(key=lambda sample: sample["doc_id"])
        values = [sample.get(name) for sample in samples]
        kinds = (bool, int, float, np.number)
        if not values or not all(isinstance(value, kinds) for value in values):
            return None
        column = np.array(values, dtype=np.float64)
        if not np.isclose(column.mean(), results["results"][task][metric], rtol=1e-9, atol=1e-12):
            return None
        columns.append(column)
    counts = np.ones(len(columns[0]))
    return compare_means(columns[1], columns[0], counts, resamples, "documents")
