"""Mixture of denoisers (Tay et al. 2023, 3.1)."""

from typing import Annotated

from pydantic import Field

from pretrain.config.base import OnResume, Section
from pretrain.kinds.objective import Objective
from pretrain.kinds.objectives.span import SpanConfig


class DenoiserConfig(SpanConfig):
    """Denoiser of UL2."""

    mode: Annotated[str | None, OnResume.ALLOW] = None
    """Special token that the source begins with. None: no such token."""
    prefix: Annotated[bool, OnResume.ALLOW] = False
    """Prefix language model: the only span is the end of the row, a share `density` of it."""
    weight: Annotated[float, OnResume.ALLOW] = Field(default=1.0, gt=0)
    """Share of the rows relative to the other denoisers."""


def _ul2() -> list[DenoiserConfig]:
    regular = [DenoiserConfig(mode="[NLU]", density=0.15, mean_length=length) for length in (3.0, 8.0)]
    extreme = [
        DenoiserConfig(mode="[NLG]", density=density, mean_length=length)
        for density, length in ((0.5, 3.0), (0.5, 8.0), (0.15, 64.0), (0.5, 64.0))
    ]
    return [*regular, *extreme, DenoiserConfig(mode="[S2S]", density=0.25, prefix=True)]


class Ul2Config(Section):
    """Mixture of denoisers (Tay et al. 2023, 3.1); for `kind: ul2`."""

    denoisers: list[DenoiserConfig] = Field(default_factory=_ul2, min_length=1)
    """Default: the seven of table 1 of the paper with equal weights (two R, four X, one S)."""


UL2 = Objective(
    shapes=("encoder+decoder", "decoder"),
    data=("text",),
    section=Ul2Config,
    rows="pretrain.objective.mixed:build_ul2",
    whole_rows=True,
    whole_prompts=True,
    one_text_a_row=True,
    scored_as={"preferences": "dpo"},
)
