"""Span corruption (Raffel et al. 2020, 3.1.4)."""

from typing import Annotated

from pydantic import Field

from pretrain.config.base import OnResume, Section
from pretrain.kinds.objective import Objective


class SpanConfig(Section):
    """Span corruption (Raffel et al. 2020, 3.1.4); for `kind: span`."""

    density: Annotated[float, OnResume.ALLOW] = Field(default=0.15, gt=0, lt=1)
    """Share of tokens that are removed from the source and predicted."""
    mean_length: Annotated[float, OnResume.ALLOW] = Field(default=3.0, ge=1)
    """Mean length of a removed span in tokens."""


SPAN = Objective(
    shapes=("encoder+decoder",),
    data=("text",),
    section=SpanConfig,
    rows="pretrain.objective.span:build_span",
    whole_rows=True,
)
