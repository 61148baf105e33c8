"""Answers to questions, as places in a text (Devlin et al. 2019, 4.2)."""

from pretrain.kinds.objective import Objective

ANSWERS = Objective(
    shapes=("encoder", "decoder"),
    data=("answers",),
    head="spans",
    rows="pretrain.objective.answers:build_answers",
    loss="pretrain.objective.answers:sum_answer_loss",
    loss_settings=(),
    shown=("f1",),
    mixes=False,
    apart="searches documents, which",
    instead_of_tokens="finds answers in texts",
    token_kinds="pretrain.objective.answers:answer_kinds",
    no_targets="no label is in the rows; see `pretrain data show`",
)
