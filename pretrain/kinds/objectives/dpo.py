"""Preferences: direct preference optimization (Rafailov et al. 2023), IPO, SimPO and ORPO."""

from functools import partial
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from pretrain.config.base import Conflicts, OnResume, Section, check_name
from pretrain.kinds.objective import Objective
from pretrain.kinds.preference_losses import PREFERENCE_LOSSES


class DpoConfig(Section):
    """Direct preference optimization (Rafailov et al. 2023, 4) and its kin, for `kind: dpo`.

    The reference is the model that training begins with, `init.from`.
    """

    loss: Annotated[str, AfterValidator(partial(check_name, known=PREFERENCE_LOSSES)), OnResume.ALLOW] = "sigmoid"
    """Loss of a pair, as TRL calls it: `sigmoid` (DPO), `sigmoid_norm` (DPO a token), `ipo`, and without a
    reference `simpo` and `orpo`."""
    beta: Annotated[float, OnResume.WARN] = Field(default=0.1, gt=0)
    """Factor of the difference to the reference: a larger one keeps the model closer to it. For `simpo` that of
    the log-probabilities a token, and for `orpo` the weight of the ratio of odds."""
    label_smoothing: Annotated[float, OnResume.WARN] = Field(default=0.0, ge=0, lt=0.5)
    """Share of the preferences that are assumed to be the wrong way round, in training; not for `ipo` and `orpo`."""
    gamma: Annotated[float, OnResume.WARN] = Field(default=0.5, ge=0)
    """Difference of rewards that the answers of a pair should have at least, for `simpo`."""

    def _conflicts(self) -> Conflicts:
        taken = PREFERENCE_LOSSES[self.loss].settings
        for name in ("label_smoothing", "gamma"):
            if name not in taken and self.differs(name):
                takers = [loss for loss, record in PREFERENCE_LOSSES.items() if name in record.settings]
                yield f"{name} goes with loss={' or '.join(takers)}, not {self.loss}", "leave it out"


def _has_reference(section: DpoConfig) -> bool:
    return PREFERENCE_LOSSES[section.loss].reference


def preference_conflicts(kind: str, config: Any) -> Conflicts:
    """Yields values of a run that do not go with the comparison of answers."""
    key = f"objective.kind={kind}"
    if config.init.from_ is None and config.objective.has_reference:
        yield f"{key} compares a model with the one that it began as", "set init.from"
    if getattr(config.model, "multi_token", 0):
        yield f"{key} compares answers, which model.multi_token does not predict", "use model.multi_token=0"
    why = f"and {key} adds up the tokens of an answer on one rank"
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
    loss_settings=("loss", "beta", "label_smoothing", "gamma"),
    # As TRL calls them. A reward is beta times what the loss compares.
    shown=(
        *("rewards/margins", "rewards/chosen", "rewards/rejected", "rewards/accuracies"),
        *("logps/chosen", "logps/rejected"),
    ),
    mixes=False,
    instead_of_tokens="compares answers",
    reference=_has_reference,
    apart="has answers in a row that",
    conflicts=partial(preference_conflicts, "dpo"),
    token_kinds="pretrain.objective.preferences:pair_kinds",
    learns_parts=True,
    counted="pairs",
    targets="pairs of answers",
)
