"""Resolution of a config with its data, and the context from which an objective builds rows.

    RunConfig, Dataset  --fit_config-->  vocabulary and special tokens filled in  --context_of_run-->  RowContext
    ObjectiveConfig, RowContext  --objective.build_rows-->  RowMaker

Shared by training, evaluation and the data commands. No torch.
"""

from pathlib import Path

import numpy as np

from pretrain.config.lengths import RowLengths
from pretrain.config.model import HeadConfig, SpecialTokens
from pretrain.config.objective import ObjectiveConfig
from pretrain.config.resumption import start_folder
from pretrain.config.run import RunConfig
from pretrain.errors import ConfigError, DataError
from pretrain.kinds.objectives import OBJECTIVES
from pretrain.objective import RowContext
from pretrain.plan.trained import train_new_tokens
from pretrain.rows import Vocabulary
from pretrain.shards.dataset import Dataset
from pretrain.tokenizer.file import load_tokenizer, parse_tokenizer, read_release
from pretrain.tokenizer.roles import describe_vocabulary, special_tokens_of


def fit_config(config: RunConfig, dataset: Dataset) -> RunConfig:
    """Fills in vocabulary size, special tokens and labels from the data; images have labels only.

    Raises:
        ConfigError: The config contradicts the data.
    """
    vocab_size = config.model.vocab_size
    index = dataset.index
    _check_kind(config.objective, dataset)
    if vocab_size is not None and vocab_size < index.vocab_size:
        if config.init.from_ is None:
            raise ConfigError(
                f"model.vocab_size={vocab_size} is smaller than the {index.vocab_size} tokens of the shards",
                where=str(dataset.sources[0].folder),
                fix=f"use model.vocab_size={index.vocab_size}, or leave it out",
            )
        vocab_size = index.vocab_size  # tokens were added to those of the model: the tables grow
    special = fill_special(config.model.special_tokens, dataset)
    for name in ("encoder", "decoder"):
        if special.pad is None and getattr(getattr(config.model, name), "position_offset", 0) == "pad":
            raise ConfigError(
                f"model.{name}.position_offset=pad needs a padding token, which the tokenizer of the shards lacks",
                where=str(dataset.sources[0].folder),
                fix="give the offset as a number",
            )
    vocab_size = vocab_size or (index.vocab_size if index.has_tokenizer else None)
    model = config.model.model_copy(update={"vocab_size": vocab_size, "special_tokens": special})
    if index.labels and config.model.head.record.names_labels:
        model = model.model_copy(update={"head": _fill_labels(config.model.head, dataset)})
    finetune = config.finetune
    if finetune.new_tokens == "trained" and _has_new_tokens(config, dataset):
        finetune = train_new_tokens(model, finetune)
    return config.model_copy(update={"model": model, "finetune": finetune})


def _has_new_tokens(config: RunConfig, dataset: Dataset) -> bool:
    """Returns whether data have tokens that `init.from` lacks, be there rows for them or not."""
    if config.init.from_ is None or (config.model.vocab_size or 0) < dataset.index.vocab_size:
        return config.init.from_ is not None
    start = start_folder(Path(config.init.from_))
    if not start.exists():
        return False
    try:
        content = read_release(str(start))
    except DataError:  # a model without a tokenizer
        return False
    theirs = parse_tokenizer(content, str(start))
    ours = load_tokenizer(dataset.tokenizer_path).get_vocab(with_added_tokens=True)
    return not ours.keys() <= theirs.get_vocab(with_added_tokens=True).keys()


def _fill_labels(head: HeadConfig, dataset: Dataset) -> HeadConfig:
    labels = list(dataset.index.labels)
    if head.labels and head.labels != labels:
        raise ConfigError(
            f"model.head.labels are {_listed(head.labels)}, those of the data {_listed(labels)}",
            where=str(dataset.sources[0].folder),
            fix="leave them out, or prepare the data with these labels",
        )
    return head.model_copy(update={"labels": labels})


def _listed(labels: list[str], most: int = 10) -> str:
    return ", ".join(labels[:most]) + (f", ... ({len(labels)})" if len(labels) > most else "")


def fill_special(given: SpecialTokens, dataset: Dataset) -> SpecialTokens:
    """Returns the special tokens of a config, completed from the tokenizer of the data, if any."""
    if not dataset.index.has_tokenizer:
        return given
    ends = {"eos": dataset.index.eos_id}
    if dataset.index.begin_id is not None:
        ends["bos"] = dataset.index.begin_id
    special = special_tokens_of(load_tokenizer(dataset.tokenizer_path)).model_copy(update=ends)
    if dataset.index.layout.captions and special.start is None:
        special = special.model_copy(update={"start": special.eos})  # as decoders of GPT-2 do
    named = {name: number for name, number in given if number is not None}
    return SpecialTokens.model_validate(special.model_dump() | named)


def _check_kind(objective: ObjectiveConfig, dataset: Dataset) -> None:
    kind = dataset.index.kind
    for task in objective.tasks:
        layouts = OBJECTIVES[task.kind].data
        if kind not in layouts:
            raise ConfigError(
                f"objective.kind={task.kind} learns from {' or '.join(layouts)}, and the data are {kind}",
                where=str(dataset.sources[0].folder),
                fix="choose another objective.kind or data.path",
            )


def context_of_run(config: RunConfig, dataset: Dataset) -> RowContext:
    """Returns the row context of a run. `config`: from `fit_config`."""
    return build_context(
        config.objective,
        config.model.special_tokens,
        dataset,
        seed=config.seed,
        lengths=config.lengths,
        num_stacks=len(config.stacks),
        document_mask=config.data.document_mask,
    )


def build_context(
    objective: ObjectiveConfig,
    special: SpecialTokens,
    dataset: Dataset,
    *,
    seed: int,
    lengths: RowLengths,
    num_stacks: int,
    document_mask: bool,
) -> RowContext:
    """Returns the row context of an objective. `special`: from `fill_special`."""
    if not dataset.index.has_tokenizer:
        vocabulary = Vocabulary(dataset.index.vocab_size, dataset.index.eos_id, np.zeros(1, bool))
        return RowContext(seed, vocabulary, lengths, num_stacks, document_mask)
    whole_words = any(getattr(task.section, "whole_words", False) for task in objective.tasks)
    vocabulary = describe_vocabulary(load_tokenizer(dataset.tokenizer_path), special, whole_words=whole_words)
    return RowContext(seed, vocabulary, lengths, num_stacks, document_mask)
