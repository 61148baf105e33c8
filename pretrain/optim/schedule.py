"""The learning rate over the steps: linear warm-up, then cosine, linear or constant. Pure: there is no state to save.

Not here: setting it on an optimizer. The loop multiplies `optim.lr` by the factor before each step.
"""

import math

from pretrain.config.optim import ScheduleConfig


def learning_rate_factor(step: int, schedule: ScheduleConfig, total_steps: int) -> float:
    """Returns the learning rate of a step, over the peak.

    Steps are numbered by how many came before: step 0 is the first. Warm-up rises linearly from 0 *before* it, so
    that step 0 has factor 1 / warmup_steps (not 0, which would waste the step) and step warmup_steps - 1 has 1. From
    there to the end (`decay_steps`, or `total_steps`) the factor falls to `min_ratio`, and stays there.

    Args:
        step: At least 0; may lie beyond the end.
        schedule: Shape. Its end lies after its warm-up (checked with the config).
        total_steps: Steps of the run; the end of the schedule where it names none.

    Returns:
        A factor in (0, 1] during warm-up, and in [min_ratio, 1] after it.
    """
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    if schedule.kind == "constant":
        return 1.0
    end = schedule.decay_steps or total_steps
    progress = min(1.0, (step - schedule.warmup_steps) / (end - schedule.warmup_steps))
    if schedule.kind == "linear":
        remaining = 1.0 - progress
    else:
        # SGDR without restarts (Loshchilov and Hutter 2017, eq. 5).
        remaining = 0.5 * (1.0 + math.cos(math.pi * progress))
    return schedule.min_ratio + (1.0 - schedule.min_ratio) * remaining
