"""Labels of words."""

from pretrain.kinds.objective import Objective

TAG = Objective(
    shapes=("encoder",),
    data=("tags",),
    head="labels",
    rows="pretrain.objective.masked:build_labels",
    labels_words=True,
    token_kinds="pretrain.objective.masked:label_kinds",
    legend="{first token: label of its word}",
    next_command="pretrain classify {path} --text 'A text like those of the data'",
    no_targets="no label is in the rows; see `pretrain data show`",
)
