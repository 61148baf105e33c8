"""Bamba (Ganti et al. 2024): layers of Mamba-2, some of attention among them, and a LLaMA otherwise."""

import math
from typing import Any

from pretrain.config.model import ModelConfig, StackConfig
from pretrain.families.config_json import Fields, Keys, refusal
from pretrain.families.decoders.llama import LLAMA_STACK
from pretrain.families.dialect import LLAMA_MODULES, Dialect, Names, decoder_family
from pretrain.families.family import Weight
from pretrain.families.mixer_keys import MixerTensors, filter_weight, shortest_pattern
from pretrain.families.rotary_keys import RopeKeys
from pretrain.families.sizes import Architecture, Values
from pretrain.kinds.mixers import ATTENTION

_BAMBA = Architecture(
    ("decoder",),
    LLAMA_STACK | {"rope_fraction": 0.5},
    {"max_seq_len": 4096, "tied_embeddings": False},
)
"""Ganti et al. 2024 (Bamba), as released: Mamba-2, and three layers of attention."""
_TINY: Values = {"heads": 6, "head_width": 32, "state_width": 12, "groups": 2}
_BAMBA_SIZES = {
    "bamba-9b": _BAMBA.size(
        32, 4096, 32, 14336, of=(128256, 9_780_235_392), kv_heads=8,
        mixers=["attention" if number in (9, 18, 27) else "mamba2" for number in range(32)],
        mamba2={"heads": 128, "head_width": 64, "state_width": 128},
    ),
    "bamba-tiny": _BAMBA.size(
        2, 96, 4, 192, max_seq_len=128, kv_heads=2, mixers=["mamba2", "attention"], mamba2=_TINY
    ),
}  # fmt: skip
MAMBA_KEYS: Keys = {
    "mamba_n_heads": ("heads", 128),
    "mamba_d_state": ("state_width", 256),
    "mamba_n_groups": ("groups", 1),
    "mamba_d_conv": ("kernel", 4),
    "mamba_proj_bias": ("bias", False),
    "mamba_conv_bias": ("filter_bias", True),
}
_INNER = ("mamba_expand", "mamba_d_head")
"""Keys of the summed width of heads over the width of the model, and of the width of one."""
_NO_LIMITS = ([0.0, {"__float__": "Infinity"}], [0.0, math.inf])
"""Bounds of a step that are none, as files of transformers have them."""


def read_mamba(
    fields: Fields, eps: str, usual_eps: float, keys: Keys = MAMBA_KEYS, inner: tuple[str, str] = _INNER
) -> dict[str, Any]:  # fmt: skip
    """Returns the sizes of Mamba-2, whose heads together are so many times as wide as the model."""
    values = fields.read(keys)
    expand, head = inner
    wide = fields.integer(expand, 2) * fields.integer("hidden_size", 4096)
    width = fields.values.get(head, "auto")
    width = wide // values["heads"] if width == "auto" else fields.integer(head)
    if width * values["heads"] != wide:
        why = f"{values['heads']} heads are not {expand} x hidden_size = {wide} wide together"
        raise refusal(head, width, why)
    limit = fields.values.get("time_step_limit")
    if limit is not None and limit not in _NO_LIMITS:
        raise refusal("time_step_limit", limit, "steps of ours have no bounds")
    return values | {"head_width": width, "norm_eps": fields.number(eps, usual_eps)}


def write_mamba(stack: StackConfig, keys: Keys = MAMBA_KEYS, inner: tuple[str, str] = _INNER) -> dict[str, Any]:
    """Returns the keys of `read_mamba`."""
    sizes = stack.mamba2.sizes(stack.width, stack.heads)
    values = {key: getattr(sizes, ours) for key, (ours, _) in keys.items()}
    return values | dict(zip(inner, (sizes.inner // stack.width, sizes.head_width), strict=True))


def mamba_weights(stack: StackConfig, module: str = "mamba") -> list[Weight]:
    """Returns the tensors of a layer of Mamba-2, which is a module of this name."""
    sizes = stack.mamba2.sizes(stack.width, stack.heads)
    channels = sum(sizes.rows)
    rows = {
        "a_log": ("A_log", sizes.heads),
        "dt_bias": ("dt_bias", sizes.heads),
        "skip": ("D", sizes.heads),
        "input.weight": ("in_proj.weight", sum(sizes.fused)),
        "norm": ("norm.weight", sizes.inner),
        "output.weight": ("out_proj.weight", stack.width),
    }
    if sizes.bias:
        rows |= {"input.bias": ("in_proj.bias", sum(sizes.fused))}
        rows |= {"output.bias": ("out_proj.bias", stack.width)}
    if sizes.filter_bias:
        rows |= {"convolution.bias": ("conv1d.bias", channels)}
    weights = [
        Weight(f"attention.{name}", ((f"{module}.{part}", count),))
        for name, (part, count) in rows.items()
    ]  # fmt: skip
    return [*weights, filter_weight(f"{module}.conv1d", channels, sizes.kernel)]


def _read_bamba(fields: Fields) -> dict[str, Any]:
    layers = fields.integer("num_hidden_layers", 32)
    listed = fields.values.get("attn_layer_indices") or []
    mixers = [ATTENTION if number in listed else "mamba2" for number in range(layers)]
    return {"mixers": shortest_pattern(mixers), "mamba2": read_mamba(fields, "rms_norm_eps", 1e-5)}


def _write_bamba(config: ModelConfig) -> dict[str, Any]:
    stack = config.last_stack
    numbers = range(stack.layers)
    listed = [number for number in numbers if stack.mixer_name(number) == ATTENTION]
    return {"attn_layer_indices": listed, **write_mamba(stack)}


_BAMBA_MODULES = {
    **LLAMA_MODULES,
    "feedforward_norm": ("pre_ff_layernorm",),
    "feedforward.gate_up": ("feed_forward.gate_proj", "feed_forward.up_proj"),
    "feedforward.down": ("feed_forward.down_proj",),
}


FAMILIES = (
    decoder_family(
        Dialect(
            model_type="bamba", name="Bamba", sizes=_BAMBA_SIZES, biases=("attention_bias", "mlp_bias"),
            kv_heads=8, rope=RopeKeys(share=0.5), names=Names(norm="final_layernorm"),
            tokens={"pad": 0, "bos": 1, "eos": 2},
            defaults={
                "vocab_size": 128000, "intermediate_size": 14336, "rms_norm_eps": 1e-5,
                "max_position_embeddings": 262144,
            },
            read=_read_bamba, write=_write_bamba, modules=lambda config: _BAMBA_MODULES,
            mixers={"mamba2": MixerTensors(mamba_weights)}, labels=False, fixed_heads=True,
        )
    ),
)  # fmt: skip
