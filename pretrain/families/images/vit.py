"""ViT (Dosovitskiy et al. 2021) and DeiT (Touvron et al. 2021), of patches.

Both have a head over labels, or none, with or without the pooler. The distillation token of a DeiT
is a register of ours; the class with a second head that reads it is refused.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from pretrain.config.model import HeadConfig, ModelConfig
from pretrain.families.config_json import Fields, Keys, refusal
from pretrain.families.decoders.gpt2 import GPT2_STACK
from pretrain.families.family import Family, Weight, affine
from pretrain.families.label_names import IMAGES, read_label_head, score_weights, write_label_names
from pretrain.families.sizes import Architecture, Size, Sizes
from pretrain.families.stack_tables import StackNames, Table, table_family

_VIT = Architecture(
    ("encoder",),
    GPT2_STACK | {"activation": "gelu", "norm_eps": 1e-12},
    {"head": {"kind": "labels", "bias": True}},
)
"""Dosovitskiy et al. 2021, 3.1 and table 1; eps as released. `max_seq_len` follows from the input."""
IMAGENET = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
"""Normalization of pixels by the means of ImageNet's channels."""


def vit_size(
    layers: int,
    width: int,
    heads: int,
    image: int,
    patch: int,
    *,
    of: tuple[int | None, int] | None = None,
    **patches: Any,
) -> Size:
    """Returns a ViT; its feed-forward layers are four times as wide as the model."""
    patches = {"kind": "patches", "image": image, "size": patch} | patches
    return _VIT.size(layers, width, heads, 4 * width, of=of).over(input=patches)


_VIT_SIZES = {
    # Dosovitskiy et al. 2021, table 1: patches of 16, 32 and 14 pixels; Ti and S: Steiner et al. 2022, table 2.
    "vit-ti16": vit_size(12, 192, 3, 224, 16, of=(None, 5_717_416)),
    "vit-s16": vit_size(12, 384, 6, 224, 16, of=(None, 22_050_664)),
    "vit-s32": vit_size(12, 384, 6, 224, 32, of=(None, 22_878_952)),
    "vit-b16": vit_size(12, 768, 12, 224, 16, of=(None, 86_567_656)),
    "vit-b32": vit_size(12, 768, 12, 224, 32, of=(None, 88_224_232)),
    "vit-l16": vit_size(24, 1024, 16, 224, 16, of=(None, 304_326_632)),
    "vit-l32": vit_size(24, 1024, 16, 224, 32, of=(None, 306_535_400)),
    "vit-h14": vit_size(32, 1280, 16, 224, 14, of=(None, 632_045_800)),
    "vit-tiny": vit_size(2, 64, 4, 16, 4),
}
_DEIT_SIZES = {
    # Touvron et al. 2021, table 1; the distillation token is a register.
    "deit-ti16": vit_size(12, 192, 3, 224, 16, registers=1, **IMAGENET, of=(None, 5_717_800)),
    "deit-s16": vit_size(12, 384, 6, 224, 16, registers=1, **IMAGENET, of=(None, 22_051_432)),
    "deit-b16": vit_size(12, 768, 12, 224, 16, registers=1, **IMAGENET, of=(None, 86_569_192)),
    "deit-tiny": vit_size(2, 64, 4, 16, 4, registers=1),
}
VIT_KEYS: Keys = {
    "num_hidden_layers": ("layers", 12),
    "hidden_size": ("width", 768),
    "num_attention_heads": ("heads", 12),
    "intermediate_size": ("ff_width", 3072),
    "layer_norm_eps": ("norm_eps", 1e-12),
    "hidden_dropout_prob": ("dropout", 0.0),
    "attention_probs_dropout_prob": ("attention_dropout", 0.0),
    "qkv_bias": ("qkv_bias", True),
    "image_size": ("input.image", 224),
    "patch_size": ("input.size", 16),
    "num_channels": ("input.channels", 3),
    "initializer_range": ("model.init_std", 0.02),
}
VIT_BLOCK: Mapping[str, tuple[str, ...]] = {
    "attention_norm": ("layernorm_before",),
    "attention.output": ("attention.output.dense",),
    "feedforward_norm": ("layernorm_after",),
    "feedforward.up": ("intermediate.dense",),
    "feedforward.down": ("output.dense",),
    "attention.qkv": tuple(f"attention.attention.{name}" for name in ("query", "key", "value")),
}
VIT_BUILT_IN = {"gated": False, "norm": "layer", "bias": True, "model.init_scaled": False}
_POOLER = "pooler.dense"
# Names of transformers 5 in memory; files keep those of its first release.
_RENAMES = (
    (r"^vision_encoder_decoder\.", ""),
    # So written by transformers 5.
    (r"^decoder\.decoder_encoder\.layer\.", "decoder.decoder_layers."),
    (r"\.attention\.q_proj\.", ".attention.attention.query."),
    (r"\.attention\.k_proj\.", ".attention.attention.key."),
    (r"\.attention\.v_proj\.", ".attention.attention.value."),
    (r"\.attention\.o_proj\.", ".attention.output.dense."),
    (r"\.mlp\.fc1\.", ".intermediate.dense."),
    (r"\.mlp\.fc2\.", ".output.dense."),
)


def _read(
    kind: str, name: str, fields: Fields, names: frozenset[str], found: dict[str, Any]
) -> dict[str, Any]:  # fmt: skip
    if any(one.startswith("distillation_classifier.") for one in names):
        why = "no model of ours has the second head of a DeiT with its teacher"
        raise refusal("architectures", fields.values.get("architectures"), why)
    fields.only("pooler_act", "tanh", "a pooler of ours has tanh")
    fields.only("pooler_output_size", found["width"], "a pooler of ours is as wide as the model")
    head = HeadConfig(kind="none")
    pooler = f"{kind}.{_POOLER}.weight" in names
    if fields.claims(f"{name}{IMAGES}") or "classifier.weight" in names:
        head, pooler = read_label_head(fields, dropout=0.0), False
    return {"model.head": head, "model.pooler": pooler, "input.registers": int(kind == "deit")}


def vit_embeddings(kind: str, config: ModelConfig) -> list[Weight]:
    """Returns the weights before the encoder of a ViT or DeiT, by the prefix of its tensors."""
    stack, patches = config.input_stack, config.input
    assert patches is not None, "a model of images"
    width = stack.width
    tables = f"{kind}.embeddings."
    before = [(f"{tables}cls_token", 1)] * patches.class_token
    before += [(f"{tables}distillation_token", 1)] * patches.registers
    kernel = (width, patches.channels, patches.size, patches.size)
    projection = f"{tables}patch_embeddings.projection"
    weights = [
        Weight("embedding.projection.weight", ((f"{projection}.weight", width),), shape=kernel),
        Weight("embedding.projection.bias", ((f"{projection}.bias", width),)),
        Weight("embedding.before.weight", tuple(before), shape=(1, 1, width)),
    ]
    if stack.position == "learned":
        length = config.positions_of("encoder")
        table = ((f"{tables}position_embeddings", length),)
        weights.append(Weight("encoder.position.weight", table, shape=(1, length, width)))
    return weights


def _ends(kind: str, config: ModelConfig) -> list[Weight]:
    weights = []
    if config.pooler:
        width = config.input_stack.width
        weights += affine("", f"{kind}.", {"pooler": {_POOLER: width}}, bias=True)
    if config.head.record.names_labels:
        weights += score_weights(config.head)
    return weights


def vit_names(kind: str) -> StackNames:
    """Returns the names of an encoder with this prefix."""
    return StackNames(f"{kind}.encoder.layer.{{}}.", VIT_BLOCK, after={"norm": f"{kind}.layernorm"})


def vit_renames(kind: str) -> tuple[tuple[str, str], ...]:
    """Returns old spellings under this prefix, or under `encoder`."""
    return ((rf"^({kind}\.|encoder\.|)layers\.", r"\1encoder.layer."), *_RENAMES)


def _family(kind: str, name: str, sizes: Sizes) -> Family:
    made = Table(
        model_type=kind, name=name, unit=lambda config: IMAGES if config.head.record.names_labels else "",
        keys=VIT_KEYS, built_in=VIT_BUILT_IN | {"position": "learned"},
        read=partial(_read, kind, name), write=lambda config: write_label_names(config.head),
        embeddings=partial(vit_embeddings, kind), stacks={"encoder": vit_names(kind)},
        ends=partial(_ends, kind),
    )  # fmt: skip
    return table_family(
        made, ignored=(rf"{kind}\.pooler\..*", rf"{kind}\.embeddings\.mask_token"),
        renames=vit_renames(kind), prefix=f"{kind}.", reads="patches", sizes=sizes,
    )  # fmt: skip


VIT, DEIT = _family("vit", "ViT", _VIT_SIZES), _family("deit", "DeiT", _DEIT_SIZES)
FAMILIES = (VIT, DEIT)
