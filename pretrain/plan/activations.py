"""Activation memory by formula: the bytes that autograd saves for the backward pass. Read it with `model/block.py`.

    attention     input of the norm, input and result of the projection, rotated queries and keys, mixed values
    feed-forward  input of the norm, input and result of the projection, activations, gated product
    ends          input of the last norm, and the two gradients that the chunked loss makes in the forward pass

A block counts by its checkpointing mode: `none` keeps all of it, `full` its input, `selective` its input
and the results of matrix products and attention. A storage counts once, and a view keeps all of it:
values are a view of the projection's result. Attention counts as linear in length, which it is but for
`eager`, and for dense masks of `sdpa` on CUDA. Not here: weights and optimizer (`memory.py`).
"""

from dataclasses import dataclass

from pretrain.config.engine import EngineConfig
from pretrain.config.lengths import RowLengths
from pretrain.config.model import ModelConfig, StackConfig
from pretrain.config.recurrent import RecurrentConfig, RecurrentStackConfig
from pretrain.plan.params import decoder_input_width, parameter_shapes
from pretrain.plan.trained import TrainableSubset

_STATISTIC = 4
"""Bytes of a mean, a standard deviation or a log-sum-exp: fp32 in every precision."""

_TILE = 128
"""Queries of a tile where attention runs tile by tile (`model/backends/blocks.py`)."""


@dataclass(frozen=True, slots=True)
class _ElementSizes:
    """Bytes of an element, by tensor."""

    residual: int  # stream between blocks, inputs of norms
    compute: int  # operands and results of matrix products and attention
    mask: int  # dropout's memory: a flag on CUDA, a factor on a CPU
    on_cpu: bool  # without fused kernels for RMSNorm and for dropout of attention weights

    @property
    def copied(self) -> int:
        """Bytes of autocast's copy of a weight; 0 where weights have the precision of the products."""
        return self.compute if self.compute != self.residual else 0


def _element_sizes(engine: EngineConfig, device: str) -> _ElementSizes:
    """Returns the sizes on `cuda` or `cpu`; under autocast the stream stays fp32."""
    compute = 4 if engine.precision == "fp32" else 2
    residual = compute if engine.kind == "deepspeed" else 4
    return _ElementSizes(residual, compute, mask=1 if device == "cuda" else compute, on_cpu=device == "cpu")


@dataclass(frozen=True, slots=True)
class _BlockBytes:
    """Bytes that one block keeps in each checkpointing mode; `whole` also while it is computed again."""

    whole: int
    selective: int
    full: int


def _norm_bytes(stack: StackConfig, size: _ElementSizes) -> int:
    """Returns bytes a token that a norm keeps: its input and statistics."""
    if stack.norm == "layer":
        return stack.width * size.residual + 2 * _STATISTIC
    # Step by step, RMSNorm keeps its input and what it divided, both in fp32.
    return stack.width * (8 if size.on_cpu else size.residual) + _STATISTIC


def _head_norm_bytes(stack: StackConfig, size: _ElementSizes) -> int:
    """Returns bytes a token of the norms of queries and keys, whose input the projection keeps already."""
    heads = stack.heads + stack.num_kv_heads
    if not size.on_cpu:
        return heads * _STATISTIC
    return heads * (stack.per_head_width * (4 if size.compute == 4 else 8) + _STATISTIC)


def _attention_bytes(stack: StackConfig, size: _ElementSizes, *, normed: bool, blockwise: bool) -> tuple[int, int]:
    """Returns bytes a token of self-attention: all, and the results of matrix products and attention."""
    heads, kv, width = stack.heads, stack.num_kv_heads, stack.per_head_width
    products = (heads + 2 * kv) * width * size.compute
    mixed = heads * width * size.compute + (0 if blockwise else _STATISTIC * heads)
    around = stack.width * size.compute + (_norm_bytes(stack, size) if normed else 0)
    # Values are a view of the product; rotated or normed queries and keys are copies.
    turned = (heads + kv) * width * size.compute if stack.position == "rotary" or stack.qk_norm else 0
    turned += _head_norm_bytes(stack, size) if stack.qk_norm else 0
    dropped = stack.width * size.mask if stack.dropout else 0
    return around + products + turned + mixed + dropped, products + mixed + stack.width * size.compute


def _cross_bytes(stack: StackConfig, size: _ElementSizes, *, blockwise: bool) -> tuple[int, int]:
    """Returns the same a target token of cross attention; keys and values are a source token's."""
    inner = stack.heads * stack.per_head_width * size.compute
    mixed = inner + (0 if blockwise else _STATISTIC * stack.heads)
    around = stack.width * size.compute + _norm_bytes(stack, size)
    dropped = stack.width * size.mask if stack.dropout else 0
    return around + inner + mixed + dropped, inner + mixed + stack.width * size.compute


def _feedforward_bytes(stack: StackConfig, size: _ElementSizes) -> tuple[int, int]:
    """Returns the same of a feed-forward layer."""
    hidden, up = stack.ff_width * size.compute, (2 if stack.gated else 1) * stack.ff_width * size.compute
    if stack.gated:
        inside = up + 2 * hidden
    else:
        # The backward pass of ReLU needs its result only, which the next product holds too.
        inside = hidden if stack.activation == "relu" else 2 * hidden
    around = stack.width * size.compute + _norm_bytes(stack, size)
    dropped = stack.width * size.mask if stack.dropout else 0
    return around + inside + dropped, up + stack.width * size.compute


@dataclass(frozen=True, slots=True)
class _StackRows:
    """Rows of a micro-batch that a stack reads; `source_length` is 0 where it reads no encoder."""

    count: int
    length: int
    source_length: int = 0

    @property
    def tokens(self) -> int:
        return self.count * self.length


def _block_bytes(
    stack: StackConfig, rows: _StackRows, size: _ElementSizes, *, causal: bool, normed: bool = True
) -> _BlockBytes:
    """Counts one block; `normed` is False for a first block whose norm is the stack's `input_norm`."""
    in_tiles = size.on_cpu and stack.attention_weight_dropout > 0
    has_bias = stack.position == "relative"
    parts = [
        _attention_bytes(stack, size, normed=normed, blockwise=in_tiles or has_bias),
        _feedforward_bytes(stack, size),
    ]
    if rows.source_length:
        parts.append(_cross_bytes(stack, size, blockwise=in_tiles))
    source = rows.count * rows.source_length
    keys_values = 2 * stack.num_kv_heads * stack.per_head_width * size.compute * source
    keys_values += stack.width * size.copied * source  # autocast's copy of the encoder's output
    entry = stack.width * size.residual * rows.tokens
    whole = sum(part[0] for part in parts) * rows.tokens + keys_values
    products = sum(part[1] for part in parts) * rows.tokens + keys_values
    if size.on_cpu and (in_tiles or has_bias):
        products += _score_bytes(stack, rows, size, causal=causal, cross=in_tiles)
    copies = size.copied * _block_weights(stack, reads_encoder=rows.source_length > 0)
    return _BlockBytes(whole=whole + copies, selective=entry + products, full=entry)


def _block_weights(stack: StackConfig, *, reads_encoder: bool) -> int:
    attention = 2 * stack.width * (stack.heads + stack.num_kv_heads) * stack.per_head_width
    return attention * (2 if reads_encoder else 1) + stack.width * stack.ff_width * (3 if stack.gated else 2)


def _score_bytes(stack: StackConfig, rows: _StackRows, size: _ElementSizes, *, causal: bool, cross: bool) -> int:
    """Returns what `selective` keeps of tiled attention on a CPU, whose scores are matrix products there.

    In 16 bits the kernel's fp32 copies come on top.
    """
    pairs = 0
    for start in range(0, rows.length, _TILE):
        queries = min(_TILE, rows.length - start)
        pairs += queries * ((start + queries if causal else rows.length) + (rows.source_length if cross else 0))
    return rows.count * stack.heads * pairs * size.compute


@dataclass(frozen=True, slots=True)
class ActivationBytes:
    """Bytes that a micro-batch keeps on a rank."""

    blocks: int  # all blocks, by their checkpointing mode
    ends: int  # embeddings, norms and dropout outside blocks, rotary tables, the head's own layers
    loss: int  # gradients of hidden states and of the head's weight, made in the forward pass
    recomputed: int  # the one block that is computed again at a time; 0 without checkpointing

    @property
    def kept(self) -> int:
        """Bytes at the end of the forward pass."""
        return self.blocks + self.ends + self.loss

    @property
    def peak(self) -> int:
        """Peak of the backward pass."""
        return self.kept + self.recomputed


def _stack_bytes(
    stack: StackConfig, engine: EngineConfig, rows: _StackRows, size: _ElementSizes, *, causal: bool, frozen_blocks: int
) -> tuple[int, int, int]:
    """Returns bytes of blocks, of ends, and of the largest recomputed block. Frozen blocks keep nothing."""
    blocks = recomputed = 0
    mode, every = engine.activation_checkpointing, engine.activation_checkpointing_every
    for number in range(frozen_blocks, stack.layers):
        normed = not (number == 0 and stack.norm_placement == "pre" and stack.input_norm)
        found = _block_bytes(stack, rows, size, causal=causal, normed=normed)
        if mode == "none" or number % every:
            blocks += found.whole
        else:
            blocks += found.full if mode == "full" else found.selective
            recomputed = max(recomputed, found.whole - (0 if mode == "full" else found.selective))
    ends = rows.tokens * _norm_bytes(stack, size) * (int(stack.input_norm) + int(stack.norm_placement == "pre"))
    if stack.dropout:
        ends += rows.tokens * stack.width * (size.residual if size.on_cpu else size.mask)
    return blocks, ends, recomputed


def _table_bytes(stack: StackConfig, length: int, max_seq_len: int) -> int:
    """Returns the size of fp32 position tables that are not parameters."""
    if stack.position == "sinusoidal":
        return 4 * max_seq_len * stack.width
    if stack.position != "rotary":
        return 0
    rows = min(max_seq_len, 1 << (length - 1).bit_length())
    tables = 2 if stack.rope_local_theta is not None and stack.window is not None else 1
    return 2 * _STATISTIC * rows * stack.per_head_width * tables


def _head_bytes(model: ModelConfig, positions: int, size: _ElementSizes, *, trained: bool) -> tuple[int, int]:
    """Returns bytes of the layers before the scores, and of the loss, at so many positions."""
    if model.head.kind == "none":
        return 0, 0
    stack = model.last_stack
    transform = 0
    if model.head.transform:
        transform = positions * (stack.width * 2 * size.compute + _norm_bytes(stack, size))
    rows = model.num_head_rows
    sums = rows * stack.width + (rows if model.head.bias else 0) if trained else 0
    return transform, (positions * stack.width + sums) * size.compute


def activation_bytes(
    model: ModelConfig,
    engine: EngineConfig,
    lengths: RowLengths,
    micro: int,
    *,
    device: str = "cuda",
    head_share: float = 1.0,
    trains_head: bool = True,
    frozen_blocks: dict[str, int] | None = None,
) -> ActivationBytes:
    """Counts the activations of a micro-batch of a Transformer.

    Args:
        model: Model whose `vocab_size` is known.
        engine: Engine, with its precision and activation checkpointing.
        lengths: Tokens of a row, T and S.
        micro: Rows of a micro-batch.
        device: `cuda` or `cpu`.
        head_share: Share of the positions at which the head is computed.
        trains_head: True: the output projection has a gradient.
        frozen_blocks: First blocks of each stack that no gradient reaches. None: none. In other
            blocks the input of a frozen matrix is counted too, though it is not kept.
    """
    size = _element_sizes(engine, device)
    source = lengths.source or 0
    blocks = recomputed = 0
    ends = micro * 8 * (2 * lengths.target + source)  # ids and targets
    for stack, rows in (
        (model.encoder, _StackRows(micro, source or lengths.target)),
        (model.decoder, _StackRows(micro, lengths.target, source)),
    ):
        if stack is None:
            continue
        causal = stack is model.decoder
        unreached = (frozen_blocks or {}).get("decoder" if causal else "encoder", 0)
        inside, outside, again = _stack_bytes(stack, engine, rows, size, causal=causal, frozen_blocks=unreached)
        blocks, ends, recomputed = blocks + inside, ends + outside, max(recomputed, again)
        ends += _table_bytes(stack, rows.length, model.max_seq_len)
    if model.encoder is not None and model.decoder is not None:
        # The encoder's output, which every decoder block reads.
        ends += micro * source * model.encoder.width * size.residual
    transform, loss = _head_bytes(model, round(micro * lengths.target * head_share), size, trained=trains_head)
    return ActivationBytes(blocks=blocks, ends=ends + transform, loss=loss, recomputed=recomputed)


def adapter_bytes(
    model: ModelConfig, trained: TrainableSubset, engine: EngineConfig, lengths: RowLengths, micro: int
) -> int:
    """Counts the activations of adapters: the result of A and, under dropout, A's input and its mask.

    `selective` keeps results of products, B's too; `full` computes all of it again.
    """
    mode, size = engine.activation_checkpointing, _element_sizes(engine, "cuda")
    if mode == "full" or not trained.layers:
        return 0
    shapes, rank, kept = parameter_shapes(model), trained.finetune.rank, 0
    for layer in trained.layers:
        outputs, inputs = shapes[f"{layer}.weight"]
        reads_source = layer.startswith("encoder.") or layer.endswith("cross.key_value")
        tokens = micro * ((lengths.source if reads_source else None) or lengths.target)
        elements = rank + (outputs if mode == "selective" else 2 * inputs if trained.finetune.dropout else 0)
        kept += tokens * elements * size.compute
    return kept


_KEPT_STATES = {"rnn": 1, "gru": 7, "lstm": 16}
"""State vectors that a step keeps: gates before and after, state, and products of both. As on a CPU, not of cuDNN."""


def _cell_elements(stack: RecurrentStackConfig, input_width: int) -> int:
    inputs = input_width + stack.width * (stack.layers - 1)
    return inputs + stack.layers * _KEPT_STATES[stack.cell] * stack.width + (2 * stack.width if stack.dropout else 0)


def recurrent_bytes(model: RecurrentConfig, engine: EngineConfig, lengths: RowLengths, micro: int) -> int:
    """Returns the bytes that a micro-batch of a recurrent model keeps, to within about a third.

    Additive attention keeps a vector of width D for each pair of target and source token.
    """
    size, width = (4 if engine.precision == "fp32" else 2), model.decoder.width
    elements = lengths.target * _cell_elements(model.decoder, decoder_input_width(model))
    source = lengths.source or lengths.target
    if model.encoder is not None:
        elements += source * _cell_elements(model.encoder, width)
    if model.attention != "none":
        elements += lengths.target * 3 * width + source * width
        elements += lengths.target * source * (2 + (width if model.attention == "bahdanau" else 0))
    head = lengths.target * width * micro + model.padded_vocab_size * width
    return size * (micro * elements + head)
