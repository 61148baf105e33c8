"""The Transformer: read this file first.

    one stack    tokens_BT -> embedding -> stack (positions, blocks, norms) -> hidden_BTD -> head -> logits, or a loss
    two stacks   source tokens_BS -> embedding -> encoder -> hidden_BSD
                 tokens_BT -> embedding -> decoder, which reads hidden_BSD in every block -> hidden_BTD -> head

A decoder is causal (GPT), an encoder is not (BERT), both together are a T5; all is the same code. What a family varies
is data in `ModelConfig`: each part builds what the config names, and nothing asks for a family.

Not here: losses (`objective/`), sampling (`generate/`), sharding and mixed precision (`engine/`).
"""

import torch
from torch import Tensor, nn

from pretrain.config.engine import EngineConfig
from pretrain.config.model import ModelConfig, StackConfig
from pretrain.model.attention import KVCache
from pretrain.model.heads import LabelHead, Pooler, average_documents, build_head
from pretrain.model.stack import EncoderOutput, Stack, StackRows
from pretrain.types import Batch, ModelOutput, SourceBatch


class Transformer(nn.Module):
    """Embedding, one or two stacks, head.

    Parameter names are those of checkpoints and stay: `embedding.weight`, `decoder.position.weight` (learned),
    `decoder.blocks.3.attention.qkv.weight`, `decoder.norm.weight`, `head.weight` (absent from `named_parameters` when
    tied: it is the embedding's). The values are not set here: `init_weights`, or a checkpoint, does.

    Attributes:
        max_seq_len: Longest sequence that can be read, by either stack.
        vocab_size: Number of ids, padding of the table not counted.
        num_layers: Blocks of the stack that the head reads.
        is_causal: Whether that stack is a decoder.
        special_tokens: Ids with a meaning.
    """

    def __init__(self, config: ModelConfig, engine: EngineConfig, device: torch.device) -> None:
        super().__init__()
        assert config.vocab_size is not None, "vocab_size is filled in from the tokenizer before the model is built"
        width = config.last_stack.width
        self.max_seq_len, self.vocab_size = config.max_seq_len, config.vocab_size
        self.num_layers, self.is_causal = config.last_stack.layers, config.decoder is not None
        self.special_tokens = config.special_tokens
        self.embedding = nn.Embedding(config.padded_vocab_size, width)
        self.embedding_scale = width**0.5 if config.scaled_embeddings else 1.0

        def build_stack(stack: StackConfig | None, causal: bool) -> Stack | None:
            if stack is None:
                return None
            reads_encoder = causal and config.encoder is not None
            return Stack(
                stack, engine, max_seq_len=config.max_seq_len, causal=causal, reads_encoder=reads_encoder, device=device
            )

        self.encoder, self.decoder = build_stack(config.encoder, False), build_stack(config.decoder, True)
        self.head = build_head(config)
        self.averages = config.head.mean
        self.pooler = Pooler(width) if config.pooler else None
        self.tied_embeddings = config.tied_embeddings
        self.tie()

    def tie(self) -> None:
        """Makes the head's weight the embedding's again, where the config ties them; moving to a device undoes it."""
        if self.tied_embeddings and self.head is not None:
            self.head.weight = self.embedding.weight

    @property
    def stacks(self) -> list[Stack]:
        """The encoder and the decoder, as far as there are."""
        return [stack for stack in (self.encoder, self.decoder) if stack is not None]

    def new_cache(self, capacity: int) -> KVCache:
        """Returns an empty cache for `capacity` positions."""
        return KVCache(self.num_layers, capacity)

    def forward(self, batch: Batch, *, cache: KVCache | None = None, logits: bool = True) -> ModelOutput:
        """Reads a batch.

        Args:
            batch: Tokens, and for packed or padded rows where their documents are; with two stacks the source, too.
                Targets are not looked at.
            cache: Decoding: the batch continues what the cache holds, and is added to it. The source is encoded at the
                first step only.
            logits: Whether to run the head; an objective does so itself, without ever holding all logits.
        """
        rows = StackRows(batch.positions_BT, batch.documents_BT, batch.lengths_B, batch.prefix_BT, batch.token_types_BT)
        encoded = None
        if self.encoder is not None and self.decoder is not None:
            assert batch.source is not None, "a model of two stacks needs a source"
            encoded = self._encode(batch.source, skip=cache is not None and cache.length > 0)
        hidden_BTD = self.stacks[-1](self._embed(batch.tokens_BT), rows, encoded, cache)
        if isinstance(self.head, LabelHead):
            hidden_BTD = self._summarize(hidden_BTD, batch)
        return ModelOutput(hidden_BTD, self.head(hidden_BTD) if logits and self.head is not None else None)

    def _embed(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = self.embedding(tokens_BT)
        return x_BTD if self.embedding_scale == 1.0 else x_BTD * self.embedding_scale

    def _summarize(self, hidden_BTD: Tensor, batch: Batch) -> Tensor:
        """Returns what labels are read from: at a document's first position, what stands for the document."""
        if self.averages:
            documents_BT = batch.documents_BT
            if documents_BT is None and batch.lengths_B is not None:
                columns = torch.arange(hidden_BTD.shape[1], device=hidden_BTD.device)
                documents_BT = torch.where(columns < batch.lengths_B[:, None], 0, -1)
            hidden_BTD = average_documents(hidden_BTD, documents_BT)
        if self.pooler is not None:
            hidden_BTD = self.pooler(hidden_BTD.flatten(0, 1)[:, None]).view_as(hidden_BTD)
        return hidden_BTD

    def _encode(self, source: SourceBatch, *, skip: bool) -> EncoderOutput:
        rows = StackRows(source.positions_BS, source.documents_BS, source.lengths_B)
        length = source.tokens_BS.shape[1]
        if skip:
            return EncoderOutput(None, length, rows)
        assert self.encoder is not None
        return EncoderOutput(self.encoder(self._embed(source.tokens_BS), rows), length, rows)


def build_transformer(config: ModelConfig, engine: EngineConfig, device: torch.device, *, storage: bool) -> Transformer:
    """Builds a Transformer with its weights unset; arguments as `build_model`.

    Raises:
        ConfigError: The attention backend cannot serve the model or the device: the reason is given.
    """
    # On the meta device first, so that torch's own initialisation costs nothing and draws no random number.
    with torch.device("meta"):
        model = Transformer(config, engine, device)
    if storage and device.type != "meta":
        model.to_empty(device=device)
        model.tie()
    if engine.compile:
        for stack in model.stacks:
            for block in stack.blocks:
                # The forward only: hooks that an engine puts on a block stay outside the graph. Parameter names stay.
                block.forward = torch.compile(block.forward)
    return model
