"""A layer of the gated delta rule against the one of OLMo Hybrid in transformers: result and gradients."""

import torch
from transformers.models.olmo_hybrid.configuration_olmo_hybrid import OlmoHybridConfig
from transformers.models.olmo_hybrid.modeling_olmo_hybrid import OlmoHybridGatedDeltaNet

from pretrain.model.parts.attention import AttentionContext
from pretrain.model.parts.gated_delta import GatedDelta
from tests.unit.model.tiny import tiny_config

DELTA = {"heads": 2, "value_heads": 4, "key_width": 6, "value_width": 10}


def test_a_layer_equals_that_of_olmo_hybrid():
    torch.manual_seed(0)
    config = tiny_config("hybrid-tiny", delta=DELTA).decoder
    theirs = OlmoHybridGatedDeltaNet(
        OlmoHybridConfig(
            vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
            linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=6, linear_value_head_dim=10,
        ),
        layer_idx=0,
    )  # fmt: skip
    ours = GatedDelta(config)
    fused = {
        "qkv.weight": torch.cat([theirs.q_proj.weight, theirs.k_proj.weight, theirs.v_proj.weight]),
        "rates.weight": torch.cat([theirs.a_proj.weight, theirs.b_proj.weight]),
        "convolution.weight": theirs.conv1d.weight[:, 0],
        "a_log": theirs.A_log,
        "dt_bias": theirs.dt_bias,
        "norm.weight": theirs.o_norm.weight,
        "gate.weight": theirs.g_proj.weight,
        "output.weight": theirs.o_proj.weight,
    }
    ours.load_state_dict({name: weight.detach().clone() for name, weight in fused.items()})
    read = torch.randn(2, 150, 64)
    results = []
    for layer in (ours, theirs):
        x = read.clone().requires_grad_()
        result = layer(x, AttentionContext(None)).result_BTD if layer is ours else layer(x)
        result.square().sum().backward()
        decay = ours.a_log if layer is ours else theirs.A_log
        results.append((result, x.grad, decay.grad))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
