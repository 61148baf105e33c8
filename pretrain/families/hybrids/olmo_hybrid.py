"""OLMo Hybrid (OLMo team 2026): three layers of the gated delta rule to one of OLMo 3's attention.

Norms are of the results of attention, and before layers of the rule.
"""

from typing import Any

from pretrain.config.model import ModelConfig, StackConfig
from pretrain.families.config_json import Fields, Keys, build_section
from pretrain.families.decoders.llama import LLAMA_STACK
from pretrain.families.dialect import LLAMA_MODULES, QK_NORMS, Dialect, decoder_family
from pretrain.families.family import Weight
from pretrain.families.mixer_keys import LINEAR, MixerTensors, read_mixers, write_mixers
from pretrain.families.rotary_keys import FULL
from pretrain.families.sizes import Architecture
from pretrain.kinds.mixers import DeltaConfig

_OLMO_HYBRID = Architecture(
    ("decoder",),
    LLAMA_STACK
    | {"mixers": ["delta", "delta", "delta", "attention"], "qk_norm": "whole", "position": "none"}
    | {"norm_placement": "output", "mixer_norm_placement": "pre", "norm_eps": 1e-6},
    {"max_seq_len": 8192, "tied_embeddings": False},
)
"""As released: no positions, which the state of the other layers makes up for."""
_SIZES = {
    "olmo_hybrid-7b": _OLMO_HYBRID.size(
        32, 3840, 30, 11008, of=(100352, 7_430_870_688), max_seq_len=65536
    ),
    "olmo_hybrid-tiny": _OLMO_HYBRID.size(
        4, 64, 4, 192, max_seq_len=128, kv_heads=2, position="rotary",
        delta={"heads": 2, "value_heads": 4, "key_width": 6, "value_width": 10},
    ),
}  # fmt: skip
_KINDS = {LINEAR: "delta"}
_SIZE_KEYS: Keys = {
    "linear_num_key_heads": ("heads", 0),
    "linear_num_value_heads": ("value_heads", 0),
    "linear_key_head_dim": ("key_width", 0),
    "linear_value_head_dim": ("value_width", 0),
}
_OUTPUT_NORMS = {
    **LLAMA_MODULES,
    **QK_NORMS,
    "attention_norm": ("post_attention_layernorm",),
    "feedforward_norm": ("post_feedforward_layernorm",),
}


def _read(fields: Fields) -> dict[str, Any]:
    layers = fields.integer("num_hidden_layers", 32)
    usual = [FULL if number % 4 == 3 else LINEAR for number in range(layers)]
    if FULL not in usual:
        usual[-1] = FULL
    sizes = {ours: fields.optional_integer(key) for key, (ours, _) in _SIZE_KEYS.items()}
    sizes |= {"kernel": fields.integer("linear_conv_kernel_dim", 4)}
    sizes |= {"negative_eigenvalues": fields.flag("linear_allow_neg_eigval", True)}
    width, heads = fields.integer("hidden_size", 3840), fields.integer("num_attention_heads", 30)
    filled = build_section(DeltaConfig, sizes).sizes(width, heads)._asdict()
    values = {"mixers": read_mixers(fields, usual, _KINDS), "delta": filled}
    rope = fields.section("rope_parameters") or {"rope_theta": fields.values.get("rope_theta", 0)}
    if rope.get("rope_theta", 0) is None:  # as released
        fields.values |= {"rope_parameters": None, "rope_theta": 10000.0}
        values["position"] = "none"
    return values


def _write(config: ModelConfig) -> dict[str, Any]:
    stack = config.last_stack
    sizes = stack.delta.sizes(stack.width, stack.heads)
    values = {key: getattr(sizes, ours) for key, (ours, _) in _SIZE_KEYS.items()}
    values |= {
        "linear_conv_kernel_dim": sizes.kernel,
        "linear_allow_neg_eigval": sizes.negative_eigenvalues,
        "layer_types": write_mixers(stack, _KINDS),
    }
    if not stack.is_rotary:
        values["rope_parameters"] = {"rope_type": "default", "rope_theta": None}
    return values


def _delta(stack: StackConfig) -> list[Weight]:
    sizes = stack.delta.sizes(stack.width, stack.heads)
    heads, *rows = sizes.value_heads, *sizes.rows

    def parts(names: str, counts: list[int]) -> tuple[tuple[str, int], ...]:
        files = [f"linear_attn.{name}.weight" for name in names.split()]
        return tuple(zip(files, counts, strict=True))

    filters = parts("q_conv1d k_conv1d v_conv1d", rows)
    return [
        Weight("attention.a_log", (("linear_attn.A_log", heads),)),
        Weight("attention.dt_bias", (("linear_attn.dt_bias", heads),)),
        Weight("attention.qkv_gate.weight", parts("q_proj k_proj v_proj g_proj", [*rows, rows[-1]])),
        # transformers cuts its one filter into thirds when it saves.
        Weight("attention.convolution.weight", filters, shape=(-1, 1, sizes.kernel)),
        Weight("attention.rates.weight", parts("a_proj b_proj", [heads, heads])),
        Weight("attention.norm.weight", parts("o_norm", [sizes.value_width])),
        Weight("attention.output.weight", parts("o_proj", [stack.width])),
    ]


_PRE_NORMS = {
    "attention_norm": ("input_layernorm",),
    "feedforward_norm": ("post_attention_layernorm",),
}

FAMILIES = (
    decoder_family(
        Dialect(
            model_type="olmo_hybrid", name="OlmoHybrid", sizes=_SIZES, labels=False,
            fixed_heads=True, biases=("attention_bias",), tokens={"pad": 100277, "eos": 100257},
            defaults={
                "vocab_size": 100352, "hidden_size": 3840, "num_attention_heads": 30,
                "max_position_embeddings": 65536,
            },
            built_in={
                "qk_norm": "whole", "norm_placement": "output", "mixer_norm_placement": "pre",
            },
            read=_read, write=_write, modules=lambda config: _OUTPUT_NORMS,
            mixers={"delta": MixerTensors(_delta, _PRE_NORMS)},
            renames=(
                ("attention_layer_norm", "input_layernorm"),
                ("feedforward_layer_norm", "post_attention_layernorm"),
            ),
        )
    ),
)  # fmt: skip
