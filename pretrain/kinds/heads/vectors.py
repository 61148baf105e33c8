"""A vector of each document, of its last hidden states."""

from pretrain.kinds.head import HeadRecord

VECTORS = HeadRecord(
    has_scores=False,
    summarizes=True,
    averages=True,
    pools=True,
    settings=("mean",),
    stacks=("encoder", "decoder"),
    of_texts=True,
    counted="pairs",
    targets="pairs of texts",
    without_loss="a model that embeds has no loss on running text: measure it by --retrieval",
)
