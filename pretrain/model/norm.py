"""Normalisation over the model width: RMSNorm and LayerNorm, through torch's fused functions."""

from torch import nn

from pretrain.config.model import StackConfig


def build_norm(config: StackConfig) -> nn.Module:
    """Builds the norm of a stack, [..., D] to [..., D].

    RMSNorm (Zhang and Sennrich 2019) has a weight only, LayerNorm (Ba et al. 2016) a bias too where the stack has any.
    Both compute their statistics in fp32 whatever the input's dtype.
    """
    if config.norm == "rms":
        return nn.RMSNorm(config.width, eps=config.norm_eps)
    return nn.LayerNorm(config.width, eps=config.norm_eps, bias=config.bias)
