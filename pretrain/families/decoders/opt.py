"""OPT (Zhang et al. 2022): a GPT-2 with ReLU, and two rows of positions that no token reads.

The one of 350M parameters has norms after the residual sums, and narrow embeddings, which are refused.
"""

from typing import Any

from pretrain.config.model import HeadConfig, ModelConfig
from pretrain.families.config_json import Fields, Keys, refusal
from pretrain.families.decoders.gpt2 import GPT2_STACK
from pretrain.families.family import Weight, own_head
from pretrain.families.label_names import with_heads
from pretrain.families.sizes import Architecture
from pretrain.families.stack_tables import StackNames, Table, table_family

_OPT = Architecture(
    ("decoder",),
    GPT2_STACK | {"activation": "relu", "position_offset": 2},
    {"max_seq_len": 2048, "tied_embeddings": True},
)
"""Zhang et al. 2022, 2.1, table 1; dropout, 0.1 in the release, is 0, as in GPT-2's."""
_SIZES = {
    "opt-125m": _OPT.size(12, 768, 12, 3072, of=(50272, 125_239_296)),
    "opt-1.3b": _OPT.size(24, 2048, 32, 8192, of=(50272, 1_315_758_080)),
    "opt-6.7b": _OPT.size(32, 4096, 32, 16384, of=(50272, 6_658_473_984)),
    "opt-30b": _OPT.size(48, 7168, 56, 28672, of=(50272, 29_974_540_288)),
    "opt-tiny": _OPT.size(2, 64, 4, 256, max_seq_len=128),
}
_KEYS: Keys = {
    "num_hidden_layers": ("layers", 12),
    "hidden_size": ("width", 768),
    "num_attention_heads": ("heads", 12),
    "ffn_dim": ("ff_width", 3072),
    "dropout": ("dropout", 0.1),
    "attention_dropout": ("attention_dropout", 0.0),
    "vocab_size": ("model.vocab_size", 50272),
    "max_position_embeddings": ("model.max_seq_len", 2048),
    "tie_word_embeddings": ("model.tied_embeddings", True),
    "init_std": ("model.init_std", 0.02),
}
_BLOCK = {
    "attention_norm": ("self_attn_layer_norm",),
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.output": ("self_attn.out_proj",),
    "feedforward_norm": ("final_layer_norm",),
    "feedforward.up": ("fc1",),
    "feedforward.down": ("fc2",),
}
_WORDS = "model.decoder.embed_tokens.weight"
_HEAD = "lm_head.weight"


def _read(fields: Fields, names: frozenset[str], found: dict[str, Any]) -> dict[str, Any]:
    width = fields.optional_integer("word_embed_proj_dim")
    if width not in (None, found["width"]):
        raise refusal("word_embed_proj_dim", width, f"must be hidden_size={found['width']}")
    has_head = found["model.tied_embeddings"] or _HEAD in names or fields.claims("OPTForCausalLM")
    return {"model.head": HeadConfig(kind="lm" if has_head else "none")}


def _write(config: ModelConfig) -> dict[str, Any]:
    return {"word_embed_proj_dim": config.last_stack.width}


def _ends(config: ModelConfig) -> list[Weight]:
    return own_head(config, _HEAD)


_TABLE = Table(
    model_type="opt", name="OPT", scorer="ForCausalLM", keys=_KEYS, words=_WORDS,
    activation=("activation_function", "relu"), tokens={"pad": 1, "bos": 2, "eos": 2},
    built_in={
        "gated": False, "norm": "layer", "norm_eps": 1e-5, "bias": True, "position": "learned",
        "position_offset": 2,
    },
    refused={
        "do_layer_norm_before": (True, "norms would follow the residual sums"),
        "_remove_final_layer_norm": (False, "the last norm would be missing"),
        "enable_bias": (True, "linear layers would have no biases"),
        "layer_norm_elementwise_affine": (True, "norms would have no weights"),
    },
    read=_read, write=_write, ends=_ends,
    stacks={
        "decoder": StackNames(
            "model.decoder.layers.{}.", _BLOCK, {"position": "model.decoder.embed_positions.weight"},
            {"norm": "model.decoder.final_layer_norm"},
        )
    },
)  # fmt: skip
_FAMILY = table_family(_TABLE, aliases={_HEAD: _WORDS}, prefix="model.", sizes=_SIZES)
FAMILIES = (with_heads(_FAMILY, "model."),)
