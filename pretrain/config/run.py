"""RunConfig, the whole config of a run; rules between sections."""

import json
from pathlib import Path
from typing import Annotated

from pydantic import Field

from pretrain.config.base import Conflicts, OnResume, Section
from pretrain.config.data import BatchConfig, BatchPlan, DataConfig, ImagesConfig, nearest_multiples, plan_batch
from pretrain.config.engine import EngineConfig, ParallelConfig, expert_conflicts, sequence_conflicts, tensor_conflicts
from pretrain.config.finetune import FinetuneConfig
from pretrain.config.lengths import RowLengths, image_lengths, row_lengths
from pretrain.config.model import ModelConfig, ModelSection, StackConfig
from pretrain.config.objective import ObjectiveConfig, kind_conflicts, multi_token_conflicts
from pretrain.config.optim import OptimConfig
from pretrain.config.tracking import ProfileConfig, TrackingConfig, tracking_conflicts
from pretrain.config.train import (
    CheckpointConfig,
    EvalConfig,
    GuardConfig,
    InitConfig,
    LaunchConfig,
    ResumeConfig,
    RunSection,
    TrainConfig,
    best_conflicts,
)
from pretrain.errors import ConfigError
from pretrain.kinds.heads import HEADS
from pretrain.kinds.objectives import OBJECTIVES
from pretrain.kinds.optimizers import optimizers_where


def training_conflicts(optim: OptimConfig, engine: EngineConfig, model: Section, batch: BatchConfig) -> Conflicts:
    """Yields conflicts between sections, with keys from the root of the config."""
    yield from optim.transfer_conflicts(model)
    if isinstance(model, ModelConfig):
        yield from _transformer_conflicts(engine, model)
    elif optim.splits_heads:
        yield (
            f"optim.{optim.kind}.split_heads=true steps attention heads on their own, which model.kind=recurrent lacks",
            "leave it out",
        )
    elif batch.short_windows:
        limits = "batch.short_windows limits attention of Transformers"
        yield f"{limits}, which model.kind=recurrent lacks", "leave it out"
    if optim.record.matrices and engine.offload_optimizer != "none":
        offload = f"engine.offload_optimizer={engine.offload_optimizer}"
        yield (
            f"optim.kind={optim.kind} steps whole matrices, which {offload} would gather and multiply on the CPU",
            "use engine.offload_optimizer=none or optim.kind=adamw",
        )


def _transformer_conflicts(engine: EngineConfig, model: ModelConfig) -> Conflicts:
    experts = model.last_stack.experts
    if experts is not None and experts.top_k == 1 and experts.normalize:
        why = "which makes every weight 1 and leaves the router without a gradient"
        yield f"top_k=1 with normalize=true of the experts, {why}", "set normalize=false"
    stacks = [stack for stack in (model.encoder, model.decoder) if stack is not None]
    is_t5 = model.init == "t5" or not all(stack.scaled_attention for stack in stacks)
    if engine.precision == "fp16" and is_t5:
        # Raffel et al. trained T5 in bf16: its feed-forward layers and scores exceed 65504.
        style = "a T5-style model (model.init=t5 or scaled_attention=false)"
        yield (
            f"engine.precision=fp16 overflows in {style}, whose activations exceed the range of fp16",
            "use engine.precision=bf16",
        )


FP8_MULTIPLE = 16
"""Divisor of the rows and columns of every FP8 product."""


def fp8_conflicts(model: ModelConfig, batch: BatchConfig, lengths: RowLengths, *, crops: bool) -> Conflicts:
    """Yields bad sizes of FP8 products: weights, and their gradients, which sum over the tokens.

    `crops`: rows are cropped to a multiple of 8 tokens.
    """
    if model.last_stack.experts:
        yield "engine.fp8 rounds linear layers, and experts are grouped ones", "use engine.fp8=off"
    if model.last_stack.latent:
        yield "engine.fp8 was not tried with latent attention", "use engine.fp8=off"
    if mixers := model.last_stack.lacking("fp8"):
        yield f"engine.fp8 was not tried with {mixers}", "use engine.fp8=off"
    if model.multi_token:
        yield "engine.fp8 was not tried with model.multi_token", "use engine.fp8=off"
    rule = f"a multiple of {FP8_MULTIPLE} for engine.fp8"
    for name in ("encoder", "decoder"):
        stack: StackConfig | None = getattr(model, name)
        if stack is None:
            continue
        sizes = {
            "width": stack.width,
            "heads x head_width": stack.heads * stack.per_head_width,
            "2 x kv_heads x head_width": 2 * stack.num_kv_heads * stack.per_head_width,
            "ff_width": stack.ff_width,
        }
        for key, size in sizes.items():
            if size % FP8_MULTIPLE:
                yield f"model.{name}: {key}={size} must be {rule}", "change it, or use engine.fp8=off"
    for length in {lengths.target, lengths.source or lengths.target, 8 if crops else lengths.target}:
        if batch.micro * length % FP8_MULTIPLE:
            yield (
                f"batch.micro={batch.micro} rows of {length} tokens are {batch.micro * length}, must be {rule}",
                "use another batch.micro",
            )


class RunConfig(Section):
    """Config of a run; `pretrain config FILE` prints it with every default filled in."""

    seed: Annotated[int, OnResume.ALLOW] = Field(default=1234, ge=0, lt=2**63)
    """Seed of weights, data order and dropout."""
    extend: Annotated[list[str], OnResume.WARN] = Field(default_factory=list)
    """Modules to import first, which add entries to registries: objectives, backends, families."""
    run: RunSection
    data: DataConfig
    batch: BatchConfig
    model: ModelSection
    """Architecture of the model."""
    objective: ObjectiveConfig = ObjectiveConfig()
    optim: OptimConfig
    train: TrainConfig
    eval: EvalConfig = EvalConfig()
    engine: EngineConfig = EngineConfig()
    parallel: ParallelConfig = ParallelConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    guard: GuardConfig = GuardConfig()
    tracking: TrackingConfig = TrackingConfig()
    profile: ProfileConfig = ProfileConfig()
    init: InitConfig = InitConfig()
    finetune: FinetuneConfig = FinetuneConfig()
    resume: ResumeConfig = ResumeConfig()
    launch: LaunchConfig = LaunchConfig()

    @property
    def folder(self) -> Path:
        """The run folder, `run.dir/run.name`."""
        return Path(self.run.dir) / self.run.name

    @property
    def stacks(self) -> list[str]:
        """Names of the stacks of the model."""
        return [name for name in ("encoder", "decoder") if getattr(self.model, name)]

    @property
    def counted(self) -> str:
        """Metric that counts targets: `tokens`, `labels`, `answers`, or `pairs` (of answers)."""
        return OBJECTIVES[self.objective.kind].counted or self.model.head.record.counted

    @property
    def lengths(self) -> RowLengths:
        """Row lengths in tokens, in the data and in the model."""
        lengths = row_lengths(self.objective, self.batch, len(self.stacks))
        patches = self.model.input
        return lengths if patches is None else image_lengths(lengths, self.objective, patches)

    def plan_ranks(self, ranks: int) -> BatchPlan:
        """Divides the global batch over `ranks`, checking what they share.

        Raises:
            ConfigError: The batch, a key of `parallel` or `engine.zero_hpz` does not divide; names
                the nearest that does.
        """
        group = self.engine.zero_hpz
        if ranks % group:
            raise ConfigError(
                f"engine.zero_hpz={group} must divide the number of ranks, {ranks}",
                fix=f"start {nearest_multiples(ranks, group)} ranks",
            )
        shared = self.parallel
        return plan_batch(self.batch, ranks, shared.sequence, shared.experts, shared.tensor)

    def shortened(self) -> tuple[str, str] | None:
        """Returns what is cut of the schedule in a short run, and the remedy; None: nothing."""
        return self.optim.schedule.shortened(self.batch, self.train.steps)

    def even_steps(self) -> list[str]:
        """Returns overrides under which all steps have as many tokens, and step n its learning rate.

        For a run with another batch size, in which positions in tokens would be other steps.
        """
        schedule = self.optim.schedule
        steps = schedule.in_steps(self.batch, self.train.steps).model_dump()
        changed = {key: value for key, value in steps.items() if value != getattr(schedule, key)}
        uneven = [f"batch.{key}=[]" for key in ("schedule", "short_rows", "short_windows")]
        items = [f"optim.schedule.{key}={json.dumps(value)}" for key, value in changed.items()]
        return uneven + items

    def _conflicts(self) -> Conflicts:
        yield from self._batch_conflicts()
        yield from self._parallel_conflicts()
        yield from best_conflicts(self.checkpoint, self.eval, self.objective, self.data, self.optim.ema)
        yield from tracking_conflicts(self.tracking, self.eval, self.model)
        if self.eval.tasks.names and (self.stacks != ["decoder"] or not self.model.head.record.scores_words):
            yield "eval.tasks are for models with a decoder alone and its head", "leave them out"
        yield from self._objective_conflicts()
        yield from OBJECTIVES[self.objective.kind].conflicts(self)
        if self.finetune.kind == "lora":
            yield from self._adapter_conflicts()
        yield from self._image_conflicts()
        yield from self._length_conflicts()

    def _batch_conflicts(self) -> Conflicts:
        length = self.batch.seq_len
        for key, tokens in self.batch.sizes:
            if tokens % length:
                # Sizes that one rank can run: a multiple of the rows alone would be refused at the start.
                sizes = nearest_multiples(tokens, length * self.batch.micro)
                yield f"{key}={tokens} must be a multiple of batch.seq_len={length}", f"use {sizes}"
        yield from training_conflicts(self.optim, self.engine, self.model, self.batch)
        if self.engine.has_fp8 and isinstance(self.model, ModelConfig):
            yield from fp8_conflicts(self.model, self.batch, self.lengths, crops=self.data.packing == "padded")

    def _parallel_conflicts(self) -> Conflicts:
        if self.parallel.sequence > 1:
            yield from sequence_conflicts(self.parallel.sequence, self.engine, self.model)
        if self.parallel.experts > 1:
            yield from expert_conflicts(self.parallel.experts, self.engine, self.model)
        if self.parallel.tensor == 1:
            return
        yield from tensor_conflicts(self.parallel, self.engine, self.model)
        key = f"parallel.tensor={self.parallel.tensor}"
        if self.optim.record.matrices:
            matrices = f"the whole matrices that optim.kind={self.optim.kind} steps"
            elementwise = optimizers_where(lambda record: record.matrices is None)
            yield f"{key} leaves no rank with {matrices}", f"use optim.kind={elementwise}"
        if self.tracking.attention.text is not None:
            yield f"{key} leaves no rank with all heads for tracking.attention", "leave its text out"

    def _objective_conflicts(self) -> Conflicts:
        kinds = [task.kind for task in self.objective.tasks]
        yield from multi_token_conflicts(self.model, self.objective)
        if self.objective.distill is not None:
            for name in ("sequence", "tensor"):
                ranks = getattr(self.parallel, name)
                if ranks > 1:
                    what = f"parallel.{name}={ranks}, which cuts what objective.distill compares"
                    yield f"{what}: all scores of whole rows", f"use parallel.{name}=1"
        yield from _generator_conflicts(self)
        for kind in kinds:
            yield from kind_conflicts(kind, self.model, self.data, self.init.from_)
        if not set.intersection(*(set(OBJECTIVES[kind].data) for kind in kinds)):
            yield f"objective.mixture: {', '.join(kinds)} have no kind of data in common", "mix objectives that do"
        alone = [kind for kind in kinds if not OBJECTIVES[kind].mixes]
        if alone and len(kinds) > 1:
            yield f"objective.mixture: {alone[0]} cannot be mixed", f"use objective.kind={alone[0]} alone"
        yield from self._row_conflicts(kinds)

    def _row_conflicts(self, kinds: list[str]) -> Conflicts:
        running = all(OBJECTIVES[kind].running_text for kind in kinds)
        if self.batch.short_rows and (not running or self.data.packing != "concat"):
            both = f"objective.kind={'+'.join(kinds)} and data.packing={self.data.packing}"
            need = "batch.short_rows cuts rows of running text, for objective.kind=causal and data.packing=concat"
            yield f"{need}, not {both}", "leave it out"
        if self.batch.source_len is not None and not any(OBJECTIVES[kind].source_rows for kind in kinds):
            yield "batch.source_len needs objective.kind=seq2seq", "leave it out"

    def _adapter_conflicts(self) -> Conflicts:
        if isinstance(self.model, ModelConfig) and self.model.last_stack.experts:
            yield "finetune.kind=lora adapts matrices, and those of experts are one parameter", "use finetune.kind=full"
        if self.init.from_ is None:
            yield "finetune.kind=lora needs a base model", "set init.from"
        divides = "whole matrices, which engine.zero_stage=3 divides"
        if self.engine.zero_stage == 3 and self.finetune.dora:
            yield f"finetune.dora takes norms of {divides}", "use engine.zero_stage=2, or leave dora out"
        if self.engine.zero_stage == 3 and self.finetune.quantize != "none":
            yield f"finetune.quantize keeps {divides}", "use engine.zero_stage=2, or leave quantize out"
        if self.init.freeze:
            yield "init.freeze does not go with finetune.kind=lora, which freezes the whole model", "leave it out"
        if self.parallel.tensor > 1:
            cuts = f"parallel.tensor={self.parallel.tensor} cuts linear layers"
            yield f"{cuts}, which finetune.kind=lora adapts whole", "use parallel.tensor=1"
        if getattr(self.model, "multi_token", 0):
            yield (
                "finetune.kind=lora adapts one stack, without the modules of model.multi_token",
                "use model.multi_token=0, or finetune.kind=full",
            )
        if self.optim.transfer is not None:
            yield "optim.transfer has no rule for the adapters of finetune.kind=lora", "leave it out"
        if self.engine.has_fp8:
            yield "finetune.kind=lora adapts linear layers of torch, which FP8 replaces", "use engine.fp8=off"
        if self.model.kind == "recurrent":
            yield "finetune.kind=lora adapts Transformer blocks, which model.kind=recurrent lacks"

    def _image_conflicts(self) -> Conflicts:
        patches = self.model.input
        if patches is None:
            if self.data.images != ImagesConfig():
                yield "data.images is of images, which a model without model.input does not read", "leave it out"
        else:
            if not self.model.captions and self.batch.seq_len != patches.positions:
                rule = f"must be {patches.positions}, the positions of an image"
                yield f"batch.seq_len={self.batch.seq_len} {rule} ({patches.describe()})"
            resized = self.data.images.resize
            if resized and resized < patches.image:
                crop = f"the crop, model.input.image={patches.image}"
                fix = f"use {patches.image} or more, or leave it out"
                yield f"data.images.resize={resized} is smaller than {crop}", fix
        for name in ("mixup", "cutmix"):
            for task in self.objective.tasks:
                if getattr(self.data.images, name) and not HEADS[OBJECTIVES[task.kind].head].names_labels:
                    mixes = f"data.images.{name} mixes labels"
                    yield f"{mixes}, which objective.kind={task.kind} does not have", "leave it out"

    def _length_conflicts(self) -> Conflicts:
        most = self.model.max_seq_len
        for name in ("seq_len", "source_len"):
            length = getattr(self.batch, name) or 0
            if length > most:
                # Pretrained weights know no more positions.
                longer = "" if self.init.from_ else f" or model.max_seq_len={length}"
                yield f"batch.{name}={length} exceeds model.max_seq_len={most}", f"use batch.{name}={most}{longer}"
        _ = self.lengths  # raises if rows are too short for the objective


def _generator_conflicts(config: RunConfig) -> Conflicts:
    """Yields an objective of replaced tokens without a generator, and another one with it."""
    heads, kind = getattr(config.model, "generator_heads", 0), config.objective.kind
    needs = OBJECTIVES[kind].generator_share is not None
    key = f"model.generator_heads={heads}"
    if needs != bool(heads):
        fix = "leave it out" if heads else "set it to a third or a quarter of model.encoder.heads"
        yield f"{key} does not go with objective.kind={kind}: replaced tokens are a generator's", fix
    untried = {
        "parallel.sequence": config.parallel.sequence > 1,
        "finetune.kind": config.finetune.kind == "lora",
        "optim.transfer": config.optim.transfer is not None,
        "engine.fp8": config.engine.has_fp8,
    }
    for name, is_on in untried.items():
        if heads and is_on:
            yield f"{name} was not tried with {key}", "leave it out"
