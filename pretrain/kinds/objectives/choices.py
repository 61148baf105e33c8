"""Answers to questions, as one of several choices (Devlin et al. 2019, 4.4)."""

from pretrain.kinds.objective import Objective

CHOICES = Objective(
    shapes=("encoder",),
    data=("choices",),
    head="choices",
    rows="pretrain.objective.answers:build_choices",
    loss="pretrain.objective.answers:sum_choice_loss",
    loss_settings=(),
    shown=("chance",),
    mixes=False,
    target_share=lambda section: 0.0,  # one a document
    apart="compares documents, which",
    instead_of_tokens="chooses an answer",
    token_kinds="pretrain.objective.answers:choice_kinds",
    no_targets="no label is in the rows; see `pretrain data show`",
)
