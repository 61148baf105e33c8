"""RunConfig, the whole config of a run; rules between sections."""

import json
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from pretrain.config.base import OnResume, Section, refuse
from pretrain.config.data import BatchConfig, BatchPlan, DataConfig, ImagesConfig, nearest_multiples, plan_batch
from pretrain.config.engine import EngineConfig, ParallelConfig, expert_conflicts, sequence_conflicts, tensor_conflicts
from pretrain.config.finetune import FinetuneConfig
from pretrain.config.lengths import RowLengths, image_lengths, row_lengths
from pretrain.config.model import ModelConfig, ModelSection, StackConfig
from pretrain.config.objective import ALONE, NEEDS, UNITS, ObjectiveConfig, check_kind, check_multi_token
from pretrain.config.optim import OptimConfig
from pretrain.config.tracking import ProfileConfig, TrackingConfig, check_tracking
from pretrain.config.train import (
    CheckpointConfig,
    EvalConfig,
    GuardConfig,
    InitConfig,
    LaunchConfig,
    ResumeConfig,
    RunSection,
    TrainConfig,
    check_best,
)
from pretrain.errors import ConfigError

WHOLE_MATRIX_KINDS = {"adafactor", "muon", "soap"}
"""Optimizers (`optim.kind`) whose step needs a whole matrix."""


def check_training(optim: OptimConfig, engine: EngineConfig, model: Section, batch: BatchConfig) -> None:
    """Checks rules between sections. Raises: ValueError, with keys from the root of the config."""
    optim.check_transfer(model)
    experts = model.last_stack.experts if isinstance(model, ModelConfig) else None
    if experts is not None and experts.top_k == 1 and experts.normalize:
        why = "which makes every weight 1 and leaves the router without a gradient"
        raise ValueError(f"top_k=1 with normalize=true of the experts, {why}; set normalize=false")
    if optim.muon.split_heads and not isinstance(model, ModelConfig):
        what = "optim.muon.split_heads=true steps attention heads on their own"
        raise ValueError(f"{what}, which model.kind=recurrent lacks; leave it out")
    if batch.short_windows and not isinstance(model, ModelConfig):
        what = "batch.short_windows limits attention of Transformers"
        raise ValueError(f"{what}, which model.kind=recurrent lacks; leave it out")
    if optim.kind in WHOLE_MATRIX_KINDS and engine.offload_optimizer != "none":
        raise ValueError(
            f"optim.kind={optim.kind} steps whole matrices, which "
            f"engine.offload_optimizer={engine.offload_optimizer} would gather and multiply on the CPU; "
            f"use engine.offload_optimizer=none or optim.kind=adamw"
        )
    if engine.precision == "fp16" and isinstance(model, ModelConfig):
        stacks = [stack for stack in (model.encoder, model.decoder) if stack is not None]
        if model.init == "t5" or not all(stack.scaled_attention for stack in stacks):
            # Raffel et al. trained T5 in bf16: its feed-forward layers and scores exceed 65504.
            raise ValueError(
                "engine.precision=fp16 overflows in a T5-style model (model.init=t5 or "
                "scaled_attention=false), whose activations exceed the range of fp16; "
                "use engine.precision=bf16"
            )


FP8_MULTIPLE = 16
"""Divisor of the rows and columns of every FP8 product."""


def check_fp8(model: ModelConfig, batch: BatchConfig, lengths: RowLengths, *, crops: bool) -> None:
    """Checks the sizes of FP8 products: of the weights, and of their gradients, which sum over the tokens.

    `crops`: rows are cropped to a multiple of 8 tokens. Raises: ValueError, with the size.
    """
    if model.last_stack.experts:
        what = "engine.fp8 rounds linear layers, and experts are grouped ones"
        raise ValueError(f"{what}; use engine.fp8=off")
    if model.last_stack.latent:
        raise ValueError("engine.fp8 was not tried with latent attention; use engine.fp8=off")
    if model.multi_token:
        raise ValueError("engine.fp8 was not tried with model.multi_token; use engine.fp8=off")
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
                raise ValueError(f"model.{name}: {key}={size} must be {rule}; change it, or use engine.fp8=off")
    for length in {lengths.target, lengths.source or lengths.target, 8 if crops else lengths.target}:
        if batch.micro * length % FP8_MULTIPLE:
            tokens = f"batch.micro={batch.micro} rows of {length} tokens"
            raise ValueError(f"{tokens} are {batch.micro * length}, must be {rule}; use another batch.micro")


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
    def unit(self) -> str:
        """Noun of the targets: `tokens`, `labels`, `answers`, `pairs` (of answers), or `pixels`."""
        if self.objective.kind == "dpo":
            return "pairs"
        return UNITS.get(self.model.head.kind, "tokens")

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
            what = f"engine.zero_hpz={group} must divide the number of ranks, {ranks}"
            raise ConfigError(what, fix=f"start {nearest_multiples(ranks, group)} ranks")
        shared = self.parallel
        return plan_batch(self.batch, ranks, shared.sequence, shared.experts, shared.tensor)

    def shortened(self) -> tuple[str, str] | None:
        """Returns what is cut of the schedule in a short run, and the remedy; None: nothing."""
        return self.optim.schedule.shortened(self.batch, self.train.steps)

    def even_steps(self) -> list[str]:
        """Returns overrides under which all steps have as many tokens, and step n its learning rate.

        For a run with another batch size, in which positions in tokens would be other steps.
        """
        given = self.optim.schedule
        steps = given.in_steps(self.batch, self.train.steps).model_dump()
        changed = {key: value for key, value in steps.items() if value != getattr(given, key)}
        uneven = [f"batch.{key}=[]" for key in ("schedule", "short_rows", "short_windows")]
        items = [f"optim.schedule.{key}={json.dumps(value)}" for key, value in changed.items()]
        return uneven + items

    @model_validator(mode="after")
    def _check_batch(self) -> Self:
        length = self.batch.seq_len
        for key, tokens in self.batch.sizes:
            if tokens % length:
                rule = f"{key}={tokens} must be a multiple of batch.seq_len={length}"
                # Sizes that one rank can run: a multiple of the rows alone would be refused at the start.
                raise ValueError(f"{rule}; use {nearest_multiples(tokens, length * self.batch.micro)}")
        check_training(self.optim, self.engine, self.model, self.batch)
        if self.engine.fp8 != "off" and isinstance(self.model, ModelConfig):
            check_fp8(self.model, self.batch, self.lengths, crops=self.data.packing == "padded")
        if self.parallel.sequence > 1:
            refuse(sequence_conflicts(self.parallel.sequence, self.engine, self.model))
        if self.parallel.experts > 1:
            refuse(expert_conflicts(self.parallel.experts, self.engine, self.model))
        if self.parallel.tensor > 1:
            refuse(tensor_conflicts(self.parallel, self.engine, self.model))
            if self.optim.kind in WHOLE_MATRIX_KINDS:
                what = f"parallel.tensor={self.parallel.tensor} leaves no rank with the whole matrices"
                which = f"that optim.kind={self.optim.kind} steps"
                raise ValueError(f"{what} {which}; use optim.kind=adamw or lion")
            if self.tracking.attention.text is not None:
                what = f"parallel.tensor={self.parallel.tensor} leaves no rank with all heads"
                raise ValueError(f"{what} for tracking.attention; leave its text out")
        check_best(self.checkpoint, self.eval, self.objective, self.data, self.optim.ema)
        check_tracking(self.tracking, self.eval, self.model)
        if self.eval.tasks.names and (self.stacks != ["decoder"] or self.model.head.kind != "lm"):
            what = "eval.tasks are for models with a decoder alone and its head"
            raise ValueError(f"{what}; leave them out")
        return self

    @model_validator(mode="after")
    def _check_objective(self) -> Self:
        kinds = [task.kind for task in self.objective.tasks]
        check_multi_token(self.model, self.objective)
        _check_generator(self)
        for kind in kinds:
            check_kind(kind, self.model, self.data, self.init.from_)
        if not set.intersection(*(set(NEEDS[kind].data) for kind in kinds)):
            common = f"{', '.join(kinds)} have no kind of data in common"
            raise ValueError(f"objective.mixture: {common}; mix objectives that do")
        alone = [kind for kind in kinds if kind in ALONE]
        if alone and len(kinds) > 1:
            fix = f"use objective.kind={alone[0]} alone"
            raise ValueError(f"objective.mixture: {alone[0]} cannot be mixed; {fix}")
        if self.batch.short_rows and (set(kinds) != {"causal"} or self.data.packing != "concat"):
            both = f"objective.kind={'+'.join(kinds)} and data.packing={self.data.packing}"
            need = "batch.short_rows cuts rows of running text, for objective.kind=causal and data.packing=concat"
            raise ValueError(f"{need}, not {both}; leave it out")
        if self.batch.source_len is not None and "seq2seq" not in kinds:
            raise ValueError("batch.source_len needs objective.kind=seq2seq; leave it out")
        return self

    @model_validator(mode="after")
    def _check_preferences(self) -> Self:
        if self.objective.kind != "dpo":
            return self
        if self.init.from_ is None:
            what = "objective.kind=dpo compares a model with the one that it began as"
            raise ValueError(f"{what}; set init.from")
        if not self.data.document_mask:
            what = "objective.kind=dpo has answers in a row that must not attend to each other"
            raise ValueError(f"{what}; use data.document_mask=true")
        if getattr(self.model, "multi_token", 0):
            what = "objective.kind=dpo compares answers, which model.multi_token does not predict"
            raise ValueError(f"{what}; use model.multi_token=0")
        for name in ("sequence", "tensor"):
            if getattr(self.parallel, name) > 1:
                what = f"parallel.{name}={getattr(self.parallel, name)} cuts rows"
                why = "and objective.kind=dpo adds up the tokens of an answer on one rank"
                raise ValueError(f"{what}, {why}; use parallel.{name}=1")
        return self

    @model_validator(mode="after")
    def _check_finetune(self) -> Self:
        if self.finetune.kind != "lora":
            return self
        if isinstance(self.model, ModelConfig) and self.model.last_stack.experts:
            what = "finetune.kind=lora adapts matrices, and those of experts are one parameter"
            raise ValueError(f"{what}; use finetune.kind=full")
        if self.init.from_ is None:
            raise ValueError("finetune.kind=lora needs a base model; set init.from")
        whole = "dora" if self.finetune.dora else "quantize" if self.finetune.quantize != "none" else ""
        if whole and self.engine.zero_stage == 3:
            takes = "takes norms of" if whole == "dora" else "keeps"
            what = f"finetune.{whole} {takes} whole matrices, which engine.zero_stage=3 divides"
            raise ValueError(f"{what}; use engine.zero_stage=2, or leave {whole} out")
        if self.init.freeze:
            why = "which freezes the whole model"
            raise ValueError(f"init.freeze does not go with finetune.kind=lora, {why}; leave it out")
        if self.parallel.tensor > 1:
            what = f"parallel.tensor={self.parallel.tensor} cuts linear layers"
            why = "which finetune.kind=lora adapts whole"
            raise ValueError(f"{what}, {why}; use parallel.tensor=1")
        if getattr(self.model, "multi_token", 0):
            what = "finetune.kind=lora adapts one stack, without the modules of model.multi_token"
            raise ValueError(f"{what}; use model.multi_token=0, or finetune.kind=full")
        if self.optim.transfer is not None:
            raise ValueError("optim.transfer has no rule for the adapters of finetune.kind=lora; leave it out")
        if self.engine.fp8 != "off":
            what = "finetune.kind=lora adapts linear layers of torch, which FP8 replaces"
            raise ValueError(f"{what}; use engine.fp8=off")
        if self.model.kind == "recurrent":
            what = "finetune.kind=lora adapts Transformer blocks"
            raise ValueError(f"{what}, which model.kind=recurrent lacks")
        return self

    @model_validator(mode="after")
    def _check_images(self) -> Self:
        patches = self.model.input
        given = None if self.model.captions else patches
        if given is not None and self.batch.seq_len != given.positions:
            rule = f"must be {given.positions}, the positions of an image"
            raise ValueError(f"batch.seq_len={self.batch.seq_len} {rule} ({given.describe()})")
        if patches is None and self.data.images != ImagesConfig():
            what = "data.images is of images, which a model without model.input does not read"
            raise ValueError(f"{what}; leave it out")
        resized = self.data.images.resize
        if patches is not None and resized and resized < patches.image:
            what = f"data.images.resize={resized} is smaller than the crop"
            fix = f"use {patches.image} or more, or leave it out"
            raise ValueError(f"{what}, model.input.image={patches.image}; {fix}")
        for name in ("mixup", "cutmix"):
            for task in self.objective.tasks:
                if getattr(self.data.images, name) and NEEDS[task.kind].head != "labels":
                    what = f"data.images.{name} mixes labels, which objective.kind={task.kind} does not have"
                    raise ValueError(f"{what}; leave it out")
        return self

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        lengths = {"seq_len": self.batch.seq_len, "source_len": self.batch.source_len or 0}
        for name, length in lengths.items():
            if length > self.model.max_seq_len:
                most = self.model.max_seq_len
                # Pretrained weights know no more positions.
                longer = "" if self.init.from_ else f" or model.max_seq_len={length}"
                fix = f"use batch.{name}={most}{longer}"
                raise ValueError(f"batch.{name}={length} exceeds model.max_seq_len={most}; {fix}")
        _ = self.lengths  # raises if rows are too short for the objective
        return self


def _check_generator(config: RunConfig) -> None:
    """Checks that an objective of replaced tokens has a generator, and no other has one. Raises: ValueError."""
    heads, kind = getattr(config.model, "generator_heads", 0), config.objective.kind
    key = f"model.generator_heads={heads}"
    if (kind == "replaced") != bool(heads):
        fix = "leave it out" if heads else "set it to a third or a quarter of model.encoder.heads"
        raise ValueError(f"{key} does not go with objective.kind={kind}: replaced tokens are a generator's; {fix}")
    others = {
        "parallel.sequence": config.parallel.sequence > 1,
        "finetune.kind": config.finetune.kind == "lora",
        "optim.transfer": config.optim.transfer is not None,
        "engine.fp8": config.engine.fp8 != "off",
    }
    for name in (name for name, is_on in others.items() if heads and is_on):
        raise ValueError(f"{name} was not tried with {key}; leave it out")
