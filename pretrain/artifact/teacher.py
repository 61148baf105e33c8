"""Frozen teacher of `objective.distill`, which reads each micro-batch before the student does.

    open_teacher      a model on disk, compared with the config and the tokenizer of the data
    Teacher(batch)    hidden states [P, D] of the positions with a loss  ->  Distillation

Each rank has a teacher whole, in evaluation mode, outside of the trained module: no engine shards,
saves or trains it. Its scores are computed by chunks, where those of the student are.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pretrain.artifact.lora import check_tokens
from pretrain.artifact.model_path import open_source
from pretrain.artifact.open import load_model
from pretrain.artifact.source import AdaptedModel, ModelSource
from pretrain.checkpoint.agree import agree
from pretrain.config.objective import DistillConfig
from pretrain.config.run import RunConfig
from pretrain.data.mixture import source_of
from pretrain.dist import World
from pretrain.errors import ConfigError, DataError
from pretrain.model import LanguageModel
from pretrain.objective.distillation import Distillation, learn_stored
from pretrain.rows import IGNORE_INDEX, TokenRows
from pretrain.shards.dataset import Dataset
from pretrain.shards.teacher_scores import StoredScores
from pretrain.types import Batch, ModelRows, RowMaker, TaughtTokens


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


def open_teacher(
    config: RunConfig, dataset: Dataset, device: torch.device, world: World
) -> Callable[[Batch], Distillation] | None:
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
    if settings.stored:
        return partial(learn_stored, settings)
    dtype = torch.float32 if config.engine.precision == "fp32" else torch.bfloat16
    return Teacher(load_model(open_source(path), device), settings, dtype)


def fingerprint(source: ModelSource) -> str:
    """Returns a sha256 over the CRC32 of every parameter of a model, wherever it is."""
    return AdaptedModel(source, source.config, source.shapes).fingerprint()


def open_stored(config: RunConfig, dataset: Dataset) -> list[StoredScores]:
    """Opens the stored scores of each source; none where a run does not ask for them.

    Raises:
        ConfigError: They have another temperature.
        DataError: There are none, or they are of another teacher, of other data, or damaged.
    """
    settings = config.objective.distill
    if settings is None or not settings.stored:
        return []
    expected = fingerprint(open_source(Path(settings.teacher)))
    stores = [StoredScores(source.folder, source.index) for source in dataset.sources]
    for source, stored in zip(dataset.sources, stores, strict=True):
        where = str(source.folder)
        if stored.identity.teacher != expected:
            text = f"scores of another teacher than {settings.teacher}"
            raise DataError(text, where=where, fix="run `pretrain distill` again, or name that teacher")
        if settings.kind != "mse" and stored.identity.temperature != settings.temperature:
            text = f"scores of temperature {stored.identity.temperature:g}"
            fix = f"use objective.distill.temperature={stored.identity.temperature:g}"
            raise ConfigError(f"{text}, and objective.distill has {settings.temperature:g}", where=where, fix=fix)
    return stores


def add_scores(make_rows: RowMaker, stores: Sequence[StoredScores]) -> RowMaker:
    """Returns a row maker whose rows have the stored scores of their targets, if there are any."""
    if not stores:
        return make_rows

    def make(rows: TokenRows) -> ModelRows:
        made = make_rows(rows)
        assert rows.places_BT is not None, "a stream with places"
        has_target_BT = made.targets_BT != IGNORE_INDEX
        width = stores[0].identity.top_k
        shape = made.targets_BT.shape
        ids_BTG, scores_BTG = (
            np.zeros((*shape, width), np.int64),
            np.zeros((*shape, width), np.float32),
        )
        # Finite where there is no target: half of the mass is of others.
        taught = TaughtTokens(ids_BTG, scores_BTG, np.full((*shape, 2), np.log(0.5), np.float32))
        for number, stored in enumerate(stores):
            chosen_BT = has_target_BT & (source_numbers(rows.sample_ids_B, len(stores)) == number)[:, None]
            top = stored.find(rows.places_BT[:, :-1][chosen_BT])
            for out, array in zip((taught.ids_BTG, taught.scores_BTG, taught.rest_BT2), top, strict=True):
                out[chosen_BT] = array
        return replace(made, taught=taught)

    return make


def source_numbers(sample_ids_B: np.ndarray, num_sources: int) -> np.ndarray:
    """Returns the source of each row."""
    return np.asarray(source_of(sample_ids_B)) if num_sources > 1 else np.zeros(len(sample_ids_B), np.int64)


def check_teacher(source: ModelSource, config: RunConfig, dataset: Dataset) -> None:
    """Compares a teacher with a run and its data. Raises: ConfigError, DataError."""
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
