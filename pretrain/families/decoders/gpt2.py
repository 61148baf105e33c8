"""GPT-2 (Radford et al. 2019): pre-norm, learned positions, weights stored as [in, out].

With cross attention it is the decoder of a `VisionEncoderDecoderModel`, in `images/captioner.py`.
"""

from typing import Any

from pretrain.config.model import HeadConfig, ModelConfig
from pretrain.families.config_json import THEIR_ACTIVATIONS, Fields, Keys, build_config, write_keys, write_tokens
from pretrain.families.family import Family, Weight, affine, own_head, table
from pretrain.families.label_names import with_heads
from pretrain.families.sizes import Architecture

GPT2_STACK = {
    "activation": "gelu_tanh",
    "gated": False,
    "norm": "layer",
    "bias": True,
    "position": "learned",
}
GPT2 = Architecture(("decoder",), GPT2_STACK, {"max_seq_len": 1024, "tied_embeddings": True})
"""Radford et al. 2019, 2.3. Dropout, 0.1 in the release, is 0: one pass over a corpus does not overfit."""
_SIZES = {
    # Radford et al. 2019, table 2; named by what is really in the released checkpoints.
    "gpt2-124m": GPT2.size(12, 768, 12, 3072, of=(50257, 124_439_808)),
    "gpt2-350m": GPT2.size(24, 1024, 16, 4096, of=(50257, 354_823_168)),
    "gpt2-774m": GPT2.size(36, 1280, 20, 5120, of=(50257, 774_030_080)),
    "gpt2-1.5b": GPT2.size(48, 1600, 25, 6400, of=(50257, 1_557_611_200)),
    "gpt2-tiny": GPT2.size(2, 64, 4, 256, max_seq_len=128),
}
_STACK: Keys = {
    "n_layer": ("layers", 12),
    "n_embd": ("width", 768),
    "n_head": ("heads", 12),
    "layer_norm_epsilon": ("norm_eps", 1e-5),
    "scale_attn_weights": ("scaled_attention", True),
    "resid_pdrop": ("dropout", 0.1),
    "attn_pdrop": ("attention_dropout", 0.1),
}
_MODEL: Keys = {
    "vocab_size": ("vocab_size", 50257),
    "n_positions": ("max_seq_len", 1024),
    "tie_word_embeddings": ("tied_embeddings", True),
    "initializer_range": ("init_std", 0.02),
}
_WORDS = "transformer.wte.weight"
_HEAD = "lm_head.weight"


def read_gpt2(values: dict[str, Any], names: frozenset[str], *, cross: bool = False) -> ModelConfig:
    """Reads the config.json of a GPT-2; with `cross` of one that reads an encoder."""
    fields = Fields(values)
    fields.only("scale_attn_by_inverse_layer_idx", False, "scores would be divided by the layer number")
    why = "a decoder without cross attention would not read the encoder"
    why = why if cross else "the decoder would read an encoder"
    fields.only("add_cross_attention", cross, why, missing=False)
    model = fields.read(_MODEL)
    stack = fields.read(_STACK)
    has_head = model["tied_embeddings"] or _HEAD in names or fields.claims("GPT2LMHeadModel")
    stack |= {
        "ff_width": fields.optional_integer("n_inner") or 4 * stack["width"],
        "activation": fields.activation("activation_function", "gelu_new"),
        "gated": False,
        "norm": "layer",
        "bias": True,
        "position": "learned",
    }
    return build_config(
        **model,
        decoder=stack,
        head=HeadConfig(kind="lm" if has_head else "none"),
        special_tokens=fields.special_tokens(bos=50256, eos=50256),
    )


def write_gpt2(config: ModelConfig) -> dict[str, Any]:
    """Returns the config.json of a GPT-2."""
    stack = config.last_stack
    # The tanh approximation has two names in transformers, and a GPT-2 is released with this one.
    activations = THEIR_ACTIVATIONS | {"gelu_tanh": "gelu_new"}
    return {
        **write_keys(config, _MODEL),
        **write_keys(stack, _STACK),
        **write_tokens(config.special_tokens),
        "n_inner": stack.ff_width,
        "activation_function": activations[stack.activation],
        "embd_pdrop": stack.dropout,
    }


def gpt2_weights(config: ModelConfig) -> list[Weight]:
    """Returns the weights of a GPT-2, with cross attention where the model has it."""
    stack = config.last_stack
    qkv_rows = (stack.heads + 2 * stack.num_kv_heads) * stack.per_head_width
    norms = {"attention_norm": {"ln_1": stack.width}, "feedforward_norm": {"ln_2": stack.width}}
    linears = {
        "attention.qkv": {"attn.c_attn": qkv_rows},
        "attention.output": {"attn.c_proj": stack.width},
        "feedforward.up": {"mlp.c_fc": stack.ff_width},
        "feedforward.down": {"mlp.c_proj": stack.width},
    }
    if config.reads_encoder:
        norms["cross_norm"] = {"ln_cross_attn": stack.width}
        linears |= {
            "cross.query": {"crossattention.q_attn": stack.width},
            "cross.key_value": {"crossattention.c_attn": 2 * stack.width},
            "cross.output": {"crossattention.c_proj": stack.width},
        }
    found = [
        table("embedding.weight", _WORDS, config.vocab_size),
        Weight("decoder.position.weight", (("transformer.wpe.weight", config.max_seq_len),)),
    ]
    for number in range(stack.layers):
        ours, theirs = f"decoder.blocks.{number}.", f"transformer.h.{number}."
        found += affine(ours, theirs, norms, bias=True)
        found += affine(ours, theirs, linears, bias=True, transposed=True)
    found += affine("decoder.", "transformer.", {"norm": {"ln_f": stack.width}}, bias=True)
    return found + own_head(config, _HEAD)


_FAMILY = Family(
    model_type="gpt2",
    read_config=read_gpt2,
    write_config=write_gpt2,
    architecture=lambda config: "GPT2LMHeadModel" if config.head.record.scores_words else "GPT2Model",
    weights=gpt2_weights,
    aliases={_HEAD: _WORDS},
    # Causal masks that older versions saved as buffers.
    ignored=(r"transformer\.h\.\d+\.attn\.(masked_)?bias",),
    prefix="transformer.",
    sizes=_SIZES,
)
FAMILIES = (with_heads(_FAMILY, _FAMILY.prefix),)
