"""What the ranks of the engine tests do: build engines over a tiny model and synthetic batches, save, load, train."""

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState

from pretrain.checkpoint.manager import CheckpointManager, load_checkpoint
from pretrain.checkpoint.state import TrainState
from pretrain.config.data import BatchConfig, plan_batch
from pretrain.config.engine import PLAIN_ENGINE, EngineConfig
from pretrain.config.model import ModelConfig
from pretrain.config.objective import ObjectiveConfig
from pretrain.config.optim import OptimConfig
from pretrain.config.presets import expand_preset
from pretrain.config.recurrent import parse_model
from pretrain.dist import World, all_reduce_sum
from pretrain.engine.engine import Engine, build_engine
from pretrain.engine.loss_scale import set_loss_scale
from pretrain.engine.sharded import fill_sharded
from pretrain.engine.start import start_accelerator
from pretrain.errors import CheckpointError
from pretrain.model import build_model, init_weights
from pretrain.model.init import initial_weight
from pretrain.objective import build_loss
from pretrain.optim.build import build_optimizer
from pretrain.optim.groups import group_parameters
from pretrain.train.exchange import start_exchange
from pretrain.train.module import TrainModule
from pretrain.types import IGNORE_INDEX, Batch, Source

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
    return replace(batch, source=Source(tokens[:, :-1].flip(1), lengths_B=lengths))


def rows_of(batch: Batch, rows: slice) -> Batch:
    """Some rows of a batch."""
    source = batch.source
    if source is not None and source.lengths_B is not None:
        source = Source(source.tokens_BS[rows], lengths_B=source.lengths_B[rows])
    return Batch(batch.tokens_BT[rows], batch.targets_BT[rows], source=source)


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
    sharded: bool = False,
    objective: ObjectiveConfig | None = None,
) -> Engine:
    """Builds an engine; several may be built one after another in a process.

    `offload`: `optimizer`, `params` or `both` stay in host memory. `sharded`: its parameters are made and cut up one by
    one, as training does at stage 3.
    """
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    config = EngineConfig(
        kind=kind,
        zero_stage=stage,
        precision=precision,
        device="auto" if precision == "fp16" else "cpu",
        offload_optimizer="cpu" if offload in ("optimizer", "both") else "none",
        offload_params="cpu" if offload in ("params", "both") else "none",
        timeout_s=60,
        compile=compile,
    )
    plan = plan_batch(BatchConfig(global_tokens=ROWS * SEQ_LEN, seq_len=SEQ_LEN, micro=micro), world.size)
    optim = OptimConfig(kind=optimizer, lr=1e-2, grad_clip=grad_clip)
    accelerator = start_accelerator(config, grad_clip, plan, 30000, world)
    model_config = parse_model(expand_preset(model))
    built = build_model(model_config, config, torch.device("cpu"), storage=not sharded)
    groups = group_parameters(built)
    if sharded:
        fill_sharded(built, partial(initial_weight, config=model_config, seed=5), config, accelerator)
    else:
        init_weights(built, model_config, seed=5)
    names = {id(parameter): name for name, parameter in built.named_parameters()}
    module = TrainModule(built, build_loss(objective or ObjectiveConfig()))
    torch_optimizer = build_optimizer(groups, optim, torch.device("cpu"))
    return build_engine(module, names, torch_optimizer, accelerator, config, grad_clip, plan, world)


def train(
    engine: Engine, world: World, steps: range, micro: int, poison: int | None = None, source: bool = False
) -> list[list[float]]:
    """Runs steps; returns [loss, grad norm, skipped] of each. At step `poison`, rank 0's loss is made infinite."""
    rows = []
    for step in steps:
        whole = global_batch(step, source)
        mine = range(world.rank * ROWS // world.size, (world.rank + 1) * ROWS // world.size)
        micros = [rows_of(whole, slice(first, first + micro)) for first in range(mine.start, mine.stop, micro)]
        scale = world.size / whole.num_targets()
        if step == poison and world.rank == 0:
            scale = float("inf")
        losses = [engine.forward_backward(b, scale, b is micros[-1]).double() for b in micros]
        pending = start_exchange(sum(losses, torch.zeros(2, dtype=torch.float64)), 0, 0, 0, 0, False)
        update = engine.update(1e-2)
        agreed = pending()
        rows.append([agreed.loss_sum / whole.num_targets(), update.grad_norm, float(update.skipped)])
    return rows


def losses_of(world: World, cases: list[list[Any]], steps: int, micro: int) -> list[list[list[float]]]:
    """Trains each (kind, stage, precision) from the same start."""
    return [train(build(world, *case, micro=micro), world, range(steps), micro) for case in cases]


def two_stacks_losses(world: World, cases: list[list[Any]], steps: int, micro: int) -> list[list[list[float]]]:
    """The same for an encoder-decoder with padded sources."""
    return [
        train(build(world, *case, micro=micro, model=TWO_STACKS), world, range(steps), micro, source=True)
        for case in cases
    ]


def sharded_losses(world: World, precisions: list[str], steps: int, micro: int) -> list[list[list[list[float]]]]:
    """Trains an encoder-decoder at stage 3 from parameters cut up one by one, and from whole ones."""

    def trained(precision: str, sharded: bool) -> list[list[float]]:
        engine = build(world, "deepspeed", 3, precision, micro=micro, model=TWO_STACKS, sharded=sharded)
        return train(engine, world, range(steps), micro, source=True)

    return [[trained(precision, True), trained(precision, False)] for precision in precisions]


def sharded_peak(world: World) -> list[int]:
    """Fills a model for stage 3; returns [elements of the model, of its largest parameter, most that were live]."""
    config = EngineConfig(kind="deepspeed", zero_stage=3, precision="fp32", device="cpu", timeout_s=60)
    plan = plan_batch(BatchConfig(global_tokens=ROWS * SEQ_LEN, seq_len=SEQ_LEN, micro=2), world.size)
    accelerator = start_accelerator(config, 1.0, plan, 30000, world)
    model_config = ModelConfig.model_validate(expand_preset(TWO_STACKS))
    model = build_model(model_config, config, torch.device("cpu"), storage=False)
    sizes = [parameter.numel() for parameter in model.parameters()]
    peak = 0

    def draw(name: str, shape: torch.Size) -> torch.Tensor:
        nonlocal peak
        held = sum(p.ds_tensor.numel() for p in model.parameters() if hasattr(p, "ds_tensor"))
        whole = sum(p.numel() for p in model.parameters() if not p.is_meta)
        peak = max(peak, held + whole + shape.numel())
        return initial_weight(name, shape, model_config, 5)

    fill_sharded(model, draw, config, accelerator)
    return [sum(sizes), max(sizes), peak]


def offload_facts(world: World, cases: list[list[Any]]) -> list[list[Any]]:
    """Of each case: what DeepSpeed says is in host memory, what the engine says of itself, the type of optimizer."""
    facts = []
    for case in cases:
        engine: Any = build(world, *case, micro=2)
        inner = engine._engine
        sections = (inner.zero_offload_optimizer(), inner.zero_offload_param())
        devices = [section.device if section else "none" for section in sections]
        facts.append([*devices, engine.description, type(inner.basic_optimizer).__name__])
    return facts


def compiled_losses(world: World, stages: list[int], steps: int, micro: int) -> tuple[list[list[list[float]]], int]:
    """Trains with compiled blocks at each ZeRO stage; returns the rows, and how often a graph was broken."""
    from torch._dynamo.utils import counters

    rows = [
        train(build(world, "deepspeed", stage, "fp32", micro=micro, compile=True), world, range(steps), micro)
        for stage in stages
    ]
    return rows, sum(counters["graph_break"].values())


def bare_float64(steps: int) -> list[list[float]]:
    """The definition: the token mean over one big batch, float64, no engine, no chunked loss; [loss, grad norm]."""
    torch.set_num_threads(1)
    model_config = ModelConfig.model_validate(expand_preset(MODEL))
    model = build_model(model_config, PLAIN_ENGINE.model_copy(update={"attention": "eager"}), torch.device("cpu"))
    init_weights(model, model_config, seed=5)
    model.double()
    decaying, rest = group_parameters(model)
    groups = [{"params": decaying.parameters, "weight_decay": 0.1}, {"params": rest.parameters, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), fused=False)
    rows = []
    for step in range(steps):
        batch = global_batch(step)
        logits = model(batch).logits_BTV[..., :VOCAB].flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, batch.targets_BT.flatten(), ignore_index=IGNORE_INDEX)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rows.append([loss.item(), norm.item()])
    return rows


def bare_blocks(optimizer: str, steps: int) -> list[list[float]]:
    """torch's own optimizer over each matrix of the model apart, one big batch, fp32, no engine; [loss, grad norm]."""
    torch.set_num_threads(1)
    model_config = ModelConfig.model_validate(expand_preset(MODEL))
    model = build_model(model_config, PLAIN_ENGINE.model_copy(update={"attention": "eager"}), torch.device("cpu"))
    init_weights(model, model_config, seed=5)
    apart: dict[str, list[torch.nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        rows = [36, 12, 12] if name.endswith("qkv.weight") else [parameter.shape[0]]
        rows = [50, 50] if name.endswith("gate_up.weight") else rows
        apart[name] = [torch.nn.Parameter(part.detach().clone()) for part in parameter.split(rows)]
    hidden = [part for name, parts in apart.items() if "embedding" not in name for part in parts if part.ndim == 2]
    others = [part for name, parts in apart.items() for part in parts if "embedding" in name or part.ndim == 1]
    if optimizer == "muon":
        steppers = [torch.optim.Muon(hidden, lr=0.02, weight_decay=0.1)]
        steppers += [torch.optim.AdamW(others, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)]
    else:
        steppers = [torch.optim.Adafactor(hidden, lr=1e-2, eps=(1e-18, 1e-3), weight_decay=0.1)]
        steppers += [torch.optim.Adafactor(others, lr=1e-2, eps=(1e-18, 1e-3), weight_decay=0.0)]
    rows_out = []
    for step in range(steps):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(torch.cat(list(apart[name])))
        batch = global_batch(step)
        logits = model(batch).logits_BTV[..., :VOCAB].flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, batch.targets_BT.flatten(), ignore_index=IGNORE_INDEX)
        model.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for name, parameter in model.named_parameters():
            for part, gradient in zip(
                apart[name], parameter.grad.split([p.shape[0] for p in apart[name]]), strict=True
            ):
                part.grad = gradient.clone()
        for stepper in steppers:
            stepper.step()
        rows_out.append([loss.item(), norm.item()])
    return rows_out


def save_each(world: World, cases: list[list[Any]], folder: str, steps: int) -> list[list[list[float]]]:
    """Trains each case, saves it to folder/<case>, trains on; returns what followed the save."""
    followed = []
    for case in cases:
        engine = build(world, *case, micro=2)
        train(engine, world, range(steps), 2)
        manager(world, folder, case).save(engine.state, TrainState(step=steps, optimizer_step=steps))
        followed.append(train(engine, world, range(steps, steps + 3), 2))
    return followed


def manager(world: World, folder: str, case: list[Any]) -> CheckpointManager:
    """The checkpoint manager of a case."""
    return CheckpointManager(Path(folder) / "-".join(map(str, case)), 2, world, {})


def load_pairs(world: World, pairs: list[list[list[Any]]], folder: str, steps: int) -> list[list[list[float]]]:
    """For each (saved case, case to load it with): loads and trains on; returns the steps that followed."""
    followed = []
    for saved, case in pairs:
        engine = build(world, *case, micro=2)
        path = Path(folder) / "-".join(map(str, saved)) / f"step-{steps:08d}"
        state = load_checkpoint(path, engine.state)
        assert state.step == steps
        followed.append(train(engine, world, range(steps, steps + 3), 2))
    return followed


def refused_load(world: World, saved: list[Any], case: list[Any], folder: str, steps: int) -> str:
    """What loading a saved case into another says."""
    engine = build(world, *case, micro=2)
    try:
        load_checkpoint(Path(folder) / "-".join(map(str, saved)) / f"step-{steps:08d}", engine.state)
    except CheckpointError as error:
        return str(error)
    return ""


def first_moments(world: World, cases: list[list[Any]], clips: list[float]) -> list[list[float]]:
    """Global norm of the gradient of step 0, and that of AdamW's first moment after it, for each case and clip."""
    rows = []
    for case in cases:
        for clip in clips:
            engine = build(world, *case, micro=2, grad_clip=clip)
            ((_, norm, _),) = train(engine, world, range(1), 2)
            square = sum(float(f.tensors["exp_avg"].square().sum()) for f in engine.state.owned_fragments())
            total = all_reduce_sum(torch.tensor([square], dtype=torch.float64))
            rows.append([norm, float(total) ** 0.5])
    return rows


def poisoned(world: World, cases: list[list[Any]]) -> list[list[Any]]:
    """Trains 4 steps with a non-finite gradient at step 2; returns rows, and whether weights and moments stayed."""
    results = []
    for case in cases:
        engine = build(world, *case, micro=2)
        rows = train(engine, world, range(2), 2)
        before = snapshot(engine)
        rows += train(engine, world, range(2, 3), 2, poison=2)
        unchanged = all(torch.equal(a, b) for a, b in zip(before, snapshot(engine), strict=True))
        rows += train(engine, world, range(3, 4), 2)
        results.append([rows, unchanged])
    return results


def snapshot(engine: Engine) -> list[torch.Tensor]:
    """Copies of all weights and moments on this rank."""
    return [tensor.clone() for fragment in engine.state.held_fragments() for tensor in fragment.tensors.values()]


def allow_half_on_cpu() -> None:
    """Lets DeepSpeed run fp16 here, which it refuses on CPUs without fast kernels for it: they are slow, not wrong."""
    from deepspeed.accelerator import get_accelerator

    from pretrain.engine import start

    start.pick_device = lambda config: "cpu"
    os.environ["DS_ACCELERATOR"] = "cpu"
    get_accelerator().is_fp16_supported = lambda: True


def half_losses(world: World, cases: list[list[Any]], folder: str, steps: int) -> list[dict[str, Any]]:
    """Trains each fp16 case from a loss scale that overflows, saves it, goes on; and goes on from what was saved."""
    allow_half_on_cpu()
    results = []
    for case in cases:
        engine: Any = build(world, *case, micro=2)
        set_loss_scale(engine._engine.optimizer, {"loss_scale.cur_scale": 2.0**20, "loss_scale.cur_hysteresis": 1})
        rows = train(engine, world, range(steps), 2)
        applied = steps - int(sum(row[2] for row in rows))
        scalars = engine.state.scalars()
        manager(world, folder, case).save(engine.state, TrainState(step=steps, optimizer_step=applied))
        followed = train(engine, world, range(steps, steps + 3), 2)
        again: Any = build(world, *case, micro=2)
        load_checkpoint(Path(folder) / "-".join(map(str, case)) / f"step-{steps:08d}", again.state)
        loaded = again.state.scalars()
        resumed = train(again, world, range(steps, steps + 3), 2)
        results.append({"rows": rows, "scalars": scalars, "loaded": loaded, "followed": followed, "resumed": resumed})
    return results


PRIVATE = {
    (0, "fp32"): [],
    (0, "bf16"): ["optimizer.fp16_groups", "optimizer.fp32_groups"],
    (1, None): ["optimizer.bit16_groups", "optimizer.single_partition_of_fp32_groups", "optimizer.update_lp_params"],
    (3, None): [
        "optimizer.fp16_groups",
        "optimizer.fp32_partitioned_groups_flat",
        "optimizer.persistent_parameters",
        "optimizer.grad_position",
        "optimizer.get_param_id",
    ],
}
OF_PARAMETER = {
    1: ["_hp_mapping.hp_fragment_address.numel", "_hp_mapping.lp_fragment_address.start"],
    3: ["ds_tensor.ds_numel", "ds_numel", "ds_shape", "partition", "all_gather"],
}


def missing_private(world: World, cases: list[list[Any]]) -> list[str]:
    """The paths of attributes that are absent, by case."""
    missing = []
    for _, stage, precision in cases:
        wrapped: Any = build(world, "deepspeed", stage, precision, micro=2)
        engine, kind = wrapped._engine, 1 if stage in (1, 2) else stage
        paths = ["basic_optimizer.param_groups", "was_step_applied", "get_global_grad_norm"]
        paths += PRIVATE[kind, precision if stage == 0 else None]
        missing += [f"ZeRO {stage} {precision}: {path}" for path in paths if not _has(engine, path)]
        parameter = next(engine.module.parameters())
        missing += [
            f"ZeRO {stage}: parameter.{path}" for path in OF_PARAMETER.get(kind, []) if not _has(parameter, path)
        ]
    return missing


def _has(root: Any, path: str) -> bool:
    for name in path.split("."):
        if not hasattr(root, name):
            return False
        root = getattr(root, name)
    return True
