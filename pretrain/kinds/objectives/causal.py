"""Next-token prediction (Radford et al. 2019)."""

from pretrain.kinds.objective import Objective

CAUSAL = Objective(
    shapes=("decoder",),
    data=("text", "records"),
    stored_scores=True,
    rows="pretrain.objective.causal:build_causal",
    scored_as={"records": "supervised", "preferences": "dpo"},
    running_text=True,
)
