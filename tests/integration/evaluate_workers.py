"""What the ranks of the evaluation tests do."""

from pathlib import Path
from typing import Any
from unittest import mock

import torch

from pretrain.artifact.model_path import open_source
from pretrain.artifact.open import load_artifact
from pretrain.config.train import TasksConfig
from pretrain.dist import World, gather_objects
from pretrain.evaluation.corpus import CorpusOptions
from pretrain.evaluation.distributed import joined_ranks
from pretrain.evaluation.held_out import evaluate_held_out
from pretrain.evaluation.translation import TranslationTask, evaluate_translation
from pretrain.training.downstream import DownstreamTasks


def evaluations(world: World, folder: str) -> dict[str, Any]:
    """Everything that `pretrain evaluate` measures on prepared data and of translations, as facts."""
    place = Path(folder)
    with joined_ranks("cpu") as (joined, device):
        assert (joined, device) == (world, "cpu")
        return measure(place)


def measure(place: Path) -> dict[str, Any]:
    """The same without joining."""
    choice = CorpusOptions(batch_tokens=64)
    sources = CorpusOptions(data=(str(place / "texts"), str(place / "more")), split="train", batch_tokens=64)
    task = TranslationTask(place / "test.en", place / "test.de", beams=(2,), max_tokens=8, batch_tokens=64)
    translated = evaluate_translation(place / "mt", task, output=place / "out.txt").facts()
    for system in translated["systems"]:
        del system["seconds"], system["sentences_per_s"]
    return {
        "loss": evaluate_held_out(place / "gpt", sources).facts(),
        "compared": evaluate_held_out(place / "gpt", choice, other=place / "gpt2", resamples=100).facts(),
        "labels": evaluate_held_out(place / "bert", choice, other=place / "bert2", resamples=100).facts(),
        "translated": translated,
    }


def scores_after_a_failure(world: World, folder: str, names: list[str]) -> list[list[str]]:
    """Names of the scores of tasks of which rank 1 fails at the first, alone: out of memory, then at its files."""
    from pretrain.evaluation import harness_model, tasks

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("of this rank alone")

    found = []
    with joined_ranks("cpu"):
        artifact = load_artifact(open_source(Path(folder) / "gpt"), "cpu")
        config = TasksConfig(names=names, path=str(Path(folder) / "tasks"), every_steps=1, batch_tokens=64)
        downstream = DownstreamTasks(config, artifact, together=False)
        for owner, name in ((harness_model.HarnessModel, "_score"), (tasks, "_load")):
            kept = getattr(owner, name)
            answers = iter([fail] if world.rank == 1 else [])
            with mock.patch.object(owner, name, lambda *given, a=answers, k=kept: next(a, k)(*given)):
                scores = downstream.measure(lambda: False, lambda: None)
            found.append(sorted(scores))
            assert gather_objects(world.rank) == [0, 1]  # all are at the same place
    return found
