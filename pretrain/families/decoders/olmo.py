"""OLMo 1 to 3 (Groeneveld et al. 2024, OLMo team 2025): norms without weights, or of outputs and all queries.

OLMoE (Muennighoff et al. 2024) is an OLMo 2 with experts, and norms before sub-layers; FlexOlmo (Shi et al.
2025) has norms of outputs.
"""

from dataclasses import replace
from typing import Any

from pretrain.families.decoders.llama import LLAMA_STACK
from pretrain.families.dialect import LLAMA_MODULES, QK_NORMS, Dialect, Names, decoder_family
from pretrain.families.expert_keys import ExpertKeys, expert_hooks
from pretrain.families.rotary_keys import RopeKeys
from pretrain.families.sizes import Architecture

_OLMO = Architecture(
    ("decoder",),
    LLAMA_STACK | {"norm": "unweighted"},
    {"max_seq_len": 2048, "tied_embeddings": False},
)
"""Groeneveld et al. 2024 (OLMo), 2.1, table 1: norms have no weights; the sizes of the first releases."""
_OLMO2 = Architecture(
    ("decoder",),
    LLAMA_STACK | {"qk_norm": "whole", "norm_placement": "output", "norm_eps": 1e-6, "rope_theta": 500000.0},
    {"max_seq_len": 4096, "tied_embeddings": False},
)
"""OLMo team 2025 (OLMo 2), 2.1, table 1: norms of the outputs of sub-layers, and of all queries and keys."""
_OLMO3 = Architecture(
    ("decoder",),
    _OLMO2.stack | {"window": 4096, "global_every": 4, "global_first": 3, "rope_local_scaling": False},
    {"max_seq_len": 8192, "tied_embeddings": False},
)
"""OLMo team 2025 (OLMo 3), 3.2, before the extension of its context: windows in three of four layers."""
_OLMOE = Architecture(
    ("decoder",),
    LLAMA_STACK | {"qk_norm": "whole"},
    {"max_seq_len": 4096, "tied_embeddings": False},
)
"""Muennighoff et al. 2024 (OLMoE), 2, table 1: the scores of the eight chosen experts are their weights."""
_FLEX = Architecture(("decoder",), _OLMO2.stack, {"max_seq_len": 4096, "tied_embeddings": False})
_OLMO_SIZES = {
    # Groeneveld et al. 2024, table 1.
    "olmo-1b": _OLMO.size(16, 2048, 16, 8192, of=(50304, 1_176_764_416), tied_embeddings=True),
    "olmo-7b": _OLMO.size(32, 4096, 32, 11008, of=(50304, 6_888_095_744)),
    "olmo-tiny": _OLMO.size(2, 64, 4, 192, max_seq_len=128, kv_heads=2),
}
_OLMO2_SIZES = {
    # OLMo team 2025, table 1; the eps of the releases.
    "olmo2-1b": _OLMO2.size(16, 2048, 16, 8192, of=(100352, 1_484_916_736)),
    "olmo2-7b": _OLMO2.size(32, 4096, 32, 11008, of=(100352, 7_298_617_344)),
    "olmo2-13b": _OLMO2.size(40, 5120, 40, 13824, of=(100352, 13_716_198_400)),
    "olmo2-32b": _OLMO2.size(64, 5120, 40, 27648, of=(100352, 32_234_279_936), kv_heads=8),
    "olmo2-tiny": _OLMO2.size(2, 64, 4, 192, max_seq_len=128, kv_heads=2),
}
_OLMO3_SIZES = {
    # OLMo team 2025 (OLMo 3), table 1.
    "olmo3-7b": _OLMO3.size(32, 4096, 32, 11008, of=(100278, 7_298_011_136)),
    "olmo3-32b": _OLMO3.size(64, 5120, 40, 27648, of=(100278, 32_233_522_176), kv_heads=8),
    "olmo3-tiny": _OLMO3.size(4, 64, 4, 192, max_seq_len=128, kv_heads=2, window=16),
}
_OLMOE_SIZES = {
    # Muennighoff et al. 2024, table 1: 6.9B parameters, 1.3B of which meet a token.
    "olmoe-1b-7b": _OLMOE.size(
        16, 2048, 16, 1024, of=(50304, 6_919_161_856),
        experts={"count": 64, "top_k": 8, "normalize": False, "z_loss": 0.001},
    ),
    "olmoe-tiny": _OLMOE.size(
        2, 64, 4, 48, max_seq_len=128, experts={"count": 8, "top_k": 2, "normalize": False}
    ),
}  # fmt: skip
_FLEX_SIZES = {
    # Shi et al. 2025, 4.1: seven experts of a 7B model.
    "flex_olmo-7x7b": _FLEX.size(
        32, 4096, 32, 11008, of=(100352, 33_270_665_216),
        experts={"count": 7, "top_k": 5, "normalize": False},
    ),
    "flex_olmo-tiny": _FLEX.size(
        2, 64, 4, 48, max_seq_len=128, experts={"count": 8, "top_k": 2, "normalize": False}
    ),
}  # fmt: skip
_EXPERTS = ExpertKeys(("num_experts",), (64, 8), "mlp", "gate_proj", "up_proj", "down_proj")
_FLEX_EXPERTS = replace(_EXPERTS, defaults=(7, 5))
_CLIPPED = {"clip_qkv": (None, "queries, keys and values would be clipped")}
_UNWEIGHTED = {ours: theirs for ours, theirs in LLAMA_MODULES.items() if not ours.endswith("norm")}
_NORMED_MODULES = {**LLAMA_MODULES, **QK_NORMS}
OUTPUT_NORMS = {
    **_NORMED_MODULES,
    "attention_norm": ("post_attention_layernorm",),
    "feedforward_norm": ("post_feedforward_layernorm",),
}
_NORMED_OUTPUTS = {"qk_norm": "whole", "norm_placement": "output"}
_ALL: dict[str, Any] = {
    "defaults": {"vocab_size": 50304, "rms_norm_eps": 1e-5},
    "tokens": {"pad": 1, "eos": 50279},
    "fixed_heads": True,
    "biases": ("attention_bias",),
}

FAMILIES = tuple(
    decoder_family(dialect)
    for dialect in (
        Dialect(
            model_type="olmo", name="Olmo", sizes=_OLMO_SIZES, refused=_CLIPPED, names=Names(norm=""),
            built_in={"norm": "unweighted", "norm_eps": 1e-5}, spelled={"rms_norm_eps": None},
            modules=lambda config: _UNWEIGHTED, **_ALL,
        ),
        Dialect(
            model_type="olmo2", name="Olmo2", sizes=_OLMO2_SIZES, built_in=_NORMED_OUTPUTS,
            refused=_CLIPPED, modules=lambda config: OUTPUT_NORMS, **_ALL,
        ),
        Dialect(
            model_type="olmo3", name="Olmo3", sizes=_OLMO3_SIZES, windows=4, built_in=_NORMED_OUTPUTS,
            rope=RopeKeys(local=(None, 500000.0)), missing={"rope_theta": 500000.0},
            modules=lambda config: OUTPUT_NORMS, **_ALL,
        ),
        Dialect(
            model_type="olmoe", name="Olmoe", sizes=_OLMOE_SIZES, labels=False, fixed_heads=True,
            tokens={"pad": 1, "eos": 50279},
            defaults={
                "vocab_size": 50304, "hidden_size": 2048, "num_hidden_layers": 16,
                "num_attention_heads": 16, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
            },
            missing={"intermediate_size": 2048, "router_aux_loss_coef": 0.01},
            built_in={"qk_norm": "whole"},
            refused={
                **_CLIPPED,
                "attention_bias": (False, "the attention layers would have biases, and experts none"),
            },
            **expert_hooks(_EXPERTS, _NORMED_MODULES),
        ),
        Dialect(
            model_type="flex_olmo", name="FlexOlmo", sizes=_FLEX_SIZES, labels=False,
            fixed_heads=True, tokens={"pad": 100277, "eos": 100257}, built_in=_NORMED_OUTPUTS,
            defaults={"vocab_size": 100352, "max_position_embeddings": 4096},
            missing={"intermediate_size": 11008, "rope_theta": 500000.0, "router_aux_loss_coef": 0.01},
            refused={"attention_bias": (False, "the attention layers would have biases, and experts none")},
            **expert_hooks(_FLEX_EXPERTS, OUTPUT_NORMS),
        ),
    )
)  # fmt: skip
