"""Adafactor (Shazeer and Stern 2018), with which T5 was trained: `optim.kind: adafactor`.

The variance of a matrix's gradient is kept as its row and column means: R + C numbers instead of R x C. There is no
first moment. The step of a matrix is relative to its own root mean square, so `optim.lr` is a fraction: T5's is
`lr: 1e-2` under `schedule: {kind: inverse_sqrt, hold_steps: 10000}`, with no decay. The paper bounds that fraction by
1 / sqrt(step), and so does torch: an `lr` of 1e-2 that is held for longer than 10,000 steps meets the bound there.
"""

from functools import partial

import torch

from pretrain.config.optim import OptimConfig
from pretrain.optim.groups import ParameterGroup
from pretrain.optim.whole import WholeGroup, WholeOptimizer

_ROOT_FLOOR = 1e-18
"""torch's epsilon 1. It bounds the root of the variance from below, and the mean of the row factors as well.

torch's default, 1e-7, is as large as the gradients of a big model; the paper's 1e-30 becomes 0 when torch squares it.
"""


def build_adafactor(groups: list[ParameterGroup], config: OptimConfig, device: torch.device) -> WholeOptimizer:
    """Builds torch's Adafactor over all parameters.

    State, once a first step has been taken: a row and a column of variances a matrix, one variance an element of a
    vector.
    """
    options = config.adafactor
    whole = [
        WholeGroup(
            group,
            partial(
                torch.optim.Adafactor,
                lr=config.lr,
                beta2_decay=-options.decay_rate,
                eps=(_ROOT_FLOOR, options.min_scale),
                d=options.clip_threshold,
                weight_decay=config.weight_decay if group.decays else 0.0,
            ),
            config.lr,
            group.lr_ratio,
        )
        for group in groups
    ]
    return WholeOptimizer(whole, None)
