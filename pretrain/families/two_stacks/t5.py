"""T5 (Raffel et al. 2020), v1.0, v1.1 and ByT5, mT5 (Xue et al. 2021) and UMT5 (Chung et al. 2023):
a relative position bias, no bias terms, unscaled attention.

T5 v1.0 ties the head and divides its input by sqrt(D), v1.1 (flan-T5, ByT5 too) does neither. Up to
transformers 4 both depend on `tie_word_embeddings`; 5 always ties, unless the files have a head of
its own, and writes `scale_decoder_outputs: false` where it does not divide. mT5 never divides. A
UMT5 divides where `tie_word_embeddings` is true, as 5 always writes it; the releases say false, which 5
does not heed: scores of its own then are those of ours over sqrt(D).
"""

from functools import partial
from typing import Any

from pretrain.config.model import HeadConfig, ModelConfig
from pretrain.families.config_json import ACTIVATIONS, THEIR_ACTIVATIONS, Fields, Keys, refusal
from pretrain.families.family import Family, Weight, table
from pretrain.families.sizes import BOTH, Architecture, Size
from pretrain.families.stack_tables import StackNames, Table, table_family

_T5 = Architecture(
    BOTH,
    {
        "activation": "relu",
        "gated": False,
        "norm": "rms",
        "norm_eps": 1e-6,
        "bias": False,
        "scaled_attention": False,
        "position": "relative",
        "relative_buckets": 32,
        "relative_max_distance": 128,
        "dropout": 0.1,
        "head_width": 64,
    },
    # The embedding, of deviation 1, is the head's too, whose input is divided by sqrt(D).
    {"head": {"scaled": True}, "max_seq_len": 512, "tied_embeddings": True, "init": "t5"},
)
"""Raffel et al. 2020, 2.1 and 3.1.2."""
_T5_V1_1 = Architecture(
    BOTH,
    _T5.stack | {"activation": "gelu_tanh", "gated": True, "dropout": 0.0},
    {"max_seq_len": 512, "tied_embeddings": False, "init": "t5"},
)
"""Shazeer 2020, 2. The release (T5 v1.1) had no dropout in pretraining; fine-tuning wants 0.1 again."""
_MT5 = _T5_V1_1._replace(ends=_T5_V1_1.ends | {"family": "mt5"})
"""Xue et al. 2021, 3.2: T5 v1.1 for many languages."""
_UMT5 = _T5_V1_1._replace(stack=_T5_V1_1.stack | {"relative_shared": False})
"""Chung et al. 2023, 4, as released: a relative bias in each layer."""


def _byt5(encoder: int, decoder: int, *size: int, **other: Any) -> Size:
    made = _T5_V1_1.size(encoder, *size, **other)
    return made.over(decoder=made.values["decoder"] | {"layers": decoder})


_SIZES_OF = {
    "t5": {
        # Raffel et al. 2020, 3.7.
        "t5-small": _T5.size(6, 512, 8, 2048, of=(32128, 60_506_624)),
        "t5-base": _T5.size(12, 768, 12, 3072, of=(32128, 222_903_552)),
        "t5-large": _T5.size(24, 1024, 16, 4096, of=(32128, 737_668_096)),
        "t5-3b": _T5.size(24, 1024, 32, 16384, of=(32128, 2_851_598_336), head_width=128),
        "t5-11b": _T5.size(24, 1024, 128, 65536, of=(32128, 11_307_321_344), head_width=128),
        "t5-tiny": _T5.size(2, 64, 4, 192, head_width=24, max_seq_len=128),
        # Sizes of the v1.1 release: XL and XXL stand for 3B and 11B, wider, with fewer heads.
        "t5-v1.1-small": _T5_V1_1.size(8, 512, 6, 1024, of=(32128, 76_961_152)),
        "t5-v1.1-base": _T5_V1_1.size(12, 768, 12, 2048, of=(32128, 247_577_856)),
        "t5-v1.1-large": _T5_V1_1.size(24, 1024, 16, 2816, of=(32128, 783_150_080)),
        "t5-v1.1-xl": _T5_V1_1.size(24, 2048, 32, 5120, of=(32128, 2_849_757_184)),
        "t5-v1.1-xxl": _T5_V1_1.size(24, 4096, 64, 10240, of=(32128, 11_135_332_352)),
        "t5-v1.1-tiny": _T5_V1_1.size(2, 64, 4, 96, head_width=24, max_seq_len=128),
        # Xue et al. 2022, table 2: of bytes, with three times as many layers in the encoder.
        "byt5-small": _byt5(12, 4, 1472, 6, 3584, of=(384, 299_637_760)),
        "byt5-base": _byt5(18, 6, 1536, 12, 3968, of=(384, 581_653_248)),
        "byt5-large": _byt5(36, 12, 1536, 16, 3840, of=(384, 1_228_183_552)),
        "byt5-xl": _byt5(36, 12, 2560, 32, 6720, of=(384, 3_737_801_728)),
        "byt5-xxl": _byt5(36, 12, 4672, 64, 12352, of=(384, 12_906_899_328)),
        "byt5-tiny": _byt5(3, 1, 64, 4, 96, head_width=24, max_seq_len=128),
    },
    # Xue et al. 2021, 3.2, as released.
    "mt5": {
        "mt5-small": _MT5.size(8, 512, 6, 1024, of=(250112, 300_176_768)),
        "mt5-base": _MT5.size(12, 768, 12, 2048, of=(250112, 582_401_280)),
        "mt5-large": _MT5.size(24, 1024, 16, 2816, of=(250112, 1_229_581_312)),
        "mt5-xl": _MT5.size(24, 2048, 32, 5120, of=(250112, 3_742_619_648)),
        "mt5-xxl": _MT5.size(24, 4096, 64, 10240, of=(250112, 12_921_057_280)),
        "mt5-tiny": _MT5.size(2, 64, 4, 96, head_width=24, max_seq_len=128),
    },
    # Chung et al. 2023, as released.
    "umt5": {
        "umt5-small": _UMT5.size(8, 512, 6, 1024, of=(256384, 306_601_984)),
        "umt5-base": _UMT5.size(12, 768, 12, 2048, of=(256384, 592_043_520)),
        "umt5-xl": _UMT5.size(24, 2048, 32, 5120, of=(256384, 3_768_356_864)),
        "umt5-xxl": _UMT5.size(24, 4096, 64, 10240, of=(256384, 12_972_531_712)),
        "umt5-tiny": _UMT5.size(2, 64, 4, 96, head_width=24, max_seq_len=128),
    },
}
_KEYS: Keys = {
    "num_layers": ("encoder.layers", 6),
    "d_model": ("width", 512),
    "num_heads": ("heads", 8),
    "d_ff": ("ff_width", 2048),
    "layer_norm_epsilon": ("norm_eps", 1e-6),
    "relative_attention_num_buckets": ("relative_buckets", 32),
    "relative_attention_max_distance": ("relative_max_distance", 128),
    "dropout_rate": ("dropout", 0.1),
    "vocab_size": ("model.vocab_size", 32128),
    "n_positions": ("model.max_seq_len", 512),
}
_DEFAULTS = {"vocab_size": 250112, "d_ff": 1024, "num_layers": 8, "num_heads": 6}
_GATED = {name: f"gated-{name}" for name in ("quick_gelu", "silu", "relu", "relu2")}
_GATED |= {"gelu": "gated-gelu_python", "gelu_tanh": "gated-gelu"}
"""Our activation -> `feed_forward_proj`; theirs reads "gated-gelu" as gated gelu_new."""
_HEAD = "lm_head.weight"
_COPIES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", _HEAD)


def _names(stack: str) -> StackNames:
    block = {
        "attention_norm": ("0.layer_norm",),
        "attention.qkv": tuple(f"0.SelfAttention.{part}" for part in "qkv"),
        "attention.output": ("0.SelfAttention.o",),
    }
    last = 1
    if stack == "decoder":
        last = 2
        block |= {
            "cross_norm": ("1.layer_norm",),
            "cross.query": ("1.EncDecAttention.q",),
            "cross.key_value": ("1.EncDecAttention.k", "1.EncDecAttention.v"),
            "cross.output": ("1.EncDecAttention.o",),
        }
    feedforward = f"{last}.DenseReluDense."
    block |= {
        "feedforward_norm": (f"{last}.layer_norm",),
        "feedforward.gate_up": (f"{feedforward}wi_0", f"{feedforward}wi_1"),
        "feedforward.up": (f"{feedforward}wi",),
        "feedforward.down": (f"{feedforward}wo",),
    }
    bias = "layer.0.SelfAttention.relative_attention_bias.weight"
    return StackNames(
        layers=f"{stack}.block.{{}}.layer.",
        block=block,
        before={"position": f"{stack}.block.{{}}.{bias}"},
        after={"norm": f"{stack}.final_layer_norm"},
    )


def _read_head(model_type: str, fields: Fields, names: frozenset[str]) -> tuple[bool, bool]:
    ties = fields.flag("tie_word_embeddings", True)
    scaled = ties and model_type != "mt5"
    newest = str(fields.values.get("transformers_version", "")).startswith("5.")
    if model_type == "t5":
        scaled = fields.flag("scale_decoder_outputs", scaled)
        # Older files repeat a tied head; 5 writes one of its own alone.
        if scaled and not newest and "scale_decoder_outputs" not in fields.values:
            return scaled, True
    return scaled, _HEAD not in names


def _read(
    model_type: str, projection: str, fields: Fields, names: frozenset[str], found: dict[str, Any]
) -> dict[str, Any]:  # fmt: skip
    scaled, tied = _read_head(model_type, fields, names)
    head_width: int | None = fields.integer("d_kv", 64)
    activation, gated = _read_projection(fields, projection)
    # T5 derives it; the others believe the key.
    if model_type != "t5" and fields.flag("is_gated_act", gated) != gated:
        why = f"feed_forward_proj says {str(gated).lower()}"
        raise refusal("is_gated_act", fields.values["is_gated_act"], why)
    tokens, layers = found["model.special_tokens"], found["encoder.layers"]
    if "decoder_start_token_id" not in fields.values:
        tokens = tokens.model_copy(update={"start": tokens.pad})
    if found["heads"] * fields.integer("d_kv", 64) == found["width"]:
        head_width = None
    return {
        "head_width": head_width,
        "activation": activation,
        "gated": gated,
        "decoder.layers": fields.optional_integer("num_decoder_layers", layers) or layers,
        "model.head": HeadConfig(scaled=scaled),
        "model.tied_embeddings": tied,
        "model.special_tokens": tokens,
    }


def _read_projection(fields: Fields, default: str) -> tuple[str, bool]:
    key = "feed_forward_proj"
    text = str(fields.values.get(key, default))
    name = text.removeprefix("gated-")
    if fields.values.get("dense_act_fn") is not None:  # theirs applies it, also against the other key
        name = str(fields.values["dense_act_fn"])
    elif text == _GATED["gelu_tanh"]:
        return "gelu_tanh", True
    if name not in ACTIVATIONS:
        names = ", ".join(sorted(ACTIVATIONS))
        raise refusal(key, text, f"must be [gated-]NAME, NAME one of {names}")
    return ACTIVATIONS[name], text.startswith("gated-")


def _write(model_type: str, config: ModelConfig) -> dict[str, Any]:
    stack, scaled = config.last_stack, config.head.scaled
    keys = {
        "d_kv": stack.per_head_width,
        "num_decoder_layers": stack.layers,
        "feed_forward_proj": (_GATED if stack.gated else THEIR_ACTIVATIONS)[stack.activation],
        "tie_word_embeddings": scaled if model_type == "umt5" else config.tied_embeddings,
    }
    # Where it is not the default; transformers 4 does not know it, and would scale.
    if model_type == "t5" and scaled != config.tied_embeddings:
        keys["scale_decoder_outputs"] = scaled
    return keys


def _ends(config: ModelConfig) -> list[Weight]:
    if config.tied_embeddings:
        return []
    return [table("head.weight", _HEAD, config.vocab_size)]


def _family(model_type: str, name: str, projection: str = "gated-gelu", **differs: Any) -> Family:
    built_in = {"norm": "rms", "scaled_attention": False, "position": "relative", "model.init": "t5"}
    made = Table(
        model_type=model_type, name=name, scorer="ForConditionalGeneration",
        keys=_KEYS, activation=None, tokens={"pad": 0, "eos": 1, "start": None}, roles=("start",),
        built_in=built_in | {"relative_shared": model_type != "umt5"},
        fixed={"is_encoder_decoder": (True, "a T5 of ours has both stacks")},
        read=partial(_read, model_type, projection), write=partial(_write, model_type),
        words="shared.weight", stacks={stack: _names(stack) for stack in BOTH}, ends=_ends, **differs,
    )  # fmt: skip
    return table_family(
        made, aliases=dict.fromkeys(_COPIES, "shared.weight"), renames=((r"^transformer\.", ""),),
        # Old checkpoints have a bias of cross attention, which no model reads.
        ignored=(r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",),
        sizes=_SIZES_OF[model_type],
    )  # fmt: skip


FAMILIES = (
    _family("t5", "T5", "relu"),
    _family("mt5", "MT5", defaults=_DEFAULTS),
    _family("umt5", "UMT5", defaults=_DEFAULTS),
)
