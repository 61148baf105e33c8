"""Mixture of denoisers (Tay et al. 2023, 3.1)."""

from pydantic import Field

from pretrain.config.base import Section
from pretrain.kinds.corruption import DenoiserConfig, corrupted_shape, longest_corrupted
from pretrain.kinds.objective import Objective, RowLimits, RowShape


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


def _longest_row(section: Ul2Config, limits: RowLimits) -> int:
    return min(longest_corrupted(denoiser, limits) for denoiser in section.denoisers)


def _row_shapes(section: Ul2Config, row: int, limits: RowLimits) -> list[RowShape]:
    return [corrupted_shape(denoiser, row, limits) for denoiser in section.denoisers]


UL2 = Objective(
    shapes=("encoder+decoder", "decoder"),
    data=("text",),
    section=Ul2Config,
    rows="pretrain.objective.mixed:build_ul2",
    whole_rows=True,
    longest_row=_longest_row,
    row_shapes=_row_shapes,
    whole_prompts=True,
    one_text_a_row=True,
    scored_as={"preferences": "dpo"},
    token_kinds="pretrain.objective.mixed:denoised_kinds",
    row_note="pretrain.objective.mixed:describe_denoiser",
)
