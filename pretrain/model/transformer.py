"""The Transformer: read this file first.

    one stack    tokens_BT -> embedding -> stack (positions, blocks, norms) -> hidden_BTD -> head -> logits, or a loss
    two stacks   source tokens_BS -> embedding -> encoder -> hidden_BSD
                 tokens_BT -> embedding -> decoder, which reads hidden_BSD in every block -> hidden_BTD -> head

A decoder is causal (GPT), an encoder is not (BERT), both together make a T5, all in the same code. Differences between
families are fields of `ModelConfig`: no code tests for a family.

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

    Parameter names are part of the checkpoint format: `embedding.weight`, `decoder.position.weight` (learned),
    `decoder.blocks.3.attention.qkv.weight`, `decoder.norm.weight`, `head.weight` (when tied it is the embedding's, and
    absent from `named_parameters`). Values are unset: `init_weights` or a checkpoint fills them.

    Attributes:
        max_seq_len: Longest sequence of either stack.
        vocab_size: Number of token ids, without padding of the table.
        num_layers: Blocks of the last stack, whose output the head reads.
        is_causal: The last stack is a decoder.
        special_tokens: Ids of special tokens.
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
        """Ties the head's weight to the embedding if the config does; needed again after a move to another device."""
        if self.tied_embeddings and self.head is not None:
            self.head.weight = self.embedding.weight

    @property
    def stacks(self) -> list[Stack]:
        """The stacks of the model: encoder, decoder, or both."""
        return [stack for stack in (self.encoder, self.decoder) if stack is not None]

    def new_cache(self, capacity: int) -> KVCache:
        """Returns an empty cache for `capacity` positions."""
        return KVCache(self.num_layers, capacity)

    def forward(self, batch: Batch, *, cache: KVCache | None = None, logits: bool = True) -> ModelOutput:
        """Reads a batch.

        Args:
            batch: Tokens, with documents of packed or padded rows, and the source for two stacks. Targets are not read.
            cache: For decoding: the batch continues the cached positions and is appended to the cache. The source is
                encoded at the first step only.
            logits: Run the head. Objectives run it themselves, chunk by chunk, without materialising all logits.
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
        """Returns the input of a label head; at the first position of a document, its summary."""
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
        ConfigError: The attention backend does not support the model or the device.
    """
    # On the meta device first: torch's own initialisation then costs nothing and draws no random numbers.
    with torch.device("meta"):
        model = Transformer(config, engine, device)
    if storage and device.type != "meta":
        model.to_empty(device=device)
        model.tie()
    if engine.compile:
        for stack in model.stacks:
            for block in stack.blocks:
                # Only the forward: an engine's hooks stay outside of the graph, and parameter names do not change.
                block.forward = torch.compile(block.forward)
    return model
