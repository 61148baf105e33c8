"""`guard:` -- what is watched besides the loss: spikes, and replicas that come to differ."""

from typing import Literal

from pydantic import Field, model_validator

from pretrain.config.base import Section


class GuardConfig(Section):
    """What is watched, and what is done about it (docs/guard.md).

    Attributes:
        on_spike: What a loss far above the last ones leads to. `warn`: a line in the log, and a count in the metrics.
            `skip`: the step is also dropped before it is applied. `rollback`: the run goes back to its newest
            checkpoint and leaves out the samples since then.
        spike_window: Last finite losses that a loss is compared with; half as many are needed before there is a spike.
        spike_threshold: Robust standard deviations above their median that make a spike.
        max_skips: Spikes in a row that `skip` drops; then the loss is held to have a new level, and training goes on.
        max_rollbacks: Of one run, by themselves; one more ends it (exit code 77).
        check_replicas_every: Steps between comparisons of the weights that ranks hold alike; before each checkpoint
            too. 0: never.
    """

    on_spike: Literal["warn", "skip", "rollback"] = "warn"
    spike_window: int = Field(default=128, ge=8, le=128)
    spike_threshold: float = Field(default=8.0, gt=0)
    max_skips: int = Field(default=10, ge=1)
    max_rollbacks: int = Field(default=5, ge=1)
    check_replicas_every: int = Field(default=1000, ge=0)

    @model_validator(mode="after")
    def _check(self) -> "GuardConfig":
        for key, action in (("max_skips", "skip"), ("max_rollbacks", "rollback")):
            if key in self.model_fields_set and self.on_spike != action and getattr(self, key) != _DEFAULTS[key]:
                raise ValueError(f"{key} has a meaning with on_spike={action} only; leave it out")
        return self


_DEFAULTS = {"max_skips": 10, "max_rollbacks": 5}
