"""Fill in the middle (Bavarian et al. 2022)."""

from typing import Annotated

from pydantic import Field

from pretrain.config.base import OnResume, Section
from pretrain.kinds.objective import Objective, RowShape


class FimConfig(Section):
    """Fill in the middle (Bavarian et al. 2022), on tokens; for `kind: fim`."""

    rate: Annotated[float, OnResume.ALLOW] = Field(default=0.5, gt=0, le=1)
    """Share of documents that are rearranged."""
    spm_rate: Annotated[float, OnResume.ALLOW] = Field(default=0.5, ge=0, le=1)
    """Share of those in the order suffix, prefix, middle, and not prefix, suffix, middle."""
    max_documents: Annotated[int, OnResume.ALLOW] = Field(default=4, ge=1)
    """Limit of rearranged documents in a row, which reserves three special tokens for each."""
    tokens: Annotated[list[str], OnResume.ALLOW] = Field(
        default=["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"], min_length=3, max_length=3
    )
    """Special tokens before the prefix, the suffix and the middle."""


FIM = Objective(
    shapes=("decoder",),
    data=("text",),
    section=FimConfig,
    rows="pretrain.objective.fim:build_fim",
    whole_rows=True,
    longest_row=lambda section, limits: limits.seq_len - 3 * section.max_documents,
    row_shapes=lambda section, row, limits: [RowShape(row + 3 * section.max_documents)],
    scored_as={"preferences": "dpo"},
    token_kinds="pretrain.objective.fim:rearranged_kinds",
)
