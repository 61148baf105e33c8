"""The encoder of a recurrent encoder-decoder."""

from typing import NamedTuple

from torch import Tensor, nn

from pretrain.config.recurrent import RecurrentStackConfig
from pretrain.model.recurrent.cells import State, build_cells, join_directions, run_cells, zero_state
from pretrain.model.recurrent.segments import Segments, split_rows


class Encoded(NamedTuple):
    """What an encoder hands to a decoder.

    Attributes:
        outputs_BSD: One vector a source token.
        documents_BS: Document of each source token, padding apart; None: every row is one document.
        segments: The same as N documents.
        state: Of each document, after its last token: [layers, N, D] each.
    """

    outputs_BSD: Tensor
    documents_BS: Tensor | None
    segments: Segments
    state: State


class RecurrentEncoder(nn.Module):
    """Recurrent layers over the source; `rnn` is torch's module."""

    def __init__(self, config: RecurrentStackConfig) -> None:
        super().__init__()
        self.rnn = build_cells(config, config.width)
        self.dropout = nn.Dropout(config.dropout) if config.dropout else nn.Identity()

    def forward(self, x_BSD: Tensor, documents_BS: Tensor | None) -> Encoded:
        segments = split_rows(x_BSD.shape[:2], documents_BS, x_BSD.device)
        first = zero_state(self.rnn, x_BSD, segments.count)
        outputs_BSD, state = run_cells(self.rnn, self.dropout(x_BSD), segments, first)
        if self.rnn.bidirectional:
            state = join_directions(state)
        return Encoded(self.dropout(outputs_BSD), documents_BS, segments, state)
