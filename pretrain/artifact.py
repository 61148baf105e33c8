"""Opens any WHAT: a run folder or one of its checkpoints, with config, tokenizer and the newest good weights."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from pretrain.checkpoint.layout import MANIFEST, list_checkpoints, load_manifest
from pretrain.checkpoint.manager import load_checkpoint
from pretrain.config.load import load_config
from pretrain.config.run import RunConfig
from pretrain.data.tokenizer import load_tokenizer
from pretrain.errors import CheckpointError
from pretrain.io import check_file
from pretrain.model import Transformer, build_model
from pretrain.rundir import RunDir
from pretrain.types import Fragment


@dataclass(frozen=True, slots=True)
class Artifact:
    """A trained model, ready to use.

    Attributes:
        model: fp32, in eval mode.
        tokenizer: The run's.
        config: The run's resolved config.
        checkpoint: Where the weights came from.
    """

    model: Transformer
    tokenizer: Tokenizer
    config: RunConfig
    checkpoint: Path


def find_checkpoint(what: Path) -> Path:
    """Returns the checkpoint that `what` names: itself, or the newest good one of a run.

    Raises:
        CheckpointError: There is none, or none that verifies.
    """
    if (what / MANIFEST).is_file():
        problem = _problem(what)
        if problem:
            raise CheckpointError(f"damaged: {problem}", where=str(what), fix="use another checkpoint")
        return what
    found = list_checkpoints(RunDir(what).checkpoints)
    if not found:
        raise CheckpointError("neither a checkpoint nor a run with one", where=str(what), fix="check the path")
    for path in reversed(found):
        if _problem(path) is None:
            return path
    raise CheckpointError(f"none of its {len(found)} checkpoints is intact", where=str(what), fix="restore one")


def _problem(path: Path) -> str | None:
    try:
        files = load_manifest(path).files
    except CheckpointError as error:
        return error.what
    return next((text for record in files if (text := check_file(path / record.name, record))), None)


class _PlainWeights:
    """A model without an engine, as something that a checkpoint can fill."""

    def __init__(self, model: Transformer) -> None:
        self._model = model

    def held_fragments(self) -> Iterator[Fragment]:
        """Yields every parameter whole, weights only."""
        for name, parameter in self._model.named_parameters():
            yield Fragment(name, 0, tuple(parameter.shape), {"weight": parameter.data.view(-1)})

    owned_fragments = held_fragments

    def finish_load(self, optimizer_step: int) -> None:
        """Nothing follows: the parameters themselves were filled."""


def open_artifact(what: Path, device: str = "cpu") -> Artifact:
    """Loads a model for use.

    Args:
        what: A run folder or a checkpoint folder inside one.
        device: Where the model goes.

    Raises:
        CheckpointError: No intact checkpoint, or the run's config or tokenizer is missing.
        ConfigError: The run's config is damaged.
        DataError: Its tokenizer is.
    """
    checkpoint = find_checkpoint(what)
    run = RunDir(checkpoint.resolve().parent.parent)
    for needed in (run.config, run.tokenizer):
        if not needed.is_file():
            raise CheckpointError(f"{needed.name} is missing", where=str(run.path), fix="keep the run folder together")
    config = load_config(run.config)
    target = torch.device(device)
    model = build_model(config.model, attention="auto", activation_checkpointing="none", compile=False, device=target)
    load_checkpoint(checkpoint, _PlainWeights(model), weights_only=True)
    model.eval()
    return Artifact(model, load_tokenizer(run.tokenizer), config, checkpoint)
