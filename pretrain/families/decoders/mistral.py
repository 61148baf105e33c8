"""Mistral (Jiang et al. 2023), a LLaMA with windows, Ministral, with windows in any layers, and Mixtral.

Mixtral (Jiang et al. 2024) has experts too.
"""

from pretrain.families.decoders.llama import LLAMA, LLAMA_STACK
from pretrain.families.dialect import LLAMA_MODULES, Dialect, decoder_family
from pretrain.families.expert_keys import ExpertKeys, expert_hooks
from pretrain.families.sizes import Architecture

_MIXTRAL = Architecture(
    ("decoder",),
    LLAMA_STACK | {"kv_heads": 8, "rope_theta": 1000000.0, "experts": {"count": 8, "top_k": 2}},
    {"max_seq_len": 32768, "tied_embeddings": False},
)
"""Jiang et al. 2024 (Mixtral), 2, table 1; weights of the two chosen experts sum to 1."""
_MISTRAL_SIZES = {
    # Jiang et al. 2023, table 1. Of its 32,768 positions a layer sees the last 4096.
    "mistral-7b": LLAMA.size(
        32, 4096, 32, 14336, of=(32000, 7_241_732_096), max_seq_len=32768, kv_heads=8, window=4096
    ),
    "mistral-tiny": LLAMA.size(2, 64, 4, 192, max_seq_len=128, kv_heads=2, window=16),
}  # fmt: skip
_MINISTRAL = LLAMA._replace(ends=LLAMA.ends | {"family": "ministral"})
_MINISTRAL_SIZES = {
    # Mistral AI 2024 (Ministral), as released: windows in three of four layers, after the first.
    "ministral-8b": _MINISTRAL.size(
        36, 4096, 32, 12288, of=(131072, 8_019_808_256), max_seq_len=32768, kv_heads=8, window=32768,
        global_every=4, rope_theta=1e8,
    ),
    "ministral-tiny": _MINISTRAL.size(
        4, 64, 4, 192, max_seq_len=128, kv_heads=2, window=16, global_every=4
    ),
}  # fmt: skip
_MIXTRAL_SIZES = {
    # Jiang et al. 2024; the larger one as released.
    "mixtral-8x7b": _MIXTRAL.size(32, 4096, 32, 14336, of=(32000, 46_702_792_704)),
    "mixtral-8x22b": _MIXTRAL.size(
        56, 6144, 48, 16384, of=(32000, 140_620_634_112), max_seq_len=65536
    ),
    "mixtral-tiny": _MIXTRAL.size(
        2, 64, 4, 96, max_seq_len=128, kv_heads=2, experts={"count": 4, "top_k": 2}
    ),
}  # fmt: skip
_EXPERTS = ExpertKeys(
    ("num_local_experts",), (8, 2), "block_sparse_moe", "w1", "w3", "w2", normalizes=True
)  # fmt: skip
_TOKENS = {"bos": 1, "eos": 2}

FAMILIES = tuple(
    decoder_family(dialect)
    for dialect in (
        Dialect(
            model_type="mistral", name="Mistral", sizes=_MISTRAL_SIZES, answers="model.",
            windows="all", kv_heads=8, tokens=_TOKENS,
            defaults={"intermediate_size": 14336, "max_position_embeddings": 131072},
        ),
        Dialect(
            model_type="ministral", name="Ministral", sizes=_MINISTRAL_SIZES, answers="transformer.",
            windows=lambda number: False, kv_heads=8, tokens=_TOKENS,
            defaults={"intermediate_size": 14336, "max_position_embeddings": 131072},
        ),
        Dialect(
            model_type="mixtral", name="Mixtral", sizes=_MIXTRAL_SIZES, answers="model.",
            windows="all", kv_heads=8, tokens=_TOKENS,
            defaults={"max_position_embeddings": 131072, "rms_norm_eps": 1e-5},
            missing={"intermediate_size": 14336, "rope_theta": 1e6, "sliding_window": None},
            **expert_hooks(_EXPERTS, LLAMA_MODULES),
        ),
    )
)  # fmt: skip
