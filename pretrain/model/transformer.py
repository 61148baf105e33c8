"""The Transformer: read this file first.

    tokens_BT -> embedding -> stack (position, blocks, final norm) -> hidden_BTD -> head -> logits_BTV, or a loss

A stack is causal (decoder: GPT) or not (encoder: BERT); both are the same code. What a family varies is data in
`StackConfig`: each part below builds what the config names, and nothing asks for a family.

Not here: losses (`objective/`), sampling (`generate/`), sharding and mixed precision (`engine/`). Two stacks joined by
cross attention are refused for now.
"""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pretrain.config.model import ModelConfig, StackConfig
from pretrain.errors import ConfigError
from pretrain.model.backends import build_backend
from pretrain.model.backends.backend import AttentionBackend
from pretrain.model.block import Block
from pretrain.model.cache import KVCache
from pretrain.model.heads import LanguageModelHead
from pretrain.model.norm import build_norm
from pretrain.model.position import build_position
from pretrain.types import AttentionMask, Batch, ModelOutput


class Stack(nn.Module):
    """Blocks, with what they share: positions, the mask, dropout on the input, a final norm (pre-norm stacks only).

    Args:
        config: The stack.
        max_seq_len: Longest sequence.
        causal: Position t sees only positions up to t.
        backend: Attention kernel.
        recompute: Keep only each block's input for the backward pass, and run the block again there.
    """

    def __init__(
        self, config: StackConfig, *, max_seq_len: int, causal: bool, backend: AttentionBackend, recompute: bool
    ) -> None:
        super().__init__()
        self.max_seq_len, self.causal, self.backend, self.recompute = max_seq_len, causal, backend, recompute
        self.draws_noise = config.dropout > 0
        self.position = build_position(config, max_seq_len)
        self.dropout = nn.Dropout(config.dropout) if config.dropout else nn.Identity()
        self.blocks = nn.ModuleList(Block(config, backend) for _ in range(config.layers))
        self.norm = build_norm(config) if config.norm_placement == "pre" else nn.Identity()

    def forward(
        self, x_BTD: Tensor, positions_BT: Tensor | None, documents_BT: Tensor | None, cache: KVCache | None
    ) -> Tensor:
        """Maps embeddings to hidden states, [B, T, D] to the same.

        Args:
            x_BTD: Embeddings.
            positions_BT: Position of each token in its document; None: consecutive, after those in the cache.
            documents_BT: Document numbers of packed rows; None: a row is one document.
            cache: Keys and values of earlier positions, extended by these T. Not with `documents_BT`.
        """
        rows, queries, _ = x_BTD.shape
        offset = 0 if cache is None else cache.length
        assert offset + queries <= self.max_seq_len, f"{offset + queries} positions, at most {self.max_seq_len}"
        mask = AttentionMask(self.causal, documents_BT, query_offset=offset)
        prepared = self.backend.prepare(mask, rows=rows, queries=queries, keys=offset + queries, device=x_BTD.device)
        x_BTD, rotation = self.position(x_BTD, positions_BT, offset)
        x_BTD = self.dropout(x_BTD)
        recompute = self.recompute and torch.is_grad_enabled()
        for number, block in enumerate(self.blocks):
            layer_cache = None if cache is None else cache.layers[number]
            if recompute:
                x_BTD = checkpoint(
                    block, x_BTD, prepared, rotation, layer_cache,
                    use_reentrant=False, preserve_rng_state=self.draws_noise,
                )  # fmt: skip
            else:
                x_BTD = block(x_BTD, prepared, rotation, layer_cache)
        return self.norm(x_BTD)


class Transformer(nn.Module):
    """Embedding, one stack, head.

    Parameter names are those of checkpoints and stay: `embedding.weight`, `decoder.position.weight` (learned),
    `decoder.blocks.3.attention.qkv.weight`, `decoder.norm.weight`, `head.weight` (absent from `named_parameters` when
    tied: it is the embedding's). The values are not set here: `init_weights`, or a checkpoint, does.

    Attributes:
        max_seq_len: Longest sequence that can be read.
        vocab_size: Number of ids, padding of the table not counted.
        num_layers: Blocks.
        is_causal: Whether the stack is a decoder.
    """

    def __init__(self, config: ModelConfig, *, attention: str, recompute: bool, device: torch.device) -> None:
        super().__init__()
        stack = _only_stack(config)
        assert config.vocab_size is not None, "vocab_size is filled in from the tokenizer before the model is built"
        self.max_seq_len, self.vocab_size, self.num_layers = config.max_seq_len, config.vocab_size, stack.layers
        self.is_causal = config.decoder is not None
        backend = build_backend(attention, device)
        built = Stack(
            stack, max_seq_len=config.max_seq_len, causal=self.is_causal, backend=backend, recompute=recompute
        )
        self.embedding = nn.Embedding(config.padded_vocab_size, stack.width)
        self.encoder = None if self.is_causal else built
        self.decoder = built if self.is_causal else None
        self.head = LanguageModelHead(stack.width, config.vocab_size, config.padded_vocab_size)
        self.tied_embeddings = config.tied_embeddings
        self.tie()

    def tie(self) -> None:
        """Makes the head's weight the embedding's again, where the config ties them; moving to a device undoes it."""
        if self.tied_embeddings:
            self.head.weight = self.embedding.weight

    @property
    def stack(self) -> Stack:
        """The one stack."""
        stack = self.decoder if self.decoder is not None else self.encoder
        assert stack is not None
        return stack

    def forward(self, batch: Batch, *, cache: KVCache | None = None, logits: bool = True) -> ModelOutput:
        """Reads a batch.

        Args:
            batch: Tokens, and for packed rows their positions and documents. Targets are not looked at.
            cache: Decoding: the batch continues what the cache holds, and is added to it.
            logits: Whether to run the head; an objective does so itself, without ever holding all logits.
        """
        hidden_BTD = self.stack(self.embedding(batch.tokens_BT), batch.positions_BT, batch.documents_BT, cache)
        return ModelOutput(hidden_BTD, self.head(hidden_BTD) if logits else None)


def _only_stack(config: ModelConfig) -> StackConfig:
    if config.encoder is not None and config.decoder is not None:
        raise ConfigError(
            "model.encoder and model.decoder are both given: a model of two stacks cannot be built yet",
            fix="remove one of them",
        )
    stack = config.decoder or config.encoder
    assert stack is not None
    return stack


def build_model(
    config: ModelConfig, *, attention: str, activation_checkpointing: str, compile: bool, device: torch.device
) -> Transformer:
    """Builds a model on `device` with its weights unset; on the meta device without storage.

    Args:
        config: The model; `vocab_size` must be known.
        attention: `engine.attention`.
        activation_checkpointing: `none` or `full`.
        compile: torch.compile each block, in place: parameter names stay.
        device: Where the parameters live.

    Raises:
        ConfigError: The model has two stacks, or the attention backend cannot serve the device.
    """
    # On the meta device first, so that torch's own initialisation costs nothing and draws no random number.
    with torch.device("meta"):
        model = Transformer(config, attention=attention, recompute=activation_checkpointing == "full", device=device)
    if device.type != "meta":
        model.to_empty(device=device)
        model.tie()
    if compile:
        for block in model.stack.blocks:
            block.compile()
    return model
