"""What one Transformer block keeps for its backward pass, in bytes, by formula: read it beside `model/block.py`.

    attention     norm's input, the projection's input and result, rotated queries and keys, mixed values
    feed-forward  norm's input, the projection's input and result, what the activation gave, the gated product

Bytes are counted a token, and a storage counts once: values are a view of the projection's result, and hold all of it.
"""

from dataclasses import dataclass

from pretrain.config.engine import EngineConfig
from pretrain.config.lengths import RowLengths
from pretrain.config.model import ModelConfig, StackConfig
from pretrain.config.recurrent import RecurrentConfig, RecurrentStackConfig
from pretrain.plan.params import parameter_shapes
from pretrain.plan.trained import TrainableSubset

STATISTIC = 4

"""Bytes of a mean, a standard deviation or a log-sum-exp: fp32 in every precision."""

_TILE = 128

"""Queries of a tile where attention runs tile by tile (model/backends/blocks.py)."""


@dataclass(frozen=True, slots=True)
class Elements:
    """Bytes of an element, by what it is of.

    Attributes:
        residual: The stream between blocks, and what norms read.
        compute: What matrix products and attention read and give.
        mask: What dropout remembers: a flag on CUDA, a factor on a CPU.
        on_cpu: A CPU has no fused kernel for RMSNorm, nor for dropout of attention weights.
    """

    residual: int
    compute: int
    mask: int
    on_cpu: bool

    @property
    def copied(self) -> int:
        """Bytes of the copy that autocast makes of a weight; 0 where weights have the precision of the products."""
        return self.compute if self.compute != self.residual else 0


def elements_of(engine: EngineConfig, device: str) -> Elements:
    """Returns the sizes under an engine, on `cuda` or `cpu`; under autocast the stream stays fp32."""
    compute = 4 if engine.precision == "fp32" else 2
    residual = compute if engine.kind == "deepspeed" else 4
    return Elements(residual, compute, mask=1 if device == "cuda" else compute, on_cpu=device == "cpu")


@dataclass(frozen=True, slots=True)
class BlockBytes:
    """What one block keeps.

    Attributes:
        whole: Without checkpointing, and while it is computed again.
        selective: Its input and the results of matrix products and attention.
        full: Its input.
    """

    whole: int
    selective: int
    full: int


def norm_bytes(stack: StackConfig, size: Elements) -> int:
    """Returns bytes a token that a norm keeps: its input and statistics."""
    if stack.norm == "layer":
        return stack.width * size.residual + 2 * STATISTIC
    # Step by step, RMSNorm keeps its input and what it divided, both in fp32.
    return stack.width * (8 if size.on_cpu else size.residual) + STATISTIC


def _head_norm_bytes(stack: StackConfig, size: Elements) -> int:
    """Returns the same for the norm of each head's query and key, whose input the projection has kept already."""
    heads = stack.heads + stack.num_kv_heads
    if not size.on_cpu:
        return heads * STATISTIC
    return heads * (stack.per_head_width * (4 if size.compute == 4 else 8) + STATISTIC)


def _attention_bytes(stack: StackConfig, size: Elements, *, normed: bool, blockwise: bool) -> tuple[int, int]:
    """Returns bytes a token of self-attention: all, and the results of matrix products and attention."""
    heads, kv, width = stack.heads, stack.num_kv_heads, stack.per_head_width
    products = (heads + 2 * kv) * width * size.compute
    mixed = heads * width * size.compute + (0 if blockwise else STATISTIC * heads)
    around = stack.width * size.compute + (norm_bytes(stack, size) if normed else 0)
    # Values are a view of the product: rotated or normed queries and keys are held beside it.
    turned = (heads + kv) * width * size.compute if stack.position == "rotary" or stack.qk_norm else 0
    turned += _head_norm_bytes(stack, size) if stack.qk_norm else 0
    dropped = stack.width * size.mask if stack.dropout else 0
    return around + products + turned + mixed + dropped, products + mixed + stack.width * size.compute


def _cross_bytes(stack: StackConfig, size: Elements, *, blockwise: bool) -> tuple[int, int]:
    """Returns bytes a target token of cross attention, likewise; keys and values are a source token's."""
    inner = stack.heads * stack.per_head_width * size.compute
    mixed = inner + (0 if blockwise else STATISTIC * stack.heads)
    around = stack.width * size.compute + norm_bytes(stack, size)
    dropped = stack.width * size.mask if stack.dropout else 0
    return around + inner + mixed + dropped, inner + mixed + stack.width * size.compute


def _feedforward_bytes(stack: StackConfig, size: Elements) -> tuple[int, int]:
    """Returns bytes a token of a feed-forward layer, likewise."""
    hidden, up = stack.ff_width * size.compute, (2 if stack.gated else 1) * stack.ff_width * size.compute
    if stack.gated:
        inside = up + 2 * hidden
    else:
        # The backward pass of ReLU needs its result only, which the next product holds too.
        inside = hidden if stack.activation == "relu" else 2 * hidden
    around = stack.width * size.compute + norm_bytes(stack, size)
    dropped = stack.width * size.mask if stack.dropout else 0
    return around + inside + dropped, up + stack.width * size.compute


@dataclass(frozen=True, slots=True)
class ActivationRows:
    """The rows of a micro-batch that a stack reads.

    Attributes:
        count: How many.
        length: Their tokens each.
        source_length: Of the rows of the encoder's output that it reads; 0: it reads none.
    """

    count: int
    length: int
    source_length: int = 0

    @property
    def tokens(self) -> int:
        """Of all rows."""
        return self.count * self.length


def block_bytes(
    stack: StackConfig, rows: ActivationRows, size: Elements, *, causal: bool, normed: bool = True
) -> BlockBytes:
    """Counts what one block keeps.

    Args:
        stack: Its stack.
        rows: What it reads.
        size: Bytes of an element.
        causal: Whether it is a decoder's.
        normed: Whether its first norm is one.
    """
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
    keys_values += stack.width * size.copied * source  # of what autocast makes of the encoder's output
    entry = stack.width * size.residual * rows.tokens
    whole = sum(part[0] for part in parts) * rows.tokens + keys_values
    products = sum(part[1] for part in parts) * rows.tokens + keys_values
    if size.on_cpu and (in_tiles or has_bias):
        products += _score_bytes(stack, rows, size, causal=causal, cross=in_tiles)
    copies = size.copied * _block_weights(stack, reads_encoder=rows.source_length > 0)
    return BlockBytes(whole=whole + copies, selective=entry + products, full=entry)


def _block_weights(stack: StackConfig, *, reads_encoder: bool) -> int:
    attention = 2 * stack.width * (stack.heads + stack.num_kv_heads) * stack.per_head_width
    return attention * (2 if reads_encoder else 1) + stack.width * stack.ff_width * (3 if stack.gated else 2)


def _score_bytes(stack: StackConfig, rows: ActivationRows, size: Elements, *, causal: bool, cross: bool) -> int:
    """Returns what `selective` keeps of attention in tiles on a CPU, whose scores are products of matrices there.

    In fp32; in 16 bits the kernel's own copies in fp32 come on top.
    """
    pairs = 0
    for start in range(0, rows.length, _TILE):
        queries = min(_TILE, rows.length - start)
        pairs += queries * ((start + queries if causal else rows.length) + (rows.source_length if cross else 0))
    return rows.count * stack.heads * pairs * size.compute


# What a forward pass keeps for the backward pass, in bytes: the tensors that autograd saves,
# counted by formula.
#
#     block     inputs of norms and projections, queries, keys, values, mixed values: `block_memory.py`
#     mode      none: all of it. full: the block's input. selective: that, and results of matrix products and attention
#     ends      the input of the last norm, and the two gradients that the chunked loss leaves for its backward pass
#
# The same storage counts once, however many operations save it, and a view keeps the whole of its
# storage: that is what the memory of a device sees. Attention is counted as linear in length, which
# it is but for `eager`, and for the dense masks of `sdpa` on CUDA.
#
# Not here: recurrent cells (`recurrent_memory.py`), weights and optimizer (`state.py`).


@dataclass(frozen=True, slots=True)
class ActivationBytes:
    """What a micro-batch keeps on a rank.

    Attributes:
        blocks: All blocks, as their mode has it.
        ends: Embeddings, norms and dropout outside blocks, rotary tables, the head's own layers.
        loss: Gradients of hidden states and of the head's weight, made in the forward pass.
        recomputed: Of the one block that is computed again at a time; 0 without checkpointing.
    """

    blocks: int
    ends: int
    loss: int
    recomputed: int

    @property
    def kept(self) -> int:
        """What is held when the forward pass has ended."""
        return self.blocks + self.ends + self.loss

    @property
    def peak(self) -> int:
        """What is held in the backward pass at most."""
        return self.kept + self.recomputed


def _stack_bytes(
    stack: StackConfig, engine: EngineConfig, rows: ActivationRows, size: Elements, *, causal: bool, frozen_blocks: int
) -> tuple[int, int, int]:
    """Returns what the blocks of a stack keep, what its ends do, and the most that one block is computed again for.

    The first `frozen_blocks` blocks keep nothing: no gradient reaches them.
    """
    blocks = recomputed = 0
    mode, every = engine.activation_checkpointing, engine.activation_checkpointing_every
    for number in range(frozen_blocks, stack.layers):
        normed = not (number == 0 and stack.norm_placement == "pre" and stack.input_norm)
        found = block_bytes(stack, rows, size, causal=causal, normed=normed)
        if mode == "none" or number % every:
            blocks += found.whole
        else:
            blocks += found.full if mode == "full" else found.selective
            recomputed = max(recomputed, found.whole - (0 if mode == "full" else found.selective))
    ends = rows.tokens * norm_bytes(stack, size) * (int(stack.input_norm) + int(stack.norm_placement == "pre"))
    if stack.dropout:
        ends += rows.tokens * stack.width * (size.residual if size.on_cpu else size.mask)
    return blocks, ends, recomputed


def _table_bytes(stack: StackConfig, length: int, max_seq_len: int) -> int:
    """Returns the size of fp32 tables of positions that are no parameters."""
    if stack.position == "sinusoidal":
        return 4 * max_seq_len * stack.width
    if stack.position != "rotary":
        return 0
    rows = min(max_seq_len, 1 << (length - 1).bit_length())
    tables = 2 if stack.rope_local_theta is not None and stack.window is not None else 1
    return 2 * STATISTIC * rows * stack.per_head_width * tables


def _head_bytes(model: ModelConfig, positions: int, size: Elements, *, trained: bool) -> tuple[int, int]:
    """Returns what the layers before the scores keep, and what the loss does, for as many positions."""
    if model.head.kind == "none":
        return 0, 0
    stack = model.last_stack
    transform = 0
    if model.head.transform:
        transform = positions * (stack.width * 2 * size.compute + norm_bytes(stack, size))
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
    """Counts what a micro-batch of a Transformer keeps; `vocab_size` must be known.

    Args:
        model: The model.
        engine: Its precision, kind and activation checkpointing.
        lengths: T and S.
        micro: Rows that a rank runs at once.
        device: `cuda` or `cpu`: dropout remembers a flag or a factor.
        head_share: Of the positions, those at which the head is computed.
        trains_head: The matrix that makes scores has a gradient.
        frozen_blocks: First blocks of each stack that no gradient reaches. None: none. In other
            blocks the input of a frozen matrix is counted too, though it is not kept.
    """
    size = elements_of(engine, device)
    source = lengths.source or 0
    blocks = recomputed = 0
    ends = micro * 8 * (2 * lengths.target + source)  # ids and targets
    for stack, rows in (
        (model.encoder, ActivationRows(micro, source or lengths.target)),
        (model.decoder, ActivationRows(micro, lengths.target, source)),
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
    """Counts what adapters keep besides what the layers beside them do.

    That is the result of A and, under dropout, what A reads and which of it was dropped. `selective` keeps results of
    products, B's too; `full` computes all of it again.
    """
    mode, size = engine.activation_checkpointing, elements_of(engine, "cuda")
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


# What torch's recurrent cells keep for their backward pass, roughly: as on a CPU; what cuDNN
# reserves is its own.


_KEPT_STATES = {"rnn": 1, "gru": 7, "lstm": 16}

"""Vectors of the width of the state that a step keeps: its gates before and after, its state, and products of both."""


def _stack_elements(stack: RecurrentStackConfig, input_width: int) -> int:
    """Returns elements that a token leaves in all layers."""
    inputs = input_width + stack.width * (stack.layers - 1)
    return inputs + stack.layers * _KEPT_STATES[stack.cell] * stack.width + (2 * stack.width if stack.dropout else 0)


def recurrent_bytes(model: RecurrentConfig, engine: EngineConfig, lengths: RowLengths, micro: int) -> int:
    """Returns the bytes that a micro-batch keeps, to within about a third.

    With attention the pairs of target and source count: additive attention keeps a vector of width D for each of them.

    Args:
        model: Its vocabulary known.
        engine: Its precision.
        lengths: T and S.
        micro: Rows that a rank runs at once.
    """
    size, width = (4 if engine.precision == "fp32" else 2), model.decoder.width
    elements = lengths.target * _stack_elements(model.decoder, width * (2 if model.feeds_back else 1))
    source = lengths.source or lengths.target
    if model.encoder is not None:
        elements += source * _stack_elements(model.encoder, width)
    if model.attention != "none":
        elements += lengths.target * 3 * width + source * width
        elements += lengths.target * source * (2 + (width if model.attention == "bahdanau" else 0))
    head = lengths.target * width * micro + model.padded_vocab_size * width
    return size * (micro * elements + head)
