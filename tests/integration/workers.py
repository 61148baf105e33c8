"""What the ranks of the engine tests work with: synthetic batches, an engine over a tiny model, its steps."""

from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from accelerate.state import AcceleratorState, GradientState

from pretrain.artifact.lora import add_adapters, freeze, initial_adapter
from pretrain.artifact.quantized import QuantizedLinear
from pretrain.artifact.source import MAGNITUDE_SUFFIX, is_adapter, name_without_adapter, row_norms
from pretrain.config.data import BatchConfig, plan_batch
from pretrain.config.engine import EngineConfig
from pretrain.config.finetune import FinetuneConfig
from pretrain.config.model import parse_model
from pretrain.config.objective import ObjectiveConfig
from pretrain.config.optim import OptimConfig
from pretrain.config.presets import expand_preset
from pretrain.data.loader import StepCounts, cut_columns
from pretrain.dist import World, gather_objects
from pretrain.engine.build import build_engine, fill_sharded, start_accelerator
from pretrain.engine.engine import Engine
from pretrain.model import build_model
from pretrain.model.build import fill_weights, initial_weight
from pretrain.model.sequence_parallel import share_rows
from pretrain.objective import build_loss
from pretrain.optim.build import build_optimizer
from pretrain.optim.groups import group_parameters
from pretrain.optim.muon import MUON_BATCH_ELEMENTS
from pretrain.optim.parametrization import scale_of
from pretrain.training.step import TrainModule, start_exchange
from pretrain.types import IGNORE_INDEX, Batch, Columns, StackRows

ROWS, SEQ_LEN, VOCAB = 12, 16, 61
# 61 tokens padded to 64, tied embeddings and grouped-query attention: odd sizes, so that partitions cut parameters.
MODEL = {
    "preset": "llama-tiny",
    "vocab_size": VOCAB,
    "vocab_multiple": 8,
    "tied_embeddings": True,
    "max_seq_len": SEQ_LEN,
    "decoder": {"width": 36, "heads": 6, "kv_heads": 2, "head_width": 6, "ff_width": 50},
}

# What ZeRO's hooks meet beyond one stack: a weight read in three places, a shared bias, cross attention, a head's bias.
_TWO_STACKS_STACK = {"position": "relative", "relative_buckets": 8, "relative_max_distance": 12, "qk_norm": True}
TWO_STACKS = {
    **MODEL,
    "encoder": MODEL["decoder"] | _TWO_STACKS_STACK | {"layers": 2},
    "decoder": MODEL["decoder"] | _TWO_STACKS_STACK,
    "head": {"bias": True, "transform": True},
}


def global_batch(step: int, source: bool = False) -> Batch:
    """The batch of a step, equal on every rank: rows have very different numbers of targets, some none."""
    generator = torch.Generator().manual_seed(1000 + step)
    starts = torch.randint(0, VOCAB, (ROWS, 1), generator=generator)
    tokens = (starts + torch.arange(SEQ_LEN + 1)) % VOCAB
    targets = tokens[:, 1:].clone()
    keep = torch.randint(0, SEQ_LEN + 1, (ROWS, 1), generator=generator)
    targets[torch.arange(SEQ_LEN)[None, :] >= keep] = IGNORE_INDEX
    batch = Batch(tokens[:, :-1].contiguous(), targets)
    if not source:
        return batch
    lengths = torch.randint(1, SEQ_LEN + 1, (ROWS,), generator=generator, dtype=torch.int32)
    return replace(batch, source=StackRows(tokens[:, :-1].flip(1), lengths_B=lengths))


def rows_of(batch: Batch, rows: slice) -> Batch:
    """Some rows of a batch."""
    source = batch.source
    if source is not None and source.lengths_B is not None:
        source = StackRows(source.tokens_BT[rows], lengths_B=source.lengths_B[rows])
    return Batch(batch.tokens_BT[rows], batch.targets_BT[rows], source=source)


RECIPES: dict[str, dict[str, Any]] = {
    "normuon": {"kind": "muon", "muon": {"row_beta2": 0.9, "split_heads": True}, "cautious_decay": True},
    "cautious": {"kind": "adamw", "cautious_decay": True},
    "completep": {"transfer": {"kind": "completep", "base_width": 18, "base_layers": 1}},
    "soap": {"kind": "soap", "soap": {"every": 2}},
}
"""Sections `optim:` by a name; any other name is that of a kind."""

ADAPTED: dict[str, dict[str, Any]] = {"lora": {}, "dora": {"dora": True}, "qlora": {"quantize": "nf4"}}
"""Keys of `finetune:` of adapters."""

BY_BATCHES = " by batches"
"""End of the name of a Muon that steps matrices in batches, as on a GPU."""


def build(
    world: World,
    kind: str,
    stage: int,
    precision: str,
    optimizer: str = "adamw",
    offload: str = "none",
    *,
    micro: int,
    grad_clip: float = 1.0,
    model: dict[str, Any] = MODEL,
    compile: bool = False,
    checkpointing: str = "none",
    sharded: bool = False,
    fp8: str = "off",
    objective: ObjectiveConfig | None = None,
    finetune: str = "full",
    zero_hpz: int = 1,
    tiles: int = 1,
) -> Engine:
    """Builds an engine; several may be built one after another in a process.

    `offload`: `optimizer`, `params` or `both` stay in host memory; `activations` until the backward pass.
    `sharded`: its parameters are made and cut up one by one, as training does at stage 3. `finetune`: `freeze` freezes
    the embedding and the first block, those of `ADAPTED` all but adapters of rank 4, which then are all of the state.
    `zero_hpz` other than 1: at most one engine in a process.
    """
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    config = EngineConfig(
        kind=kind,
        zero_stage=stage,
        zero_hpz=zero_hpz,
        precision=precision,
        device="auto" if precision == "fp16" else "cpu",
        offload_optimizer="cpu" if offload in ("optimizer", "both") else "none",
        offload_params="cpu" if offload in ("params", "both") else "none",
        offload_activations="cpu" if offload == "activations" else "none",
        compile=compile,
        activation_checkpointing=checkpointing,
        feedforward_tiles=tiles,
        fp8=fp8,
    )
    plan = plan_batch(
        BatchConfig(global_tokens=ROWS * SEQ_LEN, seq_len=SEQ_LEN, micro=micro), world.size, world.row_ranks
    )
    recipe = optimizer.removesuffix(BY_BATCHES)
    optim = OptimConfig.model_validate({"lr": 1e-2, "grad_clip": grad_clip} | RECIPES.get(recipe, {"kind": recipe}))
    accelerator = start_accelerator(config, grad_clip, plan, 30000, world)
    model_config = parse_model(expand_preset(model))
    built = build_model(model_config, config, torch.device("cpu"), storage=not sharded, world=world)
    share_rows(built, world, config.group_timeout_s)
    if finetune == "freeze":
        freeze(built, ["embedding.*", "decoder.blocks.0.*"])
    elif finetune in ADAPTED:
        add_adapters(built, FinetuneConfig(kind="lora", rank=4, **ADAPTED[finetune]))

    def draw(name: str, shape: torch.Size) -> torch.Tensor:
        if name.endswith(MAGNITUDE_SUFFIX):
            layer = name.removesuffix(MAGNITUDE_SUFFIX)
            return row_norms(draw(f"{layer}.weight", built.get_submodule(layer).weight.shape))
        if is_adapter(name):
            return initial_adapter(name, shape, seed=5)
        weight = initial_weight(name_without_adapter(name), shape, model_config, seed=5)
        return weight.mul_(scale(name_without_adapter(name)).init)

    scale = partial(scale_of, config=optim, model=model_config)
    groups = group_parameters(built, scale_of=scale, split_heads=optim.muon.split_heads)
    if sharded:
        fill_sharded(built, draw, config, accelerator, world)
    else:
        fill_weights(built, draw)
    for name, part in built.named_modules():
        if isinstance(part, QuantizedLinear):
            part.take(draw(f"{name}.weight", torch.Size((part.out_features, part.in_features))))
    names = {id(parameter): name for name, parameter in built.named_parameters()}
    module = TrainModule(built, build_loss(objective or ObjectiveConfig()))
    batch_elements = MUON_BATCH_ELEMENTS["cuda"] if optimizer.endswith(BY_BATCHES) else 0
    with mock.patch.dict(MUON_BATCH_ELEMENTS, cpu=batch_elements):
        torch_optimizer = build_optimizer(groups, optim, torch.device("cpu"), fuses=config.fuses_update("cpu"))
    saves_frozen = finetune not in ADAPTED
    return build_engine(
        module,
        names,
        torch_optimizer,
        accelerator,
        config,
        grad_clip,
        world,
        saves_frozen=saves_frozen,
        balance=module.kept,
    )


def train(
    engine: Engine,
    world: World,
    steps: range,
    micro: int,
    poison: int | None = None,
    source: bool = False,
    lr: float = 1e-2,
) -> list[list[float]]:
    """Runs steps; returns [loss, grad norm, skipped] of each, and that of modules that predict further tokens.

    At step `poison`, rank 0's loss is made infinite.
    """
    rows = []
    for step in steps:
        whole = global_batch(step, source)
        each = ROWS // world.data_size
        mine = range(world.data_rank * each, (world.data_rank + 1) * each)
        micros = [rows_of(whole, slice(first, first + micro)) for first in range(mine.start, mine.stop, micro)]
        if world.row_ranks > 1:
            columns = Columns(world.row_rank, world.row_ranks)
            micros = [cut_columns(batch, columns) for batch in micros]
        scale = world.size / whole.num_targets()
        if step == poison and world.rank == 0:
            scale = float("inf")
        module: Any = engine.module
        module.targets_per_token = whole.num_targets() / (ROWS * SEQ_LEN)
        losses = [engine.forward_backward(b, scale, b is micros[-1]).double() for b in micros]
        sums = sum(losses, torch.zeros(len(module.layout), dtype=torch.float64))
        pending = start_exchange(sums, StepCounts(), None, module.layout)
        update = engine.update(lr)
        agreed = pending()
        if module.balance is not None and not update.skipped:
            module.balance.follow(agreed.sums["routed"])
        further = [] if agreed.multi_token_loss is None else [agreed.multi_token_loss]
        rows.append([agreed.loss_sum / whole.num_targets(), update.grad_norm, float(update.skipped), *further])
    return rows


def whole_moments(engine: Engine) -> dict[str, list[float]]:
    """First moment of every parameter, from all ranks. Collective."""
    mine = [
        (piece.name, piece.offset, piece.stripes or (piece.length, piece.length), piece.tensors["exp_avg"].tolist())
        for piece in engine.state.owned_fragments()
        if "exp_avg" in piece.tensors
    ]
    found: dict[str, dict[int, float]] = {}
    for name, offset, (run, stride), values in (piece for part in gather_objects(mine) for piece in part):
        places = [offset + number // run * stride + number % run for number in range(len(values))]
        found.setdefault(name, {}).update(zip(places, values, strict=True))
    for name, whole in found.items():
        assert sorted(whole) == list(range(len(whole))), name
    return {name: [whole[place] for place in sorted(whole)] for name, whole in found.items()}
