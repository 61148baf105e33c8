"""Heads: scores over the vocabulary or over labels, or a loss without materialised scores; document summaries."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pretrain.config.model import ModelConfig
from pretrain.model.block import ACTIVATIONS, build_norm

HeadLoss = Callable[[Tensor, Tensor, Tensor | None], Any]
"""`loss(hidden_BTD, weight_VD, bias_V)`, of the input, weight and bias of the last linear map of a head."""


class LanguageModelHead(nn.Module):
    """Linear map from D to the padded vocabulary V. Rows from `vocab_size` on are padding.

    With `head.transform`, a linear layer, the stack's activation and a norm come before it (Devlin et al. 2019, as
    released).

    With tied embeddings, `weight` is the embedding's parameter: the same object in both modules, so that ZeRO stage
    3, which gathers weights module by module, gathers it for each.

    Attributes:
        num_scores: Rows of `weight` without padding.
        soft_cap: Bound of the scores, which a loss must apply too. None: unbounded.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.vocab_size is not None
        self.num_scores, width = config.vocab_size, config.last_stack.width
        self.scale = width**-0.5 if config.head.scaled else 1.0
        self.soft_cap = config.head.soft_cap
        self.activation = ACTIVATIONS[config.last_stack.activation]
        self.transform = nn.Linear(width, width, bias=config.last_stack.bias) if config.head.transform else None
        self.norm = build_norm(config.last_stack) if config.head.transform else None
        self.weight = nn.Parameter(torch.empty(config.padded_vocab_size, width))
        self.bias = nn.Parameter(torch.empty(config.padded_vocab_size)) if config.head.bias else None

    def forward(self, hidden_BTD: Tensor, loss: HeadLoss | None = None) -> Tensor:
        """Scores every token, or computes a loss chunk by chunk.

        Args:
            hidden_BTD: Hidden states after the final norm; or [P, D] of chosen positions.
            loss: Called with the input and the weights of the linear map, while these are gathered (ZeRO stage 3).

        Returns:
            logits_BTV, -inf for padding of the vocabulary; or the result of `loss`.
        """
        if self.transform is not None and self.norm is not None:
            hidden_BTD = self.norm(self.activation(self.transform(hidden_BTD)))
        if self.scale != 1.0:
            hidden_BTD = hidden_BTD * self.scale
        if loss is not None:
            return loss(hidden_BTD, self.weight, self.bias)
        logits_BTV = nn.functional.linear(hidden_BTD, self.weight, self.bias)
        if self.soft_cap is not None:
            logits_BTV = self.soft_cap * (logits_BTV / self.soft_cap).tanh()
        if self.num_scores < self.weight.shape[0]:
            logits_BTV[..., self.num_scores :] = -torch.inf
        return logits_BTV


class LabelHead(nn.Module):
    """Dropout and a linear map from D to labels.

    With `head.transform`, a linear layer, the stack's activation and a norm come before both (Warner et al. 2024, as
    released). The summary of a document is computed before (`Transformer`, `average_documents`).

    Attributes:
        num_scores: Number of labels V, the rows of `weight`.
        soft_cap: None: scores of labels are unbounded.
    """

    soft_cap = None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_scores, width = config.num_scores, config.last_stack.width
        self.activation = ACTIVATIONS[config.last_stack.activation]
        self.transform = nn.Linear(width, width, bias=config.last_stack.bias) if config.head.transform else None
        self.norm = build_norm(config.last_stack) if config.head.transform else None
        self.dropout = nn.Dropout(config.head.dropout) if config.head.dropout else nn.Identity()
        self.weight = nn.Parameter(torch.empty(self.num_scores, width))
        self.bias = nn.Parameter(torch.empty(self.num_scores)) if config.head.bias else None

    def forward(self, hidden_BTD: Tensor, loss: HeadLoss | None = None) -> Tensor:
        """Scores the labels, or computes a loss; see `LanguageModelHead.forward`."""
        if self.transform is not None and self.norm is not None:
            hidden_BTD = self.norm(self.activation(self.transform(hidden_BTD)))
        hidden_BTD = self.dropout(hidden_BTD)
        if loss is not None:
            return loss(hidden_BTD, self.weight, self.bias)
        return nn.functional.linear(hidden_BTD, self.weight, self.bias)


Head = LanguageModelHead | LabelHead


def build_head(config: ModelConfig) -> Head | None:
    """Builds the head of a config; None for `head.kind=none`."""
    if config.head.kind == "none":
        return None
    return LabelHead(config) if config.head.kind == "labels" else LanguageModelHead(config)


def average_documents(hidden_BTD: Tensor, documents_BT: Tensor | None) -> Tensor:
    """Returns the mean over each token's document, [B, T, D], computed in fp32.

    Args:
        hidden_BTD: Hidden states.
        documents_BT: Document numbers as in `Batch`; negative: padding. None: each row is one document.
    """
    exact = torch.promote_types(hidden_BTD.dtype, torch.float32)
    if documents_BT is None:
        return hidden_BTD.mean(dim=1, keepdim=True, dtype=exact).to(hidden_BTD.dtype).expand_as(hidden_BTD)
    num_rows, length, width = hidden_BTD.shape
    first_B1 = torch.arange(num_rows, device=hidden_BTD.device)[:, None] * (length + 1)
    # A row has at most T documents; its padding counts as one more.
    place_P = torch.where(documents_BT < 0, length, documents_BT).add(first_B1).flatten()
    sums = torch.zeros(num_rows * (length + 1), width, dtype=exact, device=hidden_BTD.device)
    sums = sums.index_add(0, place_P, hidden_BTD.flatten(0, 1).to(exact))
    counts = torch.bincount(place_P, minlength=len(sums)).to(exact)
    means = sums / counts.clamp(min=1)[:, None]
    return means.index_select(0, place_P).view_as(hidden_BTD).to(hidden_BTD.dtype)


class Pooler(nn.Linear):
    """`tanh(linear(hidden of the first position))`, [B, T, D] to [B, D] (Devlin et al. 2019, as released)."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        return super().forward(hidden_BTD[:, 0]).tanh()
