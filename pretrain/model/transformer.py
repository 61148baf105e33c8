"""The Transformer: read this file first.

    one stack    tokens_BT -> embedding -> stack (positions, blocks, norms) -> hidden_BTD
                 -> head -> logits, or a loss
    images       pixels_BCYX -> patches -> stack -> hidden_BTD -> head of labels
    restored     visible patches -> encoder -> hidden_BSD -> bridge -> their places among T, a mask
                 vector in the others -> decoder -> head of pixels (He et al. 2022, MAE)
    two stacks   source tokens_BT -> embedding -> encoder -> hidden_BSD
                 tokens_BT -> embedding -> decoder, reads hidden_BSD in every block -> head
    captions     pixels_BCYX -> patches -> encoder -> bridge, where widths differ -> hidden_BSD
                 tokens_BT -> embedding -> decoder, as of two stacks

A decoder is causal (GPT), an encoder is not (BERT), both together make a T5, all in the same code;
the decoder of a head of pixels is not causal, and has no cross attention.
Differences between families are fields of `ModelConfig`: no code tests for a family.

Not here: losses (`objective/`), sampling (`generation/`), sharding and mixed precision (`engine/`).
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from pretrain.config.engine import EngineConfig
from pretrain.config.model import ModelConfig
from pretrain.model.further_tokens import TokenPredictors
from pretrain.model.kv_cache import KVCache
from pretrain.model.parts.head import Head, Pooler, VectorHead
from pretrain.model.parts.ngrams import NgramEmbedding
from pretrain.model.parts.patch_embedding import PatchEmbedding
from pretrain.model.stack import EncoderOutput, Stack, StackInput
from pretrain.types import Batch, ModelOutput, StackRows


def _build_embeddings(config: ModelConfig) -> tuple[nn.Embedding | PatchEmbedding, PatchEmbedding | None]:
    patches = None
    if config.input is not None:
        patches = PatchEmbedding(config.input, config.input_stack.width)
        if not config.captions:
            return patches, None
    return nn.Embedding(config.padded_vocab_size, config.last_stack.table_width), patches


class Transformer(nn.Module):
    """Embedding, one or two stacks, head.

    Parameter names are part of the checkpoint format: `embedding.weight` (of images
    `embedding.projection.weight`, its bias, `embedding.before.weight`; of images with captions the
    same of `patches`, beside the table of tokens), `ngram_embedding.weight`,
    `decoder.position.weight` (learned), `decoder.blocks.3.attention.qkv.weight`,
    `decoder.norm.weight`, `head.weight` (when tied it is the embedding's, and absent from
    `named_parameters`); between stacks of different widths `bridge.weight` and its bias; of a head
    of pixels `mask.weight`, the vector of a hidden patch; of modules that predict further tokens
    `multi_token.inputs.0.projection.weight`, the norms beside it, `multi_token.blocks.0.` as in a
    stack, and `multi_token.norms.0.weight`; of a generator of replaced tokens `generator.` and the
    names of a model, but for those that it shares. Values are unset: `init_weights` or a checkpoint fills
    them.

    Attributes:
        max_seq_len: Longest sequence of either stack.
        vocab_size: Number of token ids, without padding of the table; 0 of a model of images.
        num_layers: Blocks of the last stack, the input of the head.
        is_causal: The last stack is a decoder.
        generator: Model of masked tokens, whose samples replace them in training; None: there is none.
        special_tokens: Ids of special tokens.
    """

    def __init__(self, config: ModelConfig, engine: EngineConfig, device: torch.device) -> None:
        super().__init__()
        width = config.last_stack.width
        self.max_seq_len = config.max_seq_len
        self.vocab_size = config.vocab_size or 0
        self.num_layers = config.last_stack.layers
        self.is_causal = config.decoder is not None and not config.restores
        self.special_tokens = config.special_tokens
        self.embedding, self.patches = _build_embeddings(config)
        table_width = config.last_stack.table_width
        self.ngram_embedding = None
        if config.ngram_embeddings:
            self.ngram_embedding = NgramEmbedding(config.ngram_embeddings, config.ngram_rows, table_width)
        scale = table_width**0.5 if config.scaled_embeddings else 1.0
        self.embedding_scale = config.embedding_scale * scale
        self.encoder = Stack(config, "encoder", engine, device) if config.encoder is not None else None
        self.decoder = Stack(config, "decoder", engine, device) if config.decoder is not None else None
        self.multi_token = None
        if config.multi_token and self.decoder is not None:
            of_decoder = (config.last_stack, self.decoder.backend, engine)
            self.multi_token = TokenPredictors(*of_decoder, config.multi_token)
        self.bridge = nn.Linear(config.input_stack.width, width) if config.has_bridge else None
        self.mask = nn.Embedding(1, width) if config.restores else None
        self.head: Head | VectorHead | None = None
        if config.head.record.pools:
            self.head = VectorHead(config)
        elif config.head.record.has_scores:
            self.head = Head(config)
        self.averages = config.head.mean
        self.pooler = Pooler(width, config.pooler_activation) if config.pooler else None
        self.generator = Transformer(config.generator, engine, device) if config.generator_heads else None
        self._generator_reads = config.generator_reads
        self.tied_embeddings = config.tied_embeddings
        self.shared: Any = None  # ranks that share its matrices, `TensorRanks`
        self.tie()

    def tie(self) -> None:
        """Ties the head to the embedding if the config does, and a generator's tables to the model's.

        Needed again after `to_empty`.
        """
        # The same object in both modules: ZeRO stage 3 gathers weights module by module.
        if self.generator is not None:
            for name, weight in self.named_parameters():
                if name.startswith(self._generator_reads):
                    module, _, kind = name.rpartition(".")
                    setattr(self.generator.get_submodule(module), kind, weight)
            self.generator.tie()
        if self.tied_embeddings and self.head is not None:
            assert isinstance(self.embedding, nn.Embedding), "patches have no table"
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
            batch: Tokens, with documents of packed or padded rows, and the source for two stacks.
                Targets are not read.
            cache: For decoding: the batch continues the cached positions and is appended to the
                cache. The source is encoded at the first step only.
            logits: Run the head. Objectives run it chunk by chunk, without materialising all
                logits.
        """
        if self.shared is not None:
            self.shared.has_columns = batch.columns is not None
        encoded = None
        if self.mask is not None:
            x_BTD = self._restore(batch)
        elif isinstance(self.embedding, PatchEmbedding):
            x_BTD = self.embedding(batch.pixels_BCYX)
        else:
            if self.encoder is not None and self.decoder is not None:
                encoded = self._encode(batch, skip=cache is not None and cache.length > 0)
            x_BTD = self._embed(batch.tokens_BT, batch.positions_BT, cache)
        predictors = self.multi_token if self.training and cache is None else None
        output: ModelOutput = self.stacks[-1](StackInput(x_BTD, batch, encoded, cache), predictors)
        if self.head is not None and self.head.summarizes:
            output = output._replace(hidden_BTD=self._summarize(output.hidden_BTD, batch))
        if not logits or self.head is None:
            return output
        return output._replace(logits_BTV=self.head(output.hidden_BTD))

    def _embed(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor | None,
        cache: KVCache | None = None,
    ) -> Tensor:
        x_BTD = self.embedding(tokens_BT)
        if self.ngram_embedding is not None:
            x_BTD = x_BTD + self.ngram_embedding(tokens_BT, positions_BT, cache)
        return x_BTD if self.embedding_scale == 1.0 else x_BTD * self.embedding_scale

    def _restore(self, batch: Batch) -> Tensor:
        assert self.bridge is not None and self.mask is not None
        source = batch.source
        assert source is not None and source.positions_BT is not None, "the places of what is visible"
        places_BS = source.positions_BT
        x_BSD = self.embedding(batch.pixels_BCYX, places_BS)
        x_BSD = self.bridge(self._hidden(x_BSD, source))
        mask_D = self.mask(torch.zeros_like(batch.tokens_BT[:1, :1])).to(x_BSD.dtype)
        x_BTD = mask_D.expand(*batch.tokens_BT.shape, -1)
        return x_BTD.scatter(1, places_BS[..., None].expand_as(x_BSD), x_BSD)

    def _hidden(self, x_BSD: Tensor, rows: StackRows) -> Tensor:
        assert self.encoder is not None
        return self.encoder(StackInput(x_BSD, rows)).hidden_BTD

    def _encode(self, batch: Batch, *, skip: bool) -> EncoderOutput:
        if self.patches is not None:
            return self._encode_pixels(batch, skip=skip)
        source = batch.source
        assert source is not None, "a model of two stacks needs a source"
        rows = replace(source, columns=batch.columns, window=batch.window)
        hidden_BSD = None
        if not skip:
            x_BSD = self._embed(source.tokens_BT, source.positions_BT)
            hidden_BSD = self._hidden(x_BSD, rows)
        return EncoderOutput(hidden_BSD, source.tokens_BT.shape[1], rows)

    def _encode_pixels(self, batch: Batch, *, skip: bool) -> EncoderOutput:
        assert self.encoder is not None and self.patches is not None
        rows = StackRows(batch.tokens_BT[:, :0])  # patches have no tokens
        hidden_BSD = None
        if not skip:
            assert batch.pixels_BCYX is not None, "captions need an image"
            hidden_BSD = self._hidden(self.patches(batch.pixels_BCYX), rows)
            if self.bridge is not None:
                hidden_BSD = self.bridge(hidden_BSD)
        return EncoderOutput(hidden_BSD, self.encoder.max_seq_len, rows)

    def _summarize(self, hidden_BTD: Tensor, batch: Batch) -> Tensor:
        """Returns the input of a label head; at the first position of a document, its summary."""
        if self.averages or self.is_causal:
            documents_BT = batch.documents_BT
            if documents_BT is None and batch.lengths_B is not None:
                columns = torch.arange(hidden_BTD.shape[1], device=hidden_BTD.device)
                documents_BT = torch.where(columns < batch.lengths_B[:, None], 0, -1)
            summary = _average_documents if self.averages else _last_of_documents
            hidden_BTD = summary(hidden_BTD, documents_BT)
        if self.pooler is not None:
            hidden_BTD = self.pooler(hidden_BTD.flatten(0, 1)[:, None]).view_as(hidden_BTD)
        return hidden_BTD


def _last_of_documents(hidden_BTD: Tensor, documents_BT: Tensor | None) -> Tensor:
    """Returns the last hidden state of each token's document, [B, T, D]; what causal attention knows all of it by."""
    if documents_BT is None:
        return hidden_BTD[:, -1:].expand_as(hidden_BTD)
    length = hidden_BTD.shape[1]
    columns_BT = torch.arange(length, device=hidden_BTD.device).expand_as(documents_BT)
    # A row has at most T documents; its padding counts as one more.
    documents_BT = torch.where(documents_BT < 0, length, documents_BT).long()
    last_BP = columns_BT.new_zeros(len(documents_BT), length + 1)
    last_BP = last_BP.scatter_reduce(1, documents_BT, columns_BT, "amax")
    return hidden_BTD.gather(1, last_BP.gather(1, documents_BT)[..., None].expand_as(hidden_BTD))


def _average_documents(hidden_BTD: Tensor, documents_BT: Tensor | None) -> Tensor:
    """Returns the mean over each token's document, [B, T, D], computed in fp32."""
    exact = torch.promote_types(hidden_BTD.dtype, torch.float32)
    if documents_BT is None:
        means = hidden_BTD.mean(dim=1, keepdim=True, dtype=exact).to(hidden_BTD.dtype)
        return means.expand_as(hidden_BTD)
    num_rows, length, width = hidden_BTD.shape
    first_B1 = torch.arange(num_rows, device=hidden_BTD.device)[:, None] * (length + 1)
    # A row has at most T documents; its padding counts as one more.
    place_P = torch.where(documents_BT < 0, length, documents_BT).add(first_B1).flatten()
    sums = torch.zeros(num_rows * (length + 1), width, dtype=exact, device=hidden_BTD.device)
    sums = sums.index_add(0, place_P, hidden_BTD.flatten(0, 1).to(exact))
    counts = torch.bincount(place_P, minlength=len(sums)).to(exact)
    means = sums / counts.clamp(min=1)[:, None]
    return means.index_select(0, place_P).view_as(hidden_BTD).to(hidden_BTD.dtype)
