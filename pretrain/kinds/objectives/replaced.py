"""Replaced-token detection (Clark et al. 2020)."""

from typing import Annotated

from pydantic import Field

from pretrain.config.base import OnResume
from pretrain.kinds.objective import Objective
from pretrain.kinds.objectives.masked import MaskedConfig


class ReplacedConfig(MaskedConfig):
    """Replaced-token detection (Clark et al. 2020, 3.1); for `kind: replaced`."""

    random: Annotated[float, OnResume.ALLOW] = Field(default=0.0, ge=0, le=1)
    """Share of the tokens that the generator predicts which it reads as a random token."""
    keep: Annotated[float, OnResume.ALLOW] = Field(default=0.0, ge=0, le=1)
    """Share of these that it reads unchanged; the rest is the mask token."""
    weight: Annotated[float, OnResume.ALLOW] = Field(default=50.0, gt=0)
    """Factor of the loss of the model in the minimised sum, beside that of its generator."""


REPLACED = Objective(
    shapes=("encoder",),
    data=("text",),
    head="replaced",
    section=ReplacedConfig,
    rows="pretrain.objective.replaced:build_replaced",
    loss="pretrain.objective.replaced:sum_replaced_loss",
    loss_settings=("weight", "rate"),
    # The generator's term; tokens that were replaced, and the share of them that was found.
    shown=("generator_loss", "replaced_share", "found_share"),
    mixes=False,
    instead_of_tokens="finds replaced ones",
    generator_share=lambda section: section.rate,
    token_kinds="pretrain.objective.masked:masked_kinds",
    no_targets="no token was drawn to be predicted; raise batch.global_tokens, or objective.replaced.rate",
)
