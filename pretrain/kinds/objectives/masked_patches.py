"""Masked autoencoder of images (He et al. 2022)."""

from typing import Annotated

from pydantic import Field

from pretrain.config.base import OnResume, Section
from pretrain.kinds.objective import Objective


class MaskedPatchesConfig(Section):
    """Masked autoencoder of images (He et al. 2022, 3); for `kind: masked_patches`."""

    rate: Annotated[float, OnResume.ALLOW] = Field(default=0.75, gt=0, lt=1)
    """Share of the patches of an image that are hidden from the encoder and predicted."""
    normalize: Annotated[bool, OnResume.ALLOW] = True
    """Predict pixels minus the mean of their patch, divided by its standard deviation (He et al.
    2022, 3). False: pixels as normalized by `model.input`."""


def _count_source(section: MaskedPatchesConfig, num_patches: int, num_before: int) -> int:
    """Returns the vectors that the encoder reads, as in MAE's release. Raises: ValueError: All or no patches."""
    visible = int(num_patches * (1 - section.rate))
    if not 0 < visible < num_patches:
        raise ValueError(
            f"objective.masked_patches.rate={section.rate} leaves {visible} of {num_patches} patches visible; "
            f"choose one that hides some, and not all"
        )
    return num_before + visible


MASKED_PATCHES = Objective(
    shapes=("encoder+decoder",),
    data=("images",),
    head="pixels",
    reads="patches",
    section=MaskedPatchesConfig,
    rows="pretrain.objective.masked_patches:build_masked_patches",
    loss="pretrain.objective.masked_patches:sum_patch_loss",
    loss_settings=("normalize",),
    mixes=False,
    target_share=lambda section: section.rate,
    image_source=_count_source,
    no_targets="no token was drawn to be predicted; raise batch.global_tokens, or objective.masked_patches.rate",
)
