"""Activation memory by formula: the bytes that autograd saves for the backward pass.

    attention     input of the norm, input and result of the projection, rotated queries and keys,
                  mixed values
    feed-forward  input of the norm, input and result of the projection, activations, gated product
    ends          input of the last norm, and the two gradients that the chunked loss makes forward

Read it with `model/block.py`. A block counts by its checkpointing mode: `none` keeps all of
it, `full` its input, `selective` its input and the results of matrix products and attention. With
`feedforward_tiles` a feed-forward layer keeps its input, and a part of the rest exists at a time. A
storage counts once, and a view keeps all of it: values are a view of the projection's result. Under
`offload_activations` two blocks are on the device at a time: one that runs, and one that is copied.
Attention counts as linear in length, which it is but for `eager`, and for dense masks of `sdpa` on
CUDA. Not here: weights and optimizer (`memory.py`).
"""

from dataclasses import dataclass

from pretrain.config.engine import EngineConfig
from pretrain.config.lengths import RowLengths
from pretrain.config.model import ExpertsConfig, ModelConfig, RecurrentConfig, StackConfig
from pretrain.config.model.parts.recurrent import cell_elements, decoder_input_width
from pretrain.config.model.stack import predictor_number
from pretrain.plan.task import TrainingTask, copies_of_heads
from pretrain.plan.trained import adapter_bytes

_STATISTIC = 4
"""Bytes of a mean, a standard deviation or a log-sum-exp: fp32 in every precision."""

_TILE = 128
"""Queries of a tile where attention runs tile by tile (`model/backends/sdpa.py`)."""


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


class _StackCounter:
    """Bytes of a micro-batch in a stack; of sub-layers a token's: all, and results of products."""

    def __init__(self, task: TrainingTask, name: str, engine: EngineConfig, rows: int, device: str) -> None:
        model = task.model
        assert isinstance(model, ModelConfig), "recurrent models are counted apart"
        self.stack: StackConfig = getattr(model, name)
        self.ranks, self.tensor, self.shares_experts = task.sequence, task.tensor, task.experts > 1
        self.copies = copies_of_heads(self.stack.heads, self.stack.num_kv_heads, task.row_ranks)
        lengths = task.columns
        is_last = name == "decoder"
        self.causal = is_last and not model.restores
        source = lengths.source or 0
        self.length = lengths.target if is_last else source or lengths.target
        # 0: it reads no encoder.
        self.source_length = source if is_last and model.reads_encoder else 0
        self.rows = rows
        # A CPU has no fused kernels for RMSNorm, and none for dropout of attention weights.
        self.on_cpu = device == "cpu"
        self.compiles = engine.compiles(device)
        self.tiles = engine.feedforward_tiles
        self.compute = engine.compute_bytes  # operands and results of matrix products and attention
        # The stream between blocks, and the inputs of norms: fp32 under autocast.
        self.residual = self.compute if engine.kind == "deepspeed" else 4
        # Autocast makes a copy of each weight.
        self.copied = self.compute if self.compute != self.residual else 0
        # Dropout remembers a flag on CUDA, a factor on a CPU.
        self.mask = 0 if not self.stack.dropout else self.compute if self.on_cpu else 1
        no_kernel = self.stack.attention_weight_dropout > 0 or self.stack.score_cap is not None
        self.in_tiles = self.on_cpu and no_kernel

    def norm(self, width: int = 0) -> int:
        """Returns bytes a token that a norm of the stack's or another width keeps: its input and statistics."""
        # RMSNorm step by step: its input and what it divided, in fp32; with an offset: a copy in fp32.
        is_layer = self.stack.norm != "rms"
        each = 4 if self.stack.norm_offset and not self.on_cpu else self.residual
        each = 8 if self.on_cpu and not is_layer else each
        return (width or self.stack.width) * each + _STATISTIC * (1 + is_layer)

    def around(self, *, normed: bool = True, shared: bool | str = False) -> int:
        """Returns bytes a token of a sub-layer's input, norms, dropout and scale; `shared`: the stack's `parallel`."""
        # The gradient of learned factors needs the result that they scale.
        scaled = 0
        is_normed_after = self.stack.norm_placement in ("output", "sandwich")
        if self.stack.layer_scale is not None:
            scaled = self.residual if is_normed_after else self.compute
        # The columns of all ranks that share matrices; attention has read the same stream or input.
        read = self.tensor * self.compute - (self.residual if shared is True else 0)
        if shared == "one_norm" and not self.copied and self.tensor == 1:
            read = 0
        norms = (normed + (self.stack.norm_placement == "sandwich")) * (shared != "one_norm")
        return self.stack.width * (read + self.mask + scaled) + norms * self.norm()

    def attention(self, number: int) -> tuple[int, int]:
        stack = self.stack
        normed = stack.norms_attention(number)
        if stack.latent is not None:
            return self.latent(normed=normed)
        turned_heads = stack.heads + stack.num_kv_heads
        products = (turned_heads + stack.num_kv_heads) * stack.per_head_width * self.compute
        blockwise = self.in_tiles or stack.position == "relative"
        statistic = 0 if blockwise else _STATISTIC
        mixed = stack.heads * (stack.per_head_width * self.compute + statistic)
        # Values are a view of the product; rotated or normed queries and keys are copies.
        turned = further = 0
        if (stack.is_rotary and number not in stack.unrotated_layers) or stack.qk_norm:
            turned = turned_heads * stack.per_head_width * self.compute
        if stack.qk_norm:
            # The projection keeps the input already. LayerNorm is one kernel; weights of each head multiply its result.
            each = (4 if self.compute == 4 else 8) if self.on_cpu else 4 * (stack.norm_offset and self.compute < 4)
            each = {"layer": 0, "heads": 4 if self.compute == 4 else 8}.get(str(stack.qk_norm), each)
            further = turned_heads * (each * stack.per_head_width + _STATISTIC)
        if stack.value_parts(number) > 1:
            # The sum, and autocast's copy of an embedding.
            copied = stack.value_table(number) is not None and self.copied > 0
            turned += stack.num_kv_heads * stack.per_head_width * self.compute
            further += copied * stack.num_kv_heads * stack.per_head_width * self.compute
        results = products + mixed
        kept = results + turned + further
        if self.ranks > 1:
            # Attention keeps what it has received instead, and the next product what came back.
            reads_product = stack.qk_norm or stack.value_parts(number) > 1
            kept = sum(self.exchanged()) + mixed + further + (products if reads_product else 0)
        return self.around(normed=normed) + kept, results + stack.width * self.compute

    def latent(self, *, normed: bool) -> tuple[int, int]:
        """Counts latent attention: what is projected down twice, before and after its norm."""
        stack, latent = self.stack, self.stack.latent
        assert latent is not None
        wide = stack.heads * stack.per_head_width * self.compute
        ranks = latent.kv_rank + (latent.query_rank or 0)
        norms = ranks * (4 if self.compute == 4 else 8) * self.on_cpu + 2 * _STATISTIC
        down = (ranks + latent.rope_width) * self.compute
        values = stack.heads * latent.value_width * self.compute  # as the output projection reads them
        mixed = wide + _STATISTIC * stack.heads
        kept = down + ranks * self.compute + norms + 3 * wide + mixed + values
        up = stack.heads * (2 * stack.per_head_width - latent.rope_width + latent.value_width) * self.compute
        return self.around(normed=normed) + kept, down + up + mixed + stack.width * self.compute

    def exchanged(self) -> tuple[int, int]:
        """Returns bytes a token of queries, keys and values for the exchange, and of results."""
        stack = self.stack
        if self.ranks == 1:
            return 0, 0
        head = stack.per_head_width * self.compute
        return (stack.heads + 2 * self.copies * stack.num_kv_heads) * head, stack.heads * head

    def exchanges(self, engine: EngineConfig) -> int:
        """Returns bytes that a rank exchanges for a micro-batch, in all passes of each block."""
        sent, back = self.exchanged()
        each = (sent + back) * self.length
        if self.source_length:  # queries, results, keys and values
            each += 2 * back * self.length + (sent - back) * self.source_length
        again = engine.activation_checkpointing != "none"
        repeated = -(-self.stack.layers // engine.activation_checkpointing_every) if again else 0
        return self.rows * each * (2 * self.stack.layers + repeated)

    def cross(self) -> tuple[int, int]:
        """Counts a target token; keys and values are a source token's."""
        mixed = self.stack.heads * self.stack.per_head_width * self.compute
        results = 2 * mixed + (0 if self.in_tiles else _STATISTIC * self.stack.heads)
        _, back = self.exchanged()
        return self.around() + results + back, results + self.stack.width * self.compute

    def feedforward(self, number: int) -> tuple[int, int]:
        around = self.around(shared=self.stack.parallel)
        if self.tiles > 1:
            # The columns of other ranks are gathered again with each tile, and go with it.
            return around - (self.tensor - 1) * self.stack.width * self.compute, 0
        inside, results = self.tile(number)
        return around + inside, results

    def tile(self, number: int) -> tuple[int, int]:
        """Returns what a feed-forward layer keeps besides its input, and results of products."""
        experts = self.stack.experts
        if experts is not None and self.stack.has_experts(number):
            return self.mixture(experts)
        inside, up = self.hidden(self.stack.ff_width)
        return inside, up + self.stack.width * self.compute

    def hidden(self, width: int) -> tuple[int, int]:
        """Returns bytes a token between both products of a layer, and of the first one's result."""
        stack = self.stack
        hidden = width * self.compute
        results = (1 + stack.gated) * hidden
        # The backward pass of ReLU needs its result only, which the next product holds too; a square needs its input.
        is_relu = stack.activation == "relu" and not stack.gated
        inside = 4 * hidden if stack.gated else hidden if is_relu else 2 * hidden
        if self.compiles:  # an activation or a product is computed again; signs of ReLU are kept
            return min(inside, 3 * hidden) + width * is_relu, results
        # Of x sigmoid(1.702 x) also the sigmoid; a bound or a shift of a projection is a copy of it.
        further = int(stack.activation == "quick_gelu")
        if stack.gated:
            is_bounded = stack.gate_limit is not None
            further += (stack.activation == "relu2") + is_bounded + (is_bounded or stack.gate_shift != 0)
        return inside + further * hidden, results

    def widest(self) -> int:
        """Returns bytes of the widest product's result of a micro-batch."""
        stack = self.stack
        often, width = (stack.experts.top_k, stack.expert_width) if stack.experts else (1, stack.ff_width)
        projected = (stack.heads + 2 * stack.num_kv_heads) * stack.per_head_width * self.compute
        return max(often * self.hidden(width)[1] // self.tiles, projected) * self.rows * self.length

    def mixture(self, experts: ExpertsConfig) -> tuple[int, int]:
        """Counts a row of each expert chosen, before and after it; and shared ones."""
        stack = self.stack
        row = stack.width * self.compute
        inside, up = self.hidden(stack.expert_width)
        # The router in fp32: logits and scores, twice where those of a sigmoid are divided by their
        # sum; weights and sums before a division; three indices of a row.
        scores = experts.count * _STATISTIC * (2 if experts.scores == "softmax" else 4)
        routed = experts.top_k * (3 * 8 + 3 * _STATISTIC) + scores
        routed += 0 if self.compute == 4 else 4 * stack.width  # its input in fp32
        routed += experts.top_k * 2 * 8 * (stack.bias + self.shares_experts)
        whole = routed + experts.top_k * (2 * row + inside)
        results = experts.count * _STATISTIC + experts.top_k * (row + up)
        if experts.shared:
            inside, up = self.hidden(experts.shared * stack.expert_width)
            whole, results = whole + inside, results + up + row
        return whole, results

    def block(self, number: int) -> tuple[int, int, int]:
        """Returns bytes of a block by checkpointing mode: none, selective, full."""
        stack = self.stack
        parts = [self.attention(number), self.feedforward(number)]
        source = self.rows * self.source_length
        # The decoder's keys and values of the source, and autocast's copy of the encoder's output.
        shared = 2 * self.copies * stack.num_kv_heads * stack.per_head_width * self.compute * source
        shared += stack.width * (self.copied + (self.tensor > 1) * self.tensor * self.compute) * source
        # Weights of attention and feed-forward layers, of which autocast makes copies.
        attention = 2 * stack.width * (stack.heads + stack.num_kv_heads) * stack.per_head_width
        held = (stack.experts.count + stack.experts.shared) if stack.experts else 1
        weights = attention + held * stack.width * stack.expert_width * (3 if stack.gated else 2)
        if self.source_length:
            parts.append(self.cross())
            weights += attention
        if stack.residual_scalars and number > 0:
            parts.append((stack.width * self.residual, 0))  # the stream before the scalars
        tokens = self.rows * self.length
        entry = stack.width * self.residual * tokens
        # The other blocks read the first one's values, a view of its product.
        shown = 0
        if stack.value_residual and number == 0:
            shown = (stack.heads + 2 * stack.num_kv_heads) * stack.per_head_width * self.compute * tokens
        whole, products = (sum(part) * tokens + shared for part in zip(*parts, strict=True))
        products += self.scores() if self.on_cpu and (self.in_tiles or stack.position == "relative") else 0
        return whole + self.copied * weights, entry + products, entry + shown

    def scores(self) -> int:
        """Returns what `selective` keeps of tiled attention on a CPU, whose scores are products."""
        pairs = 0
        length, source = (n * self.ranks * self.tensor for n in (self.length, self.source_length))
        for start in range(0, length, _TILE):
            queries = min(_TILE, length - start)
            keys = start + queries if self.causal else length
            pairs += queries * (keys + (source if self.in_tiles else 0))
        return self.rows * self.stack.heads // (self.ranks * self.tensor) * pairs * self.compute

    def blocks(self, engine: EngineConfig, frozen: int, predictors: int) -> tuple[int, int, int]:
        """Returns bytes of blocks but the frozen ones, of the largest recomputed one, and on the host.

        `predictors`: blocks of `multi_token`, which stay on the device.
        """
        stack = self.stack
        each = []
        mode = engine.activation_checkpointing
        # A tile of the feed-forward layer, on top of a block that is computed again.
        inside = 0
        if self.tiles > 1:
            inside = max(self.tile(number)[0] for number in range(stack.layers))
            inside += (self.tensor > 1) * self.tensor * stack.width * self.compute
        recomputed = tile = -(-self.rows * self.length // self.tiles) * inside
        further = predictors * [predictor_number(stack)]
        for number in (*range(frozen, stack.layers), *further):
            whole, selective, full = self.block(number)
            # What is kept, and what of it autograd holds: without a graph no results of `selective`.
            if mode == "none" or number % engine.activation_checkpointing_every:
                each.append((whole, whole))
            elif mode == "full":
                each.append((full, full))
                recomputed = max(recomputed, whole + tile)
            else:
                each.append((selective, selective if self.compiles else full))
                recomputed = max(recomputed, whole - selective)
        kept = sum(kept for kept, _ in each)
        held = [held for _, held in each[: len(each) - predictors]]
        if engine.offload_activations == "none" or len(held) < 2:
            return kept, recomputed, 0
        return kept - sum(held) + 2 * max(held), recomputed, sum(held[:-1])

    def joins(self) -> int:
        """Returns bytes of a module of `multi_token` outside of its block: norms, a pair of vectors."""
        stack = self.stack
        norms = (3 - (stack.norm_placement == "post")) * self.norm()
        return self.rows * self.length * (norms + 2 * stack.width * self.compute)

    def ends(self, max_seq_len: int) -> int:
        """Returns bytes of norms, dropout, and fp32 tables of positions outside the blocks."""
        stack = self.stack
        tokens = self.rows * self.length
        norms = self.norm() * (stack.norm_placement != "post") + self.norm(stack.table_width) * bool(stack.input_norm)
        found = tokens * (norms + (stack.embedding_width or 0) * self.compute)
        found += tokens * stack.table_width * (self.residual if self.on_cpu else self.mask) * (stack.dropout > 0)
        found += tokens * stack.value_embeddings * stack.num_kv_heads * stack.per_head_width * self.residual
        if stack.position == "sinusoidal":
            found += 4 * max_seq_len * stack.width
        if stack.is_rotary:
            rows = min(max_seq_len, 1 << (self.length - 1).bit_length())
            tables = 2 if stack.rope_local_theta is not None and stack.window is not None else 1
            found += 2 * _STATISTIC * rows * stack.rotary_width * tables
        return found


_Stacks = dict[str, _StackCounter]


def _count_stacks(task: TrainingTask, engine: EngineConfig, micro: int, device: str) -> _Stacks:
    names = [name for name in ("encoder", "decoder") if getattr(task.model, name) is not None]
    return {name: _StackCounter(task, name, engine, micro, device) for name in names}


def exchanged_bytes(task: TrainingTask, engine: EngineConfig, micro: int) -> int:
    """Returns bytes that a rank passes to the exchanges of a micro-batch, its own part included."""
    if isinstance(task.model, RecurrentConfig):
        return 0
    stacks = _count_stacks(task, engine, micro, "cuda")
    return sum(counter.exchanges(engine) for counter in stacks.values())


def activation_bytes(task: TrainingTask, engine: EngineConfig, micro: int, device: str = "cuda") -> ActivationBytes:
    """Counts the activations of a micro-batch of `micro` rows on `cuda` or `cpu`.

    Blocks below the first trained parameter keep nothing. In other blocks the input of a frozen
    matrix is counted, though it is not kept. Recurrent models are right to within about a third.
    """
    model = task.model
    lengths = task.columns
    if isinstance(model, RecurrentConfig):
        return ActivationBytes(_recurrent_bytes(model, engine, lengths, micro))
    source = lengths.source or 0
    blocks = recomputed = gradient = on_host = loss = 0
    ends = micro * 8 * (2 * lengths.target + source)  # ids and targets
    stacks = _count_stacks(task, engine, micro, device)
    for name, counter in stacks.items():
        frozen = task.flops.frozen_blocks.get(name, 0)
        kept, again, away = counter.blocks(engine, frozen, model.multi_token)
        blocks += kept
        on_host += away
        recomputed = max(recomputed, again)
        gradient = max(gradient, counter.widest() if kept else 0)
        ends += counter.ends(model.positions_of(name)) + model.multi_token * counter.joins()
    last = list(stacks.values())[-1]
    if len(stacks) == 2:
        # The encoder's output, which every decoder block reads, or the bridge.
        ends += micro * source * stacks["encoder"].stack.width * last.residual
    if model.head.kind != "none":
        width, positions = model.head_width, round(micro * lengths.target * task.head_share)
        if model.head.transform:
            ends += positions * ((last.stack.width + width) * last.compute + last.norm(width))
        sums = model.num_head_rows // task.tensor * (width + model.head.bias) if task.trains_head else 0
        loss = (1 + model.multi_token) * (positions * width + sums) * last.compute
        if model.restores:  # pixels, predicted ones and their difference, by autograd
            loss = positions * (width * last.compute + 3 * model.num_head_rows * _STATISTIC)
    if task.trained is not None:
        blocks += adapter_bytes(model, task.trained, engine, lengths, micro)
    if task.generator is not None:  # narrower: the largest block that is computed again is the model's
        other = activation_bytes(task.generator, engine, micro, device)
        blocks, ends = blocks + other.blocks, ends + other.ends
        loss, on_host = loss + other.loss, on_host + other.on_host
    return ActivationBytes(blocks, ends, loss, recomputed, gradient, on_host)


def _recurrent_bytes(model: RecurrentConfig, engine: EngineConfig, lengths: RowLengths, micro: int) -> int:
    """Counts cells, head and attention; additive attention keeps a vector a pair of tokens."""
    width = model.decoder.width
    elements = lengths.target * cell_elements(model.decoder, decoder_input_width(model))
    source = lengths.source or lengths.target
    if model.encoder is not None:
        elements += source * cell_elements(model.encoder, width)
    if model.attention != "none":
        elements += lengths.target * 3 * width + source * width
        elements += lengths.target * source * (2 + (width if model.attention == "bahdanau" else 0))
    head = lengths.target * width * micro + model.padded_vocab_size * width
    return engine.compute_bytes * (micro * elements + head)
