"""GPT-NeoX (Black et al. 2022), Pythia (Biderman et al. 2023): both sub-layers read the same input, by two norms.

Queries, keys and values of a head are stored side by side, and a part of each head is rotated.
"""

from functools import cache
from typing import Any

from pretrain.config.model import ModelConfig, StackConfig
from pretrain.families.config_json import Fields
from pretrain.families.dialect import Dialect, Names, decoder_family
from pretrain.families.rotary_keys import RopeKeys
from pretrain.families.sizes import Architecture

NEOX = Architecture(
    ("decoder",),
    {
        "activation": "gelu",
        "gated": False,
        "norm": "layer",
        "bias": True,
        "position": "rotary",
        "rope_fraction": 0.25,
        "parallel": True,
    },
    {"max_seq_len": 2048, "tied_embeddings": False},
)
"""Black et al. 2022 (GPT-NeoX-20B), 2.1; Biderman et al. 2023 (Pythia), table 1."""
_SIZES = {
    # Biderman et al. 2023, table 1; embeddings not counted in their names' sizes.
    "pythia-70m": NEOX.size(6, 512, 8, 2048, of=(50304, 70_426_624)),
    "pythia-160m": NEOX.size(12, 768, 12, 3072, of=(50304, 162_322_944)),
    "pythia-410m": NEOX.size(24, 1024, 16, 4096, of=(50304, 405_334_016)),
    "pythia-1b": NEOX.size(16, 2048, 8, 8192, of=(50304, 1_011_781_632)),
    "pythia-1.4b": NEOX.size(24, 2048, 16, 8192, of=(50304, 1_414_647_808)),
    "pythia-2.8b": NEOX.size(32, 2560, 32, 10240, of=(50304, 2_775_208_960)),
    "pythia-6.9b": NEOX.size(32, 4096, 32, 16384, of=(50432, 6_857_302_016)),
    "pythia-12b": NEOX.size(36, 5120, 40, 20480, of=(50688, 11_846_072_320)),
    "gpt_neox-tiny": NEOX.size(2, 64, 4, 256, max_seq_len=128),
}
LAYER_NORM = {"norm": "layer", "norm_bias": True}


@cache
def _grouped(heads: int, kv_heads: int, width: int) -> tuple[int, ...]:
    queries = heads // kv_heads * width
    step = queries + 2 * width
    blocks = [range(start, start + step) for start in range(0, kv_heads * step, step)]
    parts = (slice(queries), slice(queries, queries + width), slice(queries + width, None))
    return tuple(row for part in parts for block in blocks for row in block[part])


def grouped_order(stack: StackConfig) -> tuple[int, ...]:
    """Returns our rows in theirs, where each key-value head follows its query heads."""
    return _grouped(stack.heads, stack.num_kv_heads, stack.per_head_width)


def _read(fields: Fields) -> dict[str, Any]:
    has_bias = fields.flag("attention_bias", True)
    apart = None if has_bias else False
    is_parallel = fields.flag("use_parallel_residual", True)
    return {"parallel": is_parallel, "qkv_bias": apart, "output_bias": apart}


def _write(config: ModelConfig) -> dict[str, Any]:
    stack = config.last_stack
    return {"use_parallel_residual": stack.parallel is True, "attention_bias": stack.has_qkv_bias}


_NAMES = Names(
    prefix="gpt_neox.",
    words="gpt_neox.embed_in.weight",
    layer="gpt_neox.layers.{}.",
    norm="final_layer_norm",
    head="embed_out",
)
_MODULES = {
    "attention_norm": ("input_layernorm",),
    "attention.qkv": ("attention.query_key_value",),
    "attention.output": ("attention.dense",),
    "feedforward_norm": ("post_attention_layernorm",),
    "feedforward.up": ("mlp.dense_h_to_4h",),
    "feedforward.down": ("mlp.dense_4h_to_h",),
}

FAMILIES = (
    decoder_family(
        Dialect(
            model_type="gpt_neox", sizes=_SIZES, answers="gpt_neox.", name="GPTNeoX",
            fixed_heads=True, tokens={"bos": 0, "eos": 2},
            spelled={"rms_norm_eps": "layer_norm_eps"} | {"num_key_value_heads": None},
            defaults={
                "vocab_size": 50432, "hidden_size": 6144, "intermediate_size": 24576,
                "num_hidden_layers": 44,
                "num_attention_heads": 64, "rms_norm_eps": 1e-5,
            },
            more={"hidden_dropout": ("dropout", 0.0)},
            built_in=LAYER_NORM | {"activation": "gelu", "gated": False, "bias": True},
            rope=RopeKeys(theta="rotary_emb_base", share=0.25, share_key="rotary_pct"),
            names=_NAMES,
            modules=lambda config: _MODULES, order=grouped_order, read=_read,
            write=_write,
            # Causal masks that older versions saved as buffers.
            ignored=(r"gpt_neox\.layers\.\d+\.attention\.(masked_)?bias",),
            renames=((r"^lm_head\.", "embed_out."),),
        )
    ),
)  # fmt: skip
