"""The training task of a run, and the work of a rank in a step, which the roofline takes."""

from dataclasses import dataclass
from functools import cached_property

from pretrain.config.engine import EngineConfig
from pretrain.config.lengths import RowLengths
from pretrain.config.recurrent import AnyModelConfig, RecurrentConfig
from pretrain.config.run import RunConfig
from pretrain.plan.activations import activation_bytes, adapter_bytes, recurrent_bytes
from pretrain.plan.flops import TrainingFlops, count_flops
from pretrain.plan.memory import bytes_per_parameter, state_bytes
from pretrain.plan.roofline import Work
from pretrain.plan.trained import TrainableSubset, Values, count_values, plan_trained


@dataclass(frozen=True)
class TrainingTask:
    """A model, its rows, and its trained parameters: independent of the layout."""

    model: AnyModelConfig  # model whose vocabulary is known
    lengths: RowLengths  # tokens of a row
    head_share: float = 1.0  # share of the positions at which the head is computed
    optimizer: str = "adamw"  # `optim.kind`
    trained: TrainableSubset | None = None  # trained part of the model. None: all

    @cached_property
    def values(self) -> Values:
        """Numbers of values: of the model, trained, and saved."""
        return count_values(self.model, self.trained)

    @cached_property
    def flops(self) -> TrainingFlops:
        """FLOPs of a row."""
        lengths = self.lengths
        return count_flops(
            self.model,
            lengths.target,
            source_len=lengths.source,
            head_share=self.head_share,
            trained=self.trained,
        )

    @property
    def trains_head(self) -> bool:
        """True if the output projection has a gradient."""
        name = "embedding.weight" if self.model.tied_embeddings else "head.weight"
        return self.trained is None or name in self.trained.names

    @property
    def tokens(self) -> int:
        """Tokens of a row, source and target."""
        return self.lengths.target + (self.lengths.source or 0)


ASSUMED_VOCAB_SIZE = 32_768
ASSUMED_LABELS = ("a", "b")


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """An engine, the rows of a micro-batch, and micro-batches of a step: no change of these changes the samples."""

    engine: EngineConfig
    micro: int
    accumulation: int

    def overrides(self) -> list[str]:
        """Returns the overrides of a command line: `engine.zero_stage=2 batch.micro=8`."""
        engine = self.engine
        return [
            f"engine.kind={engine.kind}",
            f"engine.zero_stage={engine.zero_stage}",
            f"engine.activation_checkpointing={engine.activation_checkpointing}",
            f"engine.offload_optimizer={engine.offload_optimizer}",
            f"engine.offload_params={engine.offload_params}",
            f"batch.micro={self.micro}",
        ]


def changes(layout: ParallelLayout, config: RunConfig) -> list[str]:
    """Returns the overrides of a layout that change a config."""
    same = ParallelLayout(config.engine, config.batch.micro, 1).overrides()
    return [override for override in layout.overrides() if override not in same]


def known_model(model: AnyModelConfig, vocab_size: int | None = None, labels: tuple[str, ...] = ()) -> AnyModelConfig:
    """Fills in the vocabulary and labels that tokenizer and data would give; None or empty: assumed ones."""
    update: dict[str, object] = {}
    if model.vocab_size is None:
        update["vocab_size"] = vocab_size or ASSUMED_VOCAB_SIZE
    if model.head.kind == "labels" and not model.head.labels:
        update["head"] = model.head.model_copy(update={"labels": list(labels or ASSUMED_LABELS)})
    return model.model_copy(update=update) if update else model


def task_of(config: RunConfig, model: AnyModelConfig | None = None) -> TrainingTask:
    """Returns the task of a run; `model` is its model with a known vocabulary. None: that is assumed."""
    model = model or known_model(config.model)
    trained = plan_trained(model, config.init.freeze, config.finetune)
    return TrainingTask(model, config.lengths, config.objective.head_share, config.optim.kind, trained)


def recompute_share(model: AnyModelConfig, engine: EngineConfig) -> float:
    """Returns the share of the blocks' forward pass that is run again; `selective` recomputes no products."""
    if engine.activation_checkpointing != "full" or isinstance(model, RecurrentConfig):
        return 0.0
    layers = [stack.layers for stack in (model.encoder, model.decoder) if stack is not None]
    again = [-(-count // engine.activation_checkpointing_every) for count in layers]
    return sum(again) / sum(layers)


def kept_by(task: TrainingTask, engine: EngineConfig, micro: int, device: str) -> tuple[int, int]:
    """Returns bytes of activations of a micro-batch: at the end of the forward pass, and at the peak."""
    if isinstance(task.model, RecurrentConfig):
        kept = recurrent_bytes(task.model, engine, task.lengths, micro)
        return kept, kept
    found = activation_bytes(
        task.model,
        engine,
        task.lengths,
        micro,
        device=device,
        head_share=task.head_share,
        trains_head=task.trains_head,
        frozen_blocks=task.flops.frozen_blocks,
    )
    beside = 0 if task.trained is None else adapter_bytes(task.model, task.trained, engine, task.lengths, micro)
    return found.kept + beside, found.peak + beside


def plan_work(
    task: TrainingTask,
    engine: EngineConfig,
    world_size: int,
    micro: int,
    accumulation: int,
    *,
    recompute: float | None = None,
) -> Work:
    """Counts the work of a rank; `recompute` is the share of the forward pass that is run again, None the engine's."""
    lengths, model, values = task.lengths, task.model, task.values
    flops = task.flops
    plain = engine.model_copy(update={"activation_checkpointing": "none"})
    kept, _ = kept_by(task, plain, micro, "cuda")
    on_host = engine.offload_optimizer != "none"
    of_each = state_bytes(task.optimizer, values) / values.trained
    state = bytes_per_parameter(engine.zero_stage, engine.precision, world_size, of_each, offload_optimizer=on_host)
    weight_bytes = 4 if engine.precision == "fp32" else 2
    offload = 0.0
    if on_host:
        # Gradients down, weights up; and the update itself, at about the same speed, out of the host's memory.
        whole = bytes_per_parameter(engine.zero_stage, engine.precision, world_size, of_each)
        offload += 2 * weight_bytes * values.trained / world_size + 2 * whole.optimizer * values.trained
    if engine.offload_params != "none":
        offload += 2 * weight_bytes * values.weights / world_size * accumulation
    layers = sum(stack.layers for stack in (model.encoder, model.decoder) if stack is not None)
    rows = model.padded_vocab_size if model.head.kind == "lm" else 0
    return Work(
        projection_flops=micro * flops.whole.projections,
        attention_flops=micro * flops.whole.attention,
        head_flops=micro * flops.whole.head,
        projection_forward=micro * flops.forward.projections,
        attention_forward=micro * flops.forward.attention,
        recompute=recompute_share(model, engine) if recompute is None else recompute,
        width=model.last_stack.width,
        kept_bytes=kept,
        logits=micro * lengths.target * task.head_share * rows,
        parameters=values.weights,
        trained=values.trained,
        weight_bytes=weight_bytes,
        layers=layers,
        state_bytes=(state.gradients + state.optimizer) * values.trained,
        offload_bytes=offload,
        accumulation=accumulation,
        fp32=engine.precision == "fp32",
    )
