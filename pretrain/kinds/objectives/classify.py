"""Labels of documents."""

from pretrain.kinds.objective import Objective, few_positions

CLASSIFY = Objective(
    shapes=("encoder", "decoder"),
    data=("classes",),
    head="labels",
    rows="pretrain.objective.masked:build_labels",
    target_share=few_positions,
    apart="labels documents, which",
    scored_as={"tags": "tag"},
)
