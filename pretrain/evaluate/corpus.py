"""Prepared data as a model reads it for evaluation: every token of a split once, in a fixed order.

a run or checkpoint        objective, rows and seed of its config; its own data, or others
a model or Hugging Face    next token, masked, or sequence to sequence, by its shape; rows as asked for
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pretrain.artifact.source import ModelSource
from pretrain.config.data import BatchConfig, DataConfig, SourceConfig
from pretrain.config.lengths import RowLengths, row_lengths
from pretrain.config.load import load_config
from pretrain.config.objective import NEEDS, ObjectiveConfig
from pretrain.config.recurrent import AnyModelConfig
from pretrain.data.bin_stream import BinStream
from pretrain.data.loader import ValidationLoader
from pretrain.data.stream import open_stores, open_windows
from pretrain.errors import ConfigError, DataError
from pretrain.evaluate.evaluation_log import Data
from pretrain.evaluate.label_scores import check_labels
from pretrain.objective import build_rows
from pretrain.resolve import build_context, fill_special
from pretrain.shards.dataset import open_dataset
from pretrain.shards.index import DataIndex, data_hash
from pretrain.tokenizer import load_tokenizer, parse_tokenizer

DEFAULT_SEQ_LEN = 1024
DEFAULT_SEED = 1234
_OBJECTIVES = {"decoder": "causal", "encoder": "masked", "encoder+decoder": "seq2seq"}
_TOKENIZER = "tokenizer.json"
_UNNAMEABLE = re.compile(r"[^A-Za-z0-9._-]")


@dataclass(frozen=True, slots=True)
class CorpusOptions:
    """What the command line says of the data; None: not said.

    Attributes:
        data: Shard folders or addresses; empty: those of the run.
        split: Which split is read.
        seq_len: Tokens of a row.
        source_len: Pairs: tokens of a source row.
        max_tokens: Only the first tokens of each split.
        batch_tokens: Tokens that are read together; at least one row.
    """

    data: tuple[str, ...] = ()
    split: str = "validation"
    seq_len: int | None = None
    source_len: int | None = None
    max_tokens: int | None = None
    batch_tokens: int = 8192


@dataclass(frozen=True, slots=True)
class Setting:
    """How rows are made, settled.

    Attributes:
        objective: What is predicted.
        data: Where the tokens are, and how they are packed.
        lengths: Lengths of rows.
        seed: Seed of masking and corruption.
        guessed: The objective is not a run's, but what a model of this shape is for.
    """

    objective: ObjectiveConfig
    data: DataConfig
    lengths: RowLengths
    seed: int
    guessed: bool = False


@dataclass(frozen=True, slots=True)
class EvaluationSource:
    """One source's split.

    Attributes:
        name: The source's.
        loader: Reads it, from the beginning each time.
        num_left_out: Pairs that are longer than a row, and in none.
        tokens_per_byte: Tokens for each byte of its text, if the loss is one of it all; 0: it is not, or not known.
    """

    name: str
    loader: ValidationLoader
    num_left_out: int
    tokens_per_byte: float


def settle(source: ModelSource, choice: CorpusOptions) -> Setting:
    """Returns how rows are made for a model.

    Raises:
        ConfigError: No data, or rows that cannot be.
    """
    labels = source.config.head.kind == "labels"
    objective = ObjectiveConfig(kind="classify" if labels else _OBJECTIVES[source.config.shape])
    data, batch, seed = DataConfig(path="-"), None, DEFAULT_SEED
    if source.run is not None:
        config = load_config(source.run.config)
        objective, data, batch, seed = config.objective, config.data, config.batch, config.seed
    elif not choice.data:
        raise ConfigError("this model has no data of its own", where=str(source.path), fix="give --data DIR")
    if choice.data:
        data = data.model_copy(update={"path": None, "mixture": [], "curriculum": []} | _sources(choice.data))
    seq_len = choice.seq_len or (batch.seq_len if batch else min(source.config.max_seq_len, DEFAULT_SEQ_LEN))
    source_len = choice.source_len or (batch.source_len if batch else None)
    if (longest := max(seq_len, source_len or 0)) > source.config.max_seq_len:
        raise ConfigError(
            f"rows of {longest} tokens, model.max_seq_len is {source.config.max_seq_len}",
            where=str(source.path),
            fix=f"use --seq-len {source.config.max_seq_len}",
        )
    try:
        rows = BatchConfig(global_tokens=seq_len, seq_len=seq_len, source_len=source_len, micro=1)
        lengths = row_lengths(objective, rows, len(source.config.shape.split("+")))
    except ValueError as error:
        raise ConfigError(str(error).replace("batch.seq_len", "--seq-len"), fix="use longer rows") from None
    return Setting(objective, data, lengths, seed, guessed=source.run is None)


def _sources(paths: Sequence[str]) -> dict[str, Any]:
    """Returns one folder as the data, or several as sources by the names of their folders."""
    if len(paths) == 1:
        return {"path": paths[0]}
    names = [_UNNAMEABLE.sub("-", Path(path.rstrip("/")).name).lstrip("._-")[:64] for path in paths]
    if len(set(names)) < len(names) or not all(names):
        names = [f"data{number}" for number in range(1, len(paths) + 1)]
    return {
        "mixture": [SourceConfig(name=name, path=path, weight=1.0) for name, path in zip(names, paths, strict=True)]
    }


class Corpus:
    """The data of an evaluation, opened for a setting.

    Args:
        setting: Setting of the first model.
        choice: Options of the command line.
        model: Tells stacks and special tokens.
        rank: Rank of this process, which reads its share of the batches.
        world_size: Processes.

    Attributes:
        objective: What is predicted.
        labels: Names of the labels that are predicted; empty: tokens are.
        sources: One or several; at least one has the split.
        data: What each of them is.

    Raises:
        ConfigError: The objective does not fit the data, or lacks a token.
        DataError: Data are missing or damaged, or have no such split.
    """

    def __init__(
        self, setting: Setting, choice: CorpusOptions, model: AnyModelConfig, *, rank: int = 0, world_size: int = 1
    ) -> None:
        stores = open_stores(setting.data, lambda: False)
        folders = {path: store.folder for path, store in zip(setting.data.paths, stores, strict=True)}
        self._dataset = open_dataset(setting.data, folders.__getitem__)
        for store in stores:
            store.check()
        self.objective = setting.objective
        if setting.guessed and self.objective.kind == "classify" and self._dataset.index.kind == "tags":
            self.objective = ObjectiveConfig(kind="tag")
        self._check_kind(self.objective)
        self.labels = list(self._dataset.index.labels)
        packing = setting.data.packing
        if self._dataset.index.kind != "text" and packing == "concat":
            packing = "bins"
        data = setting.data.model_copy(update={"packing": packing})
        context = build_context(
            self.objective,
            fill_special(model.special_tokens, self._dataset),
            self._dataset,
            seed=setting.seed,
            lengths=setting.lengths,
            num_stacks=len(model.shape.split("+")),
            document_mask=data.document_mask,
        )
        make_rows = build_rows(self.objective, context)
        rows = max(1, choice.batch_tokens // max(setting.lengths.target, setting.lengths.source or 0))
        # A code for the text predicts each token from those before it, and no other objective does.
        is_code = all(task.kind == "causal" for task in self.objective.tasks)
        self.sources: list[EvaluationSource] = []
        self.data: list[Data] = []
        for source, store, path in zip(self._dataset.sources, stores, setting.data.paths, strict=True):
            if len(stores) > 1 and choice.split not in source.index.splits:
                continue
            index = _as_validation(source.index, choice.split)
            windows = open_windows(index, store, data, setting.lengths, rows)
            loader = ValidationLoader(
                windows,
                make_rows,
                micro=rows,
                rank=rank,
                world_size=world_size,
                max_tokens=choice.max_tokens,
                crop=packing == "padded",
            )
            left_out = windows.num_too_long if isinstance(windows, BinStream) and index.kind == "pairs" else 0
            tokens_per_byte = _tokens_per_byte(index) if is_code else 0.0
            self.sources.append(EvaluationSource(source.name, loader, left_out, tokens_per_byte))
            self.data.append(Data(source.name, str(path), data_hash(source.index)))
        if not self.sources:
            raise DataError(f"no source has a split {choice.split!r}", fix="choose another --split")

    def _check_kind(self, objective: ObjectiveConfig) -> None:
        kind = self._dataset.index.kind
        for task in objective.tasks:
            if kind not in NEEDS[task.kind].data:
                raise ConfigError(
                    f"the model is evaluated by objective.kind={task.kind} on {' or '.join(NEEDS[task.kind].data)}, "
                    f"and the data are {kind}",
                    where=str(self._dataset.sources[0].folder),
                    fix="give other data",
                )

    def check_model(self, source: ModelSource) -> None:
        """Refuses data whose tokens or labels are not those of a model. Raises: DataError, ConfigError."""
        index, folder = self._dataset.index, self._dataset.sources[0].folder
        if self.labels:
            check_labels(source, index, str(folder))
        size = source.config.vocab_size
        if size is not None and index.vocab_size > size:
            raise DataError(
                f"has token ids up to {index.vocab_size}, the vocabulary of {source.path} has {size}",
                where=str(folder),
                fix="prepare the text with the model's tokenizer",
            )
        content = dict(source.load_tokenizer_files()).get(_TOKENIZER)
        if content is None:  # of sentencepiece alone: it names no ids that could be compared
            return
        mine = parse_tokenizer(content, f"{source.path}: {_TOKENIZER}").get_vocab(with_added_tokens=True)
        its = load_tokenizer(self._dataset.tokenizer_path).get_vocab(with_added_tokens=True)
        differing = sorted(token for token, number in its.items() if mine.get(token) != number)
        if differing:
            token = differing[0]
            raise DataError(
                f"another tokenizer than that of {source.path}: {token!r} is {its[token]}, not {mine.get(token)}",
                where=str(folder),
                fix="prepare the text with the model's tokenizer",
            )


def _as_validation(index: DataIndex, split: str) -> DataIndex:
    """Returns the index with a split in the place of the one that is read in a fixed order. Raises: DataError."""
    return replace(index, splits={**index.splits, "validation": index.split(split)})


def _tokens_per_byte(index: DataIndex) -> float:
    split = index.splits["validation"]
    return split.num_tokens / split.num_bytes_text if split.num_bytes_text else 0.0
