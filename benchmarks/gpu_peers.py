"""Training steps of ours and of peers for the GPU campaign: the same weights, the same batches, one update a call.

    Work, draw_weights  ->  build_ours | build_bare | build_hugging_face | build_nanogpt  ->  Step
    Step(micro-batches)  ->  mean loss before the update, on the device; then Step.close()

All clip to a global norm of 1 and update with fused AdamW at the same constant rate. bf16 is that of the engine for
ours, autocast over fp32 weights for the others, which is what they document.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.trainer_peers import forget_accelerate
from pretrain.artifact.lora import add_adapters, initial_adapter
from pretrain.artifact.source import is_adapter, name_without_adapter
from pretrain.config.data import BatchPlan
from pretrain.config.engine import EngineConfig
from pretrain.config.finetune import FinetuneConfig
from pretrain.config.lengths import RowLengths
from pretrain.config.model import ModelConfig
from pretrain.config.objective import ObjectiveConfig
from pretrain.config.optim import OptimConfig
from pretrain.config.presets import expand_preset
from pretrain.dist import read_world
from pretrain.engine.build import build_engine, builds_sharded, fill_sharded, start_accelerator
from pretrain.engine.deepspeed_engine import DeepSpeedZeroEngine
from pretrain.engine.engine import Engine
from pretrain.interop.choose import choose_family
from pretrain.interop.tensors import parameter_shapes, to_theirs
from pretrain.model import LanguageModel, build_model
from pretrain.model.build import fill_weights
from pretrain.objective import build_loss
from pretrain.optim.build import build_optimizer
from pretrain.optim.groups import group_parameters
from pretrain.plan.flops import RowFlops
from pretrain.plan.task import ParallelLayout, TrainingTask
from pretrain.plan.trained import plan_trained
from pretrain.training.fitted import cluster_of, fit_loss
from pretrain.training.step import TrainModule
from pretrain.types import Batch, StackRows

OPTIM = OptimConfig(lr=3e-4, weight_decay=0.0)
INIT_STD = 0.02
SENSITIVE_STD = 1.28
"""Over the root of the width: a deviation at which attention decides the loss. With that of initial weights, a wrong
mask changes the loss of some tiny models by less than 1e-4 of it."""

Weights = dict[str, Tensor]


class MicroBatches(NamedTuple):
    """Batches of a step on the device, and the targets of each, known on the host."""

    batches: list[Batch]
    num_targets: list[int]


@dataclass(frozen=True)
class Step:
    """An optimizer step: returns the mean loss before it. `close` releases what would outlive it."""

    take: Callable[[MicroBatches], Tensor]
    close: Callable[[], None] = lambda: None

    def __call__(self, micro: MicroBatches) -> Tensor:
        return self.take(micro)


@dataclass(frozen=True)
class Work:
    """A model and the rows of a step.

    Attributes:
        model: The model, its vocabulary known.
        seq_len: Tokens of a row, of the target.
        micro: Rows of a micro-batch.
        accumulation: Micro-batches of a step.
        source_len: Tokens of a source row. None: one stack.
        head_share: Share of the positions that have a target.
        precision: `bf16` or `fp32`.
        lora_rank: Rank of the adapters, which alone are trained. None: all is trained.
    """

    model: ModelConfig
    seq_len: int
    micro: int
    accumulation: int = 1
    source_len: int | None = None
    head_share: float = 1.0
    precision: Literal["fp32", "bf16"] = "bf16"
    lora_rank: int | None = None

    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary."""
        assert self.model.vocab_size is not None
        return self.model.vocab_size

    @property
    def rows(self) -> int:
        """Rows of a step."""
        return self.micro * self.accumulation

    @cached_property
    def task(self) -> TrainingTask:
        """The same for `pretrain plan`."""
        trained = None if self.finetune is None else plan_trained(self.model, [], self.finetune)
        lengths = RowLengths(self.seq_len, self.seq_len, self.source_len)
        return TrainingTask(self.model, lengths, self.head_share, trained=trained)

    @property
    def finetune(self) -> FinetuneConfig | None:
        """Adapters, if any."""
        return None if self.lora_rank is None else FinetuneConfig(kind="lora", rank=self.lora_rank)

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.rows * self.task.tokens

    @property
    def flops(self) -> RowFlops:
        """FLOPs of training on a row."""
        return self.task.flops.whole

    @property
    def shape(self) -> dict[str, Any]:
        """Shape of the step, for a row."""
        stack = self.model.last_stack
        return {
            "parameters": self.task.values.weights,
            "layers": stack.layers,
            "width": stack.width,
            "vocab_size": self.model.vocab_size,
            "T": self.seq_len,
            "S": self.source_len,
            "micro": self.micro,
            "accumulation": self.accumulation,
            "precision": self.precision,
        }


def plan_model(preset: str, vocab_size: int, **values: Any) -> ModelConfig:
    """Returns a preset with other values of the model, and of each stack under `stack`."""
    stack = values.pop("stack", {})
    named = {"preset": preset, "vocab_size": vocab_size, **values}
    expanded = expand_preset(named)
    for name in ("encoder", "decoder"):
        if expanded.get(name) is not None:
            expanded[name] = {**expanded[name], **stack}
    return ModelConfig.model_validate(expanded)


def draw_weights(model: ModelConfig, device: torch.device, *, sensitive: bool = False) -> Weights:
    """Draws the weights that all arms start from, fp32 on the host; on the device, where a billion takes no time.

    They are exact in bf16: DeepSpeed makes its masters from weights of 16 bits, other engines from fp32.

    `sensitive`: large ones, by which a wrong attention shows in the loss at once.
    """
    stack, std = model.last_stack, INIT_STD
    if sensitive:
        # T5 does not divide scores by the root of the head's width: queries and keys take a half each.
        std = SENSITIVE_STD * stack.width**-0.5 * (1 if stack.scaled_attention else stack.per_head_width**-0.25)
    generator = torch.Generator(device).manual_seed(0)
    weights = {}
    for name, shape in parameter_shapes(model).items():
        if len(shape) == 1:
            weights[name] = torch.full(shape, 0.0 if name.endswith("bias") else 1.0)
        else:
            weights[name] = torch.randn(shape, device=device, generator=generator).mul_(std).bfloat16().float().cpu()
    return weights


def random_steps(work: Work, device: torch.device, count: int = 1, seed: int = 0) -> list[MicroBatches]:
    """Draws the batches of some steps: random tokens, a target everywhere."""
    generator = torch.Generator(device).manual_seed(seed)

    def draw(length: int) -> tuple[Tensor, ...]:
        """Returns all rows of a step, the same for any micro-batch, cut."""
        shape = (work.rows, length)
        return torch.randint(1, work.vocab_size, shape, device=device, generator=generator).split(work.micro)

    found = []
    for _ in range(count):
        batches = [Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()) for ids in draw(work.seq_len + 1)]
        if work.source_len is not None:
            sources = map(StackRows, draw(work.source_len))
            batches = [replace(batch, source=source) for batch, source in zip(batches, sources, strict=True)]
        found.append(MicroBatches(batches, [work.micro * work.seq_len] * work.accumulation))
    return found


def build_ours(work: Work, weights: Weights, config: EngineConfig) -> tuple[Step, Engine]:
    """Builds the engine that `pretrain train` builds, one rank; returns its step and itself."""
    forget_accelerate()
    world = read_world()
    clip = OPTIM.grad_clip
    plan = BatchPlan(work.rows, work.rows, work.micro, work.accumulation)
    accelerator = start_accelerator(config, clip, plan, work.task.values.weights, world)
    model = build_model(work.model, config, accelerator.device, storage=not builds_sharded(config))
    fit_loss(
        model, work.task, ParallelLayout(config, work.micro, work.accumulation), cluster_of(world, accelerator.device)
    )
    if work.finetune is not None:
        add_adapters(model, work.finetune)

    def draw(name: str, shape: torch.Size) -> Tensor:
        # A copy: ZeRO 3 frees what it has cut up.
        return initial_adapter(name, shape, seed=0) if is_adapter(name) else weights[name_without_adapter(name)].clone()

    groups = group_parameters(model)
    if builds_sharded(config):
        fill_sharded(model, draw, config, accelerator, world)
    else:
        fill_weights(model, draw)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    fuses = config.fuses_update(accelerator.device.type)
    optimizer = build_optimizer(groups, OPTIM, accelerator.device, fuses=fuses)
    module = TrainModule(model, build_loss(ObjectiveConfig()))
    saves_frozen = work.finetune is None
    engine = build_engine(module, names, optimizer, accelerator, config, clip, world, saves_frozen=saves_frozen)
    return _engine_step(engine), engine


def _engine_step(engine: Engine) -> Step:
    def take(micro: MicroBatches) -> Tensor:
        total = sum(micro.num_targets)
        nll = torch.zeros((), dtype=torch.float64, device=engine.device)
        for number, batch in enumerate(micro.batches):
            nll += engine.forward_backward(batch, 1 / total, number + 1 == len(micro.batches))[0]
        engine.update(OPTIM.lr)
        return nll / total

    def close() -> None:
        # DeepSpeed's hooks hold an engine for as long as the process lives.
        if isinstance(engine, DeepSpeedZeroEngine):
            engine._wrapped.destroy()

    return Step(take, close)


def _bare_step(model: nn.Module, optimizer: torch.optim.Optimizer, work: Work, loss_of: Callable[..., Tensor]) -> Step:
    """Returns the step of a plain loop; `loss_of(batch, targets of it)` is a sum."""
    parameters = list(model.parameters())

    def take(micro: MicroBatches) -> Tensor:
        total = sum(micro.num_targets)
        summed = torch.zeros((), device=parameters[0].device)
        for batch, num_targets in zip(micro.batches, micro.num_targets, strict=True):
            with torch.autocast(parameters[0].device.type, torch.bfloat16, enabled=work.precision == "bf16"):
                loss = loss_of(batch, num_targets) / total
            loss.backward()
            summed += loss.detach()
        nn.utils.clip_grad_norm_(parameters, OPTIM.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return summed

    return Step(take)


def build_bare(work: Work, weights: Weights, device: torch.device, *, compiled: bool) -> tuple[Step, LanguageModel]:
    """Builds our model, loss and optimizer in a plain loop, without an engine."""
    config = EngineConfig(kind="single", precision=work.precision, compile=compiled)
    model = build_model(work.model, config, device)
    fill_weights(model, lambda name, shape: weights[name])
    optimizer = build_optimizer(group_parameters(model), OPTIM, device)
    objective = build_loss(ObjectiveConfig())
    return _bare_step(model, optimizer, work, lambda batch, num_targets: objective(model, batch).loss_sum), model


def fused_adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Returns the same optimizer for a peer's parameters."""
    betas = (OPTIM.beta1, OPTIM.beta2)
    return torch.optim.AdamW(model.parameters(), OPTIM.lr, betas, OPTIM.eps, weight_decay=0.0, fused=True)


def build_hugging_face(work: Work, weights: Weights, device: torch.device, *, compiled: bool) -> Step:
    """Builds transformers' model of the same architecture and weights, with its own choice of attention."""
    model = hugging_face_model(work.model, weights, device).train()
    if work.finetune is not None:
        model = _with_adapters(model, work.finetune)
    called = torch.compile(model) if compiled else model

    def loss_of(batch: Batch, num_targets: int) -> Tensor:
        inputs: dict[str, Any] = {"input_ids": batch.tokens_BT, "labels": batch.targets_BT}
        if batch.source is not None:
            inputs |= {"input_ids": batch.source.tokens_BT, "decoder_input_ids": batch.tokens_BT}
        elif work.model.decoder is not None:
            inputs["shift_labels"] = batch.targets_BT
        if batch.lengths_B is not None:
            places = torch.arange(batch.tokens_BT.shape[1], device=device)
            inputs["attention_mask"] = (places < batch.lengths_B[:, None]).long()
        return called(**inputs).loss * num_targets

    return _bare_step(model, fused_adamw(model), work, loss_of)


def _with_adapters(model: Any, config: FinetuneConfig) -> Any:
    """Returns transformers' model with peft's adapters on each of its linear layers but the head."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=config.rank, lora_alpha=config.alpha, target_modules="all-linear"))


def hugging_face_model(config: ModelConfig, weights: Weights, device: torch.device) -> Any:
    """Returns transformers' model with our weights."""
    import transformers
    from transformers.integrations import unset_hf_deepspeed_config

    # accelerate has told transformers of an engine built before, by whose ZeRO 3 it would shard this model.
    unset_hf_deepspeed_config()
    family = choose_family(config)
    described = transformers.AutoConfig.for_model(family.model_type, **family.write_config(config))
    described.use_cache = False
    names = {"decoder": "CausalLM", "encoder": "MaskedLM", "encoder+decoder": "Seq2SeqLM"}
    chosen = getattr(transformers, f"AutoModelFor{names[config.shape]}")
    with torch.device(device):
        model = chosen.from_config(described)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if not config.tied_embeddings and head.weight is embedding.weight:
        head.weight = nn.Parameter(head.weight.detach().clone())  # transformers ties every T5 without a checkpoint
    lent: Weights = {}
    for weight in family.weights(config):
        lent |= dict(to_theirs(weight, weights[weight.ours]))
    missing, unexpected = model.load_state_dict(lent, strict=False)
    own = {name for name, _ in model.named_parameters()}
    assert not unexpected and not own & set(missing), (missing, unexpected)
    return model


def build_nanogpt(work: Work, weights: Weights, device: torch.device, source: Path, *, compiled: bool) -> Step:
    """Builds nanoGPT's model with the optimizer that its own configure_optimizers gives."""
    from benchmarks.decoder_step import lend_weights, load_nanogpt

    module, stack = load_nanogpt(source), work.model.last_stack
    config = module.GPTConfig(
        block_size=work.seq_len,
        vocab_size=work.model.vocab_size,
        n_layer=stack.layers,
        n_head=stack.heads,
        n_embd=stack.width,
        dropout=0.0,
        bias=True,
    )
    model = module.GPT(config).to(device)
    ours = build_bare(work, weights, device, compiled=False)[1]
    lend_weights(ours, model, conv1d=False)
    betas = (OPTIM.beta1, OPTIM.beta2)
    optimizer = model.configure_optimizers(0.0, OPTIM.lr, betas, device.type)
    called = torch.compile(model) if compiled else model

    def loss_of(batch: Batch, num_targets: int) -> Tensor:
        return called(batch.tokens_BT, batch.targets_BT)[1] * num_targets

    return _bare_step(model, optimizer, work, loss_of)
