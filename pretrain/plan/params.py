"""Parameters of a model, counted from its config: exactly what `pretrain.model` builds.

Not here: memory (`memory.py`) and FLOPs (`flops.py`), which start from these counts.
"""

from dataclasses import dataclass

from pretrain.config.model import ModelConfig, StackConfig


@dataclass(frozen=True, slots=True)
class ParameterCount:
    """Parameters by part; a weight that two parts share counts once.

    Attributes:
        embedding: Token table, padded rows included.
        position: Table of learned positions.
        attention: Projections of all layers, with biases.
        feedforward: The same.
        norm: All norms.
        head: Output projection; 0 when tied to the embedding.
    """

    embedding: int
    position: int
    attention: int
    feedforward: int
    norm: int
    head: int

    @property
    def total(self) -> int:
        """All parameters."""
        return self.embedding + self.position + self.attention + self.feedforward + self.norm + self.head


def only_stack(model: ModelConfig) -> StackConfig:
    """Returns the one stack of a decoder-only or encoder-only model; two stacks are not counted yet."""
    assert model.encoder is None or model.decoder is None, "plan counts models of one stack"
    stack = model.decoder or model.encoder
    assert stack is not None
    return stack


def _linear(inputs: int, outputs: int, bias: bool) -> int:
    return inputs * outputs + (outputs if bias else 0)


def count_parts(model: ModelConfig) -> ParameterCount:
    """Counts the parameters of each part; `vocab_size` must be known."""
    stack = only_stack(model)
    width, heads_width = stack.width, stack.heads * stack.per_head_width
    qkv_width = heads_width + 2 * stack.num_kv_heads * stack.per_head_width
    table = model.padded_vocab_size * width
    attention = _linear(width, qkv_width, stack.bias) + _linear(heads_width, width, stack.bias)
    up_width = 2 * stack.ff_width if stack.gated else stack.ff_width
    feedforward = _linear(width, up_width, stack.bias) + _linear(stack.ff_width, width, stack.bias)
    norm = 2 * width if stack.norm == "layer" and stack.bias else width
    # Two a layer, and a last one over the residual sum, which a post-norm stack has normalised already.
    num_norms = 2 * stack.layers + (1 if stack.norm_placement == "pre" else 0)
    return ParameterCount(
        embedding=table,
        position=model.max_seq_len * width if stack.position == "learned" else 0,
        attention=stack.layers * attention,
        feedforward=stack.layers * feedforward,
        norm=num_norms * norm,
        head=0 if model.tied_embeddings else table,
    )


def count_parameters(model: ModelConfig) -> int:
    """Returns the number of parameters of the built model, with its padded vocabulary."""
    return count_parts(model).total
