"""Labels of documents."""

from pretrain.kinds.objective import Objective

CLASSIFY = Objective(
    shapes=("encoder", "decoder"),
    data=("classes",),
    head="labels",
    rows="pretrain.objective.masked:build_labels",
    target_share=lambda section: 0.0,  # one a document
    apart="labels documents, which",
    scored_as={"tags": "tag"},
    token_kinds="pretrain.objective.masked:label_kinds",
    legend="{first token: label of the document}",
    next_command="pretrain classify {path} --text 'A text like those of the data'",
    no_targets="no label is in the rows; see `pretrain data show`",
)
