"""Classes of images (Dosovitskiy et al. 2021)."""

from pretrain.kinds.objective import Objective

IMAGES = Objective(
    shapes=("encoder",),
    data=("images",),
    head="labels",
    reads="patches",
    rows="pretrain.objective.masked:build_labels",
    target_share=lambda section: 0.0,  # one a document
    no_targets="no label is in the rows; see `pretrain data show`",
)
