"""Downstream tasks of lm-eval-harness during training: `eval.tasks`, at steps of their own.

    step due -> each task by itself -> HarnessModel on the live weights -> tasks/NAME/METRIC of the trackers

Whole models deal the questions out to the ranks; where a forward pass is collective (ZeRO 3, parts
of matrices or experts), all ranks answer all of them together. A task that fails is named in a
warning, and the run goes its way: the same steps with tasks as without. Which steps are due is a
function of the step, so that a resumed run has the rows of an uninterrupted one.
"""

import logging
from collections.abc import Callable
from pathlib import Path

import torch

from pretrain import dist
from pretrain.artifact.open import Artifact
from pretrain.config.run import RunConfig
from pretrain.config.train import TasksConfig
from pretrain.engine.engine import Engine
from pretrain.errors import PretrainError
from pretrain.evaluation.tasks import TaskChoice, answer_tasks, check_tasks, list_scores
from pretrain.model.lazy_compiler import running_eagerly
from pretrain.shards.dataset import Dataset
from pretrain.training.samples import build_reader
from pretrain.types import GenerationDefaults

log = logging.getLogger(__name__)


class DownstreamTasks:
    """The tasks of a run, on all ranks. Raises: ConfigError, LaunchError (no harness)."""

    def __init__(self, config: TasksConfig, artifact: Artifact, *, together: bool) -> None:
        self._config = config
        self._artifact = artifact
        self._together = together
        self._path = None if config.path is None else Path(config.path)

    def is_due(self, step: int, is_last: bool) -> bool:
        """Returns whether tasks follow a step."""
        every = self._config.every_steps
        return is_last or (every > 0 and step % every == 0)

    def measure(self, should_stop: Callable[[], bool], go_on: Callable[[], None]) -> dict[str, float]:
        """Returns the scores by `tasks/NAME/METRIC`; on ranks other than 0 none. Collective.

        `should_stop` is a collective request between tasks, `go_on` is called after each batch.
        """
        scores: dict[str, float] = {}
        model = self._artifact.model
        was_training = model.training
        model.eval()
        try:
            for name in self._config.names:
                if should_stop():
                    break
                scores |= self._answer(name, go_on)
        finally:
            model.train(was_training)
        return scores

    def _answer(self, name: str, go_on: Callable[[], None]) -> dict[str, float]:
        config = self._config
        choice = TaskChoice((name,), self._path, config.num_fewshot, config.limit, False, config.batch_tokens)
        results, problem = None, None
        try:
            # Questions have other shapes than training: compiled blocks would be compiled for each.
            with torch.no_grad(), running_eagerly():
                results = answer_tasks(self._artifact, choice, together=self._together, go_on=go_on)
        except PretrainError as error:
            problem = str(error)
        except Exception as error:  # the harness, metrics and loaders raise nearly anything
            if self._together and isinstance(error, torch.OutOfMemoryError):
                raise  # the others wait in the pass that this rank has left
            problem = f"{type(error).__name__}: {error}".splitlines()[0]
        problems = [one for one in dist.gather_objects(problem) if one]
        if problems:
            log.warning("eval.tasks: %s has no score: %s", name, problems[0])
            return {}
        return {} if results is None else _named(list_scores(results))


def _named(scores: list[tuple[str, str, float]]) -> dict[str, float]:
    metrics = {}
    for task, metric, value in scores:
        name, _, chain = metric.partition(",")
        metrics[f"tasks/{task}/{name if chain == 'none' else f'{name}_{chain}'}"] = value
    return metrics


def build_tasks(config: RunConfig, dataset: Dataset, engine: Engine) -> DownstreamTasks | None:
    """Builds the tasks of a run; None where it has none. Raises: ConfigError, LaunchError."""
    tasks = config.eval.tasks
    if not tasks.names:
        return None
    path = None if tasks.path is None else Path(tasks.path)
    check_tasks(TaskChoice(tuple(tasks.names), path), "eval.tasks")
    model = engine.module.model
    codec = build_reader(dataset, model).codec
    artifact = Artifact(model, codec, config.model, GenerationDefaults(), config.folder)
    return DownstreamTasks(tasks, artifact, together=engine.needs_all_ranks)
