"""FLOPs against torch's own counter, and against the formula written out."""

import subprocess
import sys

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from pretrain.config.model import ModelConfig, StackConfig
from pretrain.model import build_model, init_weights
from pretrain.plan.flops import count_matmul_weights, train_flops_per_token
from pretrain.types import Batch

GPT2 = ModelConfig(
    decoder=StackConfig(layers=12, width=768, heads=12, ff_width=3072, gated=False, norm="layer", position="learned"),
    vocab_size=50257,
    max_seq_len=1024,
    tied_embeddings=True,
)


def test_gpt2_small_by_hand():
    weights = 12 * (4 * 768 * 768 + 2 * 768 * 3072) + 50304 * 768
    assert count_matmul_weights(GPT2) == weights
    assert train_flops_per_token(GPT2, 1024) == 6 * weights + 12 * 12 * 768 * 1024
    assert train_flops_per_token(GPT2, 1024, halve_causal=True) == 6 * weights + 6 * 12 * 768 * 1024


def test_an_encoder_sees_every_key_so_nothing_is_halved():
    encoder = ModelConfig(encoder=GPT2.decoder, vocab_size=100)
    assert train_flops_per_token(encoder, 64, halve_causal=True) == train_flops_per_token(encoder, 64)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("gated", [False, True])
def test_forward_and_backward_have_as_many_flops_as_torch_counts(gated, kv_heads):
    """Under the math kernel, since torch sees nothing inside the CPU's flash kernel."""
    stack = StackConfig(layers=2, width=32, heads=4, kv_heads=kv_heads, head_width=16, ff_width=48, gated=gated)
    config = ModelConfig(decoder=stack, vocab_size=100, max_seq_len=16)
    model = build_model(
        config, attention="auto", activation_checkpointing="none", compile=False, device=torch.device("cpu")
    )
    init_weights(model, config, seed=0)
    tokens = torch.randint(0, 100, (3, 16))
    counter = FlopCounterMode(display=False)
    with counter, sdpa_kernel(SDPBackend.MATH):
        model(Batch(tokens, tokens)).logits_BTV[..., :100].sum().backward()
    assert counter.get_total_flops() == train_flops_per_token(config, 16) * tokens.numel()


def test_planning_imports_no_torch():
    code = "import sys, pretrain.plan.flops, pretrain.plan.memory, pretrain.plan.params; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n"
