"""AdamW (Loshchilov and Hutter 2019)."""

from pretrain.kinds.optimizer import Optimizer, slower_by_width

ADAMW = Optimizer(
    build="pretrain.optim.rules:build_adamw",
    fused="pretrain.optim.fused:build_fused_adamw",
    usual_rate=1e-3,
    is_cautious=True,
    transfer=slower_by_width,
)
