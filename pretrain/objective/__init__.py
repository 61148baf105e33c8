"""Training objectives by name. A new one: a file with a function `(model, batch) -> LossOutput`, and a line here."""

from pretrain.config.objective import ObjectiveConfig
from pretrain.objective.causal import causal_loss
from pretrain.objective.contract import LossOutput, Objective

OBJECTIVES: dict[str, Objective] = {"causal": causal_loss}


def build_objective(config: ObjectiveConfig) -> Objective:
    """Returns the objective that the config names; call it inside the module that the engine wraps."""
    return OBJECTIVES[config.kind]


__all__ = ["OBJECTIVES", "LossOutput", "Objective", "build_objective"]
