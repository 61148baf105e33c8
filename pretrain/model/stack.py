"""A stack of blocks with shared positions and masks, and activation checkpointing (Chen et al. 2016).

Saved for the backward pass of a block, by `engine.activation_checkpointing`:

    none        everything that autograd saves
    full        the block's input; the rest is recomputed
    selective   the block's input and the results of matrix products and attention; the rest is recomputed

With `activation_checkpointing_every: n`, only every n-th block is checkpointed.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from pretrain.config.engine import EngineConfig
from pretrain.config.model import StackConfig
from pretrain.model.attention import KVCache
from pretrain.model.backends import build_backend
from pretrain.model.backends.backend import AttentionNeeds, DistanceBias
from pretrain.model.block import Block, Memory, build_norm
from pretrain.model.position import build_position
from pretrain.types import AttentionMask

_KEPT_OPERATIONS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}


def _policy(context: Any, operation: Any, *arguments: Any, **named: Any) -> CheckpointPolicy:
    if operation in _KEPT_OPERATIONS:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


class Recompute:
    """Runs blocks with activation checkpointing.

    Args:
        mode: `none`, `full` or `selective`.
        every: Blocks number 0, n, 2n ... are checkpointed.
        draws_noise: Blocks have dropout: recomputation must restore the state of the random number generator.
    """

    def __init__(self, mode: str, every: int, *, draws_noise: bool) -> None:
        self._mode, self._every, self.draws_noise = mode, every, draws_noise

    def run(self, number: int, block: Callable[..., Tensor], *arguments: Any) -> Tensor:
        """Runs block `number` of a stack. Without gradients nothing is saved in any mode."""
        if self._mode == "none" or number % self._every or not torch.is_grad_enabled():
            return block(*arguments)
        options: dict[str, Any] = {}
        if self._mode == "selective":
            options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
        return checkpoint(block, *arguments, use_reentrant=False, preserve_rng_state=self.draws_noise, **options)


_COMPUTE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class StackRows(NamedTuple):
    """Layout of the rows of a stack: positions, documents, padding.

    Attributes:
        positions_BT: Position of each token in its document; None: consecutive, after those in the cache.
        documents_BT: Document numbers of packed rows; None: a row is one document.
        lengths_B: Tokens of each row before padding; None: no padding.
        prefix_BT: Tokens visible to all of their document. None: none.
        token_types_BT: Segment of each token; None: 0.
    """

    positions_BT: Tensor | None = None
    documents_BT: Tensor | None = None
    lengths_B: Tensor | None = None
    prefix_BT: Tensor | None = None
    token_types_BT: Tensor | None = None


class EncoderOutput(NamedTuple):
    """Output of an encoder, for the decoder.

    Attributes:
        hidden_BSD: Last hidden states; None if a cache has the keys and values of the source.
        length: Source length S.
        rows: Documents and lengths of the source.
    """

    hidden_BSD: Tensor | None
    length: int
    rows: StackRows


class Stack(nn.Module):
    """Blocks between a norm of the input (`input_norm`) and one of the output (pre-norm stacks).

    Args:
        config: Config of the stack.
        engine: Attention kernel and activation checkpointing.
        max_seq_len: Longest sequence.
        causal: Position t sees only positions up to t.
        reads_encoder: Each block has cross attention.
        device: Device of the stack.
    """

    def __init__(
        self,
        config: StackConfig,
        engine: EngineConfig,
        *,
        max_seq_len: int,
        causal: bool,
        reads_encoder: bool,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.max_seq_len, self.causal, self.windows = max_seq_len, causal, config.windows
        needs = AttentionNeeds(
            device=device,
            dtype=_COMPUTE_DTYPES[engine.precision],
            head_width=config.per_head_width,
            causal=causal,
            window=config.window is not None,
            bias=config.position == "relative",
            dropout=config.attention_weight_dropout > 0,
        )
        self.backend = build_backend(engine.attention, needs)
        cross_needs = replace(needs, causal=False, window=False, bias=False, cross=True)
        self.cross_backend = build_backend(engine.attention, cross_needs) if reads_encoder else None
        draws_noise = config.dropout > 0 or config.attention_weight_dropout > 0
        mode, every = engine.activation_checkpointing, engine.activation_checkpointing_every
        self.recompute = Recompute(mode, every, draws_noise=draws_noise)
        self.position = build_position(config, max_seq_len, causal=causal)
        self.token_type = nn.Embedding(config.token_types, config.width) if config.token_types else None
        self.input_norm = build_norm(config) if config.input_norm else nn.Identity()
        self.dropout = nn.Dropout(config.dropout) if config.dropout else nn.Identity()
        self.blocks = nn.ModuleList(
            Block(config, self.backend, self.cross_backend, first=number == 0) for number in range(config.layers)
        )
        self.norm = build_norm(config) if config.norm_placement == "pre" else nn.Identity()

    def forward(
        self, x_BTD: Tensor, rows: StackRows, encoded: EncoderOutput | None = None, cache: KVCache | None = None
    ) -> Tensor:
        """Maps embeddings to hidden states, [B, T, D] to [B, T, D].

        Args:
            x_BTD: Embeddings of the tokens.
            rows: Positions, documents and padding.
            encoded: Output of the encoder, for a stack with cross attention.
            cache: Keys and values of earlier positions, extended by these T.
        """
        offset = 0 if cache is None else cache.length
        length = offset + x_BTD.shape[1]
        assert length <= self.max_seq_len, f"{length} positions, at most {self.max_seq_len}"
        placed = self.position(x_BTD, rows.positions_BT, offset)
        masks = self._prepare_masks(placed.x_BTD, rows, cache, placed.bias)
        memory = self._prepare_memory(x_BTD, rows, encoded)
        x_BTD = placed.x_BTD if self.token_type is None else placed.x_BTD + self._token_types(x_BTD, rows)
        x_BTD = self.dropout(self.input_norm(x_BTD))
        for number, (block, window) in enumerate(zip(self.blocks, self.windows, strict=True)):
            rotation = placed.rotation if window is None else placed.local_rotation
            layer_cache = None if cache is None else cache.layers[number]
            x_BTD = self.recompute.run(number, block, x_BTD, masks[window], rotation, memory, layer_cache)
        return self.norm(x_BTD)

    def _token_types(self, x_BTD: Tensor, rows: StackRows) -> Tensor:
        assert self.token_type is not None
        if rows.token_types_BT is not None:
            return self.token_type(rows.token_types_BT)
        return self.token_type(torch.zeros(1, 1, dtype=torch.int64, device=x_BTD.device))

    def _prepare_masks(
        self, x_BTD: Tensor, rows: StackRows, cache: KVCache | None, bias: DistanceBias | None
    ) -> dict[int | None, Any]:
        """Prepares one mask for each distinct window of the layers."""
        num_rows, queries, _ = x_BTD.shape
        offset = 0 if cache is None else cache.length
        key_documents = None
        if cache is not None and rows.documents_BT is not None:
            key_documents = cache.append_documents(rows.documents_BT)
        mask = AttentionMask(
            self.causal,
            documents_BT=rows.documents_BT,
            key_documents_BS=key_documents,
            key_lengths_B=rows.lengths_B,
            prefix_BS=rows.prefix_BT,
            query_offset=offset,
        )
        size = {"rows": num_rows, "queries": queries, "keys": offset + queries}
        return {
            window: self.backend.prepare(replace(mask, window=window), **size, device=x_BTD.device, bias=bias)
            for window in dict.fromkeys(self.windows)
        }

    def _prepare_memory(self, x_BTD: Tensor, rows: StackRows, encoded: EncoderOutput | None) -> Memory | None:
        if encoded is None or self.cross_backend is None:
            return None
        num_rows, queries, _ = x_BTD.shape
        documents_BT, key_documents_BS = rows.documents_BT, encoded.rows.documents_BT
        if (documents_BT is None) != (key_documents_BS is None):
            # The side without document numbers is one document a row: number 0 of the other side.
            documents_BT = _whole(documents_BT, num_rows, queries, x_BTD.device)
            key_documents_BS = _whole(key_documents_BS, num_rows, encoded.length, x_BTD.device)
        mask = AttentionMask(
            causal=False,
            documents_BT=documents_BT,
            key_documents_BS=key_documents_BS,
            key_lengths_B=encoded.rows.lengths_B,
        )
        prepared = self.cross_backend.prepare(
            mask, rows=num_rows, queries=queries, keys=encoded.length, device=x_BTD.device
        )
        return Memory(encoded.hidden_BSD, prepared)


def _whole(documents_BT: Tensor | None, num_rows: int, length: int, device: torch.device) -> Tensor:
    """Returns document numbers; without any, each row is document 0."""
    if documents_BT is not None:
        return documents_BT
    return torch.zeros(num_rows, length, dtype=torch.int32, device=device)
