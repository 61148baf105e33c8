"""Learning rate schedules, and the decay of the average of the weights: functions of the step without state.

    cosine, linear   warm-up, then decay to min_ratio at the end
    constant         warm-up, then the peak
    inverse_sqrt     warm-up, the peak for `hold`, then 1 / sqrt(step), without an end
    wsd              warm-up, the peak, and decay over the last `cooldown` steps

The training loop multiplies `optim.lr` by the factor before each step.
"""

import math

from pretrain.config.data import BatchConfig
from pretrain.config.optim import EmaConfig, ScheduleConfig


def learning_rate_factor(step: int, schedule: ScheduleConfig, total_steps: int) -> float:
    """Returns the learning rate of a step relative to the peak.

    Step 0 is the first. Warm-up is linear: step 0 has factor 1 / warmup_steps (0 would waste the
    step), and step warmup_steps - 1 has factor 1. From there to the end (`decay_steps`, or
    `total_steps`) the factor decays to `min_ratio`, and stays there.

    `step` may be beyond the end. Positions of the schedule are in steps
    (`ScheduleConfig.in_steps`).
    """
    assert schedule.is_in_steps, "convert positions by token to steps first"
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    if schedule.kind == "constant":
        return 1.0
    if schedule.kind == "inverse_sqrt":
        # 1 up to step number k, counted from 1, then sqrt(k / number); k is the hold or the
        # warm-up. With a warm-up w this is `d_model^-0.5 * min(n^-0.5, n * w^-1.5)` over its peak,
        # (d_model * w)^-0.5 (Vaswani et al. 2017, eq. 3); with a hold k and no warm-up it is T5's
        # `1 / sqrt(max(n, k))` over its peak, 1 / sqrt(k) (Raffel et al. 2020, 3.1.2).
        flat = max(schedule.hold_steps or 0, schedule.warmup_steps)
        return max(schedule.min_ratio, math.sqrt(flat / max(step + 1, flat)))
    end = schedule.decay_steps or total_steps
    if schedule.kind == "wsd":
        assert schedule.cooldown_steps is not None
        start = max(schedule.warmup_steps, end - schedule.cooldown_steps)
    else:
        start = schedule.warmup_steps
    progress = min(1.0, max(0, step - start) / max(1, end - start))
    return schedule.min_ratio + (1.0 - schedule.min_ratio) * _remaining(progress, schedule)


def rate_of_step(step: int, schedule: ScheduleConfig, batch: BatchConfig, total_steps: int) -> float:
    """Returns `learning_rate_factor` of a schedule whose positions may be tokens."""
    return learning_rate_factor(step, schedule.in_steps(batch, total_steps), total_steps)


def _remaining(progress: float, schedule: ScheduleConfig) -> float:
    """Returns the remaining share of the decay, from 1 to 0, at `progress` from 0 to 1."""
    if schedule.kind == "cosine":
        # SGDR without restarts (Loshchilov and Hutter 2017, eq. 5).
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    if schedule.kind == "wsd" and schedule.cooldown_shape == "1-sqrt":
        return 1.0 - math.sqrt(progress)  # Haegele et al. 2024, eq. 1
    return 1.0 - progress


def ema_decay(step: int, config: EmaConfig, tokens_per_step: int) -> float:
    """Returns the share of itself that the average of the weights keeps at a step; step 0 is the first.

    exp(-tokens_per_step / horizon), and less at the beginning, (1 + step) / (10 + step), as in
    TensorFlow's ExponentialMovingAverage: it reaches over the last tenth or so of the steps, and
    forgets the initial weights.
    """
    if config.horizon_steps is not None:
        share = 1 / config.horizon_steps
    else:
        assert config.horizon_tokens is not None, "there is an average"
        share = tokens_per_step / config.horizon_tokens
    return min(math.exp(-share), (1 + step) / (10 + step))
