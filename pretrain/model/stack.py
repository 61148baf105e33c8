"""A stack of blocks with common positions and masks; activation checkpointing (Chen et al. 2016).

    block    self-attention, cross attention to the encoder if there is one, feed-forward;
             a norm and a residual sum each

Saved for the backward pass of a block, by `engine.activation_checkpointing`:

    none        everything that autograd saves
    full        the block's input; the rest is recomputed
    selective   the block's input, results of matrix products and attention; the rest is recomputed

With `feedforward_tiles`, a feed-forward layer keeps its input alone in any of these.
With `activation_checkpointing_every: n`, only every n-th block is checkpointed. With
`offload_activations: cpu`, host memory has what is saved until its backward pass is near
(`activation_offload.py`).
"""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from pretrain.config.engine import EngineConfig
from pretrain.config.model import ModelConfig, StackConfig
from pretrain.model.activation_offload import ActivationOffload
from pretrain.model.attention import CachePlace, CrossAttention, KVCache, LayerCache, build_attention
from pretrain.model.backends import build_backend
from pretrain.model.backends.backend import AttentionBackend, AttentionNeeds
from pretrain.model.feedforward import FeedForward, MixtureOfExperts, pass_tokens
from pretrain.model.position import PositionedInput, Rotation, build_position
from pretrain.types import AttentionMask, Columns


def build_norm(config: StackConfig, width: int | None = None) -> nn.Module:
    """Builds a norm of the stack's width or another: RMSNorm (Zhang and Sennrich 2019), LayerNorm (Ba et al. 2016)."""
    width = width or config.width
    # Both are torch's fused functions, with statistics in fp32 for any dtype of the input.
    if config.norm == "rms":
        return nn.RMSNorm(width, eps=config.norm_eps)
    return nn.LayerNorm(width, eps=config.norm_eps, bias=config.bias)


def _layer_scale(config: StackConfig) -> nn.Parameter | None:
    return None if config.layer_scale is None else nn.Parameter(torch.empty(config.width))


class Memory(NamedTuple):
    """Output of the encoder, None if a cache has its keys and values; mask over the source."""

    hidden_BSD: Tensor | None
    prepared: Any


# By name: some exist only where their module was imported.
_SAVED_OPERATIONS = {
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::_scaled_mm",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "torch_attn::_varlen_attn",
    "flash_attn::_flash_attn_varlen_forward",
    "flex_attention",
    "pretrain::grouped_linear",
}


def _policy(context: Any, operation: Any, *arguments: Any, **named: Any) -> CheckpointPolicy:
    if operation.name() in _SAVED_OPERATIONS:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _checkpointing(config: StackConfig, engine: EngineConfig, number: int) -> dict[str, Any] | None:
    """Returns the options of `torch.utils.checkpoint` for a block; None: it is not checkpointed."""
    if engine.activation_checkpointing == "none" or number % engine.activation_checkpointing_every:
        return None
    draws_noise = max(config.dropout, config.attention_weight_dropout, config.drop_path) > 0
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": draws_noise}
    if engine.activation_checkpointing == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    return options


class Block(nn.Module):
    """Norm of a sub-layer's input (`x + f(norm(x))`, GPT-2 2.3), of the sum (`norm(x + f(x))`, Vaswani et
    al. 2017, 3.1), or of its output (`x + norm(f(x))`, OLMo 2, 2.2)."""

    def __init__(
        self,
        config: StackConfig,
        backend: AttentionBackend,
        cross_backend: AttentionBackend | None,
        engine: EngineConfig,
        number: int,
    ) -> None:
        super().__init__()
        self._checkpointing = _checkpointing(config, engine, number)
        self._tiles = engine.feedforward_tiles
        self.norm_placement = config.norm_placement
        # An `input_norm` has normalised the input of the first block already.
        skip_norm = number == 0 and config.norm_placement == "pre" and config.input_norm
        self.attention_norm = nn.Identity() if skip_norm else build_norm(config)
        self.attention = build_attention(config, backend, number)
        self.residual_mix = nn.Parameter(torch.empty(2)) if config.residual_scalars and number > 0 else None
        self.cross_norm = None if cross_backend is None else build_norm(config)
        self.cross = None if cross_backend is None else CrossAttention(config, cross_backend)
        self.feedforward_norm = build_norm(config)
        self.feedforward = MixtureOfExperts(config) if config.has_experts(number) else FeedForward(config)
        self.dropout = nn.Dropout(config.dropout) if config.dropout else nn.Identity()
        self.drop_path = config.drop_path_of(number)
        self.attention_scale = _layer_scale(config)
        self.cross_scale = None if self.cross is None else _layer_scale(config)
        self.feedforward_scale = _layer_scale(config)

    def forward(
        self,
        x_BTD: Tensor,
        prepared: Any,
        rotation: Rotation | None = None,
        memory: Memory | None = None,
        cache: LayerCache | None = None,
        others: tuple[Tensor, ...] = (),
        input_BTD: Tensor | None = None,
        counted_BT: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, ...]:
        """Maps [B, T, D] to [B, T, D]; arguments as in `SelfAttention` and `CrossAttention`.

        `input_BTD` is the input of the first block, for `residual_scalars`, and `counted_BT` the
        tokens that experts count. The first block of a stack with `value_residual` returns its
        values too, and then a block with experts its packed `RoutingSums`.
        """
        # Arguments by position: the hooks of ZeRO stage 3 do not see others.
        arguments = (x_BTD, prepared, rotation, memory, cache, others, input_BTD, counted_BT)
        # Without gradients nothing is saved in any mode.
        if self._checkpointing is None or not torch.is_grad_enabled():
            return self._layers(*arguments)
        # Within what is compiled: its policy is about operations, of which a compiled block is one.
        return checkpoint(self._layers, *arguments, **self._checkpointing)

    def _layers(
        self,
        x_BTD: Tensor,
        prepared: Any,
        rotation: Rotation | None,
        memory: Memory | None,
        cache: LayerCache | None,
        others: tuple[Tensor, ...],
        input_BTD: Tensor | None,
        counted_BT: Tensor | None,
    ) -> Tensor | tuple[Tensor, ...]:
        if self.residual_mix is not None:
            assert input_BTD is not None, "residual scalars need the input of the first block"
            x_BTD = self.residual_mix[0] * x_BTD + self.residual_mix[1] * input_BTD
        further: tuple[Tensor, ...] = ()
        result_BTD = self.attention(self._read(x_BTD, self.attention_norm), prepared, rotation, cache, others)
        if self.attention.returns_values:
            result_BTD, own_BTKH = result_BTD
            further = (own_BTKH,)
        x_BTD = self._add(x_BTD, self.attention_norm, result_BTD, self.attention_scale)
        if self.cross is not None and self.cross_norm is not None:
            assert memory is not None, "a decoder with cross attention needs a source"
            hidden_BSD, cross_prepared = memory
            result_BTD = self.cross(self._read(x_BTD, self.cross_norm), hidden_BSD, cross_prepared, cache)
            x_BTD = self._add(x_BTD, self.cross_norm, result_BTD, self.cross_scale)
        read_BTD = self._read(x_BTD, self.feedforward_norm)
        result_BTD, sums_W = pass_tokens(self.feedforward, read_BTD, counted_BT, self._tiles)
        further = further if sums_W is None else (*further, sums_W)
        x_BTD = self._add(x_BTD, self.feedforward_norm, result_BTD, self.feedforward_scale)
        return (x_BTD, *further) if further else x_BTD

    def _read(self, x_BTD: Tensor, norm: nn.Module) -> Tensor:
        """Returns the input of a sub-layer."""
        return norm(x_BTD) if self.norm_placement == "pre" else x_BTD

    def _add(self, x_BTD: Tensor, norm: nn.Module, result_BTD: Tensor, scale_D: Tensor | None) -> Tensor:
        """Adds the result of a sub-layer to the stream."""
        if self.norm_placement == "output":
            result_BTD = norm(result_BTD)
        result_BTD = self.dropout(result_BTD)
        if scale_D is not None:
            result_BTD = scale_D * result_BTD
        if self.drop_path and self.training:
            # By the generator of dropout, which each step and each recomputation seeds alike.
            kept_B11 = nn.functional.dropout(result_BTD.new_ones(len(result_BTD), 1, 1), self.drop_path)
            result_BTD = kept_B11 * result_BTD
        sum_BTD = x_BTD + result_BTD
        return norm(sum_BTD) if self.norm_placement == "post" else sum_BTD


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
        needs = AttentionNeeds(
            device=device,
            dtype=_COMPUTE_DTYPES[engine.precision],
            head_width=config.per_head_width,
            bias=config.position == "relative",
            dropout=config.attention_weight_dropout > 0,
            sinks=config.attention_sinks,
        )
        self.backend = build_backend(engine.attention, needs)
        self.cross_backend = None
        if name == "decoder" and model.reads_encoder:
            # Cross attention has no positions.
            self.cross_backend = build_backend(engine.attention, replace(needs, bias=False, sinks=False))
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
        self, x_BTD: Tensor, rows: StackRows, encoded: EncoderOutput | None = None, cache: KVCache | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Maps embeddings [B, T, D] to hidden states; extends the cache by T positions.

        With experts, and without a cache, returns also packed `RoutingSums`, [L, 2E + 2].
        """
        queries = x_BTD.shape[1]
        place = CachePlace(0, queries) if cache is None else cache.place(queries)
        assert place.keys <= self.max_seq_len, f"{place.keys} positions, at most {self.max_seq_len}"
        placed = self.position(x_BTD, rows.positions_BT, place.offset, rows.ranks)
        if place.position_1 is not None:
            placed = placed._replace(biases=tuple(bias and bias.at(place.position_1) for bias in placed.biases))
        masks = self._prepare_masks(placed, rows, cache, place)
        memory = self._prepare_memory(x_BTD, rows, encoded)
        x_BTD = placed.x_BTD
        if self.token_type is not None:
            types_BT = rows.token_types_BT
            if types_BT is None:
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
        return (hidden_BTD, torch.stack(sums)) if sums else hidden_BTD

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
        keys = [(window, number % len(placed.biases)) for number, window in enumerate(self.windows)]
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
