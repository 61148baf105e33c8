"""The training task of a run, and the layouts on machines, which do not change its samples."""

from dataclasses import dataclass, replace
from functools import cached_property

from pretrain.config.engine import EngineConfig
from pretrain.config.lengths import RowLengths
from pretrain.config.model import AnyModelConfig
from pretrain.config.model.parts import counts_of
from pretrain.config.run import RunConfig
from pretrain.plan.flops import TrainingFlops, count_flops
from pretrain.plan.trained import TrainableSubset, Values, count_values, plan_trained
from pretrain.run.recovery import COPIES

ASSUMED_VOCAB_SIZE = 32_768
ASSUMED_LABELS = ("a", "b")


@dataclass(frozen=True)
class TrainingTask:
    """A model, its rows, and its trained parameters."""

    model: AnyModelConfig  # model whose vocabulary is known
    lengths: RowLengths  # tokens of a row
    head_share: float = 1.0  # share of the positions at which the head is computed
    optimizer: str = "adamw"  # `optim.kind`
    trained: TrainableSubset | None = None  # trained part of the model. None: all
    averages: bool = False  # `optim.ema`: a moving average of the trained weights
    sequence: int = 1  # ranks that share a row
    experts: int = 1  # ranks that share the experts of a layer
    tensor: int = 1  # ranks that share the matrices of all layers, and a row
    generator_share: float = 0.0  # share of the positions at which a generator has its head
    window: int | None = None  # attention window of a step, beside those of layers. None: no limit
    masked: bool = False  # true: documents of a row do not attend to each other
    copies: int = 0  # of the state in host memory for `run.recover_every_steps`, a buffer included

    @cached_property
    def values(self) -> Values:
        """Numbers of values: of the model, trained, and saved."""
        return count_values(self.model, self.trained)

    @cached_property
    def flops(self) -> TrainingFlops:
        """FLOPs of a row."""
        flops = count_flops(
            self.model,
            self.lengths.target,
            source_len=self.lengths.source,
            head_share=self.head_share,
            trained=self.trained,
            window=self.window,
        )
        if self.generator is None:
            return flops
        other = self.generator.flops
        return replace(flops, whole=flops.whole + other.whole, forward=flops.forward + other.forward)

    @property
    def generator(self) -> "TrainingTask | None":
        """Task of the generator of replaced tokens (`model.generator_heads`); None: there is none."""
        model = counts_of(self.model).generator
        if model is None:
            return None
        return replace(self, model=model, head_share=self.generator_share, trained=None)

    @property
    def trains_head(self) -> bool:
        """True if the output projection has a gradient."""
        name = "embedding.weight" if self.model.tied_embeddings else "head.weight"
        return self.trained is None or name in self.trained.names

    @property
    def elsewhere(self) -> int:
        """Trained weights that a rank leaves to those with which it shares them."""
        return self.shared - self.shared // self.parts

    @property
    def shared(self) -> int:
        """Trained weights of which ranks may have parts: experts', or with `tensor` matrices'."""
        return self.values.matrices if self.tensor > 1 else self.values.experts

    @property
    def parts(self) -> int:
        """Ranks that have these among them."""
        return max(self.experts, self.tensor)

    @property
    def row_ranks(self) -> int:
        """Ranks that have columns of the same rows."""
        return self.sequence * self.tensor

    @property
    def columns(self) -> RowLengths:
        """Tokens of a row on one of the ranks that share it."""
        source = None if self.lengths.source is None else -(-self.lengths.source // self.row_ranks)
        return replace(self.lengths, target=-(-self.lengths.target // self.row_ranks), source=source)

    @property
    def tokens(self) -> int:
        """Tokens of a row, source and target."""
        return self.lengths.target + (self.lengths.source or 0)


class RunFlops:
    """FLOPs of training over the steps of a run, with its short rows and windows."""

    def __init__(self, config: RunConfig, task: TrainingTask) -> None:
        batch = config.batch
        self._rows_before = batch.steps.before
        self._stages: list[tuple[int, int]] = []  # first step, FLOPs of a row of `batch.seq_len`
        for step in batch.early_stages:
            parts, window = batch.seq_len // batch.length_at(step), batch.window_at(step)
            early = task  # whole rows, whose FLOPs it has counted
            if parts > 1 or window is not None:
                lengths = replace(task.lengths, target=task.lengths.target // parts)
                early = replace(task, lengths=lengths, window=window)
            self._stages.append((step, parts * early.flops.whole.total))

    def before(self, step: int) -> int:
        """Returns the FLOPs of all steps before a step, their rows without padding."""
        ends = [*(first for first, _ in self._stages[1:]), step]
        rows = self._rows_before
        return sum(
            (rows(min(end, step)) - rows(first)) * flops
            for (first, flops), end in zip(self._stages, ends, strict=True)
            if first <= max(step, 0)
        )


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """An engine, the rows of a micro-batch, and the micro-batches of a step."""

    engine: EngineConfig
    micro: int
    accumulation: int

    def on(self, ranks: int) -> "ParallelLayout":
        """Returns it with the engine that `engine.kind=auto` is on so many ranks."""
        return replace(self, engine=self.engine.on(ranks))

    def overrides(self) -> list[str]:
        """Returns the overrides of a command line: `engine.zero_stage=2 batch.micro=8`."""
        names = ("kind", "zero_stage", "activation_checkpointing", "offload_optimizer", "offload_params")
        engine = [f"engine.{name}={getattr(self.engine, name)}" for name in names]
        return [*engine, f"batch.micro={self.micro}"]


def changes(layout: ParallelLayout, config: RunConfig) -> list[str]:
    """Returns the overrides of a layout that change a config."""
    same = ParallelLayout(config.engine, config.batch.micro, 1).overrides()
    return [override for override in layout.overrides() if override not in same]


def known_model(model: AnyModelConfig, vocab_size: int | None = None, labels: tuple[str, ...] = ()) -> AnyModelConfig:
    """Fills in the vocabulary and labels of tokenizer and data; None or empty: assumed ones."""
    update: dict[str, object] = {}
    if model.vocab_size is None and (model.input is None or model.captions):
        update["vocab_size"] = vocab_size or ASSUMED_VOCAB_SIZE
    if model.head.record.names_labels and not model.head.labels:
        update["head"] = model.head.model_copy(update={"labels": list(labels or ASSUMED_LABELS)})
    return model.model_copy(update=update)


def task_of(config: RunConfig, model: AnyModelConfig | None = None) -> TrainingTask:
    """Returns the task of a run; `model` is its model with a known vocabulary. None: an assumed one."""
    model = model or known_model(config.model)
    trained = plan_trained(model, config.init.freeze, config.finetune)
    optim = config.optim
    return TrainingTask(
        model,
        config.lengths,
        config.objective.head_share,
        optim.kind,
        trained,
        optim.ema.is_on,
        config.parallel.sequence,
        config.parallel.experts,
        config.parallel.tensor,
        generator_share=config.objective.generator_share,
        masked=config.data.document_mask,
        copies=1 + COPIES if config.run.recover_every_steps else 0,
    )
