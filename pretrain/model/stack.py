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
from pretrain.model.backends import build_backend
from pretrain.model.backends.backend import AttentionNeeds, MaskSize
from pretrain.model.block import Block, BlockInput, BlockOutput, Memory
from pretrain.model.further_tokens import TokenPredictors
from pretrain.model.kv_cache import CachePlace, KVCache
from pretrain.model.parts.attention import AttentionContext
from pretrain.model.parts.norm import build_norm
from pretrain.model.parts.position import PositionedInput, RowPlace, build_position
from pretrain.model.parts.recurrence import prepare_documents
from pretrain.model.parts.rotary import Rotation
from pretrain.types import AttentionMask, ModelOutput, StackRows, continuing

_COMPUTE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class EncoderOutput(NamedTuple):
    """Output of an encoder, for the decoder; `length` is S.

    No hidden states if a cache has the keys and values of the source.
    """

    hidden_BSD: Tensor | None
    length: int
    rows: StackRows


class StackInput(NamedTuple):
    """Input of a stack: embeddings and their rows; for a decoder the source, and the cache of decoding."""

    x_BTD: Tensor
    rows: StackRows
    encoded: EncoderOutput | None = None
    cache: KVCache | None = None


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
        self.without_maps = config.lacking("maps")
        self.kernels = [config.mixer_kernel(number) for number in range(config.layers)]
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

    def forward(self, inputs: StackInput, predictors: TokenPredictors | None = None) -> ModelOutput:
        """Maps embeddings [B, T, D] to hidden states; extends the cache by T positions.

        Sums of experts are those of a pass without a cache; with `predictors`, those of their blocks too.
        """
        embedded_BTD, rows, encoded, cache = inputs
        place, placed = self._place(embedded_BTD, rows, cache)
        masks = self._prepare_masks(placed, rows, cache, place)
        memory = self._prepare_memory(embedded_BTD, rows, encoded)
        x_BTD = self._read(placed.x_BTD, rows)
        tables = [embedding(rows.tokens_BT) for embedding in self.value_embedding]
        counted_BT = _counted(x_BTD, rows) if self.has_experts and cache is None else None
        contexts = []
        for number, table in enumerate(self.value_tables):
            others = () if table is None else (tables[table],)
            layer_cache = None if cache is None else cache.layers[number]
            rotation = self._rotation(placed, number)
            contexts.append(AttentionContext(masks[number], rotation, layer_cache, others, rows.columns))
        hidden_BTD, sums = self.pass_blocks(x_BTD, contexts, memory, counted_BT)
        ahead: tuple[Tensor, ...] = ()
        if predictors is not None:
            last = BlockInput(hidden_BTD, contexts[-1]._replace(others=()), counted_BT=counted_BT)
            continuing_BT = continuing(rows.documents_BT, rows.lengths_B, embedded_BTD.shape[1])
            ahead, further = predictors(last, embedded_BTD, continuing_BT)
            sums += further
        return ModelOutput(hidden_BTD, routing_LW=torch.stack(sums) if sums else None, ahead=ahead)

    def pass_blocks(
        self,
        x_BTD: Tensor,
        contexts: list[AttentionContext],
        memory: Memory | None,
        counted_BT: Tensor | None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Passes the stream through all blocks and the last norm; returns sums of experts too."""
        values: tuple[Tensor, ...] = ()
        first_BTD = x_BTD if self.residual_scalars else None
        sums: list[Tensor] = []
        # Around a block's call, and so outside of what is compiled and of an engine's hooks.
        offload = self.offload if torch.is_grad_enabled() else None
        for number, (block, context) in enumerate(zip(self.blocks, contexts, strict=True)):
            mixed = AttentionContext(*context[:3], (*values, *context.others), context.columns)
            with nullcontext() if offload is None else offload.block(number):
                fields = BlockInput(x_BTD, mixed, memory, first_BTD, counted_BT)
                output: BlockOutput = block(*fields)
            x_BTD = output.x_BTD
            if output.values_BTKH is not None:
                values = (output.values_BTKH,)
            if output.routing_W is not None:
                sums.append(output.routing_W)
        return self.norm(x_BTD), sums

    def _place(self, x_BTD: Tensor, rows: StackRows, cache: KVCache | None) -> tuple[CachePlace, PositionedInput]:
        length = x_BTD.shape[1]
        place = CachePlace(0, length)
        capacity = None
        if cache is not None:
            place = cache.place(length)
            capacity = cache.capacity
        assert place.keys <= self.max_seq_len, f"{place.keys} positions, at most {self.max_seq_len}"
        placed = self.position(x_BTD, rows.positions_BT, RowPlace(place.offset, rows.ranks, capacity))
        if place.position_1 is not None:
            placed = placed._replace(biases=tuple(bias and bias.at(place.position_1) for bias in placed.biases))
        return place, placed

    def _read(self, x_BTD: Tensor, rows: StackRows) -> Tensor:
        if self.token_type is not None:
            types_BT = rows.token_types_BT
            # RoBERTa's texts are all of one type.
            if types_BT is None or self.token_type.num_embeddings == 1:
                types_BT = torch.zeros(1, 1, dtype=torch.int64, device=x_BTD.device)
            x_BTD = x_BTD + self.token_type(types_BT)
        return self.expand(self.dropout(self.input_norm(x_BTD)))

    def _rotation(self, placed: PositionedInput, number: int) -> Rotation | None:
        if number in self.unrotated:
            return None
        return placed.rotation if self.windows[number] is None else placed.local_rotation

    def _prepare_masks(
        self, placed: PositionedInput, rows: StackRows, cache: KVCache | None, place: CachePlace
    ) -> list[Any]:
        """Returns the mask of each layer: one for each distinct window, and for each of several biases."""
        num_rows, queries, _ = placed.x_BTD.shape
        lengths = (queries * rows.ranks, place.keys * rows.ranks)
        size = MaskSize(num_rows, *lengths, placed.x_BTD.device)
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
        windows = self.windows
        if rows.window is not None:
            windows = tuple(min(window or rows.window, rows.window) for window in windows)
        keys = [(window, number % len(placed.biases)) for number, window in enumerate(windows)]
        masks = {
            (window, table): self.backend.prepare(replace(mask, window=window), size, placed.biases[table])
            for window, table in dict.fromkeys(keys)
        }
        # Mixers with a state have documents in the place of a mask.
        documents = {
            kernel: prepare_documents(rows.documents_BT, key_documents, kernel, place)
            for kernel in dict.fromkeys(self.kernels) if kernel is not None
        }  # fmt: skip
        pairs = zip(self.kernels, keys, strict=True)
        return [masks[key] if kernel is None else documents[kernel] for kernel, key in pairs]

    def _prepare_memory(self, x_BTD: Tensor, rows: StackRows, encoded: EncoderOutput | None) -> Memory | None:
        if encoded is None or self.cross_backend is None:
            return None
        num_rows, queries, _ = x_BTD.shape
        size = MaskSize(num_rows, queries * rows.ranks, encoded.length * rows.ranks, x_BTD.device)
        mask = _cross_mask(rows, encoded.rows, size)
        if rows.on_host is not None and encoded.rows.on_host is not None:
            on_host = _cross_mask(rows.on_host, encoded.rows.on_host, size._replace(device=torch.device("cpu")))
            mask = replace(mask, on_host=on_host)
        prepared = self.cross_backend.prepare(mask, size)
        return Memory(encoded.hidden_BSD, prepared)


def _counted(x_BTD: Tensor, rows: StackRows) -> Tensor:
    shape = x_BTD.shape[:2]
    if rows.documents_BT is not None:
        counted_BT = rows.documents_BT >= 0
    elif rows.lengths_B is not None:
        columns_T = torch.arange(shape[1] * rows.ranks, device=x_BTD.device)
        counted_BT = columns_T < rows.lengths_B[:, None]
    else:
        return torch.ones(shape, dtype=torch.bool, device=x_BTD.device)
    return counted_BT if rows.columns is None else rows.columns.take(counted_BT)


def _cross_mask(rows: StackRows, source: StackRows, size: MaskSize) -> AttentionMask:
    documents_BT = rows.documents_BT
    key_documents_BS = source.documents_BT
    # The side without document numbers is one document a row: number 0 of the other side.
    whole = partial(torch.zeros, dtype=torch.int32, device=size.device)
    if documents_BT is None and key_documents_BS is not None:
        documents_BT = whole(size.rows, size.queries)
    elif documents_BT is not None and key_documents_BS is None:
        key_documents_BS = whole(size.rows, size.keys)
    return AttentionMask(
        causal=False,
        documents_BT=documents_BT,
        key_documents_BS=key_documents_BS,
        key_lengths_B=source.lengths_B,
        columns=rows.columns,
    )
