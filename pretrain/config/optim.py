"""`optim:` -- optimizer, decay, clipping and the learning-rate schedule."""

from typing import Literal

from pydantic import Field, field_validator, model_validator

from pretrain.config.base import Section, check_name
from pretrain.config.schedule import ScheduleConfig

OPTIMIZER_KINDS = {"adamw", "adafactor", "muon"}
"""Names of `OPTIMIZERS` in `optim/`. Modules under `extend` may add."""


class MuonConfig(Section):
    """`optim.muon` -- Muon (Jordan et al. 2024) on hidden matrices; all else takes AdamW, by the keys of `optim`.

    Attributes:
        lr: Peak learning rate of the matrices. The schedule is laid on both alike.
        momentum: Decay of the momentum.
        nesterov: Whether the gradient is added once more to the momentum.
        ns_steps: Newton-Schulz iterations.
        weight_decay: On the matrices. None: `optim.weight_decay`.
        adjust_lr_fn: `original` scales a tall matrix's rate by the root of its height over its width;
            `match_rms_adamw` scales every one so that rate and decay tuned for AdamW fit (Liu et al. 2025).
    """

    lr: float = Field(default=0.02, gt=0)
    momentum: float = Field(default=0.95, ge=0, lt=1)
    nesterov: bool = True
    ns_steps: int = Field(default=5, ge=1, lt=100)
    weight_decay: float | None = Field(default=None, ge=0)
    adjust_lr_fn: Literal["original", "match_rms_adamw"] = "original"


class AdafactorConfig(Section):
    """`optim.adafactor` -- Adafactor (Shazeer and Stern 2018).

    Attributes:
        decay_rate: The decay of the variance at step n is 1 - n^-decay_rate.
        clip_threshold: Largest root mean square of a matrix's update, before the learning rate.
        min_scale: Least root mean square that a matrix is taken to have when its step is made relative to it.
    """

    decay_rate: float = Field(default=0.8, gt=0, le=1)
    clip_threshold: float = Field(default=1.0, ge=1)
    min_scale: float = Field(default=1e-3, gt=0)


class OptimConfig(Section):
    """AdamW (Loshchilov and Hutter 2019) or another optimizer, and its schedule.

    Attributes:
        kind: Entry of `OPTIMIZERS` in `optim/`.
        lr: Peak learning rate.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        eps: Added to the root of the second moment.
        weight_decay: On matrices only: none on norms, biases and embeddings.
        grad_clip: Largest global gradient norm; 0: no clipping.
        layer_decay: The learning rate of a block over that of the block above it (Clark et al. 2020, ELECTRA);
            embeddings are below the first block, the head above the last. None: one rate for all.
        muon: What `kind: muon` adds.
        adafactor: What `kind: adafactor` adds; it has no use for beta1, beta2 and eps.
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
    layer_decay: float | None = Field(default=None, gt=0, le=1)
    muon: MuonConfig = MuonConfig()
    adafactor: AdafactorConfig = AdafactorConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    max_bad_steps: int = Field(default=10, ge=1)

    @field_validator("kind")
    @classmethod
    def _is_known(cls, kind: str) -> str:
        return check_name(kind, OPTIMIZER_KINDS)

    @model_validator(mode="after")
    def _check(self) -> "OptimConfig":
        for kind, plain in (("muon", MuonConfig()), ("adafactor", AdafactorConfig())):
            if getattr(self, kind) != plain and self.kind != kind:
                raise ValueError(f"the keys under {kind} are read under kind={kind} only, not {self.kind}; remove them")
        return self
