"""The encoder of a recurrent encoder-decoder."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from pretrain.config.recurrent import RecurrentConfig, RecurrentStackConfig
from pretrain.model.recurrent.layers import (
    Segments,
    State,
    build_cells,
    build_score,
    call_cells,
    join_directions,
    match,
    mix,
    run_cells,
    split_rows,
    zero_state,
)


class RecurrentEncoderOutput(NamedTuple):
    """What an encoder hands to a decoder.

    Attributes:
        outputs_BSD: One vector a source token.
        documents_BS: Document of each source token, padding apart; None: every row is one document.
        segments: The rows as N documents.
        state: State of each document after its last token: [layers, N, D] each.
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

    def forward(self, x_BSD: Tensor, documents_BS: Tensor | None) -> RecurrentEncoderOutput:
        segments = split_rows(x_BSD.shape[:2], documents_BS, x_BSD.device)
        first = zero_state(self.rnn, x_BSD, segments.count)
        outputs_BSD, state = run_cells(self.rnn, self.dropout(x_BSD), segments, first)
        if self.rnn.bidirectional:
            state = join_directions(state)
        return RecurrentEncoderOutput(self.dropout(outputs_BSD), documents_BS, segments, state)


# The decoder of a recurrent model: alone a language model, or after an encoder, with or without
# attention.
#
#     none       states = cells(x)                                     outputs = states
#     luong      states = cells(x), context = attend(states)           outputs = tanh(W [context; states])
#     input feeding   the same token by token, the cells read [x; last output]
#     bahdanau   token by token: context = attend(state before), states = cells([x; context]), outputs as Luong's
#
# Where nothing is fed back, all tokens go through the cells in one call. Luong et al. (2015) end
# with the tanh layer; Bahdanau et al. (2015) have a maxout layer there that reads the token too,
# and begin with a layer over the encoder's backward state: here both begin with the encoder's last
# state and end with Luong's layer, so that the score and its place are all that differs.


class DecoderState(NamedTuple):
    """Where a decoder stands in each row.

    Attributes:
        cells: State of the last document of each row: [layers, B, D] each.
        fed_BD: What attention gave last, where it is fed back. None: nothing is.
    """

    cells: State
    fed_BD: Tensor | None = None

    def select(self, rows_B: Tensor) -> "DecoderState":
        """Returns the states of the given rows, in their order."""
        fed_BD = None if self.fed_BD is None else self.fed_BD[rows_B]
        return DecoderState(tuple(held[:, rows_B] for held in self.cells), fed_BD)


class _Source(NamedTuple):
    """What a decoder sees of a source: its outputs, what scoring makes of them, and who sees what."""

    memory_BSD: Tensor
    keys_BSD: Tensor
    visible_BTS: Tensor | None


class RecurrentDecoder(nn.Module):
    """Recurrent layers, and what attends to the source; `rnn` is torch's module."""

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()
        width, dropout = config.decoder.width, config.decoder.dropout
        self.rnn = build_cells(config.decoder, 2 * width if config.feeds_back else width)
        self.score = build_score(config)
        self.readout = nn.Linear(2 * width, width, bias=False) if self.score is not None else None
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.feeds_back, self.looks_before = config.feeds_back, config.attention == "bahdanau"

    def forward(
        self,
        x_BTD: Tensor,
        documents_BT: Tensor | None,
        encoded: RecurrentEncoderOutput | None = None,
        state: DecoderState | None = None,
    ) -> tuple[Tensor, DecoderState]:
        """Reads tokens.

        Args:
            x_BTD: Their embeddings.
            documents_BT: Document of each, padding apart; None: every row is one document.
            encoded: The source.
            state: Decoding: the tokens continue what it stands for, whatever their documents.

        Returns:
            outputs_BTD, and the state after the last token of each row.
        """
        segments = split_rows(x_BTD.shape[:2], documents_BT, x_BTD.device)
        first = self._first_state(x_BTD, segments, encoded, state)
        source = None if encoded is None else self._see(encoded, documents_BT)
        x_BTD = self.dropout(x_BTD)
        last_B = segments.number_BT[:, -1]
        if not self.feeds_back:
            states_BTD, cells = run_cells(self.rnn, x_BTD, segments, first)
            outputs_BTD = self._read_out(states_BTD, self._attend(states_BTD, source))
            return self.dropout(outputs_BTD), DecoderState(tuple(held[:, last_B] for held in cells))
        assert source is not None, "a decoder with attention needs a source"
        fed_BD = torch.zeros_like(x_BTD[:, 0]) if state is None or state.fed_BD is None else state.fed_BD
        outputs_BTD, end = self._step_by_step(x_BTD, segments, first, source, fed_BD)
        return self.dropout(outputs_BTD), end

    def _first_state(
        self, x_BTD: Tensor, segments: Segments, encoded: RecurrentEncoderOutput | None, state: DecoderState | None
    ) -> State:
        """Returns the state that each document begins with: zeros, or its source's; where a row goes on, `state`."""
        first = zero_state(self.rnn, x_BTD, segments.count)
        if state is not None:
            going_on_B = segments.number_BT[:, 0]
            return tuple(held.index_copy(1, going_on_B, past) for held, past in zip(first, state.cells, strict=True))
        if encoded is None:
            return first
        source_N, found_N = match(segments, encoded.segments)
        return tuple(read[:, source_N] * found_N[:, None] for read in encoded.state)

    def _see(self, encoded: RecurrentEncoderOutput, documents_BT: Tensor | None) -> _Source | None:
        """Prepares attention; None where there is none. A target sees the source of its own document."""
        if self.score is None:
            return None
        visible_BTS, of_source = None, encoded.documents_BS
        if documents_BT is not None or of_source is not None:
            visible_BTS = _column(documents_BT, encoded.outputs_BSD) == _column(of_source, encoded.outputs_BSD).mT
        return _Source(encoded.outputs_BSD, self.score.keys(encoded.outputs_BSD), visible_BTS)

    def _attend(self, states_BTD: Tensor, source: _Source | None, step: int | None = None) -> Tensor | None:
        """Returns context_BTD. `step`: the states are those of this token alone."""
        if source is None or self.score is None:
            return None
        visible_BTS = source.visible_BTS
        if visible_BTS is not None and step is not None and visible_BTS.shape[1] > 1:
            visible_BTS = visible_BTS[:, step : step + 1]
        return mix(self.score(states_BTD, source.keys_BSD), source.memory_BSD, visible_BTS)

    def _read_out(self, states_BTD: Tensor, context_BTD: Tensor | None) -> Tensor:
        if context_BTD is None or self.readout is None:
            return states_BTD
        return self.readout(torch.cat((context_BTD, states_BTD), dim=-1)).tanh()

    def _step_by_step(
        self, x_BTD: Tensor, segments: Segments, first: State, source: _Source, fed_BD: Tensor
    ) -> tuple[Tensor, DecoderState]:
        """Runs cells that read what attention gave: of the state before (Bahdanau), or the last output (Luong)."""
        begins_T = segments.begins_BT.any(dim=0).tolist()
        cells = tuple(held[:, segments.number_BT[:, 0]] for held in first)
        outputs = []
        for step, x_BD in enumerate(x_BTD.unbind(dim=1)):  # slices would each have a gradient of the whole
            if step > 0 and begins_T[step]:
                begins_B1 = segments.begins_BT[:, step, None]
                number_B = segments.number_BT[:, step]
                cells = tuple(
                    torch.where(begins_B1, begun[:, number_B], held) for begun, held in zip(first, cells, strict=True)
                )
                fed_BD = fed_BD.masked_fill(begins_B1, 0.0)
            if self.looks_before:
                fed_BD = self._context(cells[0][-1], source, step)
            read_B1D = torch.cat((x_BD, fed_BD), dim=-1)[:, None]
            states_B1D, cells = call_cells(self.rnn, read_B1D, cells)
            context_BD = fed_BD if self.looks_before else self._context(states_B1D[:, 0], source, step)
            outputs.append(self._read_out(states_B1D[:, 0], context_BD))
            if not self.looks_before:
                fed_BD = outputs[-1]
        return torch.stack(outputs, dim=1), DecoderState(cells, fed_BD)

    def _context(self, state_BD: Tensor, source: _Source, step: int) -> Tensor:
        context_B1D = self._attend(state_BD[:, None], source, step)
        assert context_B1D is not None
        return context_B1D[:, 0]


def _column(documents_BT: Tensor | None, like: Tensor) -> Tensor:
    """Returns documents as [B, T, 1]; None: all are of number 0, as one that any T fits."""
    return torch.zeros(1, 1, 1, device=like.device) if documents_BT is None else documents_BT[..., None]


# Initial weights of a recurrent model.


def draw_recurrent(name: str, weight: Tensor, config: RecurrentConfig, generator: torch.Generator) -> None:
    """Sets one parameter. What is compared with a Transformer shall be at its best, so not all is torch's default.

    Matrices are uniform by their fan-in, as torch's; those from state to state orthogonal, gate by gate (Saxe et al.
    2014), without which a plain RNN forgets within a few steps. Embeddings are N(0, 1), as torch's: much smaller, they
    leave a cell blind to its input for hundreds of steps; N(0, 1/D) where they are the head too. Biases are 0, but for
    the first of the two of an LSTM's forget gate, which is 1: what it holds is kept until it learns what to forget
    (Jozefowicz et al. 2015).
    """
    part = name.rpartition(".")[2]
    if part.startswith("bias"):
        weight.zero_()
        if part.startswith("bias_ih") and config.decoder.cell == "lstm":
            weight.chunk(4)[1].fill_(1.0)  # torch's order: input, forget, cell, output
    elif part.startswith("weight_hh"):
        for gate in weight.split(weight.shape[1]):
            nn.init.orthogonal_(gate, generator=generator)
    elif name == "embedding.weight":
        weight.normal_(0.0, weight.shape[1] ** -0.5 if config.tied_embeddings else 1.0, generator=generator)
    else:
        bound = weight.shape[1] ** -0.5
        weight.uniform_(-bound, bound, generator=generator)
