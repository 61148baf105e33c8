"""FLOPs of training on one token, by the formula that MFU is reported with (Chowdhery et al. 2022, appendix B).

    6 N_matmul  +  12 L D T        2 FLOPs a weight forward, 4 backward; scores and mixing over all T keys

N_matmul are the weights that a token is multiplied with: the projections and the head, but not look-ups, norms and
biases. D is the width of all query heads together, N H. Recomputation is not useful work, and is not counted.
"""

from pretrain.config.model import ModelConfig
from pretrain.plan.params import only_stack


def count_matmul_weights(model: ModelConfig) -> int:
    """Returns N_matmul, the head included whether tied or not; `vocab_size` must be known."""
    stack = only_stack(model)
    attention = stack.width * stack.per_head_width * 2 * (stack.heads + stack.num_kv_heads)
    feedforward = stack.width * stack.ff_width * (3 if stack.gated else 2)
    return stack.layers * (attention + feedforward) + model.padded_vocab_size * stack.width


def train_flops_per_token(model: ModelConfig, seq_len: int, *, halve_causal: bool = False) -> int:
    """Returns the FLOPs of forward and backward, per token of a row.

    Args:
        model: `vocab_size` must be known.
        seq_len: Tokens of a row, T.
        halve_causal: Count for a decoder only the half of the scores that a causal mask leaves. The full count is the
            field's convention; print this one beside it.
    """
    stack = only_stack(model)
    attention = 12 * stack.layers * stack.heads * stack.per_head_width * seq_len
    if halve_causal and model.decoder is not None:
        attention //= 2
    return 6 * count_matmul_weights(model) + attention
