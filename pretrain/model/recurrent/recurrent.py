"""The recurrent model, and its decoding state: of constant size for each row."""

import torch
from torch import Tensor, nn

from pretrain.config.engine import EngineConfig
from pretrain.config.recurrent import RecurrentConfig
from pretrain.errors import ConfigError
from pretrain.model.heads import LanguageModelHead
from pretrain.model.recurrent.layers import real_documents
from pretrain.model.recurrent.stacks import DecoderState, RecurrentDecoder, RecurrentEncoder, RecurrentEncoderOutput
from pretrain.types import Batch, ModelOutput, SourceBatch


class RecurrentCache:
    """The state of each row, and the source.

    Attributes:
        state: None before the first token.
        encoded: None without an encoder.
        length: Positions read so far.
    """

    def __init__(self) -> None:
        self.state: DecoderState | None = None
        self.encoded: RecurrentEncoderOutput | None = None
        self.length = 0

    def select(self, rows_B: Tensor) -> None:
        """Keeps the given rows, in their order; a row may come several times."""
        if self.state is not None:
            self.state = self.state.select(rows_B)
        if self.encoded is not None:
            documents_BS = self.encoded.documents_BS
            self.encoded = self.encoded._replace(
                outputs_BSD=self.encoded.outputs_BSD[rows_B],
                documents_BS=None if documents_BS is None else documents_BS[rows_B],
            )


# A recurrent model: torch's own RNN, LSTM or GRU between the embedding and the head of a
# Transformer.
#
#     one stack    tokens_BT -> embedding -> cells -> hidden_BTD -> head -> logits, or a loss
#     two stacks   source tokens_BS -> embedding -> cells -> outputs_BSD, last states
#                  tokens_BT -> embedding -> cells that begin with those states, attention -> hidden_BTD -> head
#
# It is what Transformers are compared with, so everything around it is theirs: batches, objectives,
# engines, checkpoints.
#
# Not here: positions (order is what a recurrence has), recomputation and compilation (torch's cells
# are one kernel).


class Recurrent(nn.Module):
    """Embedding, one or two recurrent stacks, head.

    Parameter names are those of checkpoints and stay: `embedding.weight`, `decoder.rnn.weight_ih_l0` (torch's names),
    `decoder.score.query.weight`, `decoder.readout.weight`, `head.weight` (absent when tied).

    Attributes:
        max_seq_len, vocab_size, num_layers, is_causal, special_tokens: As those of a `Transformer`.
    """

    is_causal = True

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()
        assert config.vocab_size is not None, "vocab_size is filled in from the tokenizer before the model is built"
        self.max_seq_len, self.vocab_size = config.max_seq_len, config.vocab_size
        self.num_layers, self.special_tokens = config.decoder.layers, config.special_tokens
        self.embedding = nn.Embedding(config.padded_vocab_size, config.decoder.width)
        self.encoder = None if config.encoder is None else RecurrentEncoder(config.encoder)
        self.decoder = RecurrentDecoder(config)
        self.head = LanguageModelHead(config.head_model)
        self.tied_embeddings = config.tied_embeddings
        self.tie()

    def tie(self) -> None:
        """As `Transformer.tie`."""
        if self.tied_embeddings:
            self.head.weight = self.embedding.weight

    def new_cache(self, capacity: int) -> RecurrentCache:
        """Returns an empty cache; a state needs no room for what is to come."""
        return RecurrentCache()

    def forward(self, batch: Batch, *, cache: RecurrentCache | None = None, logits: bool = True) -> ModelOutput:
        """Reads a batch.

        Args:
            batch: Tokens, and for packed or padded rows where their documents are; with two stacks the source, too.
                Targets and positions are not looked at.
            cache: Decoding: the batch continues what the cache holds, and is added to it. The source is encoded at the
                first step only.
            logits: Whether to run the head.
        """
        assert batch.prefix_BT is None, "a recurrence reads in one direction"
        assert batch.tokens_BT.shape[1] <= self.max_seq_len
        documents_BT = real_documents(batch.tokens_BT.shape, batch.documents_BT, batch.lengths_B)
        encoded = cache.encoded if cache is not None and cache.length else self._encode(batch.source)
        past = None if cache is None else cache.state
        hidden_BTD, state = self.decoder(self.embedding(batch.tokens_BT), documents_BT, encoded, past)
        if cache is not None:
            cache.state, cache.encoded = state, encoded
            cache.length += batch.tokens_BT.shape[1]
        return ModelOutput(hidden_BTD, self.head(hidden_BTD) if logits else None)

    def _encode(self, source: SourceBatch | None) -> RecurrentEncoderOutput | None:
        if self.encoder is None:
            return None
        assert source is not None, "a model of two stacks needs a source"
        documents_BS = real_documents(source.tokens_BS.shape, source.documents_BS, source.lengths_B)
        return self.encoder(self.embedding(source.tokens_BS), documents_BS)


def build_recurrent(config: RecurrentConfig, engine: EngineConfig, device: torch.device, *, storage: bool) -> Recurrent:
    """Builds a recurrent model with its weights unset; arguments as `build_model`.

    Raises:
        ConfigError: The engine asks for what torch's cells have not: recomputation or compilation.
    """
    for key, plain in (("activation_checkpointing", "none"), ("compile", False)):
        if getattr(engine, key) != plain:
            raise ConfigError(
                f"engine.{key}={str(getattr(engine, key)).lower()} is for blocks of a Transformer, a model of "
                f"model.kind=recurrent has none",
                fix=f"leave engine.{key} out",
            )
    with torch.device("meta"):
        model = Recurrent(config)
    if storage and device.type != "meta":
        model.to_empty(device=device)
        model.tie()
    if not storage:
        _let_go(model)
    return model


def _let_go(model: nn.Module) -> None:
    """Drops torch's weak references to its cells' weights, which nothing may hold while their content is exchanged.

    They only serve to notice that a weight was replaced by another object (`torch.func.functional_call`).
    """
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module._flat_weight_refs = [None] * len(module._flat_weights_names)
