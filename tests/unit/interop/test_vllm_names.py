"""Tensors of exports by the names that vLLM's loaders take, which fuse some; vLLM itself is not run here.

Its parameters by name and shape, from its source: `qkv_proj` and `gate_up_proj` are given in parts or whole, GPT-2's
matrices transposed, a tied head not at all.
"""

import pytest

from pretrain.families import FAMILIES
from pretrain.interop.tensors import parameter_shapes, their_shapes
from tests.unit.interop.releases import TINY, tiny

FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
FUSED |= {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
REGISTERED = {
    "CohereForCausalLM", "Cohere2ForCausalLM", "DeepseekV3ForCausalLM", "FalconForCausalLM", "GemmaForCausalLM",
    "Gemma2ForCausalLM", "Gemma3ForCausalLM", "GptOssForCausalLM", "GPT2LMHeadModel", "GPTNeoXForCausalLM",
    "GraniteForCausalLM", "LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM", "OlmoForCausalLM",
    "Olmo2ForCausalLM", "Olmo3ForCausalLM", "OlmoeForCausalLM", "PhiForCausalLM", "Phi3ForCausalLM", "Qwen2ForCausalLM",
    "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "StableLmForCausalLM", "Starcoder2ForCausalLM", "BambaForCausalLM",
    "Lfm2ForCausalLM", "GraniteMoeHybridForCausalLM", "OlmoHybridForCausalLM", "Qwen3NextForCausalLM",
    "ArceeForCausalLM", "Ernie4_5ForCausalLM", "Exaone4ForCausalLM", "GlmForCausalLM", "Glm4ForCausalLM",
    "Qwen2MoeForCausalLM", "SeedOssForCausalLM", "DeepseekV2ForCausalLM", "Dots1ForCausalLM", "FlexOlmoForCausalLM",
    "Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM", "GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM",
    "MiniMaxM2ForCausalLM", "GPTBigCodeForCausalLM", "GPTJForCausalLM", "Mamba2ForCausalLM", "OPTForCausalLM",
}  # fmt: skip
"""Classes with a loader of vLLM's own."""
BY_TRANSFORMERS = {
    "CwmForCausalLM", "HeliumForCausalLM", "HyperCLOVAXForCausalLM", "Jais2ForCausalLM", "MinistralForCausalLM",
    "SmolLM3ForCausalLM", "SolarOpenForCausalLM", "VaultGemmaForCausalLM",
}  # fmt: skip
"""Classes that vLLM runs by the model of transformers."""


def gated(stack, more=()):
    """Parameters of a layer of LLaMA and its kin."""
    D, F, H = stack.width, stack.ff_width, stack.per_head_width
    qkv = (stack.heads + 2 * stack.num_kv_heads) * H
    shapes = {
        "self_attn.qkv_proj.weight": (qkv, D),
        "self_attn.o_proj.weight": (D, stack.heads * H),
        "mlp.gate_up_proj.weight": (2 * F, D),
        "mlp.down_proj.weight": (D, F),
        "input_layernorm.weight": (D,),
        "post_attention_layernorm.weight": (D,),
    }
    known = {
        "self_attn.qkv_proj.bias": (qkv,),
        "self_attn.q_norm.weight": (H,),
        "self_attn.k_norm.weight": (H,),
    }
    return shapes | {name: known[name] for name in more}


def gpt2(stack):
    """Parameters of a layer of GPT-2, as matrices [out, in]."""
    D, F = stack.width, stack.ff_width
    matrices = {"attn.c_attn": (3 * D, D), "attn.c_proj": (D, D), "mlp.c_fc": (F, D), "mlp.c_proj": (D, F)}
    found = {f"{name}.weight": shape for name, shape in matrices.items()}
    found |= {f"{name}.bias": shape[:1] for name, shape in matrices.items()}
    return found | {f"{norm}.{kind}": (D,) for norm in ("ln_1", "ln_2") for kind in ("weight", "bias")}


LAYERS = {
    "llama": gated,
    "mistral": gated,
    "gemma": gated,
    "phi3": gated,
    "qwen2": lambda stack: gated(stack, ["self_attn.qkv_proj.bias"]),
    "qwen3": lambda stack: gated(stack, ["self_attn.q_norm.weight", "self_attn.k_norm.weight"]),
    "gpt2": gpt2,
}


def expected(config, model_type):
    stack, layer = config.last_stack, LAYERS[model_type](config.last_stack)
    table = (config.vocab_size, stack.width)
    if model_type == "gpt2":
        found = {"transformer.wte.weight": table, "transformer.wpe.weight": (config.max_seq_len, stack.width)}
        found |= {f"transformer.ln_f.{kind}": (stack.width,) for kind in ("weight", "bias")}
        prefix = "transformer.h"
    else:
        found = {"model.embed_tokens.weight": table, "model.norm.weight": (stack.width,)}
        prefix = "model.layers"
    if not config.tied_embeddings:
        found["lm_head.weight"] = table
    return found | {f"{prefix}.{n}.{name}": shape for n in range(stack.layers) for name, shape in layer.items()}


@pytest.mark.parametrize("model_type", LAYERS)
def test_names_and_shapes_are_those_of_the_loader(model_type):
    config = tiny(TINY[model_type])
    family, shapes = FAMILIES[model_type], parameter_shapes(config)
    found: dict[str, tuple[int, ...]] = {}
    for weight in family.weights(config):
        for name, shape in their_shapes(weight, shapes[weight.ours]).items():
            *path, module, kind = name.split(".")
            fused = ".".join([*path, FUSED.get(module, module), kind])
            turned = shape[::-1] if module in ("c_attn", "c_proj", "c_fc") and kind == "weight" else shape
            rows = found[fused][0] if fused in found else 0
            assert not rows or module in FUSED, name
            found[fused] = (rows + turned[0], *turned[1:])
    assert found == expected(config, model_type)


def test_every_decoder_has_a_loader():
    decoders = {name: tiny(preset) for name, preset in TINY.items() if tiny(preset).shape == "decoder"}
    classes = {FAMILIES[name].architecture(config) for name, config in decoders.items()}
    assert classes == REGISTERED | BY_TRANSFORMERS
