"""Transfer of hyperparameters by width and depth (`optim.transfer`), without a multiplier in the model.

    m_N = width / base_width    m_L = layers / base_layers (`completep`; 1 under `mup`)

    parameter               initial std       rate, AdamW   epsilon           multiplier c
    embeddings, positions   1                 1             1 / m_N
    hidden matrix           m_N^-1/2          1 / m_N       1 / (m_N m_L)     1 / m_L at the end of a branch
    norm, bias of a block                     1             1 / (m_N m_L)     1 / m_L of that end's bias
    mixes of a block                          1             1 / (m_N m_L)
    final norm                                1             1 / m_N
    head                    1                 1             1 / m_N           1 / m_N

These are factors (Yang et al. 2022, Table 8; Dey et al. 2025, Table 1 with alpha = 1). The product
of rate and decay stays that of the base. Muon: its update has a spectral norm that does not depend
on the width under `adjust_lr_fn: original`, so that a hidden matrix keeps its rate (Yang et al.
2023, condition 1); under `match_rms_adamw` that norm grows as the root of the width, and the rate
falls so.

A multiplier is folded into its parameter from the start: W' = c W with c times the initial values
and the rate and 1 / c times the epsilon trains as c W does (Yang et al. 2022, Lemma J.1), as the
updates of AdamW and Muon do not depend on the size of a gradient. So a model is an ordinary one to
checkpoints, exports and generation. `optim.grad_clip` sees the gradient of W'.

    tied head             c is in the gain of the norm before the head
    1/H of the scores     sqrt(base_head_width / H) over the usual 1/sqrt(H): in the gain of the query norm, else its
                          root in queries, keys and values, taken back from values by the output
                          matrix
"""

import math

from pretrain.config.model import AnyModelConfig, ModelConfig, StackConfig
from pretrain.config.optim import OptimConfig
from pretrain.errors import ConfigError
from pretrain.kinds.optimizers import TransferConfig
from pretrain.optim.groups import Scale

_INPUTS = frozenset({"embedding", "ngram_embedding", "position", "token_type", "value_embedding"})
_HIDDEN = frozenset({"qkv", "output", "gate_up", "up", "down", "transform", "pooler", "expand"})
_ENDS = frozenset({"output", "down"})
"""Last layers of residual branches."""
_MIXES = frozenset({"value_mix", "residual_mix", "attention_scale", "cross_scale", "feedforward_scale"})
"""Learned factors of a block."""


def scale_of(name: str, config: OptimConfig, model: AnyModelConfig) -> Scale:
    """Returns the factors of a parameter by its name in the model; ones without `transfer`.

    Raises:
        ConfigError: There is no rule for this parameter.
    """
    transfer = config.transfer
    if transfer is None:
        return Scale()
    assert isinstance(model, ModelConfig), "OptimConfig.transfer_conflicts has others"
    *parents, layer, kind = name.split(".")
    if "value_embedding" in parents:  # one of several: its layer is a number
        layer = "value_embedding"
    stack = model.last_stack
    _check_rule(name, layer, kind, stack)
    width = stack.width / transfer.base_width
    depth = stack.layers / (transfer.base_layers or stack.layers) if "blocks" in parents else 1.0
    init = 1.0
    rate = 1.0
    if layer in _HIDDEN and kind == "weight":
        rule = config.record.transfer
        assert rule is not None, "OptimConfig.transfer_conflicts has others"
        init = width**-0.5
        rate = 1 / width if parents[:1] == ["head"] else rule(config.own, width)
        if layer in _ENDS and model.init_scaled:
            # `init_std / sqrt(2 layers)` is to be that of the base.
            init *= math.sqrt(depth)
    factor = _multiplier(name, transfer, model)
    if layer in _ENDS:
        factor /= depth
    return Scale(init * factor, rate * factor, 1 / (width * depth) / factor)


def _check_rule(name: str, layer: str, kind: str, stack: StackConfig) -> None:
    has_rule = kind in _MIXES or layer in _INPUTS | _HIDDEN | {"head"} or layer.endswith("norm")
    if not has_rule:
        raise ConfigError(f"optim.transfer has no rule for {name}", fix="leave optim.transfer out")
    if stack.norm_offset:
        # The gain of a norm is multiplied, and here it is one plus a weight.
        raise ConfigError("optim.transfer has no rule for norm_offset=true", fix="leave optim.transfer out")


def _multiplier(name: str, transfer: TransferConfig, model: ModelConfig) -> float:
    """Returns the multiplier of the logits or of the scores that a parameter contains."""
    stack = model.last_stack
    owner, _, kind = name.rpartition(".")
    if owner == _before_logits(model) and (owner.endswith("norm") or kind == "weight"):
        return transfer.base_width / stack.width
    heads = math.sqrt((transfer.base_head_width or stack.per_head_width) / stack.per_head_width)
    layer = owner.rpartition(".")[2]
    if stack.qk_norm:
        return heads if layer == "query_norm" else 1.0
    if layer == "qkv" or ".value_embedding." in name:  # values are mixed before the output matrix
        return math.sqrt(heads)
    return 1 / math.sqrt(heads) if layer == "output" and kind == "weight" else 1.0


def _before_logits(model: ModelConfig) -> str:
    """Returns the layer whose parameters contain the multiplier of the logits."""
    if not model.tied_embeddings:
        return "head"
    if model.head.transform:
        return "head.norm"
    name = "encoder" if model.decoder is None else "decoder"
    stack = model.last_stack
    return f"{name}.blocks.{stack.layers - 1}.feedforward_norm" if stack.norm_placement == "post" else f"{name}.norm"
