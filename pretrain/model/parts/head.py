"""Heads of a model, and its pooler."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pretrain.config.model import ModelConfig
from pretrain.model.parts.feedforward import ACTIVATIONS
from pretrain.model.parts.norm import build_norm

HeadLoss = Callable[[Tensor, Tensor, Tensor | None], Any]
"""`loss(hidden_BTD, weight_VD, bias_V)`: input, weight and bias of the linear map of a head."""


class Head(nn.Module):
    """Linear map from D to scores: of the padded vocabulary, of labels, spans, choices or replaced
    tokens; or to pixels of a patch.

    With `head.transform`, a linear layer, an activation and a norm come before it (BERT and
    ModernBERT, as released), in the width of tables where that is another (ELECTRA); a head of
    labels has dropout in between.

    Attributes:
        scores_ids: Scores are of the vocabulary.
        scores_labels: Scores are of labels.
        summarizes: Scores are of documents, at their first positions.
        num_scores: Rows of `weight` without the padding of a vocabulary.
        soft_cap: Bound of the scores, which a loss must apply too. None: unbounded.
        compiles_loss: The loss is compiled like the blocks (`engine.compile`).
        chunk_logits: Scores that a loss holds at once; 0: by the device.
        shared: Ranks that share the vocabulary (`TensorRanks`). None: this one has all of it.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.last_stack.width
        self.scores_ids = config.head.record.scores_words
        self.scores_labels = config.head.record.names_labels
        self.summarizes = config.head.summarizes
        self.num_scores = config.num_scores
        self.scale = config.head.scale * (width**-0.5 if config.head.scaled else 1.0)
        self.soft_cap = config.head.soft_cap
        self.compiles_loss = False
        self.chunk_logits = 0
        self.shared: Any = None
        self.activation = ACTIVATIONS[config.head.activation or config.last_stack.activation]
        self.transform = None
        self.norm = None
        if config.head.transform:
            self.transform = nn.Linear(width, config.head_width, bias=config.last_stack.bias)
            self.norm = nn.Identity()
            if config.head.record.has_norm:
                self.norm = build_norm(config.last_stack, config.head_width)
        self.dropout = nn.Dropout(config.head.dropout) if config.head.dropout else nn.Identity()
        self.weight = nn.Parameter(torch.empty(config.num_head_rows, config.head_width))
        self.bias = nn.Parameter(torch.empty(config.num_head_rows)) if config.head.bias else None

    def forward(self, hidden_BTD: Tensor, loss: HeadLoss | None = None) -> Tensor:
        """Returns logits_BTV, -inf for padding of the vocabulary; or the result of `loss`.

        The input is hidden states after the final norm, or [P, D] of chosen positions. `loss` gets
        the input and the weights of the linear map, while these are gathered (ZeRO stage 3).
        """
        if self.transform is not None and self.norm is not None:
            hidden_BTD = self.norm(self.activation(self.transform(hidden_BTD)))
        if self.scale != 1.0:
            hidden_BTD = hidden_BTD * self.scale
        hidden_BTD = self.dropout(hidden_BTD)
        if loss is not None:
            return loss(hidden_BTD, self.weight, self.bias)
        logits_BTV = nn.functional.linear(hidden_BTD, self.weight, self.bias)
        if self.shared is not None:
            logits_BTV = self.shared.join(logits_BTV)
        if self.soft_cap is not None:
            logits_BTV = self.soft_cap * (logits_BTV / self.soft_cap).tanh()
        if self.num_scores < logits_BTV.shape[-1]:
            logits_BTV[..., self.num_scores :] = -torch.inf
        return logits_BTV


class VectorHead(nn.Module):
    """Hidden states of documents as they are, and the learned number of a temperature.

    Attributes:
        scores_ids, scores_labels, summarizes: As of `Head`.
        width: Width of the vectors.
        log_scale: Logarithm of a factor of the cosines of vectors, fp32 [1]. None: 0.
    """

    scores_ids = scores_labels = False
    summarizes = True

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.width = config.last_stack.width
        self.log_scale = nn.Parameter(torch.empty(1)) if config.head.learned_temperature else None

    def forward(self, hidden_PD: Tensor, loss: Callable[..., Any] | None = None) -> Any:
        """Returns the vectors, or the result of `loss` of them and `log_scale` (ZeRO stage 3)."""
        return hidden_PD if loss is None else loss(hidden_PD, self.log_scale)


class Pooler(nn.Linear):
    """`activation(linear(hidden of the first position))`, [B, T, D] to [B, D] (BERT, as released: tanh)."""

    def __init__(self, width: int, activation: str) -> None:
        super().__init__(width, width)
        self.activation = torch.tanh if activation == "tanh" else ACTIVATIONS[activation]

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        return self.activation(super().forward(hidden_BTD[:, 0]))
