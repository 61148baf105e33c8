"""Stable LM 1 and 2 (Bellagente et al. 2024): a LLaMA with LayerNorm, a part of each head rotated."""

from typing import Any

from pretrain.config.model import ModelConfig
from pretrain.families.config_json import Fields
from pretrain.families.decoders.gpt_neox import LAYER_NORM
from pretrain.families.decoders.llama import LLAMA_STACK
from pretrain.families.dialect import Dialect, decoder_family, one_norm_modules
from pretrain.families.rotary_keys import RopeKeys
from pretrain.families.sizes import Architecture

_STABLELM = Architecture(
    ("decoder",),
    LLAMA_STACK | {"norm": "layer", "norm_bias": True, "rope_fraction": 0.25},
    {"max_seq_len": 4096, "tied_embeddings": False},
)
"""Bellagente et al. 2024 (Stable LM 2), 2.3, and its predecessor of 3B parameters, as released."""
_SIZES = {
    "stablelm-3b": _STABLELM.size(32, 2560, 32, 6912, of=(50304, 2_795_443_200)),
    "stablelm2-1.6b": _STABLELM.size(24, 2048, 32, 5632, of=(100352, 1_644_515_328), qkv_bias=True),
    "stablelm2-12b": _STABLELM.size(
        40, 5120, 32, 13824, of=(100352, 12_143_185_920), kv_heads=8, parallel="one_norm", qk_norm="heads"
    ),
    "stablelm-tiny": _STABLELM.size(2, 64, 4, 192, max_seq_len=128, kv_heads=2),
}


def _read(fields: Fields) -> dict[str, Any]:
    is_parallel = fields.flag("use_parallel_residual", False)
    has_bias = fields.flag("use_qkv_bias", False)
    qk_norm = fields.flag("qk_layernorm", False) and "heads"
    values = {"qkv_bias": has_bias or None, "qk_norm": qk_norm}
    return values | {"parallel": "one_norm" if is_parallel else False}


def _write(config: ModelConfig) -> dict[str, Any]:
    stack = config.last_stack
    flags = {"use_parallel_residual": stack.parallel, "qk_layernorm": stack.qk_norm}
    return {"use_qkv_bias": stack.has_qkv_bias} | {key: bool(value) for key, value in flags.items()}


def _modules(config: ModelConfig) -> dict[str, Any]:
    stack, modules = config.last_stack, one_norm_modules(config)
    if not stack.qk_norm:
        return modules
    for part, heads in (("query", stack.heads), ("key", stack.num_kv_heads)):
        norms = [f"self_attn.{part[0]}_layernorm.norms.{number}" for number in range(heads)]
        modules[f"attention.{part}_norm"] = dict.fromkeys(norms, stack.per_head_width)
    return modules


FAMILIES = (
    decoder_family(
        Dialect(
            model_type="stablelm", sizes=_SIZES, name="StableLm", kv_heads=32, fixed_heads=True,
            tokens={"bos": 0, "eos": 0},
            spelled={"rms_norm_eps": "layer_norm_eps"}, rope=RopeKeys(share=0.25),
            more={"hidden_dropout": ("dropout", 0.0)},
            built_in=LAYER_NORM,
            defaults={
                "vocab_size": 50304, "hidden_size": 2560, "intermediate_size": 6912,
                "max_position_embeddings": 4096,
                "rms_norm_eps": 1e-5,
            },
            modules=_modules, read=_read, write=_write,
        )
    ),
)  # fmt: skip
