"""`engine:` -- parallelism (DeepSpeed ZeRO, DDP, one process), precision and memory."""

import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from pretrain.config.base import Conflicts, OnResume, Section
from pretrain.config.model import AnyModelConfig, ModelConfig, StackConfig

CompileMode = Literal["default", "max-autotune-no-cudagraphs"]
JOB_GPUS = "PRETRAIN_JOB_GPUS"
"""Variable of the ranks of `pretrain launch slurm`: GPUs that their job has on each node, where it has any."""


class EngineConfig(Section):
    """Parallelism, precision and memory of a step. No key changes the result, up to rounding."""

    kind: Annotated[Literal["auto", "deepspeed", "ddp", "single"], OnResume.WARN] = "auto"
    """`deepspeed`: DeepSpeed ZeRO. `ddp`: DistributedDataParallel. `single`: one process. `auto`:
    `deepspeed`; in bf16 `single` on one rank without offload, and `ddp` at ZeRO stage 0."""
    zero_stage: Annotated[int, OnResume.WARN] = Field(default=2, ge=0, le=3)
    """ZeRO stage (Rajbhandari et al. 2020): 1 shards the optimizer state, 2 also the gradients, 3
    also the weights. 0 with `ddp` and `single`."""
    zero_hpz: Annotated[int, OnResume.FREE] = Field(default=1, ge=1)
    """Consecutive ranks, those of a node, that also have the weights among them at ZeRO stage 3 (Wang et
    al. 2023, ZeRO++): after the first gather of a step, gathers stay within them. 1: off."""
    precision: Annotated[Literal["fp32", "bf16", "fp16"], OnResume.WARN] = "bf16"
    """Compute dtype. `bf16`: weights and gradients of 16 bits, fp32 master weights. `fp32`: on a
    GPU without TF32, at a tenth of the speed. `fp16`: fp32 master weights and dynamic loss
    scaling; only with ZeRO 1 to 3 on a GPU."""
    fp8: Annotated[Literal["off", "auto", "tensorwise", "rowwise"], OnResume.WARN] = "off"
    """FP8 products of the blocks' matrices, by torchao (the extra `fp8`); with `precision: bf16` and
    ZeRO 0 to 2, or 3 with `activation_checkpointing: full` of each block, on a GPU of compute
    capability 8.9 or more. `tensorwise`: one scale a tensor, faster. `rowwise`: one a row, more
    exact. `auto`: the faster one where it pays by `pretrain plan`, else `off`. Weights and
    checkpoints stay as they are. A CPU emulates it, slowly, for tests."""
    gradients: Annotated[Literal["compute", "fp32"], OnResume.WARN] = "compute"
    """Dtype in which bf16 gradients are summed over micro-batches and ranks. `compute`: bf16.
    `fp32`: more exact for many micro-batches or hundreds of ranks, at twice the bytes; with ZeRO 2
    and 3, and with `ddp` and `single`, whose weights then are fp32, under autocast."""
    device: Annotated[Literal["auto", "cpu", "cuda"], OnResume.FREE] = "auto"
    """Device of the ranks. `auto`: CUDA if available, otherwise the CPU; in a job of `pretrain launch slurm`
    that has GPUs, CUDA alone."""
    attention: Annotated[str, OnResume.WARN] = "auto"
    """Attention backend: `auto`, `eager`, `sdpa`, `flex`, `varlen`, or one that a module under `extend`
    adds."""
    activation_checkpointing: Annotated[Literal["none", "full", "selective"], OnResume.FREE] = "none"
    """Recomputation in the backward pass. `full`: of each block. `selective`: of all but the
    results of matrix products and attention."""
    activation_checkpointing_every: Annotated[int, OnResume.FREE] = Field(default=1, ge=1)
    """Checkpoint only every n-th block."""
    feedforward_tiles: Annotated[int, OnResume.WARN] = Field(default=1, ge=1)
    """Parts of a micro-batch's tokens that pass each feed-forward layer one after another, and are
    computed again one by one in the backward pass, so that one part's hidden values exist at a time."""
    compile: Annotated[bool | Literal["auto"], OnResume.WARN] = "auto"
    """Compile each block, and the loss, with torch.compile. `auto`: on CUDA, where there is a C compiler,
    without `feedforward_tiles`.
    On a CPU, checkpointed blocks of packed rows run uncompiled."""
    compile_mode: Annotated[CompileMode, OnResume.WARN] = "default"
    """Mode of torch.compile for blocks. `max-autotune-no-cudagraphs`: several kernels of each matrix
    product are timed at the first step, which takes minutes, and the fastest is taken."""
    compile_scope: Annotated[Literal["block", "stack"], OnResume.WARN] = "block"
    """Extent of a compiled graph. `block`: one graph for all blocks that are alike. `stack`: all
    blocks and the last norm, fused across blocks; takes longer to compile, by the number of blocks.
    Not with ZeRO 3, which gathers weights between blocks."""
    loss_chunk: Annotated[Literal["auto", "whole"], OnResume.WARN] = "auto"
    """Logits that the loss holds at once. `auto`: 2^28 on a GPU of 60 GiB or more, 2^26 on a
    smaller one, 2^24 on a CPU. `whole`: those of a micro-batch, where they fit by `pretrain plan`,
    else as `auto`; the head's gradient then is one sum, of another rounding."""
    deterministic: Annotated[bool, OnResume.WARN] = False
    """Use deterministic CUDA kernels (the CPU is always deterministic)."""
    offload_optimizer: Annotated[Literal["none", "cpu"], OnResume.FREE] = "none"
    """`cpu`: keep master weights and optimizer state in host memory and step them there."""
    offload_params: Annotated[Literal["none", "cpu"], OnResume.FREE] = "none"
    """`cpu`: keep unused working weights in host memory, too; ZeRO stage 3 only."""
    offload_activations: Annotated[Literal["none", "cpu"], OnResume.FREE] = "none"
    """`cpu`: keep what blocks save for the backward pass in host memory until it is needed, but for the
    last block; with `activation_checkpointing: full` that is the input of each block."""
    fork_ranks: Annotated[bool, OnResume.FREE] = True
    """Start the ranks of `launch local` as forks of one process, which has imported everything (on
    Linux). False: each rank is a program, with imports of its own."""
    timeout_s: Annotated[int, OnResume.FREE] = Field(default=600, ge=1)
    """Longest seconds in a phase of a step, waiting for other ranks included, before the job ends
    and names the rank that hangs. Three times as long for loading, compiling, evaluating,
    saving."""

    @property
    def group_timeout_s(self) -> int:
        """Timeout of the process group, which names no rank: after any limit of the watchdog."""
        return 3 * self.timeout_s + 60

    def compiles(self, device: str) -> bool:
        """Returns whether blocks are to be compiled on `cuda` or `cpu`."""
        if self.compile == "auto":
            return device == "cuda" and self.feedforward_tiles == 1
        return self.compile

    @property
    def has_fp8(self) -> bool:
        """Whether products are in FP8; not known yet of `auto`."""
        return self.fp8 not in ("off", "auto")

    @property
    def recomputes_all(self) -> bool:
        """Whether each block keeps its input alone for the backward pass."""
        return self.activation_checkpointing == "full" and self.activation_checkpointing_every == 1

    @property
    def arithmetic(self) -> str:
        """Precision of the products in words, for logs."""
        return self.precision if self.fp8 == "off" else f"{self.precision} and {self.fp8} FP8"

    @property
    def on_host(self) -> str:
        """What is offloaded, as an end of a description: `, optimizer and activations in host memory`."""
        names = [name for name in ("optimizer", "params", "activations") if getattr(self, f"offload_{name}") != "none"]
        return f", {' and '.join(names)} in host memory" if names else ""

    @property
    def is_replicated(self) -> bool:
        """Whether each rank has all of the state, without DeepSpeed: `ddp` and `single`."""
        return self.kind in ("ddp", "single")

    @property
    def autocasts(self) -> bool:
        """Whether weights are fp32, and products of 16 bits."""
        return self.is_replicated and self.precision == "bf16" and self.gradients == "fp32"

    @property
    def has_masters(self) -> bool:
        """Whether our own engine steps fp32 masters of 16-bit weights."""
        return self.is_replicated and self.precision == "bf16" and self.gradients == "compute"

    def fuses_update(self, device: str) -> bool:
        """Returns whether one compiled kernel clips, updates masters and writes weights."""
        return self.has_masters and self.compiles(device)

    def on(self, ranks: int) -> "EngineConfig":
        """Returns the engine that `auto` is on so many ranks."""
        if self.kind != "auto":
            return self
        offloads = {self.offload_optimizer, self.offload_params} != {"none"}
        in_bf16 = self.precision == "bf16" and self.gradients == "compute"
        if offloads or not in_bf16 or self.zero_hpz > 1 or (ranks > 1 and self.zero_stage):
            return self.model_copy(update={"kind": "deepspeed"})
        return self.model_copy(update={"kind": "single" if ranks == 1 else "ddp", "zero_stage": 0})

    @property
    def compute_bytes(self) -> int:
        """Bytes of a value in the compute dtype."""
        return 4 if self.precision == "fp32" else 2

    @property
    def gradient_bytes(self) -> int:
        """Bytes of a gradient, as it is kept between micro-batches and sent."""
        return self.compute_bytes if self.gradients == "compute" else 4

    @model_validator(mode="before")
    @classmethod
    def _without_zero(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("kind") in ("ddp", "single"):
            return {"zero_stage": 0, **values}
        return values

    def _conflicts(self) -> Conflicts:
        if self.is_replicated and self.zero_stage:
            yield f"zero_stage={self.zero_stage} needs kind=deepspeed, not {self.kind}", "set zero_stage=0"
        if self.zero_hpz > 1 and (self.zero_stage != 3 or self.offload_params != "none"):
            yield (
                f"zero_hpz={self.zero_hpz} needs sharded weights on the device",
                "use zero_stage=3 and offload_params=none, or zero_hpz=1",
            )
        if self.precision == "fp16":
            yield from self._fp16_conflicts()
        if self.has_fp8:
            yield from self._fp8_conflicts()
        if self.feedforward_tiles > 1:
            yield from self._tile_conflicts()
        yield from self._compile_conflicts()
        sums_bf16 = self.precision == "bf16" and self.zero_stage >= 2
        if self.gradient_bytes > self.compute_bytes and not (self.is_replicated or sums_bf16):
            need = "gradients=fp32 needs precision=bf16 and zero_stage=2 or 3"
            yield (
                f"{need}, not {self.precision} at zero_stage={self.zero_stage}",
                "change them, or use gradients=compute",
            )
        yield from self._offload_conflicts()

    def _offload_conflicts(self) -> Conflicts:
        if self.offload_optimizer != "none" and not self.zero_stage:
            need = "offload_optimizer=cpu requires sharded optimizer state"
            yield need, "use kind=deepspeed and zero_stage=1, 2 or 3"
        if self.offload_params != "none" and self.zero_stage != 3:
            yield "offload_params=cpu requires sharded weights", "use kind=deepspeed and zero_stage=3"

    def _compile_conflicts(self) -> Conflicts:
        for key, plain in {"compile_mode": "default", "compile_scope": "block"}.items():
            value = getattr(self, key)
            if value != plain and self.compile is False:
                yield f"{key}={value} is of compiled blocks, and compile=false", "leave one of them out"
        between = {
            "to gather weights at zero_stage=3": self.zero_stage == 3,
            "for offload_activations": self.offload_activations != "none",
        }
        for purpose, is_set in between.items() if self.compile_scope == "stack" else ():
            if is_set:
                problem = f"compile_scope=stack leaves no place between blocks {purpose}"
                yield problem, "use compile_scope=block"

    def _fp16_conflicts(self) -> Conflicts:
        if self.is_replicated:
            yield f"precision=fp16 needs kind=deepspeed, which scales the loss, not {self.kind}", "use bf16 or fp32"
        if self.device == "cpu":
            yield "precision=fp16 needs a GPU: DeepSpeed has no fp16 on device=cpu", "use bf16 or fp32"
        if not self.zero_stage:
            # In DeepSpeed 0.19 FP16_UnfusedOptimizer unscales gradients, but backward() scales the
            # loss under ZeRO only.
            why = "DeepSpeed unscales gradients of a loss that it has not scaled"
            yield f"precision=fp16 is wrong at zero_stage=0: {why}", "use zero_stage=1, 2 or 3"

    def _fp8_conflicts(self) -> Conflicts:
        if self.precision != "bf16":
            yield (
                f"fp8={self.fp8} needs precision=bf16, which the other operations run in, not {self.precision}",
                "change it, or use fp8=off",
            )
        if self.zero_stage == 3 and not self.recomputes_all:
            # torchao saves a view of the weight for the backward pass, and DeepSpeed frees nothing then.
            yield (
                f"fp8={self.fp8} would keep every gathered weight until the backward pass at zero_stage=3",
                "use activation_checkpointing=full of each block, zero_stage=0, 1 or 2, or fp8=off",
            )

    def _tile_conflicts(self) -> Conflicts:
        keeps = "activation_checkpointing=selective keeps the products that they compute again"
        reasons = {
            keeps: self.activation_checkpointing == "selective",
            "compile=true fuses them": self.compile is True,
            "fp8 has rules for the number of their tokens": self.has_fp8,
        }
        for why, is_set in reasons.items():
            if is_set:
                yield f"feedforward_tiles={self.feedforward_tiles}: {why}", "change that, or use 1"


class ParallelConfig(Section):
    """Ranks that share rows or experts (docs/parallel.md). No key changes a result but by rounding."""

    sequence: Annotated[int, OnResume.FREE] = Field(default=1, ge=1)
    """Consecutive ranks over which the columns of rows are cut, for long rows (Jacobs et al. 2023).
    Divides the number of ranks and the heads of the model. 1: each rank has whole rows."""
    experts: Annotated[int, OnResume.FREE] = Field(default=1, ge=1)
    """Consecutive ranks over which experts of each layer are cut (Lepikhin et al. 2020, GShard).
    Divides the number of ranks and `model.decoder.experts.count`. 1: each rank has all experts, or
    by ZeRO a share of each."""
    tensor: Annotated[int, OnResume.FREE] = Field(default=1, ge=1)
    """Consecutive ranks, of one node, over which the matrices of attention, feed-forward layers and
    vocabulary are cut, and the columns of rows (Shoeybi et al. 2019; Korthikanti et al. 2022).
    Divides the number of ranks, heads, key-value heads and `ff_width`. 1: matrices are whole, or
    by ZeRO a share of each."""

    @property
    def row_ranks(self) -> int:
        """Ranks that have columns of the same rows."""
        return self.sequence * self.tensor

    @property
    def parts(self) -> int:
        """Ranks that have a parameter among them: of an expert, or a matrix."""
        return max(self.experts, self.tensor)

    def across_nodes(self, ranks: int, per_node: int) -> Iterator[tuple[str, str]]:
        """Yields what is slow where groups of ranks are on several nodes, and the fix."""
        # A rank's row partners are `tensor` apart.
        each = self.sequence if per_node % self.tensor else per_node // self.tensor
        groups = {
            "tensor": (self.tensor, per_node, "four times"),
            "sequence": (self.sequence, each, "twice"),
            "experts": (self.experts, per_node, "twice"),
        }
        for key, (size, room, times) in groups.items():
            if ranks > per_node and room % size:
                waits = f"each layer waits for the network between them {times} a pass"
                where = f"has groups on several nodes of {per_node} ranks"
                yield f"parallel.{key}={size} {where}: {waits}", _use_divisor(room)


def _use_divisor(number: int) -> str:
    fitting = [str(size) for size in range(1, number + 1) if number % size == 0]
    return f"use one of {', '.join(fitting)}" if number > 1 else "use 1"


def sequence_conflicts(ranks: int, engine: EngineConfig, model: AnyModelConfig) -> Conflicts:
    """Yields what keeps `ranks` from sharing the rows of a model."""
    key = f"parallel.sequence={ranks}"
    whole = "use parallel.sequence=1"
    if not isinstance(model, ModelConfig):
        yield f"{key} cuts rows, and a recurrent model computes each column from the one before it", whole
        return
    if model.input is not None:
        yield f"{key} cuts rows of text, and those of model.input are images", whole
    if engine.kind == "single":
        yield f"{key} cuts rows over ranks, and engine.kind=single is one process", "use deepspeed or ddp"
    yield from _neighbour_conflicts(key, model, whole)
    if engine.has_fp8:
        yield f"{key} was not tried with engine.fp8={engine.fp8}", "use engine.fp8=off"
    for name, stack in _stacks(model).items():
        if stack.drop_path:
            yield f"{key} would draw {name}.drop_path for each part of a row apart", f"{whole}, or leave it out"
        if stack.rope_scaling is not None and stack.rope_scaling.follows_length:
            yield f"{key} needs whole rows for {name}.rope_scaling.kind={stack.rope_scaling.kind}", whole
        for size, number in _divisible(stack, matrices=False).items():
            if number % ranks:
                yield f"{key} must divide {name}.{size}={number}: a rank has whole heads", _use_divisor(number)


def _stacks(model: ModelConfig) -> dict[str, StackConfig]:
    stacks = {"model.encoder": model.encoder, "model.decoder": model.decoder}
    return {name: stack for name, stack in stacks.items() if stack is not None}


def _divisible(stack: StackConfig, *, matrices: bool) -> dict[str, int]:
    """Returns numbers by key of which ranks have as many each, if they share rows, or `matrices`."""
    numbers = {"heads": stack.heads} if stack.has_attention else {}
    if matrices:
        numbers |= {"kv_heads": stack.num_kv_heads} if stack.has_attention else {}
        numbers |= {"ff_width": stack.ff_width}
    for name in stack.replaced_by:
        numbers |= stack.mixer_section(name).divisible(stack.width, stack.heads, matrices=matrices)
    return numbers


def _neighbour_conflicts(key: str, model: ModelConfig, whole: str) -> Conflicts:
    """Yields what needs the columns of other ranks besides attention."""
    if model.ngram_embeddings:
        reads = f"which model.ngram_embeddings={model.ngram_embeddings} reads"
        yield f"{key} leaves a rank without the tokens before its part, {reads}", whole
    if model.multi_token:
        reads = f"which model.multi_token={model.multi_token} reads"
        yield (
            f"{key} leaves a rank without the tokens after its part, {reads}",
            f"{whole}, or model.multi_token=0",
        )
    head = model.head
    no_whole = f"{key} leaves no rank with a whole document"
    if head.mean:
        yield f"{no_whole}, of which model.head.mean is the mean", whole
    if head.record.answers_questions:
        yield f"{no_whole}, whose scores model.head.kind={head.kind} compares", whole
    if head.summarizes and model.decoder is not None:
        yield f"{no_whole}, of whose last token model.head.kind={head.kind} are", whole


def _part_conflicts(key: str, engine: EngineConfig, part: str, *, left_out: str, sharded: str, whole: str) -> Conflicts:
    """Yields what keeps an engine from having parts of parameters on ranks, named by the last four."""
    if engine.is_replicated:
        yield (
            f"{key} needs engine.kind=deepspeed, which reduces {part} over the ranks that have it, not {engine.kind}",
            f"change it, or {whole}",
        )
    if engine.zero_stage == 0 and engine.precision != "fp32":
        # FP16_UnfusedOptimizer of DeepSpeed 0.19 leaves such parameters out of the norm.
        yield (
            f"{key} is clipped by a norm without {left_out} at zero_stage=0 in {engine.precision}",
            "use engine.zero_stage=1, 2 or 3, or engine.precision=fp32",
        )
    if engine.zero_hpz > 1:
        yield (
            f"{key} and engine.zero_hpz={engine.zero_hpz} shard {sharded} over different ranks",
            f"use engine.zero_hpz=1, or {whole}",
        )
    if engine.precision == "fp16":
        yield f"{key} was not tried with engine.precision=fp16", "use engine.precision=bf16"
    if engine.has_fp8:
        yield f"{key} was not tried with engine.fp8={engine.fp8}", "use engine.fp8=off"


def expert_conflicts(ranks: int, engine: EngineConfig, model: AnyModelConfig) -> Conflicts:
    """Yields what keeps `ranks` from sharing the experts of a model."""
    key = f"parallel.experts={ranks}"
    whole = "use parallel.experts=1"
    experts = model.last_stack.experts if isinstance(model, ModelConfig) else None
    if experts is None:
        yield f"{key} cuts experts over ranks, and this model has none", whole
        return
    if experts.count % ranks:
        stack = "encoder" if model.decoder is None else "decoder"
        yield f"{key} must divide model.{stack}.experts.count={experts.count}", _use_divisor(experts.count)
    yield from _part_conflicts(key, engine, "each expert", left_out="experts", sharded="experts", whole=whole)


def tensor_conflicts(parallel: ParallelConfig, engine: EngineConfig, model: AnyModelConfig) -> Conflicts:
    """Yields what keeps ranks from sharing the matrices of a model."""
    ranks = parallel.tensor
    key = f"parallel.tensor={ranks}"
    whole = "use parallel.tensor=1"
    if not isinstance(model, ModelConfig):
        yield f"{key} cuts attention by heads, and a recurrent model has none", whole
        return
    if model.input is not None:
        yield f"{key} cuts rows of text, and those of model.input are images", whole
    if not model.head.record.cut:
        yield f"{key} was not tried with model.head.kind={model.head.kind}", whole
    part = "each part of a matrix"
    yield from _part_conflicts(key, engine, part, left_out="the matrices", sharded="matrices", whole=whole)
    yield from _neighbour_conflicts(key, model, whole)
    for name, stack in _stacks(model).items():
        yield from _stack_conflicts(key, parallel, name, stack)
    if model.vocab_multiple % ranks:
        rule = f"must divide model.vocab_multiple={model.vocab_multiple}"
        yield f"{key} {rule}: a rank has whole rows of the vocabulary", f"use a multiple of {ranks} for it"


def _stack_conflicts(key: str, parallel: ParallelConfig, name: str, stack: StackConfig) -> Conflicts:
    scaling = stack.rope_scaling
    reasons = {
        "experts": (stack.experts is not None, "whose experts are cut by parallel.experts"),
        "latent": (stack.latent is not None, "whose keys and values of all heads are of one vector"),
        f"qk_norm={stack.qk_norm}": (
            stack.qk_norm in ("whole", "heads"),
            "a norm with weights of all heads, of which a rank has some",
        ),
        "rope_scaling": (
            scaling is not None and scaling.follows_length,
            "whose frequencies go by the length of a document, of which ranks have parts",
        ),
        "drop_path": (stack.drop_path > 0, "which would be drawn for each part of a row apart"),
    }
    for setting, (is_set, why) in reasons.items():
        if is_set:
            yield f"{key} does not go with {name}.{setting}, {why}", "use parallel.tensor=1, or leave it out"
    sizes = _divisible(stack, matrices=True)
    for size, number in sizes.items():
        if number % parallel.tensor:
            rule = f"must divide {name}.{size}={number}"
            fix = _use_divisor(math.gcd(*sizes.values()))
            yield f"{key} {rule}: ranks have as much of each layer, and whole heads", fix
    for size, number in _divisible(stack, matrices=False).items():
        if number // parallel.tensor % parallel.sequence:
            rule = f"must divide {name}.{size}={number}: a rank has whole heads"
            yield f"{key} x parallel.sequence={parallel.sequence} {rule}", "use a smaller one of both"


PLAIN_ENGINE = EngineConfig(kind="single", zero_stage=0, precision="fp32", compile=False)
"""One process in fp32, for models that are not trained."""
