"""Adafactor (Shazeer and Stern 2018): a row and a column a matrix."""

from typing import Annotated

from pydantic import Field

from pretrain.config.base import OnResume, Section
from pretrain.kinds.optimizer import MatrixState, Optimizer


class AdafactorConfig(Section):
    """Adafactor (Shazeer and Stern 2018), which ignores beta1, beta2 and eps; for `kind: adafactor`."""

    decay_rate: Annotated[float, OnResume.WARN] = Field(default=0.8, gt=0, le=1)
    """Exponent of the variance decay, which is 1 - n^-decay_rate at step n."""
    clip_threshold: Annotated[float, OnResume.WARN] = Field(default=1.0, ge=1)
    """Largest root mean square of the update of a matrix, before the learning rate."""
    min_scale: Annotated[float, OnResume.WARN] = Field(default=1e-3, gt=0)
    """Lower bound of the root mean square of a matrix, which its step is relative to."""


ADAFACTOR = Optimizer(
    build="pretrain.optim.rules:build_adafactor",
    section=AdafactorConfig,
    moments=(),
    matrices=lambda own: MatrixState(rows=1, columns=1),
    usual_rate=1e-2,
)
