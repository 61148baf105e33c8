"""The matrices of a recurrent model, which its parameters and its FLOPs are counted from."""

from collections.abc import Iterator
from dataclasses import dataclass, fields

from pretrain.config.model import ModelConfig, StackConfig
from pretrain.config.recurrent import AnyModelConfig, RecurrentConfig, RecurrentStackConfig

_GATES = {"rnn": 1, "gru": 3, "lstm": 4}


def decoder_input_width(model: RecurrentConfig) -> int:
    """Returns what the first layer of the decoder reads: a token, and what attention gave where that is fed back."""
    return model.decoder.width * (2 if model.feeds_back else 1)


def cell_matrices(stack: RecurrentStackConfig, input_width: int) -> Iterator[tuple[int, int]]:
    """Yields inputs and outputs of each matrix of each layer and direction; beside each, torch has a bias."""
    directions = 2 if stack.bidirectional else 1
    hidden = stack.width // directions
    for layer in range(stack.layers):
        for _ in range(directions):
            yield input_width if layer == 0 else stack.width, _GATES[stack.cell] * hidden
            yield hidden, _GATES[stack.cell] * hidden


def attention_weights(model: RecurrentConfig) -> tuple[int, int, int]:
    """Returns the weights of attention that meet a target token, a source token, and a pair of them."""
    square = model.decoder.width**2
    if model.attention == "bahdanau":
        return 3 * square, square, model.decoder.width
    if model.attention == "luong":
        return 2 * square, square if model.score == "general" else 0, 0
    return 0, 0, 0


# Parameters of a model, counted from its config: exactly what `pretrain.model` builds.
#
# Not here: memory (`memory.py`) and FLOPs (`flops.py`).


@dataclass(frozen=True, slots=True)
class ParameterCount:
    """Parameters by part; a weight that two parts share counts once.

    Attributes:
        embedding: Token table, padded rows included, and tables of token types.
        position: Tables of learned positions, or of biases by distance.
        attention: Projections of all layers, with biases, to the encoder's output too.
        feedforward: The same.
        norm: All norms of the stacks.
        head: Output projection unless tied to the embedding, its bias, and what comes before it.
        pooler: Summary of a sentence.
        recurrent: Cells of recurrent layers, with both of torch's biases.
    """

    embedding: int
    position: int
    attention: int
    feedforward: int
    norm: int
    head: int
    pooler: int
    recurrent: int = 0

    @property
    def total(self) -> int:
        """All parameters."""
        return sum(getattr(self, part.name) for part in fields(self))


def _linear(inputs: int, outputs: int, bias: bool) -> int:
    return inputs * outputs + (outputs if bias else 0)


def _norm(stack: StackConfig) -> int:
    return 2 * stack.width if stack.norm == "layer" and stack.bias else stack.width


def _count_position(stack: StackConfig, max_seq_len: int) -> int:
    if stack.position == "learned":
        return max_seq_len * stack.width
    return stack.relative_buckets * stack.heads if stack.position == "relative" else 0


def _count_attention(stack: StackConfig, reads_encoder: bool) -> int:
    # Queries, keys and values of self-attention are one matrix, of cross attention two: the sizes are the same.
    heads_width, kv_width = stack.heads * stack.per_head_width, stack.num_kv_heads * stack.per_head_width
    projections = _linear(stack.width, heads_width + 2 * kv_width, stack.has_qkv_bias)
    layer = projections + _linear(heads_width, stack.width, stack.bias)
    return stack.layers * layer * (2 if reads_encoder else 1)


def _count_feedforward(stack: StackConfig) -> int:
    up_width = 2 * stack.ff_width if stack.gated else stack.ff_width
    return stack.layers * (
        _linear(stack.width, up_width, stack.bias) + _linear(stack.ff_width, stack.width, stack.bias)
    )


def _count_norms(stack: StackConfig, reads_encoder: bool) -> int:
    pre = stack.norm_placement == "pre"
    # One a sub-layer. A pre-norm stack ends with one more; its first may be the norm of the input instead.
    num_norms = stack.layers * (3 if reads_encoder else 2) + (1 if pre else 0)
    if stack.input_norm and not pre:
        num_norms += 1
    return num_norms * _norm(stack) + (2 * stack.layers * stack.per_head_width if stack.qk_norm else 0)


def _count_head(model: ModelConfig) -> int:
    if model.head.kind == "none":
        return 0
    stack, rows = model.last_stack, model.num_head_rows
    transform = _linear(stack.width, stack.width, stack.bias) + _norm(stack) if model.head.transform else 0
    weight = 0 if model.tied_embeddings else rows * stack.width
    return transform + weight + (rows if model.head.bias else 0)


def _count_cells(stack: RecurrentStackConfig, input_width: int) -> int:
    return sum(inputs * outputs + outputs for inputs, outputs in cell_matrices(stack, input_width))


def _count_recurrent(model: RecurrentConfig) -> ParameterCount:
    cells = _count_cells(model.decoder, decoder_input_width(model))
    return ParameterCount(
        embedding=model.padded_vocab_size * model.decoder.width,
        position=0,
        attention=sum(attention_weights(model)),
        feedforward=0,
        norm=0,
        head=_count_head(model.head_model),
        pooler=0,
        recurrent=cells + (0 if model.encoder is None else _count_cells(model.encoder, model.encoder.width)),
    )


def count_parts(model: AnyModelConfig) -> ParameterCount:
    """Counts the parameters of each part; `vocab_size` must be known."""
    if isinstance(model, RecurrentConfig):
        return _count_recurrent(model)
    width = model.last_stack.width
    stacks = [stack for stack in (model.encoder, model.decoder) if stack is not None]
    # Of two stacks, the last is the decoder, whose blocks read the encoder's output.
    reads = [len(stacks) == 2 and stack is stacks[-1] for stack in stacks]
    return ParameterCount(
        embedding=model.padded_vocab_size * width + sum(stack.token_types * width for stack in stacks),
        position=sum(_count_position(stack, model.max_seq_len) for stack in stacks),
        attention=sum(map(_count_attention, stacks, reads)),
        feedforward=sum(map(_count_feedforward, stacks)),
        norm=sum(map(_count_norms, stacks, reads)),
        head=_count_head(model),
        pooler=_linear(width, width, True) if model.pooler else 0,
    )


def count_parameters(model: AnyModelConfig) -> int:
    """Returns the number of parameters of the built model, with its padded vocabulary."""
    return count_parts(model).total
