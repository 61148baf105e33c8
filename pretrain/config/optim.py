"""`optim.schedule:` -- the learning rate over the steps, with its positions given by step or by token."""

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from pretrain.config.base import Section, check_name

_POSITIONS = ("warmup", "decay", "cooldown", "hold")

_ONLY_OF = {"cooldown": "wsd", "hold": "inverse_sqrt"}

_ENDLESS = ("constant", "inverse_sqrt")


class ScheduleConfig(Section):
    """Learning rate as a pure function of the step.

    Each position is a number of steps (`_steps`) or of tokens (`_tokens`), not both. Tokens are those of whole batches,
    `batch.global_tokens` a step, and the position is the first step that has them all.

    Attributes:
        kind: Shape after warm-up. `inverse_sqrt` is that of the 2017 Transformer, and with `hold` that of T5; `wsd` is
            warm-up, stable, decay (Hu et al. 2024): its run can be prolonged from any checkpoint of the stable phase.
        warmup_steps: Linear rise from 0.
        warmup_tokens: The same, by token.
        decay_steps: Where the final rate is reached. None: `train.steps`.
        decay_tokens: The same, by token.
        cooldown_steps: Length of the fall at the end, under `wsd`.
        cooldown_tokens: The same, by token.
        cooldown_shape: `1-sqrt` falls fast first and keeps more of the loss (Haegele et al. 2024).
        hold_steps: Under `inverse_sqrt`, how long the peak is held: k in T5's 1 / sqrt(max(n, k)).
        hold_tokens: The same, by token.
        min_ratio: Learning rate over the peak at the end; under `inverse_sqrt` the least it falls to.
    """

    kind: Literal["cosine", "linear", "constant", "inverse_sqrt", "wsd"] = "cosine"
    warmup_steps: int = Field(default=0, ge=0)
    warmup_tokens: int | None = Field(default=None, ge=1)
    decay_steps: int | None = Field(default=None, ge=1)
    decay_tokens: int | None = Field(default=None, ge=1)
    cooldown_steps: int | None = Field(default=None, ge=1)
    cooldown_tokens: int | None = Field(default=None, ge=1)
    cooldown_shape: Literal["linear", "1-sqrt"] = "linear"
    hold_steps: int | None = Field(default=None, ge=1)
    hold_tokens: int | None = Field(default=None, ge=1)
    min_ratio: float = Field(default=0.1, ge=0, le=1)

    @model_validator(mode="after")
    def _check(self) -> "ScheduleConfig":
        for name in _POSITIONS:
            steps, tokens = getattr(self, f"{name}_steps"), getattr(self, f"{name}_tokens")
            if steps and tokens:
                raise ValueError(
                    f"{name}_steps={steps} and {name}_tokens={tokens} say the same thing; keep one of them"
                )
        for name, kind in _ONLY_OF.items():
            if self._is_given(name) and self.kind != kind:
                raise ValueError(f"{name}_steps and {name}_tokens belong to kind={kind}, not {self.kind}; remove them")
        if self._is_given("decay") and self.kind in _ENDLESS:
            raise ValueError(f"decay_steps and decay_tokens mean nothing under kind={self.kind}; remove them")
        if self.kind == "wsd" and not self._is_given("cooldown"):
            raise ValueError("kind=wsd needs cooldown_steps or cooldown_tokens; a tenth of the run is usual")
        if self.kind == "inverse_sqrt" and not (self._is_given("warmup") or self._is_given("hold")):
            raise ValueError("kind=inverse_sqrt needs warmup_steps (the 2017 Transformer) or hold_steps=10000 (T5)")
        if self.decay_steps is not None and self.decay_steps <= self.warmup_steps:
            raise ValueError(f"decay_steps={self.decay_steps} must exceed warmup_steps={self.warmup_steps}")
        if self.decay_tokens is not None and self.decay_tokens <= (self.warmup_tokens or 0):
            raise ValueError(f"decay_tokens={self.decay_tokens} must exceed warmup_tokens={self.warmup_tokens}")
        return self

    def _is_given(self, name: str) -> bool:
        return bool(getattr(self, f"{name}_steps") or getattr(self, f"{name}_tokens"))

    def in_steps(self, tokens_per_step: int) -> "ScheduleConfig":
        """Returns the same schedule with every position as a number of steps, rounded up."""
        changes: dict[str, Any] = {}
        for name in _POSITIONS:
            tokens = getattr(self, f"{name}_tokens")
            if tokens is not None:
                changes |= {f"{name}_steps": -(-tokens // tokens_per_step), f"{name}_tokens": None}
        return self.model_copy(update=changes) if changes else self

    def check_run(self, total_steps: int, tokens_per_step: int) -> None:
        """Checks that the schedule fits a run. Raises: ValueError, that names keys from the root of the config."""
        steps = self.in_steps(tokens_per_step)
        end = steps.decay_steps or total_steps
        if end <= steps.warmup_steps:
            unit, value = ("steps", self.warmup_steps) if self.warmup_tokens is None else ("tokens", self.warmup_tokens)
            raise ValueError(
                f"optim.schedule.warmup_{unit}={value} must be less than the {end} steps of the schedule; "
                f"lower it or raise train.steps"
            )
        cooldown = steps.cooldown_steps or 0
        if steps.warmup_steps + cooldown > end:
            unit = "steps" if self.cooldown_tokens is None else "tokens"
            raise ValueError(
                f"the warm-up of {steps.warmup_steps} steps and the cooldown of {cooldown} are longer than the {end} "
                f"steps of the schedule; lower optim.schedule.cooldown_{unit} or raise train.steps"
            )


# `optim:` -- optimizer, decay, clipping and the learning-rate schedule.


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
