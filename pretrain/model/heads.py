"""The head: from hidden states to scores over the vocabulary, or straight to a loss."""

from collections.abc import Callable

import torch
from torch import Tensor, nn


class LanguageModelHead(nn.Module):
    """Linear map from D to the padded vocabulary V, without bias. Rows from `vocab_size` on are padding.

    `weight` is its own parameter, or with tied embeddings the embedding's: the same object in both modules, so that an
    engine that gathers the weights of one module at a time (ZeRO stage 3) gathers it for each of them.
    """

    def __init__(self, width: int, vocab_size: int, padded_vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.weight = nn.Parameter(torch.empty(padded_vocab_size, width))

    def forward(self, hidden_BTD: Tensor, loss: Callable[[Tensor, Tensor], Tensor] | None = None) -> Tensor:
        """Scores every token, or computes a loss that never needs all scores at once.

        Args:
            hidden_BTD: Hidden states after the final norm.
            loss: Called as `loss(hidden_BTD, weight_VD)` while the weight is whole; its result is returned.

        Returns:
            logits_BTV, those of padding -inf, so that no softmax gives them mass; or what `loss` returned.
        """
        if loss is not None:
            return loss(hidden_BTD, self.weight)
        logits_BTV = nn.functional.linear(hidden_BTD, self.weight)
        if self.vocab_size < self.weight.shape[0]:
            logits_BTV[..., self.vocab_size :] = -torch.inf
        return logits_BTV
