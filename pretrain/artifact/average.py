"""The mean of several checkpoints as a model folder (Vaswani et al. 2017, 6.1: the last 5, or the last 20).

No model is built and no optimizer state is read. The result generates, is evaluated, exported, and
trained on.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.artifact.model_path import is_release, open_source, refuse_release, write_model_folder
from pretrain.artifact.open import NORMALIZE_KEY, find_normalize
from pretrain.artifact.source import ModelSource, split_average
from pretrain.checkpoint.format import MANIFEST, list_checkpoints, step_of
from pretrain.checkpoint.load import MeanReader
from pretrain.errors import CheckpointError, ConfigError, DataError
from pretrain.interop.generation import write_generation_defaults
from pretrain.run.folder import RunDir
from pretrain.types import EMA


@dataclass(frozen=True, slots=True)
class AverageReport:
    """Result of an average, in the order of steps."""

    checkpoints: list[str]
    steps: list[int | None]  # None: a model folder
    num_parameters: int  # by name
    arithmetic: str = "sums in float64, rounded to fp32 once"


def average_checkpoints(paths: Sequence[Path], last: int | None, out: Path) -> AverageReport:
    """Writes a model folder with the mean of the fp32 master weights of checkpoints.

    `paths` is one run, with the number of its `last` checkpoints; or several checkpoints, model
    folders, or runs, each for its newest valid one. `out` must not exist, or be empty.

    Raises:
        ConfigError: Too few, or of different models; names the keys. Or `out` is not empty.
        CheckpointError: One is missing, damaged, or has other parameters.
        DataError: Their tokenizers differ.
    """
    chosen = _open_chosen(paths, last)
    chosen.sort(key=lambda source: _step(source) or 0)
    _check_sources(chosen)
    files = _check_alike(chosen)
    reader = MeanReader([source.checkpoint for source in chosen if source.checkpoint is not None])
    steps = [_step(source) for source in chosen]
    report = AverageReport([str(source.path) for source in chosen], steps, len(reader.shapes))
    normalize = find_normalize(chosen[0])
    facts = {
        "model": chosen[0].config.model_dump(mode="json"),
        "generation": write_generation_defaults(chosen[0].generation),
        "origin": {"averaged": report.checkpoints, "steps": steps, "arithmetic": report.arithmetic}
        | ({"architecture": chosen[0].like} if chosen[0].like else {}),
        NORMALIZE_KEY: None if normalize is None else normalize.model_dump(mode="json"),
    }
    write_model_folder(out, facts, files, ((name, reader.read(name)) for name in reader.shapes))
    return report


def _step(source: ModelSource) -> int | None:
    return step_of(split_average(source.path)[0])


def _open_chosen(paths: Sequence[Path], last: int | None) -> list[ModelSource]:
    """Opens the checkpoints to average; chooses again where a run removes one meanwhile."""
    while True:
        chosen = _choose(paths, last)
        try:
            return [open_source(path) for path in chosen]
        except CheckpointError:
            if last is None or all(split_average(path)[0].exists() for path in chosen):
                raise


def _choose(paths: Sequence[Path], last: int | None) -> list[Path]:
    """Returns the paths of the checkpoints to average."""
    if len(paths) == 1 and is_release(paths[0]):
        raise ConfigError(
            "a Hugging Face folder holds one set of weights, of which there is no average",
            where=str(paths[0]),
            fix="name several models of one training, or a run with --last N",
        )
    for path in paths:
        refuse_release(path)
    if last is None:
        if len(paths) < 2:
            raise ConfigError(
                "a single checkpoint cannot be averaged",
                fix="give --last N with a run, or name several checkpoints",
            )
        return list(paths)
    place, averaged = split_average(paths[0])
    if len(paths) > 1 or (place / MANIFEST).is_file():
        raise ConfigError(f"--last {last} is about one run", fix="give a run, or leave --last out")
    checkpoints = list_checkpoints(RunDir(place).checkpoints)
    if len(checkpoints) < max(last, 1):
        raise CheckpointError(
            f"has {len(checkpoints)} checkpoints, --last {last} needs more",
            where=str(paths[0]),
            fix=f"lower --last, or train with checkpoint.keep={last}" if checkpoints else "check the path",
        )
    return [path / EMA if averaged else path for path in checkpoints[-last:]]


def _check_sources(chosen: Sequence[ModelSource]) -> None:
    """Raises ConfigError for adapters, and for a checkpoint that is named twice."""
    paths: set[Path] = set()
    for source in chosen:
        if source.merged is not None:
            export = f"pretrain export {source.path} OUT, then pretrain import OUT MODEL"
            raise ConfigError(
                "cannot average LoRA adapters",
                where=str(source.path),
                fix=f"make models of them first: {export}",
            )
        path = source.path.resolve()
        if path in paths:
            raise ConfigError("the same checkpoint was named twice", where=str(path), fix="name it once")
        paths.add(path)


def _check_alike(chosen: Sequence[ModelSource]) -> list[tuple[str, bytes]]:
    """Compares models and tokenizers with the first; returns the tokenizer's files."""
    first, *rest = chosen
    keys = _keys(first)
    files = first.load_tokenizer_files()
    for other in rest:
        theirs = _keys(other)
        differing = [key for key in sorted(keys.keys() | theirs) if keys.get(key) != theirs.get(key)]
        if differing:
            raise ConfigError(
                f"another model than {first.path}, by {', '.join(differing[:5])}",
                where=str(other.path),
                fix="average checkpoints of one model",
            )
        if dict(other.load_tokenizer_files()) != dict(files):
            raise DataError(
                f"another tokenizer than that of {first.path}",
                where=str(other.path),
                fix="average checkpoints that were trained with one tokenizer",
            )
    return files


def _keys(source: ModelSource) -> dict[str, Any]:
    """Returns the model's config by dotted keys."""

    def leaves(tree: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
        for key, value in tree.items():
            if isinstance(value, dict):
                yield from leaves(value, f"{prefix}.{key}")
            else:
                yield f"{prefix}.{key}", value

    # A preset is written out in the other keys.
    return dict(leaves(source.config.model_dump(exclude={"preset"}), "model"))
