"""Lion (Chen et al. 2023): one momentum a parameter."""

from pretrain.kinds.optimizer import Optimizer, slower_by_width

LION = Optimizer(
    build="pretrain.optim.rules:build_lion",
    fused="pretrain.optim.fused:build_fused_lion",
    moments=("exp_avg",),
    usual_rate=3e-4,
    is_cautious=True,
    transfer=slower_by_width,
)
