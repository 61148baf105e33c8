"""What the ranks of the tests of sequence parallelism do: train, differentiate random layouts, count what is saved."""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as td
from torch import Tensor
from torch.distributed._tools.mem_tracker import MemTracker

from pretrain.config.engine import PLAIN_ENGINE
from pretrain.config.lengths import RowLengths
from pretrain.config.model import parse_model
from pretrain.config.objective import ObjectiveConfig
from pretrain.config.presets import expand_preset
from pretrain.data.loader import cut_columns
from pretrain.dist import World
from pretrain.model import build_model
from pretrain.model.build import init_weights
from pretrain.model.sequence_parallel import share_rows
from pretrain.objective import build_loss
from pretrain.plan.activations import activation_bytes
from pretrain.plan.task import TrainingTask
from pretrain.types import IGNORE_INDEX, Batch, Columns, StackRows
from tests.integration import experts_workers
from tests.integration.workers import MODEL, SEQ_LEN, TWO_STACKS, VOCAB, build, train, whole_moments
from tests.unit.plan.kept import SavedStorages

DECODER = MODEL["decoder"]
ENCODER = MODEL | {"decoder": None, "encoder": DECODER | {"layers": 2}}
MODELS: dict[str, dict[str, Any]] = {
    "grouped": MODEL,
    "torn groups": MODEL | {"decoder": DECODER | {"heads": 6, "kv_heads": 3, "width": 36}},
    "few keys": MODEL | {"decoder": DECODER | {"heads": 8, "kv_heads": 2}},
    "window": MODEL | {"decoder": DECODER | {"window": 5, "global_every": 2, "qk_norm": True}},
    "sinks": MODEL
    | {"decoder": DECODER | {"attention_sinks": True, "bias": True, "window": 5, "global_every": 2, "global_first": 1}},
    "latent": MODEL
    | {"decoder": DECODER | {"kv_heads": None, "latent": {"kv_rank": 12, "rope_width": 4, "value_width": 4}}},
    "relative": MODEL | {"decoder": DECODER | {"position": "relative", "relative_buckets": 8}},
    "learned": MODEL | {"decoder": DECODER | {"position": "learned", "value_residual": True, "value_embeddings": 1}},
    "encoder": ENCODER | {"encoder": DECODER | {"layers": 2, "window": 6, "global_every": 2, "token_types": 2}},
    "labels": ENCODER
    | {"head": {"kind": "labels", "labels": list(map(str, range(VOCAB)))}, "pooler": True}
    | {"tied_embeddings": False},
    "hybrid": MODEL
    | {
        "decoder": DECODER
        | {"mixers": ["delta", "mamba2", "convolution", "attention"], "layers": 4, "heads": 12, "head_width": 4}
        | {"delta": {"value_heads": 24, "key_width": 3, "value_width": 4}, "convolution": {"bias": True}}
        # A group of 6 heads: 4 ranks have 3 heads each, and so half of one.
        | {"mamba2": {"heads": 12, "head_width": 5, "state_width": 4, "groups": 2}},
    },
    "two stacks": TWO_STACKS,
}


def losses_of(
    world: World, cases: list[list[Any]], steps: int, micro: int, sequence: int, model: str, **options: Any
) -> list[list[list[float]]]:
    """Trains each (kind, stage, precision, ...) with rows that `sequence` ranks share."""
    world = replace(world, sequence=sequence)
    found = []
    for case in cases:
        engine = build(world, *case, micro=micro, model=MODELS[model], sharded=case[1] == 3, **options)
        found.append(train(engine, world, range(steps), micro, source=model == "two stacks"))
    return found


def mixture_losses(
    world: World, cases: list[list[Any]], steps: int, micro: int, sequence: int
) -> list[list[list[float]]]:
    """The same of mixtures of experts; the balance at the end is the last row."""
    return experts_workers.losses_of(replace(world, sequence=sequence), cases, steps, micro)


def gradients_of(
    world: World, cases: list[list[Any]], micro: int, sequence: int, model: str
) -> list[dict[str, list[float]]]:
    """First moment of every parameter after one step without clipping: a tenth of its gradient."""
    world = replace(world, sequence=sequence)
    found = []
    for case in cases:
        engine = build(world, *case, micro=micro, model=MODELS[model], grad_clip=0.0)
        train(engine, world, range(1), micro, source=model == "two stacks")
        found.append(whole_moments(engine))
    return found


def random_batch(seed: int, two_stacks: bool, causal: bool, types: bool) -> Batch:
    """Rows of random length: packed, padded or plain, with or without prefixes, targets here and there."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    rows, length = int(draw(1, 4)), int(draw(5, SEQ_LEN + 1))
    documents, positions = _documents(rows, length, draw) if seed % 4 else (None, None)
    tokens, targets = draw(0, VOCAB, rows, length), draw(0, VOCAB, rows, length)
    targets[draw(0, 3, rows, length) == 0] = IGNORE_INDEX
    lengths = None
    if documents is not None:
        targets[documents < 0] = IGNORE_INDEX
    elif seed % 8:
        lengths = draw(1, length + 1, rows).int()
        targets[torch.arange(length) >= lengths[:, None]] = IGNORE_INDEX
    prefix = None
    if causal and not two_stacks and seed % 3 == 0:
        at = torch.arange(length).expand(rows, -1) if positions is None else positions
        prefix = at < draw(0, 6, rows, 1)
    few = (targets.flatten() != IGNORE_INDEX).nonzero().flatten() if seed % 5 == 0 else None
    source = None
    if two_stacks:
        size = int(draw(5, SEQ_LEN + 1))
        of_source, at_source = _documents(rows, size, draw) if documents is not None else (None, None)
        short = draw(1, size + 1, rows).int() if documents is None and seed % 8 else None
        source = StackRows(draw(0, VOCAB, rows, size), positions_BT=at_source, documents_BT=of_source, lengths_B=short)
    return Batch(
        tokens,
        targets,
        positions_BT=positions,
        documents_BT=documents,
        lengths_B=lengths,
        prefix_BT=prefix,
        token_types_BT=draw(0, 2, rows, length) if types and seed % 2 else None,
        target_positions_P=few,
        source=source,
    )


def _documents(rows: int, length: int, draw: Any) -> tuple[Tensor, Tensor]:
    """Numbers and positions of documents of random lengths; the last one of some rows is padding."""
    starts = draw(0, 5, rows, length) == 0
    starts[:, 0] = True
    numbers = starts.cumsum(1) - 1
    columns = torch.arange(length).expand(rows, -1)
    positions = columns - (columns * starts).cummax(1).values
    padded = (numbers == numbers.amax(1, keepdim=True)) & (numbers > 0) & (draw(0, 2, rows, 1) == 0)
    return torch.where(padded, -1, numbers).int(), positions


def layout_errors(world: World, model: str, seeds: list[int], dtype: str = "float32") -> list[float]:
    """For each random layout the largest error of a gradient, relative to the largest element of that gradient,
    or to a ten-thousandth of that of all gradients.

    The gradients of the ranks' columns are summed, and compared with those of whole rows in each process.
    """
    world = _meet(world)
    config = parse_model(expand_preset(MODELS[model]))
    built = build_model(config, PLAIN_ENGINE, torch.device("cpu"))
    init_weights(built, config, seed=3)
    built.to(getattr(torch, dtype))
    share_rows(built, world, PLAIN_ENGINE.group_timeout_s)
    loss = build_loss(ObjectiveConfig())
    parameters = list(built.parameters())

    def differentiate(batch: Batch) -> list[Tensor]:
        found = loss(built, batch)
        return [found.loss_sum.detach().clone(), *torch.autograd.grad(found.loss_sum, parameters)]

    errors = []
    for seed in seeds:
        types = any(stack.token_type is not None for stack in built.stacks)
        batch = random_batch(seed, len(built.stacks) == 2, built.is_causal, types)
        expected = differentiate(batch)
        found = differentiate(cut_columns(batch, Columns(world.rank, world.size)))
        for part in found:
            td.all_reduce(part)
        sizes = [float(its.abs().max()) for its in expected]
        # A gradient may be zero but for rounding, as that of the queries of a source of one token is.
        floor = 1e-4 * max(sizes[1:])
        pairs = zip(found, expected, sizes, strict=True)
        errors.append(max(float((mine - its).abs().max()) / max(size, floor) for mine, its, size in pairs))
    return errors


def _meet(world: World) -> World:
    """Joins the process group; returns a world in which all ranks share rows."""
    td.init_process_group("gloo", rank=world.rank, world_size=world.size)
    return replace(world, sequence=world.size)


def peak_bytes(world: World, model: str, lengths: list[int], tiles: int) -> list[list[int]]:
    """Peaks of forward and backward pass besides weights and gradients, of a whole row and of this rank's columns.

    Blocks are computed again, feed-forward layers in tiles; the loss goes chunk by chunk.
    """
    world = _meet(world)
    engine = PLAIN_ENGINE.model_copy(update={"activation_checkpointing": "full", "feedforward_tiles": tiles})
    found = []
    for length in lengths:
        config = parse_model(expand_preset(MODELS[model] | {"max_seq_len": length}))
        built = build_model(config, engine, torch.device("cpu"))
        init_weights(built, config, seed=3)
        share_rows(built, world, engine.group_timeout_s)
        tokens = torch.arange(length)[None] % VOCAB
        batch = Batch(tokens, tokens)
        parts = (batch, cut_columns(batch, Columns(world.rank, world.size)))
        found.append([_peak(built, part) for part in parts])
    return found


def _peak(model: Any, batch: Batch) -> int:
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    tracker = MemTracker()
    tracker.track_external(model)
    with tracker:
        before = tracker.get_tracker_snapshot("current")[torch.device("cpu")]["Total"]
        build_loss(ObjectiveConfig())(model, batch).loss_sum.backward()
    return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"] - before


def saved_bytes(world: World, model: str, lengths: list[int]) -> list[list[int]]:
    """Bytes that autograd saves of a row of each length, whole and of this rank's columns; and those planned."""
    world = _meet(world)
    found = []
    for length in lengths:
        section = MODELS[model] | {"max_seq_len": length}
        config = parse_model(expand_preset(section))
        built = build_model(config, PLAIN_ENGINE, torch.device("cpu"))
        init_weights(built, config, seed=3)
        share_rows(built, world, PLAIN_ENGINE.group_timeout_s)
        tokens = torch.arange(length)[None] % VOCAB
        batch = Batch(tokens, tokens)
        cut = cut_columns(batch, Columns(world.rank, world.size))
        task = TrainingTask(config, RowLengths(length, length), sequence=world.size)
        planned = activation_bytes(task, PLAIN_ENGINE, 1, "cpu").kept
        found.append([_count_saved(built, batch), _count_saved(built, cut), planned])
    return found


def _count_saved(model: Any, batch: Batch) -> int:
    """Bytes of every storage that autograd saves in a forward pass, but for parameters and what is as large as one."""
    saved = SavedStorages(model)
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
        found = build_loss(ObjectiveConfig())(model, batch)
    assert found.loss_sum.requires_grad
    return saved.num_bytes()
