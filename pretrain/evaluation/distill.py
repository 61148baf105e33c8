"""Scores of a teacher for all tokens of prepared data: `pretrain distill`.

    shards, shared by ranks -> documents of a member -> windows of the teacher's length
      -> G largest scores, and the mass of all other ids -> tars (shards/teacher_scores.py)

A token is scored with at least half a window of its document before it, or all. Batches are of one
member, and each rank has one thread: bytes do not depend on the number of processes.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pretrain import dist
from pretrain.artifact.lora import check_tokens
from pretrain.artifact.model_path import open_source
from pretrain.artifact.open import find_device, load_model
from pretrain.artifact.source import ModelSource
from pretrain.artifact.teacher import fingerprint
from pretrain.config.data import DataConfig
from pretrain.dist import World
from pretrain.errors import ConfigError
from pretrain.kinds.objectives import OBJECTIVES
from pretrain.model import LanguageModel
from pretrain.shards.dataset import open_dataset
from pretrain.shards.index import DataIndex, data_hash
from pretrain.shards.reader import ShardReader
from pretrain.shards.teacher_scores import (
    TeacherIdentity,
    TopScores,
    begin_scores,
    empty_scores,
    end_scores,
    is_written,
    write_scores,
)
from pretrain.types import IGNORE_INDEX, Batch

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DistillOptions:
    """Options of `pretrain distill`."""

    top_k: int = 64
    temperature: float = 1.0
    seq_len: int | None = None  # tokens of a window; None: those of the teacher, 1024 at most
    batch_tokens: int = 8192


def distill(teacher: Path, data: Path, options: DistillOptions, world: World, device: str = "auto") -> dict[str, Any]:
    """Writes the scores that are missing; returns facts. Collective.

    Raises:
        ConfigError: The teacher predicts no next token, has other tokens or a smaller vocabulary.
        DataError: The data are no texts, or scores of another origin are there.
    """
    source = open_source(teacher)
    dataset = open_dataset(DataConfig(path=str(data)), Path)
    index = dataset.index
    length = _check(source, index, data, options)
    check_tokens(source, dataset.tokenizer_path)
    identity = TeacherIdentity(fingerprint(source), data_hash(index), options.top_k, options.temperature, length)
    if world.is_main:
        begin_scores(data, identity)
    dist.gather_objects(None)
    model = load_model(source, find_device(device))
    if next(model.parameters()).device.type == "cpu":
        torch.set_num_threads(1)  # sums in one order
    shards = [shard for split in index.splits.values() for shard in split.shards]
    for number, shard in enumerate(shards):
        if number % world.size != world.rank or is_written(data, shard):
            continue
        reader = ShardReader(data, shard, index.dtype)
        members = (_score_member(model, *reader.member(one), options, length) for one in range(shard.num_members))
        write_scores(data, shard, members, index.dtype)
        log.info("%s: %d of %d", shard.name, number + 1, len(shards))
    dist.gather_objects(None)  # all have written
    num_bytes = end_scores(data, identity, shards) if world.is_main else 0
    num_tokens = sum(shard.num_tokens for shard in shards)
    return {
        "tokens": num_tokens,
        "bytes": num_bytes,
        "bytes_per_token": num_bytes / num_tokens,
        "shards": len(shards),
    }


def _check(source: ModelSource, index: DataIndex, data: Path, options: DistillOptions) -> int:
    """Returns the tokens of a window."""
    model = source.config
    if model.shape != "decoder" or not model.head.record.scores_words:
        raise ConfigError(f"a teacher predicts the next token, and this is {model.shape}", where=str(source.path))
    layouts = [name for record in OBJECTIVES.values() if record.stored_scores for name in record.data]
    if index.kind not in layouts:
        text = f"scores are of {' or '.join(layouts)}, and the data are {index.kind}"
        raise ConfigError(text, where=str(data), fix="name another folder by --data")
    if not 0 < options.top_k < index.vocab_size:
        text = f"--top-k {options.top_k} must be below the vocabulary, {index.vocab_size}"
        raise ConfigError(text, fix="lower it")
    length = options.seq_len or min(model.max_seq_len, 1024)
    if not 2 <= length <= model.max_seq_len:
        raise ConfigError(
            f"--seq-len {length} must be 2 to {model.max_seq_len}, which the teacher reads",
            fix="change it",
        )
    return length


def _score_member(
    model: LanguageModel,
    tokens: np.ndarray,
    starts: np.ndarray,
    options: DistillOptions,
    length: int,
) -> TopScores:
    top = empty_scores(len(tokens), options.top_k)
    head, device = model.head, next(model.parameters()).device
    assert head is not None, "a teacher has a head of words"
    windows = list(_windows(starts, len(tokens), length))
    at_once = max(1, options.batch_tokens // length)
    for number in range(0, len(windows), at_once):
        chosen = windows[number : number + at_once]
        rows = np.zeros((len(chosen), length), np.int64)
        for row, (start, end, _) in enumerate(chosen):
            rows[row, : end - start] = tokens[start:end]
        batch = Batch(torch.from_numpy(rows), torch.full(rows.shape, IGNORE_INDEX)).to(device)
        with torch.no_grad():
            hidden_BTD = model(batch, logits=False).hidden_BTD
            for row, (start, end, first) in enumerate(chosen):
                logits_PV = head(hidden_BTD[row, first - start : end - start])[:, : head.num_scores].double()
                for out, array in zip(top, take_top(logits_PV, options), strict=True):
                    out[first:end] = array.cpu().numpy()
    return top


def take_top(logits_PV: torch.Tensor, options: DistillOptions) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns ids and scores less the largest [P, G]; the largest, log of the other mass [P, 2]."""
    top = logits_PV.topk(options.top_k, dim=1)
    softened_PV = logits_PV / options.temperature
    rest_P = softened_PV.scatter(1, top.indices, -torch.inf).logsumexp(dim=1) - softened_PV.logsumexp(dim=1)
    largest_P1 = top.values[:, :1]
    return top.indices, top.values - largest_P1, torch.cat((largest_P1, rest_P[:, None]), dim=1)


def _windows(starts: np.ndarray, num_tokens: int, length: int) -> Iterator[tuple[int, int, int]]:
    """Yields first token, end, and first token that is scored, of windows of each document."""
    for start, end in zip(starts.tolist(), [*starts[1:].tolist(), num_tokens], strict=True):
        first = start
        while first < end:
            begin = start if first == start else first - length // 2
            stop = min(end, begin + length)
            yield begin, stop, first
            first = stop
