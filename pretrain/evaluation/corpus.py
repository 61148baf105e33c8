"""Prepared data as a model reads it for evaluation: every token of a split once, in a fixed order.

a run or checkpoint        objective, rows and seed of its config; its own data, or others
any other model            next token, masked, or sequence to sequence, by its stacks

Records that are given to a model of the next token are scored on their answers only. Of two answers
to a prompt, on the data of its run, the rewards relative to the start of the run are compared, and
of any other model their log-probabilities.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pretrain.artifact.source import ModelSource
from pretrain.config.data import BatchConfig, DataConfig, SourceConfig
from pretrain.config.lengths import RowLengths, image_lengths, row_lengths
from pretrain.config.load import load_config
from pretrain.config.model import AnyModelConfig
from pretrain.config.objective import ObjectiveConfig
from pretrain.data.bin_stream import BinStream
from pretrain.data.loader import ValidationLoader
from pretrain.data.stream import open_stores, open_windows
from pretrain.errors import ConfigError, DataError
from pretrain.evaluation.evaluation_log import Data
from pretrain.evaluation.label_scores import check_labels
from pretrain.kinds.objectives import OBJECTIVES, objective_of_model
from pretrain.objective import build_rows
from pretrain.objective.pairs.preferences import add_reference, read_table
from pretrain.resolve import build_context, fill_special
from pretrain.shards.dataset import DataSource, open_dataset
from pretrain.shards.index import data_hash
from pretrain.shards.store import ShardStore
from pretrain.tokenizer.file import parse_tokenizer
from pretrain.tokenizer.released import compare_texts, probe_texts
from pretrain.types import RowMaker

DEFAULT_SEQ_LEN = 1024
DEFAULT_SEED = 1234
_UNNAMEABLE = re.compile(r"[^A-Za-z0-9._-]")


@dataclass(frozen=True, slots=True)
class CorpusOptions:
    """Options of the command line for the data; None: not given."""

    data: tuple[str, ...] = ()  # folders or addresses; empty: those of the run
    split: str = "validation"
    seq_len: int | None = None
    source_len: int | None = None  # tokens of a source row of pairs
    max_tokens: int | None = None  # only the first of each split
    batch_tokens: int = 8192  # at least one row


@dataclass(frozen=True, slots=True)
class Setting:
    """Settings of rows."""

    objective: ObjectiveConfig
    data: DataConfig
    lengths: RowLengths
    seed: int
    guessed: bool = False  # the objective is by the stacks of the model, not a run's
    reference: Path | None = None  # log-probabilities of a run's pairs. None: there are none


@dataclass(frozen=True, slots=True)
class EvaluationSource:
    """The split of one source, and its batches, from the beginning each time."""

    name: str
    loader: ValidationLoader
    num_left_out: int  # pairs without a row, since they are longer
    tokens_per_byte: float  # 0: unknown, or not all tokens are predicted


def settle(source: ModelSource, choice: CorpusOptions) -> Setting:
    """Returns the settings of rows for a model. Raises: ConfigError: No data, wrong lengths, no loss."""
    model = source.config
    run = source.run
    where = str(source.path)
    if run is None:
        lack = model.head.record.without_loss
        if lack:
            raise ConfigError(lack, where=where, fix="fine-tune it, and evaluate the run")
        if not choice.data:
            lack = "this model has no data of its own"
            raise ConfigError(lack, where=where, fix="give --data DIR")
        reads = "tokens" if model.input is None else "patches"
        objective = ObjectiveConfig(kind=objective_of_model(model.shape, model.head.kind, reads))
        data = DataConfig(path="-")
        seed = DEFAULT_SEED
        seq_len, source_len = min(model.max_seq_len, DEFAULT_SEQ_LEN), None
    else:
        config = load_config(run.config, extensions="require")
        objective = config.objective
        data = config.data
        seed = config.seed
        seq_len, source_len = config.batch.seq_len, config.batch.source_len
    reference = None
    if choice.data:
        chosen = {"path": None, "mixture": [], "curriculum": []} | _sources(choice.data)
        data = data.model_copy(update=chosen)
    elif run is not None and objective.has_reference:
        reference = run.reference
    seq_len = _target_len(source, choice, seq_len)
    lengths = _lengths(source, objective, seq_len, choice.source_len or source_len)
    return Setting(objective, data, lengths, seed, guessed=run is None, reference=reference)


def _target_len(source: ModelSource, choice: CorpusOptions, usual: int) -> int:
    patches = source.config.input
    if patches is None or source.config.captions:
        return choice.seq_len or usual
    if choice.seq_len and choice.seq_len != patches.positions:
        raise ConfigError(
            f"--seq-len {choice.seq_len} must be {patches.positions}, the positions of an image",
            where=str(source.path),
            fix="leave it out",
        )
    return patches.positions


def _lengths(source: ModelSource, objective: ObjectiveConfig, seq_len: int, source_len: int | None) -> RowLengths:
    check_length(source, max(seq_len, source_len or 0))
    try:
        rows = BatchConfig(global_tokens=seq_len, seq_len=seq_len, source_len=source_len, micro=1)
        lengths = row_lengths(objective, rows, len(source.config.shape.split("+")))
        patches = source.config.input
        return lengths if patches is None else image_lengths(lengths, objective, patches)
    except ValueError as error:
        text = str(error).replace("batch.seq_len", "--seq-len")
        raise ConfigError(text, fix="use longer rows") from None


def check_length(source: ModelSource, longest: int) -> None:
    """Refuses rows that are too long for a model. Raises: ConfigError."""
    limit = source.config.max_seq_len
    if longest > limit:
        raise ConfigError(
            f"rows of {longest} tokens, model.max_seq_len is {limit}",
            where=str(source.path),
            fix=f"use --seq-len {limit}",
        )


def _sources(paths: Sequence[str]) -> dict[str, Any]:
    if len(paths) == 1:
        return {"path": paths[0]}
    folders = [Path(path.rstrip("/")).name for path in paths]
    names = [_UNNAMEABLE.sub("-", name).lstrip("._-")[:64] for name in folders]
    if len(set(names)) < len(names) or not all(names):
        names = [f"data{number}" for number in range(1, len(paths) + 1)]
    pairs = zip(names, paths, strict=True)
    return {"mixture": [SourceConfig(name=name, path=path, weight=1.0) for name, path in pairs]}


class Corpus:
    """The data of an evaluation, opened for a setting and a model's stacks and special tokens.

    `sources` are those that have the split, at least one; `data` is their identity. `labels` is
    empty where tokens are predicted.

    Raises:
        ConfigError: The objective does not fit the data, or lacks a token.
        DataError: Data are missing or damaged, or have no such split.
    """

    def __init__(
        self, setting: Setting, choice: CorpusOptions, model: AnyModelConfig, *, rank: int = 0, world_size: int = 1
    ) -> None:
        stores = open_stores(setting.data, lambda: False)
        paths = setting.data.paths
        folders = {path: store.folder for path, store in zip(paths, stores, strict=True)}
        self._dataset = open_dataset(setting.data, folders.__getitem__)
        for store in stores:
            store.check()
        self._setting = setting
        self._choice = choice
        self._ranks = (rank, world_size)
        self.objective = self._fit_objective(model)
        self._check_kind()
        self.labels: list[str] = []
        if model.head.record.names_labels:
            self.labels = list(self._dataset.index.labels)
        packing = setting.data.packing
        if packing == "concat":
            packing = self._dataset.index.layout.packing
        self._config = setting.data.model_copy(update={"packing": packing})
        self._make_rows = self._build_rows(model)
        self.has_captions = self._dataset.index.layout.captions
        self.sources: list[EvaluationSource] = []
        self.data: list[Data] = []
        for source, store, path in zip(self._dataset.sources, stores, paths, strict=True):
            if len(stores) > 1 and choice.split not in source.index.splits:
                continue
            self.sources.append(self._open(source, store, path))
            self.data.append(Data(source.name, str(path), data_hash(source.index)))
        if not self.sources:
            raise DataError(
                f"no source has a split {choice.split!r}",
                fix="choose another --split, or prepare another folder with --split tail:0.05",
            )

    def _fit_objective(self, model: AnyModelConfig) -> ObjectiveConfig:
        """Returns the setting's objective, or the one of a run fine-tuned on other data."""
        setting = self._setting
        is_own = setting.guessed or not model.head.labels  # a run says what its labels are of
        if not self._choice.data or not is_own or "+" in model.shape:
            return setting.objective
        kind = self._dataset.index.kind
        scored_as = {OBJECTIVES[task.kind].scored_as.get(kind) for task in setting.objective.tasks}
        if len(scored_as) > 1 or None in scored_as:
            return setting.objective
        return ObjectiveConfig.model_validate({"kind": scored_as.pop()})

    def _build_rows(self, model: AnyModelConfig) -> RowMaker:
        setting = self._setting
        context = build_context(
            self.objective,
            fill_special(model.special_tokens, self._dataset),
            self._dataset,
            seed=setting.seed,
            lengths=setting.lengths,
            num_stacks=len(model.shape.split("+")),
            document_mask=self._config.document_mask,
        )
        make_rows = build_rows(self.objective, context)
        if not self.objective.has_reference:
            return make_rows
        table = None if setting.reference is None else read_table(setting.reference)
        return add_reference(make_rows, table)

    def _open(self, source: DataSource, store: ShardStore, path: str) -> EvaluationSource:
        # Any split is read as the validation split is: once, in a fixed order.
        choice = self._choice
        try:
            split = source.index.split(choice.split)
        except DataError as error:
            raise DataError(error.what, where=str(path), fix=error.fix) from None
        index = replace(source.index, splits={**source.index.splits, "validation": split})
        lengths = self._setting.lengths
        rank, world_size = self._ranks
        rows = max(1, choice.batch_tokens // max(lengths.target, lengths.source or 0))
        windows = open_windows(index, store, self._config, lengths, rows)
        loader = ValidationLoader(
            windows,
            self._make_rows,
            micro=rows,
            rank=rank,
            world_size=world_size,
            max_tokens=choice.max_tokens,
            crop=self._config.packing == "padded",
        )
        left_out = 0
        if isinstance(windows, BinStream) and index.layout.leaves_out:
            left_out = windows.num_too_long
        tokens_per_byte = 0.0
        # A code for the text predicts each token from those before it, and no other objective does.
        if self.objective.predicts_text and split.num_bytes_text:
            tokens_per_byte = split.num_tokens / split.num_bytes_text
        return EvaluationSource(source.name, loader, left_out, tokens_per_byte)

    def _check_kind(self) -> None:
        kind = self._dataset.index.kind
        where = str(self._dataset.sources[0].folder)
        for task in self.objective.tasks:
            needed = OBJECTIVES[task.kind].data
            if kind not in needed:
                wanted = f"objective.kind={task.kind} on {' or '.join(needed)}"
                raise ConfigError(
                    f"the model is evaluated by {wanted}, and the data are {kind}",
                    where=where,
                    fix="give other data",
                )

    def check_model(self, source: ModelSource) -> None:
        """Refuses data of other tokens or labels than a model's. Raises: DataError, ConfigError."""
        index = self._dataset.index
        folder = str(self._dataset.sources[0].folder)
        fix = "prepare the text with the model's tokenizer"
        if self.labels:
            check_labels(source, index, folder)
        if not index.has_tokenizer:
            return
        size = source.config.vocab_size
        if size is not None and index.vocab_size > size:
            text = f"has token ids up to {index.vocab_size}, the vocabulary of {source.path} has {size}"
            raise DataError(text, where=folder, fix=fix)
        content = dict(source.load_tokenizer_files()).get("tokenizer.json")
        if content is None:  # of sentencepiece alone: it names no ids that could be compared
            return
        parsed = parse_tokenizer(content, f"{source.path}: tokenizer.json")
        mine = parsed.get_vocab(with_added_tokens=True)
        path = self._dataset.tokenizer_path
        data = parse_tokenizer(path.read_bytes(), str(path))
        theirs = data.get_vocab(with_added_tokens=True)
        differing = sorted(token for token, number in theirs.items() if mine.get(token) != number)
        if differing:
            token = differing[0]
            difference = f"{token!r} is {theirs[token]}, not {mine.get(token)}"
        elif (other := compare_texts(data, parsed, probe_texts(data))) is not None:
            difference = f"{other.text!r} is {other.ours}, not {other.theirs}"
        else:
            return
        raise DataError(
            f"another tokenizer than that of {source.path}: {difference}",
            where=folder,
            fix=fix,
        )
