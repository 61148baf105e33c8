"""Masked language modelling (Devlin et al. 2019, 3.1)."""

from typing import Annotated

from pydantic import Field

from pretrain.config.base import Conflicts, OnResume, Section
from pretrain.kinds.objective import Objective


class MaskedConfig(Section):
    """Masked language modelling (Devlin et al. 2019, 3.1); for `kind: masked`."""

    rate: Annotated[float, OnResume.ALLOW] = Field(default=0.15, gt=0, lt=1)
    """Average share of tokens that are predicted; special tokens never are."""
    random: Annotated[float, OnResume.ALLOW] = Field(default=0.1, ge=0, le=1)
    """Share of the predicted tokens that are replaced by a random token."""
    keep: Annotated[float, OnResume.ALLOW] = Field(default=0.1, ge=0, le=1)
    """Share of the predicted tokens that stay unchanged; the rest becomes the mask token. `random`
    and `keep` of 0.1 are the 80/10/10 of BERT, both 0 is ModernBERT."""
    whole_words: Annotated[bool, OnResume.ALLOW] = False
    """Predict all tokens of a word or none."""

    def _conflicts(self) -> Conflicts:
        if self.random + self.keep > 1:
            yield f"random={self.random} and keep={self.keep} must sum to at most 1"


MASKED = Objective(
    shapes=("encoder",),
    data=("text",),
    section=MaskedConfig,
    rows="pretrain.objective.masked:build_masked",
    target_share=lambda section: section.rate,
    token_kinds="pretrain.objective.masked:masked_kinds",
    legend="{truth -> what stands there}: predicted; {truth}: predicted, and left as it is",
    no_targets="no token was drawn to be predicted; raise batch.global_tokens, or objective.masked.rate",
)
