"""Modules that predict further tokens (DeepSeek-V3, 2.2)."""

import torch
from torch import Tensor, nn

from pretrain.config.engine import EngineConfig
from pretrain.config.model import StackConfig
from pretrain.model.backends.backend import AttentionBackend
from pretrain.model.block import Block, BlockInput, BlockOutput
from pretrain.model.parts.norm import build_norm
from pretrain.types import take_next


class PredictorInput(nn.Module):
    """`W [norm(embedding), norm(state)]`, two of [B, T, D] to one (DeepSeek-V3, 2.2, equation 21).

    The embedding is first, as in the released weights, and in the paper second.
    """

    def __init__(self, config: StackConfig) -> None:
        super().__init__()
        self.embedding_norm = build_norm(config)
        self.hidden_norm = build_norm(config)
        self.projection = nn.Linear(2 * config.width, config.width, bias=False)

    def forward(self, embedded_BTD: Tensor, state_BTD: Tensor) -> Tensor:
        pair = (self.embedding_norm(embedded_BTD), self.hidden_norm(state_BTD))
        return self.projection(torch.cat(pair, dim=-1))


class TokenPredictors(nn.Module):
    """Modules that predict further tokens, one after another (DeepSeek-V3, 2.2).

        state_k = block_k(input_k(embedding of the k-th token after this one, state_(k - 1)))

    state_0 are the hidden states that the head reads, as inference engines run the released weights.
    The head reads `norm_k(state_k)`, to predict token k + 1 after this one. Blocks are like the last
    one of the stack, and have its positions and mask.
    """

    def __init__(
        self, config: StackConfig, backend: AttentionBackend, engine: EngineConfig, depth: int
    ) -> None:  # fmt: skip
        super().__init__()
        number = max(config.layers - 1, 1)  # the first may lack a norm
        each = range(depth)
        self.inputs = nn.ModuleList(PredictorInput(config) for _ in each)
        self.blocks = nn.ModuleList(Block(config, backend, None, engine, number) for _ in each)
        is_normed = config.norm_placement == "post"
        self.norms = nn.ModuleList(nn.Identity() if is_normed else build_norm(config) for _ in each)

    def forward(
        self, last: BlockInput, embedded_BTD: Tensor, continuing_BT: Tensor | None
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Returns the input of the head of each module, and packed `RoutingSums` of each with experts.

        Args:
            last: Hidden states of the stack, with mask, rotation and counted tokens of its last block.
            embedded_BTD: Embeddings of its tokens.
            continuing_BT: Where the next token is of the same document (`continuing`).
        """
        ahead = []
        sums = []
        state_BTD = last.x_BTD
        for join, block, norm in zip(self.inputs, self.blocks, self.norms, strict=True):
            embedded_BTD = take_next(embedded_BTD, continuing_BT, 0.0)
            output: BlockOutput = block(*last._replace(x_BTD=join(embedded_BTD, state_BTD)))
            state_BTD = output.x_BTD
            ahead.append(norm(state_BTD))
            if output.routing_W is not None:
                sums.append(output.routing_W)
        return tuple(ahead), tuple(sums)
