"""Preferences: DPO (Rafailov et al. 2023), IPO, SimPO and ORPO of pairs; KTO without pairs."""

from functools import partial
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from pretrain.config.base import Conflicts, OnResume, Section, check_name
from pretrain.kinds.objective import Objective, RowShape
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
                yield (
                    f"{name} goes with loss={' or '.join(takers)}, not {self.loss}",
                    "leave it out",
                )


def _has_reference(section: DpoConfig) -> bool:
    return PREFERENCE_LOSSES[section.loss].reference


def preference_conflicts(kind: str, config: Any) -> Conflicts:
    """Yields values of a run that do not go with the comparison of answers."""
    key = f"objective.kind={kind}"
    if config.init.from_ is None and config.objective.has_reference:
        yield f"{key} compares a model with the one that it began as", "set init.from"
    if getattr(config.model, "multi_token", 0):
        yield (
            f"{key} compares answers, which model.multi_token does not predict",
            "use model.multi_token=0",
        )
    why = f"and {key} adds up the tokens of an answer on one rank"
    for name in ("sequence", "tensor"):
        ranks = getattr(config.parallel, name)
        if ranks > 1:
            yield f"parallel.{name}={ranks} cuts rows, {why}", f"use parallel.{name}=1"


DPO = Objective(
    shapes=("decoder",),
    data=("preferences",),
    section=DpoConfig,
    rows="pretrain.objective.pairs.preferences:build_preferences",
    loss="pretrain.objective.pairs.preferences:sum_preference_loss",
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
    token_kinds="pretrain.objective.pairs.preferences:pair_kinds",
    learns_parts=True,
    counted="pairs",
    targets="pairs of answers",
)


# Preferences without pairs (KTO, Ethayarajh et al. 2024).


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


def _feedback_conflicts(config: Any) -> Conflicts:
    yield from preference_conflicts("kto", config)
    if config.data.packing == "padded":
        yield (
            "objective.kind=kto compares each record with the others of its row",
            "use data.packing=bins",
        )


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
    rows="pretrain.objective.pairs.feedback:build_feedback",
    longest_row=lambda section, limits: limits.seq_len // 2,
    row_shapes=lambda section, row, limits: [RowShape(2 * row)],
    loss="pretrain.objective.pairs.feedback:sum_feedback_loss",
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
    conflicts=_feedback_conflicts,
    token_kinds="pretrain.objective.pairs.feedback:feedback_kinds",
    learns_parts=True,
    counted="records",
    targets="records",
)
