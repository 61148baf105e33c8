"""Answers to questions, as one of several choices (Devlin et al. 2019, 4.4)."""

from pretrain.kinds.objective import Objective, few_positions

CHOICES = Objective(
    shapes=("encoder",),
    data=("choices",),
    head="choices",
    rows="pretrain.objective.answers:build_choices",
    loss="pretrain.objective.answers:choice_loss",
    shown=("chance",),
    mixes=False,
    target_share=few_positions,
    apart="compares documents, which",
    instead_of_tokens="chooses an answer",
    token_kinds="pretrain.objective.answers:choice_kinds",
    no_targets="no label is in the rows; see `pretrain data show`",
)
