"""Phi 1 to 3: with one norm for both sub-layers and a bias of the head (Li et al. 2023), or a LLaMA with windows.

Projections of a Phi-3 (Abdin et al. 2024) are stored as one.
"""

from typing import Any

from pretrain.config.model import ModelConfig
from pretrain.families.config_json import Fields
from pretrain.families.decoders.gpt_neox import NEOX
from pretrain.families.decoders.llama import LLAMA_STACK
from pretrain.families.dialect import LLAMA_MODULES, QKV, Dialect, Names, decoder_family
from pretrain.families.rotary_keys import RopeKeys
from pretrain.families.sizes import Architecture

_PHI = Architecture(
    ("decoder",),
    NEOX.stack | {"activation": "gelu_tanh", "parallel": "one_norm", "rope_fraction": 0.5},
    {"max_seq_len": 2048, "tied_embeddings": False, "head": {"bias": True}},
)
"""Li et al. 2023 (Phi-1.5), 2, as released."""
_PHI3 = Architecture(
    ("decoder",),
    LLAMA_STACK | {"window": 2047},
    {"max_seq_len": 4096, "tied_embeddings": False},
)
"""Abdin et al. 2024 (Phi-3), 2, in its version of 4,096 positions."""
_SIZES = {
    "phi-1.5": _PHI.size(24, 2048, 32, 8192, of=(51200, 1_418_270_720)),
    "phi-2": _PHI.size(32, 2560, 32, 10240, of=(51200, 2_779_683_840), rope_fraction=0.4),
    "phi-tiny": _PHI.size(2, 64, 4, 256, max_seq_len=128),
}
_PHI3_SIZES = {
    "phi3-mini": _PHI3.size(32, 3072, 32, 8192, of=(32064, 3_821_079_552)),
    "phi3-medium": _PHI3.size(40, 5120, 40, 17920, of=(32064, 13_960_238_080), kv_heads=10),
    "phi3-tiny": _PHI3.size(
        2, 64, 4, 192, max_seq_len=128, kv_heads=2, window=None, rope_fraction=0.5
    ),
}  # fmt: skip
_PHI3_MODULES = {
    **LLAMA_MODULES,
    "attention.qkv": ("self_attn.qkv_proj",),
    "feedforward.gate_up": ("mlp.gate_up_proj",),
}
_MODULES = {
    "attention_norm": ("input_layernorm",),
    "attention.qkv": QKV,
    "attention.output": ("self_attn.dense",),
    "feedforward.up": ("mlp.fc1",),
    "feedforward.down": ("mlp.fc2",),
}


def _read(fields: Fields) -> dict[str, Any]:
    return {"head.bias": True, "qk_norm": fields.flag("qk_layernorm", False) and "layer"}


def _write(config: ModelConfig) -> dict[str, Any]:
    stack = config.last_stack
    values: dict[str, Any] = {"embd_pdrop": stack.dropout, "qk_layernorm": bool(stack.qk_norm)}
    # The tanh approximation has two names in transformers, and a Phi is released with this one.
    if stack.activation == "gelu_tanh":
        values["hidden_act"] = "gelu_new"
    return values


def _modules(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    names = (("query", "q_layernorm"), ("key", "k_layernorm"))
    norms = {f"attention.{ours}_norm": (f"self_attn.{theirs}",) for ours, theirs in names}
    return _MODULES | (norms if config.last_stack.qk_norm else {})


FAMILIES = tuple(
    decoder_family(dialect)
    for dialect in (
        Dialect(
            model_type="phi3", name="Phi3", sizes=_PHI3_SIZES, windows="all",
            tokens={"pad": 32000, "bos": 1, "eos": 32000},
            defaults={
                "vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192,
                "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
            },
            missing={"sliding_window": None, "original_max_position_embeddings": 4096},
            more={"resid_pdrop": ("dropout", 0.0)}, modules=lambda config: _PHI3_MODULES,
            rope=RopeKeys(share=1.0, kinds=("longrope",), renamed=("su", "yarn")),
        ),
        Dialect(
            model_type="phi", sizes=_SIZES, name="Phi",
            tokens={"bos": 1, "eos": 2}, spelled={"rms_norm_eps": "layer_norm_eps"},
            rope=RopeKeys(share=0.5),
            defaults={
                "vocab_size": 51200, "hidden_size": 2048, "intermediate_size": 8192,
                "num_hidden_layers": 24,
                "rms_norm_eps": 1e-5,
            },
            more={"resid_pdrop": ("dropout", 0.0)}, names=Names(norm="final_layernorm"),
            built_in={"norm": "layer", "activation": "gelu_tanh", "gated": False, "bias": True, "parallel": "one_norm"},
            modules=_modules, read=_read, write=_write,
        ),
    )
)  # fmt: skip
