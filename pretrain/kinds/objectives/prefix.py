"""Prefix language modelling (Raffel et al. 2020, 3.2.1)."""

from pretrain.kinds.objective import Objective

PREFIX = Objective(
    shapes=("decoder",),
    data=("text",),
    rows="pretrain.objective.causal:build_prefix",
    whole_prompts=True,
    scored_as={"preferences": "dpo"},
    token_kinds="pretrain.objective.token_kinds:learned_kinds",
)
