"""Hidden states, without scores."""

from pretrain.kinds.head import HeadRecord

NONE = HeadRecord(
    settings=(),
    scales=True,
    without_loss="a model without a head has no loss",
)
