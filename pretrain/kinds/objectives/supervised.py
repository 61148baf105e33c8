"""Next-token prediction of responses, without a loss on their prompts."""

from pretrain.kinds.objective import Objective

SUPERVISED = Objective(
    shapes=("decoder",),
    data=("records",),
    stored_scores=True,
    rows="pretrain.objective.causal:build_supervised",
    scored_as={"preferences": "dpo"},
    token_kinds="pretrain.objective.token_kinds:learned_kinds",
    learns_parts=True,
    next_command="pretrain generate {path} --prompt 'A text like those of the data'",
)
