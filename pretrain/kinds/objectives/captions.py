"""Captions of images (Vinyals et al. 2015)."""

from pretrain.kinds.objective import Objective

CAPTIONS = Objective(
    shapes=("encoder+decoder",),
    data=("captions",),
    reads="patches",
    rows="pretrain.objective.seq2seq:build_captions",
    mixes=False,
    image_source=lambda section, num_patches, num_before: num_before + num_patches,
    next_command="pretrain generate {path} --image cat.jpg",
)
