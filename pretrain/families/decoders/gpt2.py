"""GPT-2 (Radford et al. 2019): pre-norm, learned positions, weights stored as [in, out].

StarCoder (Li et al. 2023, `gpt_bigcode`) has one key-value head, and weights as [out, in].
With cross attention a GPT-2 is the decoder of a `VisionEncoderDecoderModel`, in `images/captioner.py`.
"""

from functools import partial
from typing import Any

from pretrain.config.model import HeadConfig, ModelConfig
from pretrain.families.config_json import Fields, Keys
from pretrain.families.family import Family, Weight, own_head
from pretrain.families.label_names import with_heads
from pretrain.families.sizes import Architecture
from pretrain.families.stack_tables import StackNames, Table, table_family

GPT2_STACK = {
    "activation": "gelu_tanh",
    "gated": False,
    "norm": "layer",
    "bias": True,
    "position": "learned",
}
GPT2 = Architecture(("decoder",), GPT2_STACK, {"max_seq_len": 1024, "tied_embeddings": True})
"""Radford et al. 2019, 2.3. Dropout, 0.1 in the release, is 0: one pass over a corpus does not overfit."""
_SIZES = {
    # Radford et al. 2019, table 2; named by what is really in the released checkpoints.
    "gpt2-124m": GPT2.size(12, 768, 12, 3072, of=(50257, 124_439_808)),
    "gpt2-350m": GPT2.size(24, 1024, 16, 4096, of=(50257, 354_823_168)),
    "gpt2-774m": GPT2.size(36, 1280, 20, 5120, of=(50257, 774_030_080)),
    "gpt2-1.5b": GPT2.size(48, 1600, 25, 6400, of=(50257, 1_557_611_200)),
    "gpt2-tiny": GPT2.size(2, 64, 4, 256, max_seq_len=128),
}
_BIGCODE = Architecture(("decoder",), GPT2_STACK | {"kv_heads": 1}, {"max_seq_len": 8192, "tied_embeddings": True})
_BIGCODE_SIZES = {
    # Li et al. 2023, table 5.
    "gpt_bigcode-starcoder": _BIGCODE.size(40, 6144, 48, 24576, of=(49152, 15_517_456_384)),
    "gpt_bigcode-tiny": _BIGCODE.size(2, 64, 4, 256, max_seq_len=128),
}
_KEYS: Keys = {
    "n_layer": ("layers", 12),
    "n_embd": ("width", 768),
    "n_head": ("heads", 12),
    "layer_norm_epsilon": ("norm_eps", 1e-5),
    "scale_attn_weights": ("scaled_attention", True),
    "resid_pdrop": ("dropout", 0.1),
    "attn_pdrop": ("attention_dropout", 0.1),
    "vocab_size": ("model.vocab_size", 50257),
    "n_positions": ("model.max_seq_len", 1024),
    "tie_word_embeddings": ("model.tied_embeddings", True),
    "initializer_range": ("model.init_std", 0.02),
}
_BLOCK = {
    "attention_norm": ("ln_1",),
    "feedforward_norm": ("ln_2",),
    "attention.qkv": ("attn.c_attn",),
    "attention.output": ("attn.c_proj",),
    "feedforward.up": ("mlp.c_fc",),
    "feedforward.down": ("mlp.c_proj",),
}
_CROSS = {
    "cross_norm": ("ln_cross_attn",),
    "cross.query": ("crossattention.q_attn",),
    "cross.key_value": ("crossattention.c_attn",),
    "cross.output": ("crossattention.c_proj",),
}
_WORDS = "transformer.wte.weight"
_HEAD = "lm_head.weight"


def _read(
    cross: bool, fields: Fields, names: frozenset[str], found: dict[str, Any]
) -> dict[str, Any]:  # fmt: skip
    why = "the decoder would read an encoder"
    if cross:
        why = "a decoder without cross attention would not read the encoder"
    fields.only("add_cross_attention", cross, why, missing=False)
    is_stored = found["model.tied_embeddings"] or _HEAD in names
    has_head = is_stored or fields.claims("GPT2LMHeadModel") or fields.claims("GPTBigCodeForCausalLM")
    return {
        "ff_width": fields.optional_integer("n_inner") or 4 * found["width"],
        "model.head": HeadConfig(kind="lm" if has_head else "none"),
    }


def _write(config: ModelConfig) -> dict[str, Any]:
    stack = config.last_stack
    return {"n_inner": stack.ff_width, "embd_pdrop": stack.dropout}


def _write_gpt2(config: ModelConfig) -> dict[str, Any]:
    keys = _write(config)
    # The tanh approximation has two names in transformers, and a GPT-2 is released with this one.
    if config.last_stack.activation == "gelu_tanh":
        keys["activation_function"] = "gelu_new"
    return keys


def _ends(config: ModelConfig) -> list[Weight]:
    return own_head(config, _HEAD)


def _family(cross: bool) -> Family:
    names = StackNames(
        layers="transformer.h.{}.", block=_BLOCK | (_CROSS if cross else {}), transposed=True,
        before={"position": "transformer.wpe.weight"}, after={"norm": "transformer.ln_f"},
    )  # fmt: skip
    table = Table(
        model_type="gpt2", name="GPT2", scorer="LMHeadModel", keys=_KEYS, words=_WORDS,
        activation=("activation_function", "gelu_new"), tokens={"bos": 50256, "eos": 50256},
        built_in={"gated": False, "norm": "layer", "bias": True, "position": "learned"},
        refused={
            "scale_attn_by_inverse_layer_idx": (False, "scores would be divided by the layer number"),
        },
        read=partial(_read, cross), write=_write_gpt2, stacks={"decoder": names}, ends=_ends,
    )  # fmt: skip
    # Causal masks that older versions saved as buffers.
    ignored = (r"transformer\.h\.\d+\.attn\.(masked_)?bias",)
    return table_family(
        table, aliases={_HEAD: _WORDS}, ignored=ignored, prefix="transformer.", sizes=_SIZES
    )  # fmt: skip


def _bigcode() -> Family:
    names = StackNames(
        layers="transformer.h.{}.", block=_BLOCK,
        before={"position": "transformer.wpe.weight"}, after={"norm": "transformer.ln_f"},
    )  # fmt: skip
    table = Table(
        model_type="gpt_bigcode", name="GPTBigCode", scorer="ForCausalLM", keys=_KEYS, words=_WORDS,
        activation=("activation_function", "gelu_pytorch_tanh"), tokens={"bos": 50256, "eos": 50256},
        built_in={"gated": False, "norm": "layer", "bias": True, "position": "learned", "kv_heads": 1},
        fixed={"multi_query": (True, "queries, keys and values of a head would be stored side by side")},
        read=partial(_read, False), write=_write, stacks={"decoder": names}, ends=_ends,
    )  # fmt: skip
    return table_family(
        table, aliases={_HEAD: _WORDS}, ignored=(r"transformer\.h\.\d+\.attn\.(masked_)?bias",),
        prefix="transformer.", sizes=_BIGCODE_SIZES,
    )  # fmt: skip


CROSS_GPT2 = _family(cross=True)
FAMILIES = (with_heads(_family(cross=False), "transformer."), with_heads(_bigcode(), None))
