"""The mean of several checkpoints as a model folder (Vaswani et al. 2017, 6.1: the last 5, or the last 20).

    run, its last N  |  checkpoints by name  ->  verified, compared  ->  mean, parameter by parameter  ->  model folder

No model is built and no optimizer state is read; what comes out generates, is evaluated, exported, and trained on.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.artifact.model_path import FORMAT, is_release, open_source
from pretrain.artifact.open import NORMALIZE_KEY, find_normalize
from pretrain.artifact.source import TOKENIZER_FOLDER, ModelSource
from pretrain.checkpoint.format import MANIFEST, MODEL_FILE, list_checkpoints, step_of
from pretrain.checkpoint.load import MeanReader, write_weights
from pretrain.errors import CheckpointError, ConfigError, DataError
from pretrain.run.folder import RunDir
from pretrain.utils.io import make_dir, new_folder, write_file, write_json


@dataclass(frozen=True, slots=True)
class AverageReport:
    """What was averaged.

    Attributes:
        checkpoints: Folders, in the order of their steps where they have one.
        steps: Step of each; None: a model folder.
        num_parameters: Parameters, by name.
        arithmetic: How the mean was taken.
    """

    checkpoints: list[str]
    steps: list[int | None]
    num_parameters: int
    arithmetic: str = "sums in float64, rounded to fp32 once"


def average_checkpoints(paths: Sequence[Path], last: int | None, out: Path) -> AverageReport:
    """Writes a model folder with the mean of the fp32 master weights of checkpoints.

    Args:
        paths: One run, with `last`; or several checkpoints, model folders, or runs, whose newest good one is meant.
        last: How many of the run's newest.
        out: The folder; must not exist, or be empty. It appears when it is whole.

    Raises:
        ConfigError: Too few, or of different models, which keys are named; `out` holds something.
        CheckpointError: One is missing, damaged, or has other parameters.
        DataError: Their tokenizers differ.
        DiskError: The disk refused; nothing is left under `out`.
    """
    chosen = [open_source(path) for path in _choose(paths, last)]
    chosen.sort(key=lambda source: step_of(source.path) or 0)
    if adapters := next((source for source in chosen if source.merged is not None), None):
        fix = f"make models of them first: pretrain export {adapters.path} OUT, then pretrain import OUT MODEL"
        raise ConfigError("cannot average LoRA adapters", where=str(adapters.path), fix=fix)
    paths = [source.path.resolve() for source in chosen]
    if twice := next((path for path in paths if paths.count(path) > 1), None):
        raise ConfigError("the same checkpoint was named twice", where=str(twice), fix="name it once")
    files = _check_alike(chosen)
    reader = MeanReader(paths)
    averaged = AverageReport(
        [str(source.path) for source in chosen], [step_of(path) for path in paths], len(reader.shapes)
    )
    origin: dict[str, Any] = {
        "averaged": averaged.checkpoints,
        "steps": averaged.steps,
        "arithmetic": averaged.arithmetic,
    }
    normalize = find_normalize(chosen[0])
    with new_folder(out) as folder:
        facts = {
            "format": FORMAT,
            "model": chosen[0].config.model_dump(mode="json"),
            "generation": chosen[0].generation.to_json(),
            "origin": origin,
            NORMALIZE_KEY: None if normalize is None else normalize.model_dump(mode="json"),
        }
        write_json(folder / MODEL_FILE, facts)
        if files:
            tokenizer = make_dir(folder / TOKENIZER_FOLDER)
            for name, content in files.items():
                write_file(tokenizer / name, content)
        write_weights(folder, ((name, reader.read(name)) for name in reader.shapes), origin)
    return averaged


def _choose(paths: Sequence[Path], last: int | None) -> list[Path]:
    """Returns the checkpoints that were meant."""
    for path in paths:
        if is_release(path):
            fix = f"make a model folder of it first: pretrain import {path} OUT"
            raise CheckpointError("a Hugging Face folder has no checkpoint of ours", where=str(path), fix=fix)
    if last is None:
        if len(paths) < 2:
            raise ConfigError(
                "a single checkpoint cannot be averaged", fix="give --last N with a run, or name several checkpoints"
            )
        return list(paths)
    if len(paths) > 1 or (paths[0] / MANIFEST).is_file():
        raise ConfigError(f"--last {last} is about one run", fix="give a run, or leave --last out")
    found = list_checkpoints(RunDir(paths[0]).checkpoints)
    if len(found) < max(last, 1):
        raise CheckpointError(
            f"has {len(found)} checkpoints, --last {last} needs more",
            where=str(paths[0]),
            fix=f"lower --last, or train with checkpoint.keep={last}" if found else "check the path",
        )
    return found[-last:]


def _check_alike(chosen: Sequence[ModelSource]) -> dict[str, bytes]:
    """Compares models and tokenizers with the first; returns the tokenizer's files."""
    first = chosen[0]
    files = dict(first.load_tokenizer_files())
    for other in chosen[1:]:
        mine, its = (dict(_leaves(source.config.model_dump(exclude={"preset"}), "model")) for source in (first, other))
        differing = [key for key in sorted(mine.keys() | its.keys()) if mine.get(key) != its.get(key)]
        if differing:
            raise ConfigError(
                f"another model than {first.path}, by {', '.join(differing[:5])}",
                where=str(other.path),
                fix="average checkpoints of one model",
            )
        if dict(other.load_tokenizer_files()) != files:
            raise DataError(
                f"another tokenizer than that of {first.path}",
                where=str(other.path),
                fix="average checkpoints that were trained with one tokenizer",
            )
    return files


def _leaves(tree: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}.{key}")
        else:
            yield f"{prefix}.{key}", value
