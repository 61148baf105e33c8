"""`optim:` -- optimizer, weight decay, clipping and the learning rate schedule."""

import math
from typing import Annotated

from pydantic import Field

from pretrain.config.base import Conflicts, OnResume, Section
from pretrain.config.data import BatchConfig
from pretrain.config.model import ModelConfig
from pretrain.kinds.optimizers import OptimizerConfig, optimizers_where
from pretrain.kinds.schedules import POSITIONS, SchedulePositions


class ScheduleConfig(SchedulePositions):
    """Learning rate as a pure function of the step.

    Each position is a number of steps (`_steps`) or of tokens (`_tokens`), not both. A number of
    tokens is rounded up to whole steps, as `batch` has them.
    """

    def in_steps(self, batch: BatchConfig, total_steps: int) -> "ScheduleConfig":
        """Returns the same schedule with every position as a number of steps, rounded up.

        In a run too short for them, a warm-up is a quarter of the steps, a cooldown the rest.
        """
        asked = self._as_asked(batch, total_steps)
        end = asked.decay_steps or total_steps
        warmup = asked.warmup_steps if asked.warmup_steps < end else end // 4
        cooldown = asked.cooldown_steps and min(asked.cooldown_steps, end - warmup)
        if (warmup, cooldown) == (asked.warmup_steps, asked.cooldown_steps):
            return asked
        return asked.model_copy(update={"warmup_steps": warmup, "cooldown_steps": cooldown})

    def shortened(self, batch: BatchConfig, total_steps: int) -> tuple[str, str] | None:
        """Returns what is cut as the run is too short, and the remedy; None where all fits."""
        asked, taken = self._as_asked(batch, total_steps), self.in_steps(batch, total_steps)
        cut, fixes = [], []
        for name, noun in (("warmup_steps", "warm-up"), ("cooldown_steps", "cooldown")):
            before, after = getattr(asked, name), getattr(taken, name)
            if before != after:
                cut.append(f"the {noun} of {before} steps is cut to {after}")
                fixes.append(f"optim.schedule.{name}={after}")
        if not cut:
            return None
        end = asked.decay_steps or total_steps
        note = f"{' and '.join(cut)}, as the schedule has {end} steps in all"
        return note, f"set {' '.join(fixes)}, or raise train.steps"

    def _as_asked(self, batch: BatchConfig, total_steps: int) -> "ScheduleConfig":
        in_tokens = {name: getattr(self, f"{name}_tokens") for name in POSITIONS}
        steps = {name: batch.steps_for(tokens) for name, tokens in in_tokens.items() if tokens is not None}
        if self.cooldown_tokens is not None:  # the last steps, back from the end
            end = steps.get("decay") or self.decay_steps or total_steps
            rows = -(-self.cooldown_tokens // batch.seq_len)
            steps["cooldown"] = end - batch.steps.step_of(batch.steps.before(end) - rows)
        changes = {f"{name}_steps": number for name, number in steps.items()} | {
            f"{name}_tokens": None for name in steps
        }
        return self.model_copy(update=changes) if changes else self

    def rate(self, step: int, batch: BatchConfig, total_steps: int) -> float:
        """Returns the learning rate of a step relative to the peak."""
        return self.in_steps(batch, total_steps).factor(step, total_steps)


class EmaConfig(Section):
    """Exponential moving average of the weights: another model in each checkpoint, `RUN/ema`."""

    horizon_steps: Annotated[int | None, OnResume.WARN] = Field(default=None, ge=1)
    """Steps after which weights count 1/e of the newest ones: 1000 is a decay of 0.999. None: no
    average, unless `horizon_tokens` is given."""
    horizon_tokens: Annotated[int | None, OnResume.WARN] = Field(default=None, ge=1)
    """The same in tokens: one horizon for any batch size (Busbridge et al. 2023)."""

    @property
    def is_on(self) -> bool:
        """Whether there is an average."""
        return self.horizon_steps is not None or self.horizon_tokens is not None

    def decay(self, step: int, tokens_per_step: int) -> float:
        """Returns the share of itself that the average of the weights keeps at a step; step 0 is the first.

        exp(-tokens_per_step / horizon), and less at the beginning, (1 + step) / (10 + step), as in
        TensorFlow's ExponentialMovingAverage: it reaches over the last tenth or so of the steps, and
        forgets the initial weights.
        """
        if self.horizon_steps is not None:
            share = 1 / self.horizon_steps
        else:
            assert self.horizon_tokens is not None, "there is an average"
            share = tokens_per_step / self.horizon_tokens
        return min(math.exp(-share), (1 + step) / (10 + step))

    def _conflicts(self) -> Conflicts:
        if self.horizon_steps is not None and self.horizon_tokens is not None:
            both = f"horizon_steps={self.horizon_steps} and horizon_tokens={self.horizon_tokens}"
            yield f"{both} say the same thing", "keep one of them"


class OptimConfig(OptimizerConfig):
    """AdamW (Loshchilov and Hutter 2019) or another optimizer, and its schedule."""

    schedule: ScheduleConfig = ScheduleConfig()
    ema: EmaConfig = EmaConfig()
    max_bad_steps: Annotated[int, OnResume.FREE] = Field(default=10, ge=1)
    """Limit of non-finite steps in a row, which are skipped; then the run ends with code 77."""

    def transfer_conflicts(self, model: Section) -> Conflicts:
        """Yields what `transfer` has no rule for, with keys from the root."""
        if self.transfer is None:
            return
        kind = self.transfer.kind
        if self.record.transfer is None:
            kinds = optimizers_where(lambda record: record.transfer)
            yield f"optim.transfer has no rule for optim.kind={self.kind}", f"use {kinds}, or leave it out"
        if not isinstance(model, ModelConfig):
            yield "optim.transfer has no rule for recurrent models", "leave it out"
            return
        if model.shape == "encoder+decoder":
            yield "optim.transfer has no rule for models of two stacks", "leave it out"
        stack = model.last_stack
        unruled = {
            f"model.init={model.init}": model.init != "normal",
            "model.scaled_embeddings=true": model.scaled_embeddings,
            "model.head.scaled=true": model.head.scaled,
            f"model.multi_token={model.multi_token}": model.multi_token > 0,
            "scaled_attention=false": not stack.scaled_attention,
            "position=relative": stack.position == "relative",
            "model.decoder.experts": stack.experts is not None,
            stack.lacking("widths"): bool(stack.lacking("widths")),
            f"optim.{self.kind}.split_heads=true": self.splits_heads,
            "norm_placement=post": kind == "completep" and stack.norm_placement == "post",
            # The norm after a layer takes its factor of the depth away.
            "norm_placement=sandwich": kind == "completep" and stack.norm_placement == "sandwich",
            "norm_placement=output": stack.norm_placement == "output",
            # The weights of the last norm have the factor of the logits.
            "norm=unweighted with tied_embeddings=true": stack.norm == "unweighted" and model.tied_embeddings,
        }
        for key, is_set in unruled.items():
            if is_set:
                yield f"optim.transfer.kind={kind} has no rule for {key}", "change that, or leave transfer out"
