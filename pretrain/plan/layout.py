"""How a run is laid out over its ranks: what `plan` reads of a config, and what `--search` varies."""

from dataclasses import dataclass

from pretrain.config.engine import EngineConfig
from pretrain.config.recurrent import AnyModelConfig
from pretrain.config.run import RunConfig
from pretrain.plan.trained import plan_trained
from pretrain.plan.work import TrainingTask

ASSUMED_VOCAB_SIZE = 32_768
ASSUMED_LABELS = ("a", "b")
"""Where neither config nor data say."""


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """What may change without changing what is learned.

    Attributes:
        engine: Stage, precision, checkpointing and offload.
        micro: Rows that a rank runs at once.
        accumulation: Micro-batches of a step.
    """

    engine: EngineConfig
    micro: int
    accumulation: int

    def overrides(self) -> list[str]:
        """Returns it as a command line has it: `engine.zero_stage=2 batch.micro=8`."""
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
    """Returns the overrides of a layout that a config does not say already."""
    same = ParallelLayout(config.engine, config.batch.micro, 1).overrides()
    return [override for override in layout.overrides() if override not in same]


def known_model(model: AnyModelConfig, vocab_size: int | None = None, labels: tuple[str, ...] = ()) -> AnyModelConfig:
    """Fills in what the tokenizer and the data would: what is given here, else something that is assumed."""
    update: dict[str, object] = {}
    if model.vocab_size is None:
        update["vocab_size"] = vocab_size or ASSUMED_VOCAB_SIZE
    if model.head.kind == "labels" and not model.head.labels:
        update["head"] = model.head.model_copy(update={"labels": list(labels or ASSUMED_LABELS)})
    return model.model_copy(update=update) if update else model


def task_of(config: RunConfig) -> TrainingTask:
    """Returns what a run trains on what; what the data would tell of the model is assumed."""
    return task_with(config, known_model(config.model))


def task_with(config: RunConfig, model: AnyModelConfig) -> TrainingTask:
    """Returns the same of a model whose vocabulary is known. Raises: ConfigError, as `plan_trained`."""
    trained = plan_trained(model, config.init.freeze, config.finetune)
    return TrainingTask(model, config.lengths, config.objective.head_share, config.optim.kind, trained)
