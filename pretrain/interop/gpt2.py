"""GPT-2 (Radford et al. 2019): LayerNorm before each sub-layer, learned positions, weights stored as [in, out]."""

from typing import Any

from pretrain.config.model import HeadConfig, ModelConfig
from pretrain.interop.family import Family, Weight
from pretrain.interop.fields import THEIR_ACTIVATIONS, Fields, build_config


def _read_config(values: dict[str, Any], names: frozenset[str]) -> ModelConfig:
    fields = Fields(values)
    fields.only("scale_attn_by_inverse_layer_idx", False, "scores would be divided by the number of the layer")
    fields.only("add_cross_attention", False, "the decoder would read an encoder")
    width = fields.integer("n_embd", 768)
    stack = {
        "layers": fields.integer("n_layer", 12),
        "width": width,
        "heads": fields.integer("n_head", 12),
        "ff_width": fields.optional_integer("n_inner") or 4 * width,
        "activation": fields.activation("activation_function", "gelu_new"),
        "gated": False,
        "norm": "layer",
        "norm_eps": fields.number("layer_norm_epsilon", 1e-5),
        "bias": True,
        "scaled_attention": fields.flag("scale_attn_weights", True),
        "position": "learned",
        "dropout": fields.number("resid_pdrop", 0.1),
        "attention_dropout": fields.number("attn_pdrop", 0.1),
    }
    tied = fields.flag("tie_word_embeddings", True)
    has_head = tied or "lm_head.weight" in names or fields.claims("GPT2LMHeadModel")
    return build_config(
        decoder=stack,
        head=HeadConfig(kind="lm" if has_head else "none"),
        vocab_size=fields.integer("vocab_size", 50257),
        max_seq_len=fields.integer("n_positions", 1024),
        tied_embeddings=tied,
        init_std=fields.number("initializer_range", 0.02),
        special_tokens=fields.special_tokens(bos=50256, eos=50256),
    )


def _write_config(config: ModelConfig) -> dict[str, Any]:
    stack, tokens = config.last_stack, config.special_tokens
    activation = "gelu_new" if stack.activation == "gelu_tanh" else THEIR_ACTIVATIONS[stack.activation]
    return {
        "vocab_size": config.vocab_size,
        "n_positions": config.max_seq_len,
        "n_embd": stack.width,
        "n_layer": stack.layers,
        "n_head": stack.heads,
        "n_inner": stack.ff_width,
        "activation_function": activation,
        "layer_norm_epsilon": stack.norm_eps,
        "initializer_range": config.init_std,
        "resid_pdrop": stack.dropout,
        "embd_pdrop": stack.dropout,
        "attn_pdrop": stack.attention_weight_dropout,
        "scale_attn_weights": stack.scaled_attention,
        "tie_word_embeddings": config.tied_embeddings,
        "bos_token_id": tokens.bos,
        "eos_token_id": tokens.eos,
        "pad_token_id": tokens.pad,
    }


def _weights(config: ModelConfig) -> list[Weight]:
    stack = config.last_stack
    qkv_rows = (stack.heads + 2 * stack.num_kv_heads) * stack.per_head_width
    norms = [("attention_norm", "ln_1"), ("feedforward_norm", "ln_2")]
    linears = [
        ("attention.qkv", "attn.c_attn", qkv_rows),
        ("attention.output", "attn.c_proj", stack.width),
        ("feedforward.up", "mlp.c_fc", stack.ff_width),
        ("feedforward.down", "mlp.c_proj", stack.width),
    ]
    assert config.vocab_size is not None
    found = [
        Weight("embedding.weight", (("transformer.wte.weight", config.vocab_size),), vocab=True),
        Weight("decoder.position.weight", (("transformer.wpe.weight", config.max_seq_len),)),
    ]
    for number in range(stack.layers):
        ours, theirs = f"decoder.blocks.{number}.", f"transformer.h.{number}."
        for kind in ("weight", "bias"):
            found += [Weight(f"{ours}{a}.{kind}", ((f"{theirs}{b}.{kind}", stack.width),)) for a, b in norms]
            found += [
                Weight(f"{ours}{a}.{kind}", ((f"{theirs}{b}.{kind}", rows),), transposed=kind == "weight")
                for a, b, rows in linears
            ]
    found += [
        Weight(f"decoder.norm.{kind}", ((f"transformer.ln_f.{kind}", stack.width),)) for kind in ("weight", "bias")
    ]
    if config.head.kind == "lm" and not config.tied_embeddings:
        found.append(Weight("head.weight", (("lm_head.weight", config.vocab_size),), vocab=True))
    return found


def _aliases(config: ModelConfig) -> dict[str, str]:
    return {"lm_head.weight": "transformer.wte.weight"} if config.tied_embeddings else {}


def _architecture(config: ModelConfig) -> str:
    return "GPT2LMHeadModel" if config.head.kind == "lm" else "GPT2Model"


GPT2 = Family(
    model_type="gpt2",
    read_config=_read_config,
    write_config=_write_config,
    architecture=_architecture,
    weights=_weights,
    aliases=_aliases,
    # Causal masks that older versions saved as buffers.
    ignored=(r"transformer\.h\.\d+\.attn\.(masked_)?bias",),
    prefix="transformer.",
)
