"""Wires a run together: the map of the system, in the order in which data flows.

    config -> data -> model -> objective -> engine -> checkpoint -> tracking

Siblings meet here and nowhere else.
"""

import hashlib
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pretrain.artifact.source import split_average
from pretrain.artifact.teacher import add_scores, open_stored, open_teacher
from pretrain.checkpoint.format import step_of
from pretrain.checkpoint.manager import CheckpointManager
from pretrain.checkpoint.state import TrainState
from pretrain.config.data import BatchPlan
from pretrain.config.engine import EngineConfig
from pretrain.config.load import dump_config
from pretrain.config.optim import OptimConfig
from pretrain.config.run import RunConfig
from pretrain.data.damage import DamagePolicy
from pretrain.data.loader import TrainLoader, ValidationLoader
from pretrain.data.order import SkipRanges
from pretrain.data.stream import SourceStreams, open_windows
from pretrain.dist import World
from pretrain.engine.build import (
    build_engine,
    builds_sharded,
    fill_sharded,
    forget_accelerator,
    import_packages,
    start_accelerator,
)
from pretrain.engine.engine import Engine
from pretrain.model import LanguageModel, build_model
from pretrain.model.build import compiles_on, fill_weights
from pretrain.model.sequence_parallel import share_rows
from pretrain.objective import build_comparison, build_loss, shown_of
from pretrain.optim.build import build_optimizer, state_size
from pretrain.optim.groups import ParameterGroup, group_parameters
from pretrain.plan.course import checkpoint_bytes, checkpoints_at_once
from pretrain.plan.params import count_parameters
from pretrain.plan.task import ParallelLayout, RunFlops, task_of
from pretrain.run.folder import RunDir, check_new
from pretrain.run.heartbeat import Progress
from pretrain.run.recovery import Recovery, read_recovery
from pretrain.run.stop import StopFlag
from pretrain.shards.dataset import Dataset
from pretrain.tracking.audit import AuditLedger
from pretrain.tracking.meter import Meter, PhaseClock, Profiler, Timeline, peak_flops
from pretrain.tracking.run_facts import find_facts, numeric_facts
from pretrain.tracking.run_output import RunOutput
from pretrain.tracking.tracker import Identity
from pretrain.training.claim import Claim, agree_on_versions, begin, check_data, recall_evaluations
from pretrain.training.downstream import DownstreamTasks, build_tasks
from pretrain.training.fitted import cluster_of, fit_engine, fit_loss
from pretrain.training.health.rank_health import RankHealth
from pretrain.training.health.self_check import check_stack
from pretrain.training.initial_weights import InitialWeights, open_start
from pretrain.training.layer_norms import LayerNorms
from pretrain.training.reference import with_reference
from pretrain.training.resolution import resolve_with_ranks
from pretrain.training.rollback import agree_on_skips, read_skips
from pretrain.training.samples import AttentionPictures, Samples, build_pictures, build_samples
from pretrain.training.step import TrainModule
from pretrain.types import Columns, RowMaker
from pretrain.utils.status_line import show_phase
from pretrain.utils.units import count

if TYPE_CHECKING:
    from accelerate import Accelerator


@dataclass(frozen=True, slots=True)
class ValidationSource:
    """The validation split of a source."""

    name: str
    loader: ValidationLoader
    damage: DamagePolicy  # counts the rows that this rank could not read, over all sources
    # Tokens per byte of its text; 0 where unknown, or where the loss is not that of the whole text.
    tokens_per_byte: float


@dataclass(slots=True)
class Run:
    """Everything that the loop works with."""

    config: RunConfig
    world: World
    plan: BatchPlan
    folder: RunDir
    dataset: Dataset
    engine: Engine
    checkpoints: CheckpointManager
    samples: SourceStreams
    loader: TrainLoader
    validation: list[ValidationSource]
    tracker: RunOutput
    audit: AuditLedger | None
    meter: Meter
    timeline: Timeline
    phase: PhaseClock
    norms: LayerNorms
    health: RankHealth
    texts: Samples | None
    tasks: DownstreamTasks | None
    pictures: AttentionPictures | None
    profiler: Profiler
    stop: StopFlag
    progress: Progress
    attempt: int
    recovery: Recovery = field(default_factory=read_recovery)


def _meet(
    claim: Claim, plan: BatchPlan, world: World, progress: Progress
) -> tuple["Accelerator", dict[str, Any]]:  # fmt: skip
    """Meets the other ranks; returns the accelerator, and the stack if it has been checked."""
    config = claim.config
    engine = config.engine.on(world.size)
    progress.enter("import")
    show_phase("importing the engine")
    import_packages(engine)
    progress.enter("meet")
    num = count_parameters(config.model)
    start = partial(start_accelerator, engine, config.optim.grad_clip, plan, num, world)
    accelerator = start()
    agree_on_versions(world)
    progress.enter("compile")
    if checked := check_stack(config, claim.folder, world, accelerator.device):
        forget_accelerator()
        accelerator = start()
    return accelerator, checked


def build_run(claim: Claim, world: World, stop: StopFlag, progress: Progress) -> tuple[Run, TrainState]:
    """Builds every part and restores the newest checkpoint, if there is one. Collective."""
    config, folder, dataset = claim.config, claim.folder, claim.dataset
    plan = config.plan_ranks(world.size)
    optim, clip = config.optim, config.optim.grad_clip
    accelerator, checked = _meet(claim, plan, world, progress)
    progress.enter("load")
    config = resolve_with_ranks(config, folder, world, progress)
    claim = replace(claim, config=config)
    show_phase(f"building a model of {count(count_parameters(config.model))} parameters")
    start = open_start(config, dataset.tokenizer_path, world)
    kind = fit_engine(config, cluster := cluster_of(world, accelerator.device)).on(world.size)
    storage = not (builds_sharded(kind) or start.quantizes)
    model = build_model(config.model, kind, accelerator.device, storage=storage, world=world)
    num_saved = start.arrange(model, accelerator.device)
    share_rows(model, world, kind.group_timeout_s)
    fit_loss(model, task_of(config), ParallelLayout(kind, plan.micro, plan.accumulation), cluster)
    groups = group_parameters(model, optim.layer_decay, start.scale_of, split_heads=optim.splits_heads)
    if builds_sharded(kind):
        fill_sharded(model, partial(_draw, start, progress), kind, accelerator, world)
    else:
        fill_weights(model, partial(_draw, start, progress))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    module = _module(config, model, dataset, accelerator.device, world)
    optimizer = _optimizer(groups, optim, kind, accelerator.device)
    options: dict[str, Any] = {"saves_frozen": start.base is None, "averages": optim.ema.is_on}
    options["balance"] = module.kept
    engine = build_engine(module, names, optimizer, accelerator, kind, clip, world, **options)
    identity = hashlib.sha256(dump_config(config).encode()).hexdigest()  # of config.yaml
    topology = {"world_size": world.size, "engine": engine.description, "lease": claim.lease_number, "config": identity}
    saved, best = config.checkpoint, config.checkpoint.best
    kept_by = (saved.keep_every_steps, best)
    checkpoints = CheckpointManager(folder.checkpoints, saved.keep, world, topology, claim.check_lease, *kept_by)
    optimized = state_size(groups, optim)
    size = checkpoint_bytes(num_saved + optimized.elements, len(names) + optimized.tensors, world.size)
    state = _restore(start, dataset, engine, checkpoints, size)

    on_cuda = accelerator.device.type == "cuda"
    record = begin(claim, world, {**topology, **_facts_of_start(accelerator.device, state), **checked})
    claim = with_reference(claim, plan, world, engine, state, progress)
    samples, make_rows = _samples(claim, plan)
    skips = agree_on_skips(folder, record, state, world.is_main)
    state = state.leaving_out(skips.ranges)
    samples.check_supply(skips.position_of(config.batch.steps.before(config.train.last_step)))
    loader = _loader(make_rows, claim, samples, plan, world, state, stop, on_cuda)
    tracker = _tracker(claim, world, record, state.step)
    audit = None if claim.lease is None else AuditLedger(folder.audit, claim.lease.check_after_stall)
    if audit is not None:
        audit.rewind(state.step)
    recall_evaluations(checkpoints, best, folder)
    meter = _meter(config, world, on_cuda)
    timeline = Timeline(on_cuda)
    module.register_forward_hook(timeline.after_forward)
    run = Run(
        config=config,
        world=world,
        plan=plan,
        folder=folder,
        dataset=dataset,
        engine=engine,
        checkpoints=checkpoints,
        samples=samples,
        loader=loader,
        validation=_validation(claim, plan, world, on_cuda),
        tracker=tracker,
        audit=audit,
        meter=meter,
        timeline=timeline,
        phase=PhaseClock(progress, meter, timeline),
        norms=LayerNorms([*names.values()], optimizer, engine.state, is_cut=_cuts_state(config, world)),
        health=_health(claim, world, engine, state.step),
        texts=build_samples(config, dataset, engine, world),
        tasks=build_tasks(config, dataset, engine),
        pictures=build_pictures(config, dataset, engine, world),
        profiler=Profiler(config.profile, folder.path, world.rank, on_cuda=on_cuda),
        stop=stop,
        progress=progress,
        attempt=len(record["attempts"]),
    )
    return run, state


def _health(claim: Claim, world: World, engine: Engine, first_step: int) -> RankHealth:
    steps = (first_step, claim.config.train.last_step)
    # At ZeRO 3 a GPU waits for gathers in its forward passes.
    is_timed = engine.device.type != "cuda" or claim.config.engine.on(world.size).zero_stage < 3
    return RankHealth(world, claim.folder, engine.device, steps, is_timed=is_timed)


def _optimizer(
    groups: list[ParameterGroup], optim: OptimConfig, engine: EngineConfig, device: torch.device
) -> torch.optim.Optimizer:
    fuses = engine.has_masters and compiles_on(engine, device)
    return build_optimizer(groups, optim, device, fuses=fuses)


def _facts_of_start(device: torch.device, state: TrainState) -> dict[str, Any]:
    return {"from_step": state.step, "numerics": numeric_facts(device), **read_recovery().facts()}


def _draw(start: InitialWeights, progress: Progress, name: str, shape: torch.Size) -> torch.Tensor | None:
    progress.go_on()  # all weights of a large model take minutes, on every rank
    return None if start.resumes else start.draw(name, shape)


def _module(
    config: RunConfig, model: LanguageModel, dataset: Dataset, device: torch.device, world: World
) -> TrainModule:
    objective = config.objective
    names = shown_of(objective).names
    module = TrainModule(model, build_loss(objective), len(dataset.sources), names)
    module.teacher = open_teacher(config, dataset, device, world)
    module.comparison = build_comparison(objective)
    return module


def _cuts_state(config: RunConfig, world: World) -> bool:
    return config.engine.on(world.size).zero_stage > 0 or config.parallel.parts > 1


def _tracker(claim: Claim, world: World, record: dict[str, Any], step: int) -> RunOutput:
    config = claim.config
    start, _ = split_average(Path(config.init.from_ or ""))
    begun_at = step_of(start)
    parent = None if begun_at is None else (str(start.parent.parent), begun_at)
    tracker = RunOutput(
        claim.folder.path,
        config.tracking,
        Identity(record["id"], config.run.name, config.model_dump(by_alias=True, mode="json"), parent),
        rank=world.rank,
        total_steps=config.train.steps,
        find_facts=partial(find_facts, claim.dataset, world.size),
    )
    tracker.rewind(step, len(record.get("rollbacks", [])))
    return tracker


def _samples(claim: Claim, plan: BatchPlan) -> tuple[SourceStreams, RowMaker]:
    config = claim.config
    stored = open_stored(config, claim.dataset)
    sizes = config.lengths, plan.rows, config.seed
    streams = SourceStreams(claim.dataset, claim.stores, config.data, *sizes, places=bool(stored))
    return streams, add_scores(claim.make_rows, stored)


def _loader(
    make_rows: RowMaker,
    claim: Claim,
    samples: SourceStreams,
    plan: BatchPlan,
    world: World,
    state: TrainState,
    stop: StopFlag,
    pin_memory: bool,
) -> TrainLoader:
    data, batch = claim.config.data, claim.config.batch
    return TrainLoader(
        samples,
        make_rows,
        plan,
        rank=world.data_rank,
        world_size=world.data_size,
        start_step=state.step,
        start_position=state.position,
        skips=SkipRanges(state.skips),
        workers=data.workers,
        prefetch=data.prefetch,
        crop=data.packing == "padded",
        pin_memory=pin_memory,
        stop=lambda: bool(stop),
        length_at=batch.length_at if batch.short_rows else None,
        window_at=batch.window_at if batch.short_windows else None,
        columns=_columns(world),
    )


def _columns(world: World) -> Columns | None:
    return Columns(world.row_rank, world.row_ranks) if world.row_ranks > 1 else None


def _meter(config: RunConfig, world: World, on_cuda: bool) -> Meter:
    peak = (peak_flops(torch.cuda.get_device_name()) or 0) * world.size if on_cuda else 0
    task, rows_before = task_of(config), config.batch.steps.before
    return Meter(
        config.train.steps,
        tokens_before=lambda step: rows_before(step) * task.tokens,
        flops_before=RunFlops(config, task).before,
        peak=peak or None,
    )


def _validation(claim: Claim, plan: BatchPlan, world: World, pin_memory: bool) -> list[ValidationSource]:
    config = claim.config
    validation = []
    damage = DamagePolicy(config.data.on_error, config.data.max_skipped_rows)
    for source, store in zip(claim.dataset.sources, claim.stores, strict=True):
        split = source.index.splits.get("validation")
        if not config.eval.every_steps or split is None:
            continue
        loader = ValidationLoader(
            open_windows(source.index, store, config.data, config.lengths, plan.rows, damage),
            claim.make_rows,
            micro=plan.micro,
            rank=world.data_rank,
            world_size=world.data_size,
            max_tokens=config.eval.max_tokens,
            crop=config.data.packing == "padded",
            pin_memory=pin_memory,
            columns=_columns(world),
        )
        # A code for the text predicts each token from those before it, and no other objective does.
        is_code = split.num_bytes_text and config.objective.predicts_text
        tokens_per_byte = split.num_tokens / split.num_bytes_text if is_code else 0.0
        validation.append(ValidationSource(source.name, loader, damage, tokens_per_byte))
    return validation


def _restore(
    start: InitialWeights, dataset: Dataset, engine: Engine, checkpoints: CheckpointManager, size: int
) -> TrainState:
    config = start.config
    folder = RunDir(config.folder)
    if folder.has_saved():
        show_phase("loading the newest checkpoint")
    checkpoints.keep_copies(read_recovery(), config.run.recover_every_steps)
    copies = checkpoints.copies
    state = None
    if copies is not None and folder.exists():
        skips = read_skips(folder, folder.read_record()).ranges
        state = copies.load(engine.state, folder.newest_step(), skips)
    state = state or checkpoints.load_newest(engine.state)
    if state is None:
        check_new(folder)
    if state is None or state.step < config.train.last_step:
        if copies is not None:
            copies.prepare(size)
        checkpoints.prepare(size, checkpoints_at_once(config.checkpoint, config.train.last_step))
    fresh = TrainState(data_hash=dataset.sha256, tokenizer_hash=dataset.index.tokenizer_sha256)
    if state is not None:
        check_data(state, fresh, config.resume.allow)
        start.check(state)
        return replace(state, data_hash=fresh.data_hash, tokenizer_hash=fresh.tokenizer_hash)
    return start.fill(engine.state, fresh)
