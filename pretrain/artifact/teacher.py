"""Frozen teacher of `objective.distill`, which reads each micro-batch before the student does.

    open_teacher      a model on disk, compared with the config and the tokenizer of the data
    Teacher(batch)    hidden states [P, D] of the positions with a loss  ->  Distillation

Each rank has a teacher whole, in evaluation mode, outside of the trained module: no engine shards,
saves or trains it. Its scores are computed by chunks, where those of the student are.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from pretrain.artifact.lora import check_tokens
from pretrain.artifact.model_path import open_source
from pretrain.artifact.open import load_model
from pretrain.artifact.source import ModelSource
from pretrain.checkpoint.agree import agree
from pretrain.config.objective import DistillConfig
from pretrain.config.run import RunConfig
from pretrain.dist import World
from pretrain.errors import ConfigError
from pretrain.model import LanguageModel
from pretrain.objective.distillation import Distillation
from pretrain.shards.dataset import Dataset
from pretrain.types import Batch


class Teacher:
    """A frozen model, and what is learned of it."""

    def __init__(self, model: LanguageModel, settings: DistillConfig, dtype: torch.dtype = torch.float32) -> None:
        self._model = model.requires_grad_(requires_grad=False)
        self._settings = settings
        self._dtype = dtype

    def __call__(self, batch: Batch) -> Distillation:
        """Reads a micro-batch; products are in the precision of the run."""
        with self._reading(batch.tokens_BT):
            hidden_PD = self._model(batch, logits=False).hidden_BTD.flatten(0, 1)
        if batch.target_positions_P is not None:
            hidden_PD = hidden_PD.index_select(0, batch.target_positions_P)

        def scores(chunk: slice) -> Tensor:
            with self._reading(hidden_PD):
                logits_PV: Tensor = self._model.head(hidden_PD[chunk])
            return logits_PV

        return Distillation(self._settings, scores)

    @contextmanager
    def _reading(self, x: Tensor) -> Iterator[None]:
        is_16_bit = self._dtype != torch.float32
        dtype = self._dtype if is_16_bit else None
        with torch.no_grad(), torch.autocast(x.device.type, dtype, enabled=is_16_bit):
            yield


def open_teacher(config: RunConfig, dataset: Dataset, device: torch.device, world: World) -> Teacher | None:
    """Loads the teacher of a run; None: it has none. Collective.

    Raises:
        ConfigError: The teacher is of another vocabulary, or other stacks.
        DataError: The data have another tokenizer.
        CheckpointError: There is no intact model.
    """
    settings = config.objective.distill
    if settings is None:
        return None
    path = Path(settings.teacher)

    def check() -> None:
        if world.is_main:
            check_teacher(open_source(path), config, dataset)

    agree(check)
    dtype = torch.float32 if config.engine.precision == "fp32" else torch.bfloat16
    return Teacher(load_model(open_source(path), device), settings, dtype)


def check_teacher(source: ModelSource, config: RunConfig, dataset: Dataset) -> None:
    """Compares a teacher with a run and its data. Raises: ConfigError, DataError: They do not fit."""
    teacher = source.config
    student = config.model
    where = str(source.path)
    fix = "choose another objective.distill.teacher"
    if teacher.shape != student.shape or not teacher.head.record.scores_words:
        text = f"the teacher has {teacher.shape} and model.head.kind={teacher.head.kind}, "
        text += f"the model {student.shape}"
        raise ConfigError(text, where=where, fix=fix)
    longest = max(config.lengths.target, config.lengths.source or 0)
    if teacher.max_seq_len < longest:
        text = f"the teacher reads {teacher.max_seq_len} tokens, and rows have {longest}"
        raise ConfigError(text, where=where, fix=f"{fix}, or shorter rows")
    if teacher.vocab_size != student.vocab_size:
        text = f"the teacher has a vocabulary of {teacher.vocab_size}, "
        text += f"and the model one of {student.vocab_size}"
        raise ConfigError(text, where=where, fix=f"{fix}, or prepare the data with its tokenizer")
    if dataset.index.has_tokenizer:
        check_tokens(source, dataset.tokenizer_path)
