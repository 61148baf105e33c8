"""Preferences without pairs (KTO, Ethayarajh et al. 2024)."""

from typing import Annotated, Any

from pydantic import Field

from pretrain.config.base import Conflicts, OnResume, Section
from pretrain.kinds.objective import Objective, RowShape
from pretrain.kinds.objectives.dpo import preference_conflicts


class KtoConfig(Section):
    """Preferences without pairs (Ethayarajh et al. 2024, 4.1), for `kind: kto`.

    The reference is the model that training begins with, `init.from`.
    """

    beta: Annotated[float, OnResume.WARN] = Field(default=0.1, gt=0)
    """Factor of the difference to the reference: a larger one keeps the model closer to it."""
    desirable_weight: Annotated[float, OnResume.WARN] = Field(default=1.0, gt=0)
    """Weight of answers that are wanted."""
    undesirable_weight: Annotated[float, OnResume.WARN] = Field(default=1.0, gt=0)
    """Weight of the others."""


def _conflicts(config: Any) -> Conflicts:
    yield from preference_conflicts("kto", config)
    if config.data.packing == "padded":
        yield "objective.kind=kto compares each record with the others of its row", "use data.packing=bins"


def _means_of_sides(means: dict[str, float]) -> dict[str, float]:
    """Returns means over the answers of each kind, by those over all records."""
    metrics = {}
    for name, mean in means.items():
        count = means.get(f"count/{name.rpartition('/')[2]}", 1.0)
        if count and not name.startswith("count/"):
            metrics[name] = mean / count
    if {"rewards/chosen", "rewards/rejected"} <= metrics.keys():
        metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
    return metrics


KTO = Objective(
    shapes=("decoder",),
    data=("feedback",),
    section=KtoConfig,
    rows="pretrain.objective.feedback:build_feedback",
    longest_row=lambda section, limits: limits.seq_len // 2,
    row_shapes=lambda section, row, limits: [RowShape(2 * row)],
    loss="pretrain.objective.feedback:sum_feedback_loss",
    loss_settings=("beta", "desirable_weight", "undesirable_weight"),
    shown=(
        *("rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected"),
        *("count/chosen", "count/rejected", "kl"),
    ),
    summarize=_means_of_sides,
    mixes=False,
    instead_of_tokens="judges answers",
    reference=lambda section: True,
    apart="has answers in a row that",
    conflicts=_conflicts,
    token_kinds="pretrain.objective.feedback:feedback_kinds",
    learns_parts=True,
    counted="records",
    targets="records",
)
