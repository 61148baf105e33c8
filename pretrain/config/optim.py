"""`optim:` -- optimizer, decay, clipping and the learning-rate schedule."""

from pydantic import Field, field_validator

from pretrain.config.base import Section, check_name
from pretrain.config.schedule import ScheduleConfig

OPTIMIZER_KINDS = {"adamw"}
"""Names of `OPTIMIZERS` in `optim/`. Modules under `extend` may add."""


class OptimConfig(Section):
    """AdamW (Loshchilov and Hutter 2019) and its schedule.

    Attributes:
        kind: Entry of `optim/build.py`.
        lr: Peak learning rate.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        eps: Added to the root of the second moment.
        weight_decay: On matrices only: none on norms, biases and embeddings.
        grad_clip: Largest global gradient norm; 0: no clipping.
        schedule: Learning rate over the steps.
        max_bad_steps: Non-finite steps in a row, each skipped, after which the run stops (exit code 77).
    """

    kind: str = "adamw"
    lr: float = Field(gt=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)
    grad_clip: float = Field(default=1.0, ge=0)
    schedule: ScheduleConfig = ScheduleConfig()
    max_bad_steps: int = Field(default=10, ge=1)

    @field_validator("kind")
    @classmethod
    def _is_known(cls, kind: str) -> str:
        return check_name(kind, OPTIMIZER_KINDS)
