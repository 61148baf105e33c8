"""Activation memory by formula: the bytes that autograd saves for the backward pass.

    attention     input of the norm, input and result of the projection, rotated queries and keys,
                  mixed values
    feed-forward  input of the norm, input and result of the projection, activations, gated product
    ends          input of the last norm, and the two gradients that the chunked loss makes forward

Parts count themselves (`pretrain/config/model/parts/`). A block counts by its checkpointing mode: `none` keeps all of
it, `full` its input, `selective` its input and the results of matrix products and attention. With
`feedforward_tiles` a feed-forward layer keeps its input, and a part of the rest exists at a time. A
storage counts once, and a view keeps all of it: values are a view of the projection's result. Under
`offload_activations` two blocks are on the device at a time: one that runs, and one that is copied.
Attention counts as linear in length, which it is but for `eager`, and for dense masks of `sdpa` on
CUDA. Not here: weights and optimizer (`memory.py`).
"""

from dataclasses import dataclass, replace

from pretrain.config.engine import EngineConfig
from pretrain.config.model.parts import counts_of
from pretrain.config.model.parts.counts import MicroBatch
from pretrain.config.model.parts.recurrent import RecurrentCounts
from pretrain.config.model.parts.stack import StackCounts
from pretrain.plan.task import TrainingTask
from pretrain.plan.trained import adapter_bytes


@dataclass(frozen=True, slots=True)
class ActivationBytes:
    """Bytes that a micro-batch keeps on a rank."""

    blocks: int  # all blocks, by their checkpointing mode, and their adapters
    ends: int = 0  # norms and dropout outside blocks, position tables, the head's own layers
    loss: int = 0  # gradients of hidden states and of the head's weight, made in the forward pass
    recomputed: int = 0  # the one block that is computed again at a time; 0 without checkpointing
    gradient: int = 0  # the gradient of the widest product's result, in the block that runs backward
    on_host: int = 0  # what `offload_activations` has in host memory after the forward pass

    @property
    def kept(self) -> int:
        """Bytes at the end of the forward pass."""
        return self.blocks + self.ends + self.loss

    @property
    def peak(self) -> int:
        """Peak of the backward pass of the blocks."""
        return self.kept + self.recomputed + self.gradient


def _micro_batch(task: TrainingTask, counts: StackCounts, engine: EngineConfig, rows: int, device: str) -> MicroBatch:
    lengths = task.columns
    source = lengths.source or 0
    return MicroBatch(
        rows=rows,
        length=lengths.target if counts.name == "decoder" else source or lengths.target,
        source_length=source if counts.reads_encoder else 0,
        causal=counts.causal,
        compute=engine.compute_bytes,
        residual=4 if engine.autocasts else engine.compute_bytes,
        on_cpu=device == "cpu",
        compiles=engine.compiles(device),
        tiles=engine.feedforward_tiles,
        sequence=task.sequence,
        tensor=task.tensor,
        shares_experts=task.experts > 1,
    )


def _kept_blocks(counts: StackCounts, batch: MicroBatch, engine: EngineConfig, frozen: int) -> tuple[int, int, int]:
    """Returns bytes of blocks but the frozen ones, of the largest recomputed one, and on the host."""
    each = []
    mode = engine.activation_checkpointing
    # A tile of the feed-forward layer, on top of a block that is computed again.
    recomputed = tile = counts.tile(batch) if batch.tiles > 1 else 0
    for number in counts.numbers[frozen:]:
        block = counts.block(batch, number)
        # What is kept, and what of it autograd holds: without a graph no results of `selective`.
        if mode == "none" or number % engine.activation_checkpointing_every:
            each.append((block.none, block.none))
        elif mode == "full":
            each.append((block.full, block.full))
            recomputed = max(recomputed, block.none + tile)
        else:
            each.append((block.selective, block.selective if batch.compiles else block.full))
            recomputed = max(recomputed, block.none - block.selective)
    whole = sum(size for size, _ in each)
    # Further modules stay on the device.
    held = [size for _, size in each[: len(each) - counts.num_further]]
    if engine.offload_activations == "none" or len(held) < 2:
        return whole, recomputed, 0
    return whole - sum(held) + 2 * max(held), recomputed, sum(held[:-1])


def exchanged_bytes(task: TrainingTask, engine: EngineConfig, micro: int) -> int:
    """Returns bytes that a rank passes to the exchanges of a micro-batch, its own part included."""
    total = 0
    again = engine.activation_checkpointing != "none"
    every = engine.activation_checkpointing_every
    for counts in counts_of(task.model).stacks:
        batch = _micro_batch(task, counts, engine, micro, "cuda")
        for number in range(counts.layers):
            is_repeated = again and number % every == 0
            total += counts.exchanged(batch, number) * (2 + is_repeated)
    return total


def activation_bytes(task: TrainingTask, engine: EngineConfig, micro: int, device: str = "cuda") -> ActivationBytes:
    """Counts the activations of a micro-batch of `micro` rows on `cuda` or `cpu`.

    Blocks below the first trained parameter keep nothing. In other blocks the input of a frozen
    matrix is counted, though it is not kept. Recurrent models are right to within about a third.
    """
    counts = counts_of(task.model)
    lengths = task.columns
    if isinstance(counts, RecurrentCounts):
        source = lengths.source or lengths.target
        return ActivationBytes(counts.kept(micro, lengths.target, source, engine.compute_bytes))
    blocks = recomputed = gradient = on_host = 0
    ends = micro * 8 * (2 * lengths.target + (lengths.source or 0))  # ids and targets
    for one in counts.stacks:
        batch = _micro_batch(task, one, engine, micro, device)
        frozen = task.flops.frozen_blocks.get(one.name, 0)
        whole, again, away = _kept_blocks(one, batch, engine, frozen)
        blocks += whole
        on_host += away
        recomputed = max(recomputed, again)
        gradient = max(gradient, one.widest(batch) if whole else 0)
        ends += one.ends(batch)
    positions = round(micro * lengths.target * task.head_share)
    before, loss = counts.head(batch, positions, trains_head=task.trains_head)
    ends += before + counts.encoded(batch, lengths.source or 0)
    if task.trained is not None:
        blocks += adapter_bytes(task.model, task.trained, engine, lengths, micro)
    sizes = ActivationBytes(blocks, ends, loss, recomputed, gradient, on_host)
    if task.generator is None:
        return sizes
    # Narrower: the largest block that is computed again is the model's.
    other = activation_bytes(task.generator, engine, micro, device)
    return replace(
        sizes,
        blocks=blocks + other.blocks,
        ends=ends + other.ends,
        loss=loss + other.loss,
        on_host=on_host + other.on_host,
    )
