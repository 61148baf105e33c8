"""StarCoder 2 (Lozhkov et al. 2024): GPT-2's LayerNorms and biases, LLaMA's rotary positions and grouped queries.

Pre-norm, a feed-forward layer without a gate, one window for all layers or none.
"""

from typing import Any

from pretrain.config.model import HeadConfig, ModelConfig
from pretrain.interop.decoders.heads import ROTARY_BUFFERS, qkv_rows, read_heads, read_rope, write_rope
from pretrain.interop.family import Family, Weight, affine, own_head, table
from pretrain.interop.fields import THEIR_ACTIVATIONS, Fields, Keys, build_config, write_keys, write_tokens

_STACK: Keys = {
    "num_hidden_layers": ("layers", 30),
    "hidden_size": ("width", 3072),
    "num_attention_heads": ("heads", 24),
    "intermediate_size": ("ff_width", 12288),
    "norm_epsilon": ("norm_eps", 1e-5),
    "residual_dropout": ("dropout", 0.0),
    "attention_dropout": ("attention_dropout", 0.0),
    "use_bias": ("bias", True),
}
_MODEL: Keys = {
    "vocab_size": ("vocab_size", 49152),
    "max_position_embeddings": ("max_seq_len", 4096),
    "tie_word_embeddings": ("tied_embeddings", True),
    "initializer_range": ("init_std", 0.018042),
}
_WORDS = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"


def _read_config(values: dict[str, Any], names: frozenset[str]) -> ModelConfig:
    fields = Fields(values)
    fields.only("use_bias", True, "the norms alone would have biases")
    model = fields.read(_MODEL)
    stack = fields.read(_STACK)
    has_head = model["tied_embeddings"] or _HEAD in names or fields.claims("Starcoder2ForCausalLM")
    stack |= {
        **read_heads(fields, stack, fields.integer("num_key_value_heads", 2)),
        "activation": fields.activation("hidden_act", "gelu_pytorch_tanh"),
        "gated": False,
        "norm": "layer",
        "window": fields.optional_integer("sliding_window"),
        **read_rope(fields, model["max_seq_len"]),
    }
    return build_config(
        **model,
        decoder=stack,
        head=HeadConfig(kind="lm" if has_head else "none"),
        special_tokens=fields.special_tokens(bos=50256, eos=50256),
    )


def _write_config(config: ModelConfig) -> dict[str, Any]:
    stack = config.last_stack
    return {
        **write_keys(config, _MODEL),
        **write_keys(stack, _STACK),
        **write_tokens(config.special_tokens),
        "num_key_value_heads": stack.num_kv_heads,
        "head_dim": stack.per_head_width,
        "hidden_act": THEIR_ACTIVATIONS[stack.activation],
        "sliding_window": stack.window,
        "embedding_dropout": stack.dropout,
        **write_rope(stack),
    }


def _weights(config: ModelConfig) -> list[Weight]:
    stack = config.last_stack
    width = stack.width
    norms = {
        "attention_norm": {"input_layernorm": width},
        "feedforward_norm": {"post_attention_layernorm": width},
    }
    linears = {
        "attention.qkv": qkv_rows(stack),
        "attention.output": {"self_attn.o_proj": width},
        "feedforward.up": {"mlp.c_fc": stack.ff_width},
        "feedforward.down": {"mlp.c_proj": width},
    }
    found = [table("embedding.weight", _WORDS, config.vocab_size)]
    for number in range(stack.layers):
        found += affine(f"decoder.blocks.{number}.", f"model.layers.{number}.", norms | linears, bias=True)
    found += affine("decoder.", "model.", {"norm": {"norm": width}}, bias=True)
    return found + own_head(config, _HEAD)


STARCODER2 = Family(
    model_type="starcoder2",
    read_config=_read_config,
    write_config=_write_config,
    architecture=lambda config: "Starcoder2ForCausalLM" if config.head.kind == "lm" else "Starcoder2Model",
    weights=_weights,
    aliases={_HEAD: _WORDS},
    ignored=(ROTARY_BUFFERS,),
    prefix="model.",
)
