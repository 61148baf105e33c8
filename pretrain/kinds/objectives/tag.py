"""Labels of words."""

from pretrain.kinds.objective import Objective

TAG = Objective(
    shapes=("encoder",),
    data=("tags",),
    head="labels",
    rows="pretrain.objective.masked:build_labels",
    labels_words=True,
)
