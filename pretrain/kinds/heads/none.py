"""Hidden states, without scores."""

from pretrain.kinds.head import HeadRecord

NONE = HeadRecord(
    has_scores=False,
    settings=(),
    scales=True,
    without_loss="a model without a head has no loss",
)
