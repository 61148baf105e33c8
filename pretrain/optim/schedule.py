"""Learning rate schedules, and the decay of the average of the weights: functions of the step without state.

The training loop multiplies `optim.lr` by the factor before each step.
"""

import math

from pretrain.config.data import BatchConfig
from pretrain.config.optim import EmaConfig, ScheduleConfig
from pretrain.kinds.schedules import SCHEDULES


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
    return SCHEDULES[schedule.kind].factor(step, schedule, schedule.decay_steps or total_steps)


def rate_of_step(step: int, schedule: ScheduleConfig, batch: BatchConfig, total_steps: int) -> float:
    """Returns `learning_rate_factor` of a schedule whose positions may be tokens."""
    return learning_rate_factor(step, schedule.in_steps(batch, total_steps), total_steps)


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
