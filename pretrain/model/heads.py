"""What reads hidden states: scores over the vocabulary, or straight to a loss; a summary of a sentence."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pretrain.config.model import ModelConfig
from pretrain.model.feedforward import ACTIVATIONS
from pretrain.model.norm import build_norm

HeadLoss = Callable[[Tensor, Tensor, Tensor | None], Any]
"""`loss(hidden_BTD, weight_VD, bias_V)`, from what the last linear map of a head reads, its weight and its bias."""


class LanguageModelHead(nn.Module):
    """Linear map from D to the padded vocabulary V. Rows from `vocab_size` on are padding.

    Before it, where the config asks for them, come a linear layer with the stack's activation and norm (Devlin et al.
    2019, as released).

    `weight` is its own parameter, or with tied embeddings the embedding's: the same object in both modules, so that an
    engine that gathers the weights of one module at a time (ZeRO stage 3) gathers it for each of them.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.vocab_size is not None
        self.vocab_size, width = config.vocab_size, config.last_stack.width
        self.scale = width**-0.5 if config.head.scaled else 1.0
        self.activation = ACTIVATIONS[config.last_stack.activation]
        self.transform = nn.Linear(width, width, bias=config.last_stack.bias) if config.head.transform else None
        self.norm = build_norm(config.last_stack) if config.head.transform else None
        self.weight = nn.Parameter(torch.empty(config.padded_vocab_size, width))
        self.bias = nn.Parameter(torch.empty(config.padded_vocab_size)) if config.head.bias else None

    def forward(self, hidden_BTD: Tensor, loss: HeadLoss | None = None) -> Tensor:
        """Scores every token, or computes a loss that never needs all scores at once.

        Args:
            hidden_BTD: Hidden states after the final norm; [P, D] of chosen positions will do too.
            loss: Called with what the linear map reads and its weights while they are whole; its result is returned.

        Returns:
            logits_BTV, those of padding -inf, so that no softmax gives them mass; or what `loss` returned.
        """
        if self.transform is not None and self.norm is not None:
            hidden_BTD = self.norm(self.activation(self.transform(hidden_BTD)))
        if self.scale != 1.0:
            hidden_BTD = hidden_BTD * self.scale
        if loss is not None:
            return loss(hidden_BTD, self.weight, self.bias)
        logits_BTV = nn.functional.linear(hidden_BTD, self.weight, self.bias)
        if self.vocab_size < self.weight.shape[0]:
            logits_BTV[..., self.vocab_size :] = -torch.inf
        return logits_BTV


class Pooler(nn.Linear):
    """`tanh(linear(hidden of the first position))`, [B, T, D] to [B, D] (Devlin et al. 2019, as released)."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        return super().forward(hidden_BTD[:, 0]).tanh()
