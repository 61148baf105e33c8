"""Direct preference optimization (Rafailov et al. 2023)."""

from typing import Annotated, Any

from pydantic import Field

from pretrain.config.base import Conflicts, OnResume, Section
from pretrain.kinds.objective import Objective


class DpoConfig(Section):
    """Direct preference optimization (Rafailov et al. 2023, 4), for `kind: dpo`.

    The reference is the model that training begins with, `init.from`.
    """

    beta: Annotated[float, OnResume.WARN] = Field(default=0.1, gt=0)
    """Factor of the difference to the reference: a larger one keeps the model closer to it."""
    label_smoothing: Annotated[float, OnResume.WARN] = Field(default=0.0, ge=0, lt=0.5)
    """Share of the preferences that are assumed to be the wrong way round, in training."""


def _conflicts(config: Any) -> Conflicts:
    if config.init.from_ is None:
        yield "objective.kind=dpo compares a model with the one that it began as", "set init.from"
    if getattr(config.model, "multi_token", 0):
        yield "objective.kind=dpo compares answers, which model.multi_token does not predict", "use model.multi_token=0"
    why = "and objective.kind=dpo adds up the tokens of an answer on one rank"
    for name in ("sequence", "tensor"):
        ranks = getattr(config.parallel, name)
        if ranks > 1:
            yield f"parallel.{name}={ranks} cuts rows, {why}", f"use parallel.{name}=1"


DPO = Objective(
    shapes=("decoder",),
    data=("preferences",),
    section=DpoConfig,
    rows="pretrain.objective.preferences:build_preferences",
    loss="pretrain.objective.preferences:sum_preference_loss",
    loss_settings=("beta", "label_smoothing"),
    # beta times the log-probability of an answer less the reference's.
    shown=("reward_margin", "reward_chosen", "reward_rejected"),
    mixes=False,
    instead_of_tokens="compares answers",
    reference=True,
    apart="has answers in a row that",
    conflicts=_conflicts,
    token_kinds="pretrain.objective.preferences:pair_kinds",
    learns_parts=True,
    counted="pairs",
    targets="pairs of answers",
)
