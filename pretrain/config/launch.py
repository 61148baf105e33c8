"""`launch:` -- what a job does when its cluster fails it."""

from pydantic import Field

from pretrain.config.base import Section


class LaunchConfig(Section):
    """Jobs under Slurm (slurm/README.md). None of it changes what is computed, up to rounding.

    Attributes:
        elastic: Whether fewer nodes than were asked for will do: a job trains on as many of those that it gets as
            divide the batch, the same samples each step.
        max_idle_restarts: Restarts in a row without a new checkpoint that end the job for good.
    """

    elastic: bool = False
    max_idle_restarts: int = Field(default=3, ge=1)
