"""Score of a text as the right one of several (Devlin et al. 2019, 4.4)."""

from pretrain.kinds.head import HeadRecord

CHOICES = HeadRecord(
    num_scores=1,
    summarizes=True,
    answers_questions=True,
    stacks=("encoder",),
    fine_tuned=True,
    of_texts=True,
    hub_class="ForMultipleChoice",
    hub_task="multiple-choice",
    counted="answers",
    targets="answers",
)
