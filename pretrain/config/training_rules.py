"""Rules between `optim`, `engine`, `model` and the length of a run."""

from pretrain.config.base import Section
from pretrain.config.engine import EngineConfig
from pretrain.config.model import ModelConfig
from pretrain.config.optim import OptimConfig

WHOLE_MATRIX_KINDS = {"adafactor", "muon"}
"""Of `optim.kind`, those that read a matrix as one."""


def check_training(
    optim: OptimConfig, engine: EngineConfig, model: Section, total_steps: int, tokens_per_step: int
) -> None:
    """Checks that the sections fit each other. Raises: ValueError, that names keys from the root of the config."""
    optim.schedule.check_run(total_steps, tokens_per_step)
    if optim.kind in WHOLE_MATRIX_KINDS and engine.offload_optimizer != "none":
        raise ValueError(
            f"optim.kind={optim.kind} steps whole matrices, which engine.offload_optimizer={engine.offload_optimizer} "
            f"would have gathered and multiplied on the CPU; use engine.offload_optimizer=none or optim.kind=adamw"
        )
    if engine.precision == "fp16" and isinstance(model, ModelConfig) and _is_t5_style(model):
        # Raffel et al. trained T5 in bf16; in fp16 its feed-forward layers and its scores exceed 65504.
        raise ValueError(
            "engine.precision=fp16 overflows in a T5-style model (model.init=t5 or scaled_attention=false): its "
            "activations grow beyond what fp16 can hold; use engine.precision=bf16"
        )


def _is_t5_style(model: ModelConfig) -> bool:
    stacks = [stack for stack in (model.encoder, model.decoder) if stack is not None]
    return model.init == "t5" or not all(stack.scaled_attention for stack in stacks)
