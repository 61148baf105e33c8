"""A recurrent model: torch's RNN, LSTM or GRU, with embedding and head of a Transformer.

    one stack    tokens_BT -> embedding -> cells -> hidden_BTD -> head -> logits, or a loss
    two stacks   source tokens_BT -> embedding -> cells -> outputs_BSD, last states
                 tokens_BT -> embedding -> cells from those states, attention -> hidden_BTD -> head

It is the baseline of Transformers, so everything around it is theirs: batches, objectives, engines,
checkpoints. Its decoding state has constant size for each row.

Not here: positions (a recurrence has order), recomputation and compilation (torch's cells are one
kernel).
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from pretrain.config.engine import EngineConfig
from pretrain.config.model import RecurrentConfig, RecurrentStackConfig
from pretrain.errors import ConfigError
from pretrain.model.parts.head import Head
from pretrain.model.recurrent.layers import (
    AdditiveScore,
    MultiplicativeScore,
    Segments,
    State,
    build_cells,
    call_cells,
    mark_padding,
    run_cells,
    split_rows,
    zero_state,
)
from pretrain.types import Batch, ModelOutput, StackRows


class RecurrentEncoderOutput(NamedTuple):
    """Output of an encoder: a vector a token, documents, and the state after each of N documents.

    `documents_BS` is the document of each token, or PADDING; None: every row is one document.
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
            # Half as many layers, twice as wide: [2 L, N, D/2] to [L, N, D].
            state = tuple(torch.cat((part[0::2], part[1::2]), dim=-1) for part in state)
        return RecurrentEncoderOutput(self.dropout(outputs_BSD), documents_BS, segments, state)


class DecoderState(NamedTuple):
    """State of a decoder after the last token of each row; cells: [layers, B, D] each.

    `fed_BD` is the last result of attention, if it is fed back.
    """

    cells: State
    fed_BD: Tensor | None = None


class _Source(NamedTuple):
    """Encoder outputs, their keys, and the source tokens visible to each target token."""

    memory_BSD: Tensor
    keys_BSD: Tensor
    visible_BTS: Tensor | None


class RecurrentDecoder(nn.Module):
    """Recurrent layers and attention to the source; `rnn` is torch's module.

        none       states = cells(x)                                     outputs = states
        luong      states = cells(x), context = attend(states)           outputs = tanh(W [context; states])
        input feeding   the same token by token; the cells read [x; last output]
        bahdanau   token by token: context = attend(last state), states = cells([x; context]);
                   outputs as Luong's

    Without feedback, all tokens go through the cells in one call.
    """

    # Luong et al. (2015) end with the tanh layer; Bahdanau et al. (2015) have a maxout layer there
    # that reads the token too, and begin with a layer over the encoder's backward state. Here both
    # begin with the encoder's last state and end with Luong's layer: only the score and its place
    # differ.

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()
        width, dropout = config.decoder.width, config.decoder.dropout
        self.rnn = build_cells(config.decoder, 2 * width if config.feeds_back else width)
        self.score: AdditiveScore | MultiplicativeScore | None = None
        if config.attention == "bahdanau":
            self.score = AdditiveScore(width)
        elif config.attention != "none":
            self.score = MultiplicativeScore(width, general=config.score == "general")
        self.readout = nn.Linear(2 * width, width, bias=False) if self.score is not None else None
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.feeds_back = config.feeds_back
        self.looks_before = config.attention == "bahdanau"

    def forward(
        self,
        x_BTD: Tensor,
        documents_BT: Tensor | None,
        encoded: RecurrentEncoderOutput | None,
        state: DecoderState | None,
    ) -> tuple[Tensor, DecoderState]:
        """Reads tokens; returns outputs_BTD, and the state after the last token of each row.

        With `state`, for decoding, the tokens continue it in any document.
        """
        segments = split_rows(x_BTD.shape[:2], documents_BT, x_BTD.device)
        first = self._first_state(x_BTD, segments, encoded, state)
        source = self._prepare_source(encoded, documents_BT)
        x_BTD = self.dropout(x_BTD)
        if self.feeds_back:
            assert source is not None, "a decoder with attention needs a source"
            fed_BD = None if state is None else state.fed_BD
            outputs_BTD, end = self._step_by_step(x_BTD, segments, first, source, fed_BD)
            return self.dropout(outputs_BTD), end
        outputs_BTD, cells = run_cells(self.rnn, x_BTD, segments, first)
        if source is not None:
            outputs_BTD = self._read_out(outputs_BTD, self._attend(outputs_BTD, source))
        last_B = segments.number_BT[:, -1]
        return self.dropout(outputs_BTD), DecoderState(tuple(part[:, last_B] for part in cells))

    def _first_state(
        self, x_BTD: Tensor, segments: Segments, encoded: RecurrentEncoderOutput | None, state: DecoderState | None
    ) -> State:
        """Returns the initial state of each document: zeros, or its source's or row's state."""
        first = zero_state(self.rnn, x_BTD, segments.count)
        if state is not None:
            continued_B = segments.number_BT[:, 0]
            pairs = zip(first, state.cells, strict=True)
            return tuple(zeros.index_copy(1, continued_B, past) for zeros, past in pairs)
        if encoded is None:
            return first
        same_NN = segments.row_N[:, None] == encoded.segments.row_N
        same_NN &= segments.document_N[:, None] == encoded.segments.document_N
        source_N = same_NN.int().argmax(dim=1)
        found_N1 = same_NN.any(dim=1, keepdim=True)
        return tuple(part[:, source_N] * found_N1 for part in encoded.state)

    def _prepare_source(self, encoded: RecurrentEncoderOutput | None, documents_BT: Tensor | None) -> _Source | None:
        if self.score is None or encoded is None:
            return None
        memory_BSD, documents_BS = encoded.outputs_BSD, encoded.documents_BS
        visible_BTS = None
        if documents_BT is not None or documents_BS is not None:
            # Without numbers every row is document 0.
            zero = torch.zeros(1, 1, device=memory_BSD.device)
            targets_BT = zero if documents_BT is None else documents_BT
            sources_BS = zero if documents_BS is None else documents_BS
            visible_BTS = targets_BT[:, :, None] == sources_BS[:, None]
        return _Source(memory_BSD, self.score.key(memory_BSD), visible_BTS)

    def align(self, states_BTD: Tensor, keys_BSD: Tensor, visible_BTS: Tensor | None) -> Tensor:
        """Returns weights_BTS: the softmax of the scores over the visible source tokens, all of them if None."""
        assert self.score is not None
        scores_BTS = self.score(states_BTD, keys_BSD)
        if visible_BTS is None:
            return scores_BTS.softmax(dim=-1)
        lowest = torch.finfo(scores_BTS.dtype).min
        weights_BTS = scores_BTS.masked_fill(~visible_BTS, lowest).softmax(dim=-1)
        # A target token without a source has equal weights now: its context is zeros.
        return weights_BTS.masked_fill(~visible_BTS, 0.0)

    def _attend(self, states_BTD: Tensor, source: _Source) -> Tensor:
        return self.align(states_BTD, source.keys_BSD, source.visible_BTS) @ source.memory_BSD

    def _read_out(self, states: Tensor, context: Tensor) -> Tensor:
        assert self.readout is not None
        return self.readout(torch.cat((context, states), dim=-1)).tanh()

    def _step_by_step(
        self, x_BTD: Tensor, segments: Segments, first: State, source: _Source, fed_BD: Tensor | None
    ) -> tuple[Tensor, DecoderState]:
        """Feeds the cells the context of the last state (Bahdanau), or the last output (Luong)."""
        begins_T = segments.begins_BT.any(dim=0).tolist()
        cells = tuple(part[:, segments.number_BT[:, 0]] for part in first)
        fed_BD = torch.zeros_like(x_BTD[:, 0]) if fed_BD is None else fed_BD
        visible_BTS = source.visible_BTS
        outputs = []
        # unbind, not slices: the gradient of a slice has the size of the whole.
        for step, x_BD in enumerate(x_BTD.unbind(dim=1)):
            if step > 0 and begins_T[step]:
                begins_B1 = segments.begins_BT[:, step, None]
                number_B = segments.number_BT[:, step]
                pairs = zip(first, cells, strict=True)
                cells = tuple(torch.where(begins_B1, new[:, number_B], old) for new, old in pairs)
                fed_BD = fed_BD.masked_fill(begins_B1, 0.0)
            if visible_BTS is not None and visible_BTS.shape[1] > 1:
                source = source._replace(visible_BTS=visible_BTS[:, step : step + 1])
            if self.looks_before:
                fed_BD = self._attend(cells[0][-1][:, None], source)[:, 0]
            inputs_BD = torch.cat((x_BD, fed_BD), dim=-1)
            states_B1D, cells = call_cells(self.rnn, inputs_BD[:, None], cells)
            context_BD = fed_BD if self.looks_before else self._attend(states_B1D, source)[:, 0]
            outputs.append(self._read_out(states_B1D[:, 0], context_BD))
            if not self.looks_before:
                fed_BD = outputs[-1]
        return torch.stack(outputs, dim=1), DecoderState(cells, fed_BD)


class RecurrentCache:
    """Decoding state of each row, its source, and the number of positions read so far."""

    def __init__(self) -> None:
        self.state: DecoderState | None = None
        self.encoded: RecurrentEncoderOutput | None = None
        self.length = 0

    def select(self, rows_B: Tensor) -> None:
        """Selects rows, in the given order; a row may occur several times."""
        if self.state is not None:
            cells, fed_BD = self.state
            fed_BD = None if fed_BD is None else fed_BD[rows_B]
            self.state = DecoderState(tuple(part[:, rows_B] for part in cells), fed_BD)
        if self.encoded is not None:
            outputs_BSD, documents_BS = self.encoded[:2]
            documents_BS = None if documents_BS is None else documents_BS[rows_B]
            selected = {"outputs_BSD": outputs_BSD[rows_B], "documents_BS": documents_BS}
            self.encoded = self.encoded._replace(**selected)


class Recurrent(nn.Module):
    """Embedding, one or two recurrent stacks, head; attributes as in a `Transformer`.

    Parameter names are part of the checkpoint format: `embedding.weight`,
    `decoder.rnn.weight_ih_l0` (torch's names), `decoder.score.query.weight`,
    `decoder.readout.weight`, `head.weight` (absent when tied).
    """

    is_causal = True

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()
        assert config.vocab_size is not None, "vocab_size is filled in from the tokenizer before the model is built"
        self.max_seq_len = config.max_seq_len
        self.vocab_size = config.vocab_size
        self.num_layers = config.decoder.layers
        self.special_tokens = config.special_tokens
        self.embedding = nn.Embedding(config.padded_vocab_size, config.decoder.width)
        self.encoder = None if config.encoder is None else RecurrentEncoder(config.encoder)
        self.decoder = RecurrentDecoder(config)
        self.head = Head(config.head_model)
        self.tied_embeddings = config.tied_embeddings
        self.tie()

    def tie(self) -> None:
        """See `Transformer.tie`."""
        if self.tied_embeddings:
            self.head.weight = self.embedding.weight

    def allow_swaps(self) -> None:
        """Drops torch's weak references to its weights, which prevent exchanging their content."""
        # They only serve to notice a replaced weight (`torch.func.functional_call`).
        for module in self.modules():
            if isinstance(module, nn.RNNBase):
                module._flat_weight_refs = [None] * len(module._flat_weights_names)

    def new_cache(self, capacity: int) -> RecurrentCache:
        """Returns an empty cache; its size does not depend on the capacity."""
        return RecurrentCache()

    def forward(self, batch: Batch, *, cache: RecurrentCache | None = None, logits: bool = True) -> ModelOutput:
        """Reads a batch; arguments as in `Transformer.forward`. Positions are not read."""
        assert batch.prefix_BT is None, "a recurrence reads in one direction"
        assert batch.tokens_BT.shape[1] <= self.max_seq_len
        documents_BT = mark_padding(batch.tokens_BT.shape, batch.documents_BT, batch.lengths_B)
        # The source is encoded at the first step of decoding only.
        encoded = cache.encoded if cache is not None and cache.length else self._encode(batch.source)
        past = None if cache is None else cache.state
        x_BTD = self.embedding(batch.tokens_BT)
        hidden_BTD, state = self.decoder(x_BTD, documents_BT, encoded, past)
        if cache is not None:
            cache.state = state
            cache.encoded = encoded
            cache.length += batch.tokens_BT.shape[1]
        return ModelOutput(hidden_BTD, self.head(hidden_BTD) if logits else None)

    def _encode(self, source: StackRows | None) -> RecurrentEncoderOutput | None:
        if self.encoder is None:
            return None
        assert source is not None, "a model of two stacks needs a source"
        documents_BS = mark_padding(source.tokens_BT.shape, source.documents_BT, source.lengths_B)
        return self.encoder(self.embedding(source.tokens_BT), documents_BS)


def check_engine(engine: EngineConfig) -> None:
    """Raises: ConfigError: The engine requests recomputation, offload or compilation of blocks, or FP8."""
    needs_blocks = {
        "activation_checkpointing": ("none",),
        "offload_activations": ("none",),
        "feedforward_tiles": (1,),
        "compile": (False, "auto"),
        "compile_mode": ("default",),
        "compile_scope": ("block",),
        "fp8": ("off", "auto"),
    }
    for key, plain in needs_blocks.items():
        value = getattr(engine, key)
        if value not in plain:
            raise ConfigError(
                f"engine.{key}={str(value).lower()} is for blocks of a Transformer, a model of "
                f"model.kind=recurrent has none",
                fix=f"leave engine.{key} out",
            )


def draw_recurrent(name: str, weight: Tensor, config: RecurrentConfig, generator: torch.Generator) -> None:
    """Sets one parameter. As a baseline of Transformers it should be at its best."""
    part = name.rpartition(".")[2]
    if part.startswith("bias"):
        weight.zero_()
        # One of the two biases of an LSTM's forget gate is 1: it keeps its state until it learns to
        # forget (Jozefowicz et al. 2015).
        if part.startswith("bias_ih") and config.decoder.cell == "lstm":
            weight.chunk(4)[1].fill_(1.0)  # torch's order: input, forget, cell, output
    elif part.startswith("weight_hh"):
        # Orthogonal (Saxe et al. 2014), else a plain RNN forgets within a few steps.
        for gate in weight.split(weight.shape[1]):
            nn.init.orthogonal_(gate, generator=generator)
    elif name == "embedding.weight":
        # torch's N(0, 1): much smaller ones leave a cell blind to its input for hundreds of steps.
        std = weight.shape[1] ** -0.5 if config.tied_embeddings else 1.0
        weight.normal_(0.0, std, generator=generator)
    else:
        # torch's: uniform by the fan-in.
        bound = weight.shape[1] ** -0.5
        weight.uniform_(-bound, bound, generator=generator)
