"""Masked autoencoder of images (He et al. 2022)."""

from typing import Annotated

from pydantic import Field

from pretrain.config.base import OnResume, Section
from pretrain.kinds.objective import Objective, chosen_positions


class MaskedPatchesConfig(Section):
    """Masked autoencoder of images (He et al. 2022, 3); for `kind: masked_patches`."""

    rate: Annotated[float, OnResume.ALLOW] = Field(default=0.75, gt=0, lt=1)
    """Share of the patches of an image that are hidden from the encoder and predicted."""
    normalize: Annotated[bool, OnResume.ALLOW] = True
    """Predict pixels minus the mean of their patch, divided by its standard deviation (He et al.
    2022, 3). False: pixels as normalized by `model.input`."""


MASKED_PATCHES = Objective(
    shapes=("encoder+decoder",),
    data=("images",),
    head="pixels",
    reads="patches",
    section=MaskedPatchesConfig,
    rows="pretrain.objective.masked_patches:build_masked_patches",
    loss="pretrain.objective.masked_patches:patch_loss",
    mixes=False,
    target_share=chosen_positions,
)
