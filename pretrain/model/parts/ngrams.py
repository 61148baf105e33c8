"""Embeddings of the last tokens of a document, beside each token's own."""

import torch
from torch import Tensor, nn

from pretrain.model.kv_cache import KVCache


class NgramEmbedding(nn.Embedding):
    """Sum of the vectors of the last 2, 3, ... tokens, [B, T] to [B, T, D] (Huang et al. 2025).

    The tables, of `rows` rows each, are one weight. A row is a hash of the n-gram, in which what is
    before the document is one further id.
    """

    _FACTOR = 6364136223846793005  # of Knuth's MMIX generator; products wrap around at 64 bits
    _SHIFT = 32  # the upper bits depend on all of a product

    def __init__(self, tables: int, rows: int, width: int) -> None:
        super().__init__(tables * rows, width)
        self.tables, self.rows = tables, rows

    def forward(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor | None,
        cache: KVCache | None,
    ) -> Tensor:
        """Returns vectors to be added to the tokens' own; called before `cache` has the tokens."""
        columns_T, tokens_BS = torch.arange(tokens_BT.shape[1], device=tokens_BT.device), tokens_BT
        if cache is not None:
            place = cache.place(tokens_BT.shape[1])
            columns_T = columns_T + place.offset if place.position_1 is None else place.position_1
            tokens_BS = cache.append_tokens(tokens_BT)
        if positions_BT is None:
            positions_BT = columns_T.expand_as(tokens_BT)
        hashed_BT = tokens_BT + 1
        rows_NBT = []
        for number in range(self.tables):
            before_BT = tokens_BS.index_select(1, (columns_T - number - 1).clamp(min=0)) + 1
            hashed_BT = hashed_BT * self._FACTOR + before_BT * (positions_BT > number)
            row_BT = (hashed_BT * self._FACTOR >> self._SHIFT) % self.rows
            rows_NBT.append(row_BT + number * self.rows)
        return super().forward(torch.stack(rows_NBT)).sum(0)
