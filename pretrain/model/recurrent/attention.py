"""Attention of a recurrent decoder to what its encoder read.

    scores_BTS of states and encoder outputs  ->  softmax over the source's own document  ->  context_BTD

Two ways of scoring: Bahdanau et al. (2015, appendix A.1.2), `v . tanh(W s + U h)`, and Luong et al. (2015, 3.1),
`s . W h` (general) or `s . h` (dot).
"""

import torch
from torch import Tensor, nn

from pretrain.config.recurrent import RecurrentConfig


class AdditiveScore(nn.Module):
    """`v . tanh(W s + U h)`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.energy = nn.Linear(width, 1, bias=False)

    def keys(self, memory_BSD: Tensor) -> Tensor:
        """Returns what of the scores depends on the source alone: computed once, not at each step."""
        return self.key(memory_BSD)

    def forward(self, states_BTD: Tensor, keys_BSD: Tensor) -> Tensor:
        hidden_BTSD = (self.query(states_BTD)[:, :, None] + keys_BSD[:, None]).tanh()
        return self.energy(hidden_BTSD)[..., 0]


class MultiplicativeScore(nn.Module):
    """`s . W h`, or `s . h`."""

    def __init__(self, width: int, *, general: bool) -> None:
        super().__init__()
        self.key = nn.Linear(width, width, bias=False) if general else nn.Identity()

    def keys(self, memory_BSD: Tensor) -> Tensor:
        """As `AdditiveScore.keys`."""
        return self.key(memory_BSD)

    def forward(self, states_BTD: Tensor, keys_BSD: Tensor) -> Tensor:
        return states_BTD @ keys_BSD.transpose(1, 2)


Score = AdditiveScore | MultiplicativeScore


def build_score(config: RecurrentConfig) -> Score | None:
    """Returns what `attention` names; None where there is none."""
    if config.attention == "none":
        return None
    width = config.decoder.width
    if config.attention == "bahdanau":
        return AdditiveScore(width)
    return MultiplicativeScore(width, general=config.score == "general")


def mix(scores_BTS: Tensor, memory_BSD: Tensor, visible_BTS: Tensor | None) -> Tensor:
    """Returns context_BTD: the mean of the encoder's outputs, weighted by the softmax of the scores.

    Args:
        scores_BTS: Of each target token and source token.
        memory_BSD: Outputs of the encoder.
        visible_BTS: bool; None: all. A target token without a source gets zeros.
    """
    if visible_BTS is None:
        return scores_BTS.softmax(dim=-1) @ memory_BSD
    lowest = torch.finfo(scores_BTS.dtype).min
    weights_BTS = scores_BTS.masked_fill(~visible_BTS, lowest).softmax(dim=-1)
    # A row that sees nothing has equal weights now: none of them may count.
    return weights_BTS.masked_fill(~visible_BTS, 0.0) @ memory_BSD
