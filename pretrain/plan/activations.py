"""What a forward pass keeps for the backward pass, in bytes: the tensors that autograd saves, counted by formula.

    block     inputs of norms and projections, queries, keys, values, mixed values: `block_memory.py`
    mode      none: all of it. full: the block's input. selective: that, and results of matrix products and attention
    ends      the input of the last norm, and the two gradients that the chunked loss leaves for its backward pass

The same storage counts once, however many operations save it, and a view keeps the whole of its storage: that is what
the memory of a device sees. Attention is counted as linear in length, which it is but for `eager`, and for the dense
masks of `sdpa` on CUDA.

Not here: recurrent cells (`recurrent_memory.py`), weights and optimizer (`state.py`).
"""

from dataclasses import dataclass

from pretrain.config.engine import EngineConfig
from pretrain.config.lengths import RowLengths
from pretrain.config.model import ModelConfig, StackConfig
from pretrain.plan.block_memory import STATISTIC, Elements, Rows, block_bytes, elements_of, norm_bytes
from pretrain.plan.shapes import parameter_shapes
from pretrain.plan.trained import Trained


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
    stack: StackConfig, engine: EngineConfig, rows: Rows, size: Elements, *, causal: bool, still: int
) -> tuple[int, int, int]:
    """Returns what the blocks of a stack keep, what its ends do, and the most that one block is computed again for.

    The first `still` blocks keep nothing: no gradient reaches them.
    """
    blocks = recomputed = 0
    mode, every = engine.activation_checkpointing, engine.activation_checkpointing_every
    for number in range(still, stack.layers):
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
    still: dict[str, int] | None = None,
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
        still: Of each stack, the first blocks that no gradient reaches. None: there are none. In other blocks what a
            frozen matrix reads is counted too, though it is not kept.
    """
    size = elements_of(engine, device)
    source = lengths.source or 0
    blocks = recomputed = 0
    ends = micro * 8 * (2 * lengths.target + source)  # ids and targets
    for stack, rows in (
        (model.encoder, Rows(micro, source or lengths.target)),
        (model.decoder, Rows(micro, lengths.target, source)),
    ):
        if stack is None:
            continue
        causal = stack is model.decoder
        unreached = (still or {}).get("decoder" if causal else "encoder", 0)
        inside, outside, again = _stack_bytes(stack, engine, rows, size, causal=causal, still=unreached)
        blocks, ends, recomputed = blocks + inside, ends + outside, max(recomputed, again)
        ends += _table_bytes(stack, rows.length, model.max_seq_len)
    if model.encoder is not None and model.decoder is not None:
        # The encoder's output, which every decoder block reads.
        ends += micro * source * model.encoder.width * size.residual
    transform, loss = _head_bytes(model, round(micro * lengths.target * head_share), size, trained=trains_head)
    return ActivationBytes(blocks=blocks, ends=ends + transform, loss=loss, recomputed=recomputed)


def adapter_bytes(model: ModelConfig, trained: Trained, engine: EngineConfig, lengths: RowLengths, micro: int) -> int:
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
