"""What the ranks of the tests of objectives do: read real shards, make rows, train, and bring back what they saw."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pretrain.config.data import BatchConfig, DataConfig, plan_batch
from pretrain.config.engine import PLAIN_ENGINE
from pretrain.config.lengths import row_lengths
from pretrain.config.model import ModelConfig
from pretrain.config.objective import ObjectiveConfig
from pretrain.config.presets import expand_preset
from pretrain.data.loader import StepBatch, TrainLoader
from pretrain.data.stream import SourceStreams, open_stores
from pretrain.dist import World
from pretrain.model import Transformer, build_model, init_weights
from pretrain.objective import RowContext, build_rows
from pretrain.rows import Vocabulary
from pretrain.shards.dataset import open_dataset
from pretrain.shards.index import DataIndex, build_split, write_index
from pretrain.shards.writer import ShardWriter
from pretrain.training.step import start_exchange
from pretrain.types import IGNORE_INDEX
from tests.helpers.shards import EOS, add_document, make_shards
from tests.integration.workers import ROWS, SEQ_LEN, TWO_STACKS, VOCAB, build

START = VOCAB - 1
SENTINELS = tuple(range(VOCAB - 2, VOCAB - 12, -1))
PAIRS = {"kind": "seq2seq", "label_smoothing": 0.1}
SPAN = {"kind": "span", "span": {"density": 0.3, "mean_length": 2.0}}


def write_pairs(folder: Path) -> None:
    """60 pairs whose two sides are together equally long: rows of one batch have from 1 to 16 targets."""
    (folder / "train").mkdir(parents=True)
    writer, rng = ShardWriter(folder / "train" / "part-00000-0000.tar", "uint16", 64, "pairs"), np.random.default_rng(0)
    for size in rng.permutation(np.tile([1, 2, 3, 14, 15, 16], 10)).tolist():
        add_document(writer, rng.integers(1, START, size), source=rng.integers(1, START, 17 - size))
    split = build_split([writer.close()], 0)
    write_index(folder, DataIndex("0" * 64, VOCAB, "uint16", EOS, {"train": split}, "pairs"))


def write_texts(folder: Path) -> None:
    """Short documents."""
    make_shards(folder, train=(900, 700), longest=12, vocab_size=SENTINELS[-1])


@contextmanager
def loader_of(folder: str, rank: int, world_size: int, micro: int, **objective: Any) -> Iterator[TrainLoader]:
    """The steps of a rank."""
    config = ObjectiveConfig.model_validate(objective)
    data = DataConfig(path=folder, lanes=2, block_samples=8, packing="padded" if config.kind == "seq2seq" else "concat")
    batch = BatchConfig(global_tokens=ROWS * SEQ_LEN, seq_len=SEQ_LEN, micro=micro)
    lengths = row_lengths(config, batch, 2)
    vocabulary = Vocabulary(VOCAB, EOS, np.zeros(VOCAB, dtype=bool), start=START, sentinels=SENTINELS)
    dataset = open_dataset(data)
    samples = SourceStreams(dataset, open_stores(data, lambda: False), data, lengths, ROWS, 3)
    loader = TrainLoader(
        samples,
        build_rows(config, RowContext(3, vocabulary, lengths, 2)),
        plan_batch(batch, world_size),
        rank=rank,
        world_size=world_size,
        crop=data.packing == "padded",
    )
    try:
        yield loader
    finally:
        loader.close()


def gradient(world: World, folder: str, micro: int, kind: str, objective: dict[str, Any]) -> dict[str, Any]:
    """The gradient of the first step by parameter, the shown loss, and this rank's number of targets."""
    engine = build(
        world, kind, 0, "fp32", micro=micro, model=TWO_STACKS, objective=ObjectiveConfig.model_validate(objective)
    )
    with loader_of(folder, world.rank, world.size, micro, **objective) as loader:
        step = next(loader)
    targets = _num_targets(step)
    sums = torch.zeros(2, dtype=torch.float64)
    for batch in step.micro_batches:
        sums += engine.forward_backward(batch, world.size / targets, batch is step.micro_batches[-1])
    shown = start_exchange(sums, step.counts, None)().loss_sum / targets
    model = engine.module.model
    grads = {name: parameter.grad.flatten().tolist() for name, parameter in model.named_parameters()}
    return {"gradient": grads, "loss": shown, "targets": step.counts.num_targets}


def steps_of(world: World, folder: str, cases: list[list[Any]], micro: int, steps: int, objective: dict[str, Any]):
    """Trains each (kind, stage, precision); returns [loss, grad norm] of each step."""
    config, results = ObjectiveConfig.model_validate(objective), []
    for kind, stage, precision in cases:
        engine = build(world, kind, stage, precision, micro=micro, model=TWO_STACKS, objective=config)
        rows = []
        with loader_of(folder, world.rank, world.size, micro, **objective) as loader:
            for _ in range(steps):
                rows.append(_train_step(engine, world, next(loader)))
        results.append(rows)
    return results


def _num_targets(step: StepBatch) -> int:
    """Returns the number of targets of a step over all ranks."""
    return start_exchange(torch.zeros(2, dtype=torch.float64), step.counts, None)().done.num_targets


def _train_step(engine: Any, world: World, step: StepBatch) -> list[float]:
    targets = _num_targets(step)
    sums = torch.zeros(2, dtype=torch.float64)
    for batch in step.micro_batches:
        sums += engine.forward_backward(batch, world.size / targets, batch is step.micro_batches[-1])
    pending = start_exchange(sums, step.counts, None)
    update = engine.update(1e-2)
    return [pending().loss_sum / targets, update.grad_norm]


def reference(folder: str, objective: dict[str, Any]) -> dict[str, Any]:
    """The definition: one process, one big batch, float64, all logits; the mean over all targets, no engine."""
    torch.set_num_threads(1)
    config = ModelConfig.model_validate(expand_preset(TWO_STACKS))
    model: Transformer = build_model(
        config, PLAIN_ENGINE.model_copy(update={"attention": "eager"}), torch.device("cpu")
    )
    init_weights(model, config, seed=5)
    model.double()
    with loader_of(folder, 0, 1, ROWS, **objective) as loader:
        (batch,) = next(loader).micro_batches
    logits = model(batch).logits_BTV[..., :VOCAB].flatten(0, 1)

    def mean(smoothing: float) -> Tensor:
        return torch.nn.functional.cross_entropy(
            logits, batch.targets_BT.flatten(), ignore_index=IGNORE_INDEX, label_smoothing=smoothing
        )

    mean(objective.get("label_smoothing", 0.0)).backward()
    gradient = {name: parameter.grad.flatten().tolist() for name, parameter in model.named_parameters()}
    return {"gradient": gradient, "loss": mean(0.0).item(), "targets": batch.num_targets()}
