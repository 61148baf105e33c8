"""A stack of blocks (`block.py`) with common positions and masks, between two norms.

With `offload_activations: cpu`, host memory has what is saved until its backward pass is near
(`activation_offload.py`).
"""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from pretrain.config.engine import EngineConfig
from pretrain.config.model import ModelConfig, StackConfig
from pretrain.model.activation_offload import ActivationOffload
from pretrain.model.attention import CachePlace, KVCache
from pretrain.model.backends import build_backend
from pretrain.model.backends.backend import AttentionNeeds
from pretrain.model.block import Block, Memory, TokenPredictors, build_norm
from pretrain.model.position import PositionedInput, build_position
from pretrain.types import AttentionMask, Columns, continuing

_COMPUTE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class StackRows(NamedTuple):
    """Positions, documents and padding of the rows of a stack; fields as in `Batch`. `tokens_BT` are read
    by value embeddings alone."""

    positions_BT: Tensor | None = None
    documents_BT: Tensor | None = None
    lengths_B: Tensor | None = None
    prefix_BT: Tensor | None = None
    token_types_BT: Tensor | None = None
    tokens_BT: Tensor | None = None
    columns: Columns | None = None
    window: int | None = None
    # The same rows on the host. Not attributes of tensors: under ZeRO 3 a module gets others.
    on_host: Any = None  # StackRows | None: a NamedTuple cannot name itself

    @property
    def ranks(self) -> int:
        """Number of ranks over which the columns of the rows are cut."""
        return 1 if self.columns is None else self.columns.ranks


class EncoderOutput(NamedTuple):
    """Output of an encoder, for the decoder; `length` is S.

    No hidden states if a cache has the keys and values of the source.
    """

    hidden_BSD: Tensor | None
    length: int
    rows: StackRows


class Stack(nn.Module):
    """Blocks between a norm of the input (`input_norm`) and one of the output (not post-norm).

    A decoder is causal, and has cross attention in each block if the model has an encoder too; one
    that fills in hidden patches is neither.
    """

    def __init__(
        self, model: ModelConfig, name: Literal["encoder", "decoder"], engine: EngineConfig, device: torch.device
    ) -> None:
        super().__init__()
        config: StackConfig = getattr(model, name)
        self.max_seq_len = model.positions_of(name)
        self.causal = name == "decoder" and not model.restores
        self.windows = config.windows
        self.follows_length = config.rope_scaling is not None and config.rope_scaling.follows_length
        self.unrotated = frozenset(config.unrotated_layers)
        needs = AttentionNeeds(
            device=device,
            dtype=_COMPUTE_DTYPES[engine.precision],
            head_width=config.per_head_width,
            bias=config.position == "relative",
            dropout=config.attention_weight_dropout > 0,
            sinks=config.attention_sinks,
            score_cap=config.score_cap,
        )
        self.backend = build_backend(engine.attention, needs)
        self.cross_backend = None
        if name == "decoder" and model.reads_encoder:
            # Cross attention has no positions.
            of_cross = replace(needs, bias=False, sinks=False, score_cap=None)
            self.cross_backend = build_backend(engine.attention, of_cross)
        patches = model.patches_of(name)
        first = model.first_position(name)
        self.position = build_position(config, self.max_seq_len, causal=self.causal, first=first, patches=patches)
        self.token_type = None
        if config.token_types:
            self.token_type = nn.Embedding(config.token_types, config.table_width)
        self.residual_scalars = config.residual_scalars
        self.value_residual = config.value_residual
        self.has_experts = config.experts is not None
        self.value_tables = [config.value_table(number) for number in range(config.layers)]
        value_width = config.num_kv_heads * config.per_head_width
        self.value_embedding = nn.ModuleList(
            nn.Embedding(model.padded_vocab_size, value_width) for _ in range(config.value_embeddings)
        )
        self.input_norm = build_norm(config, config.table_width) if config.input_norm else nn.Identity()
        self.expand = nn.Linear(config.table_width, config.width) if config.embedding_width else nn.Identity()
        self.dropout = nn.Dropout(config.dropout) if config.dropout else nn.Identity()
        self.blocks = nn.ModuleList()
        for number in range(config.layers):
            self.blocks.append(Block(config, self.backend, self.cross_backend, engine, number))
        self.norm = nn.Identity() if config.norm_placement == "post" else build_norm(config)
        self.offload = ActivationOffload(device, config.layers) if engine.offload_activations == "cpu" else None

    def forward(
        self,
        x_BTD: Tensor,
        rows: StackRows,
        encoded: EncoderOutput | None = None,
        cache: KVCache | None = None,
        predictors: TokenPredictors | None = None,
    ) -> Tensor | tuple[Tensor | None, ...]:
        """Maps embeddings [B, T, D] to hidden states; extends the cache by T positions.

        With experts, and without a cache, returns also packed `RoutingSums`, [L, 2E + 2], else None;
        with `predictors`, then the inputs of the head of each of these.
        """
        embedded_BTD = x_BTD
        queries = x_BTD.shape[1]
        place = CachePlace(0, queries) if cache is None else cache.place(queries)
        assert place.keys <= self.max_seq_len, f"{place.keys} positions, at most {self.max_seq_len}"
        capacity = None if cache is None else cache.capacity
        placed = self.position(x_BTD, rows.positions_BT, place.offset, rows.ranks, capacity)
        if place.position_1 is not None:
            placed = placed._replace(biases=tuple(bias and bias.at(place.position_1) for bias in placed.biases))
        masks = self._prepare_masks(placed, rows, cache, place)
        memory = self._prepare_memory(x_BTD, rows, encoded)
        x_BTD = placed.x_BTD
        if self.token_type is not None:
            types_BT = rows.token_types_BT
            # RoBERTa's texts are all of one type.
            if types_BT is None or self.token_type.num_embeddings == 1:
                types_BT = torch.zeros(1, 1, dtype=torch.int64, device=x_BTD.device)
            x_BTD = x_BTD + self.token_type(types_BT)
        x_BTD = self.expand(self.dropout(self.input_norm(x_BTD)))
        embedded = [embedding(rows.tokens_BT) for embedding in self.value_embedding]
        first: tuple[Tensor, ...] = ()
        input_BTD = x_BTD if self.residual_scalars else None
        counted_BT = _counted(x_BTD, rows) if self.has_experts and cache is None else None
        sums: list[Tensor] = []
        # Around a block's call, and so outside of what is compiled and of an engine's hooks.
        offload = self.offload if torch.is_grad_enabled() else None
        for number, (block, window) in enumerate(zip(self.blocks, self.windows, strict=True)):
            rotation = placed.rotation if window is None else placed.local_rotation
            if number in self.unrotated:
                rotation = None
            layer_cache = None if cache is None else cache.layers[number]
            table = self.value_tables[number]
            others = first if table is None else (*first, embedded[table])
            with nullcontext() if offload is None else offload.block(number):
                x_BTD = block(x_BTD, masks[number], rotation, memory, layer_cache, others, input_BTD, counted_BT)
            if isinstance(x_BTD, tuple):
                x_BTD, *further = x_BTD
                if self.value_residual and number == 0:
                    first = (further.pop(0),)
                sums += further
        hidden_BTD = self.norm(x_BTD)
        ahead: list[Tensor] = []
        if predictors is not None:
            continuing_BT = continuing(rows.documents_BT, rows.lengths_B, queries)
            shared = (masks[-1], rotation, counted_BT, continuing_BT)
            found = predictors(hidden_BTD, embedded_BTD, *shared)
            depth = len(predictors.blocks)
            ahead, sums = [*found[:depth]], [*sums, *found[depth:]]
        if not sums and not ahead:
            return hidden_BTD
        return hidden_BTD, torch.stack(sums) if sums else None, *ahead

    def _prepare_masks(
        self, placed: PositionedInput, rows: StackRows, cache: KVCache | None, place: CachePlace
    ) -> list[Any]:
        """Returns the mask of each layer: one for each distinct window, and for each of several biases."""
        num_rows, queries, _ = placed.x_BTD.shape
        key_documents = None
        if cache is not None and rows.documents_BT is not None:
            key_documents = cache.append_documents(rows.documents_BT)
        on_host = None
        if cache is None and rows.on_host is not None:
            on_host = AttentionMask(False, rows.on_host.documents_BT, key_lengths_B=rows.on_host.lengths_B)
        mask = AttentionMask(
            self.causal,
            documents_BT=rows.documents_BT,
            key_documents_BS=key_documents,
            key_lengths_B=rows.lengths_B,
            prefix_BS=rows.prefix_BT,
            query_offset=place.offset,
            position_1=place.position_1,
            on_host=on_host,
            columns=rows.columns,
        )
        size: dict[str, Any] = {"rows": num_rows, "queries": queries * rows.ranks}
        size |= {"keys": place.keys * rows.ranks, "device": placed.x_BTD.device}
        windows = self.windows
        if rows.window is not None:
            windows = tuple(min(window or rows.window, rows.window) for window in windows)
        keys = [(window, number % len(placed.biases)) for number, window in enumerate(windows)]
        masks = {
            (window, table): self.backend.prepare(replace(mask, window=window), bias=placed.biases[table], **size)
            for window, table in dict.fromkeys(keys)
        }
        return [masks[key] for key in keys]

    def _prepare_memory(self, x_BTD: Tensor, rows: StackRows, encoded: EncoderOutput | None) -> Memory | None:
        if encoded is None or self.cross_backend is None:
            return None
        num_rows, queries, _ = x_BTD.shape
        keys = encoded.length * rows.ranks
        size = {"rows": num_rows, "queries": queries * rows.ranks, "keys": keys}
        mask = _cross_mask(rows, encoded.rows, size, x_BTD.device)
        if rows.on_host is not None and encoded.rows.on_host is not None:
            on_host = _cross_mask(rows.on_host, encoded.rows.on_host, size, torch.device("cpu"))
            mask = replace(mask, on_host=on_host)
        prepared = self.cross_backend.prepare(mask, **size, device=x_BTD.device)
        return Memory(encoded.hidden_BSD, prepared)


def _counted(x_BTD: Tensor, rows: StackRows) -> Tensor:
    """Returns the tokens that are no padding, bool [B, T]."""
    shape = x_BTD.shape[:2]
    if rows.documents_BT is not None:
        counted_BT = rows.documents_BT >= 0
    elif rows.lengths_B is not None:
        columns_T = torch.arange(shape[1] * rows.ranks, device=x_BTD.device)
        counted_BT = columns_T < rows.lengths_B[:, None]
    else:
        return torch.ones(shape, dtype=torch.bool, device=x_BTD.device)
    return counted_BT if rows.columns is None else rows.columns.take(counted_BT)


def _cross_mask(rows: StackRows, source: StackRows, size: dict[str, int], device: torch.device) -> AttentionMask:
    documents_BT, key_documents_BS = rows.documents_BT, source.documents_BT
    # The side without document numbers is one document a row: number 0 of the other side.
    whole = partial(torch.zeros, dtype=torch.int32, device=device)
    if documents_BT is None and key_documents_BS is not None:
        documents_BT = whole(size["rows"], size["queries"])
    elif documents_BT is not None and key_documents_BS is None:
        key_documents_BS = whole(size["rows"], size["keys"])
    return AttentionMask(
        causal=False,
        documents_BT=documents_BT,
        key_documents_BS=key_documents_BS,
        key_lengths_B=source.lengths_B,
        columns=rows.columns,
    )
