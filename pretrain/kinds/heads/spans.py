"""Scores of each token as the first and as the last one of an answer (Devlin et al. 2019, 4.2)."""

from pretrain.kinds.head import HeadRecord

SPANS = HeadRecord(
    num_scores=2,
    scores_tokens=True,
    answers_questions=True,
    stacks=("encoder", "decoder"),
    fine_tuned=True,
    of_texts=True,
    hub_class="ForQuestionAnswering",
    hub_task="question-answering",
    counted="answers",
    targets="answers",
)
