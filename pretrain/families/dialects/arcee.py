"""Arcee's AFM (Arcee AI 2025) and Jais 2 (Inception 2025): a LLaMA without gates, but squares of ReLU.

Jais 2 has LayerNorm, and biases throughout.
"""

from pretrain.families.decoders.gpt_neox import LAYER_NORM
from pretrain.families.decoders.llama import LLAMA_STACK
from pretrain.families.dialect import GATE_UP, LLAMA_MODULES, Dialect, decoder_family
from pretrain.families.sizes import Architecture

_UNGATED = {"activation": "relu2", "gated": False}
_ARCEE = Architecture(("decoder",), LLAMA_STACK | _UNGATED, {"max_seq_len": 4096, "tied_embeddings": False})
_JAIS2 = Architecture(
    ("decoder",),
    _ARCEE.stack | {"norm": "layer", "bias": True},
    {"max_seq_len": 8192, "tied_embeddings": False, "family": "jais2"},
)
_ARCEE_SIZES = {
    # As released, before the extension of its context.
    "arcee-4.5b": _ARCEE.size(
        36, 2560, 20, 18432, of=(128004, 4_619_184_640), kv_heads=4
    ),
    "arcee-tiny": _ARCEE.size(2, 64, 4, 192, max_seq_len=128, kv_heads=2),
}  # fmt: skip
_JAIS2_SIZES = {
    "jais2-8b": _JAIS2.size(
        32, 3328, 26, 26624, of=(150272, 8_090_401_280), rope_theta=500000.0
    ),
    "jais2-tiny": _JAIS2.size(2, 64, 4, 192, max_seq_len=128, kv_heads=2),
}  # fmt: skip
_MODULES = {
    **{ours: theirs for ours, theirs in LLAMA_MODULES.items() if theirs != GATE_UP},
    "feedforward.up": ("mlp.up_proj",),
}
_BIASES = ("attention_bias", "mlp_bias")

FAMILIES = tuple(
    decoder_family(dialect)
    for dialect in (
        Dialect(
            model_type="arcee", name="Arcee", sizes=_ARCEE_SIZES, answers="transformer.", biases=_BIASES,
            tokens={"bos": 128000, "eos": 128001}, built_in=_UNGATED, modules=lambda config: _MODULES,
            defaults={
                "hidden_size": 2560, "intermediate_size": 18432, "max_position_embeddings": 4096,
                "rms_norm_eps": 1e-5,
            },
        ),
        Dialect(
            model_type="jais2", name="Jais2", sizes=_JAIS2_SIZES, labels=False, biases=_BIASES,
            tokens={"bos": 0, "eos": 150024}, built_in=LAYER_NORM | _UNGATED,
            modules=lambda config: _MODULES, spelled={"rms_norm_eps": "layer_norm_eps"},
            missing={"attention_bias": True, "mlp_bias": True},
            defaults={
                "vocab_size": 150272, "hidden_size": 3328, "intermediate_size": 26624,
                "num_attention_heads": 26, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
            },
        ),
    )
)  # fmt: skip
