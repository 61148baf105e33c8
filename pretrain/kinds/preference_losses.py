"""Losses of preferences by name, as TRL calls them. A new one: a record here, and its formula in `objective`."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceLoss:
    """Record of a loss of two answers to a prompt; its formula is `module:function`."""

    formula: str
    """`formula(scores_A2, **settings)`, of the log-probabilities of both answers: the loss, and the margin."""
    settings: tuple[str, ...]  # keys that the formula takes
    reference: bool = True  # log-probabilities are relative to the model that training begins with
    per_token: bool = False  # log-probabilities are means over the tokens of an answer, not sums


PREFERENCE_LOSSES: dict[str, PreferenceLoss] = {
    # Rafailov et al. 2023, equation 7; Mitchell 2023 for label smoothing.
    "sigmoid": PreferenceLoss(
        formula="pretrain.objective.pairs.preference_formulas:sigmoid_loss",
        settings=("beta", "label_smoothing"),
    ),
    # Lambert et al. 2024 (Tulu 3), 5.1.2: length-normalized DPO.
    "sigmoid_norm": PreferenceLoss(
        formula="pretrain.objective.pairs.preference_formulas:sigmoid_loss",
        settings=("beta", "label_smoothing"),
        per_token=True,
    ),
    # Azar et al. 2023 (IPO), equation 17, of means over tokens.
    "ipo": PreferenceLoss(
        formula="pretrain.objective.pairs.preference_formulas:squared_loss",
        settings=("beta",),
        per_token=True,
    ),
    # Meng et al. 2024 (SimPO), equation 6.
    "simpo": PreferenceLoss(
        formula="pretrain.objective.pairs.preference_formulas:sigmoid_loss",
        settings=("beta", "label_smoothing", "gamma"),
        reference=False,
        per_token=True,
    ),
    # Hong et al. 2024 (ORPO), equations 6 and 7.
    "orpo": PreferenceLoss(
        formula="pretrain.objective.pairs.preference_formulas:odds_loss",
        settings=("beta",),
        reference=False,
        per_token=True,
    ),
}
