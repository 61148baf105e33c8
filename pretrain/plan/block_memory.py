"""What one Transformer block keeps for its backward pass, in bytes, by formula: read it beside `model/block.py`.

    attention     norm's input, the projection's input and result, rotated queries and keys, mixed values
    feed-forward  norm's input, the projection's input and result, what the activation gave, the gated product

Bytes are counted a token, and a storage counts once: values are a view of the projection's result, and hold all of it.
"""

from dataclasses import dataclass

from pretrain.config.engine import EngineConfig
from pretrain.config.model import StackConfig
from pretrain.plan.flops import stack_weights

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
class Rows:
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


def block_bytes(stack: StackConfig, rows: Rows, size: Elements, *, causal: bool, normed: bool = True) -> BlockBytes:
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
    copies = size.copied * stack_weights(stack, reads_encoder=rows.source_length > 0) // stack.layers
    return BlockBytes(whole=whole + copies, selective=entry + products, full=entry)


def _score_bytes(stack: StackConfig, rows: Rows, size: Elements, *, causal: bool, cross: bool) -> int:
    """Returns what `selective` keeps of attention in tiles on a CPU, whose scores are products of matrices there.

    In fp32; in 16 bits the kernel's own copies in fp32 come on top.
    """
    pairs = 0
    for start in range(0, rows.length, _TILE):
        queries = min(_TILE, rows.length - start)
        pairs += queries * ((start + queries if causal else rows.length) + (rows.source_length if cross else 0))
    return rows.count * stack.heads * pairs * size.compute
