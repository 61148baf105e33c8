"""MiniMax-M2 (MiniMax 2025): a Mixtral whose experts are chosen by sigmoids and biases, half of a head rotated."""

from typing import Any

from pretrain.families.config_json import Fields
from pretrain.families.decoders.llama import LLAMA_STACK
from pretrain.families.dialect import LLAMA_MODULES, QK_NORMS, Dialect, decoder_family
from pretrain.families.expert_keys import ExpertKeys, expert_hooks
from pretrain.families.rotary_keys import RopeKeys
from pretrain.families.sizes import Architecture, Values

_MINIMAX = Architecture(
    ("decoder",),
    LLAMA_STACK
    | {"qk_norm": "whole", "kv_heads": 8, "head_width": 128, "norm_eps": 1e-6}
    | {"rope_theta": 5000000.0, "rope_fraction": 0.5},
    {"max_seq_len": 196608, "tied_embeddings": False},
)


def _experts(count: int, top_k: int) -> Values:
    return {"count": count, "top_k": top_k, "scores": "sigmoid", "balance": "bias"}


_SIZES = {
    # Without its modules of further tokens.
    "minimax_m2-230b": _MINIMAX.size(
        62, 3072, 48, 1536, of=(200064, 228_689_748_992), experts=_experts(256, 8)
    ),
    "minimax_m2-tiny": _MINIMAX.size(
        2, 64, 4, 48, max_seq_len=128, kv_heads=2, head_width=24, experts=_experts(4, 2)
    ),
}  # fmt: skip
_EXPERTS = ExpertKeys(
    ("num_local_experts",), (256, 8), "block_sparse_moe", "w1", "w3", "w2", normalizes=True,
    bias="e_score_correction_bias",
)  # fmt: skip


def _read(fields: Fields) -> dict[str, Any]:
    if fields.values.get("rotary_dim") is not None and "partial_rotary_factor" not in fields.values:
        share = fields.integer("rotary_dim") / (fields.integer("head_dim", 128) or 1)
        fields.values["partial_rotary_factor"] = share
    return _EXPERTS.read(fields)


FAMILIES = (
    decoder_family(
        Dialect(
            model_type="minimax_m2", name="MiniMaxM2", sizes=_SIZES, labels=False, kv_heads=8,
            head_width=128, rope=RopeKeys(share=1.0), tokens={"bos": 200034, "eos": 200020},
            built_in={"qk_norm": "whole"}, missing={"intermediate_size": 1536, "rope_theta": 5e6},
            defaults={
                "vocab_size": 200064, "hidden_size": 3072, "num_hidden_layers": 62,
                "num_attention_heads": 48, "max_position_embeddings": 196608,
            },
            **expert_hooks(_EXPERTS, {**LLAMA_MODULES, **QK_NORMS}) | {"read": _read},
        )
    ),
)  # fmt: skip
