"""ViT (Dosovitskiy et al. 2021) and DeiT (Touvron et al. 2021), of patches.

Both have a head over labels, or none, with or without the pooler. The distillation token of a DeiT
is a register of ours; the class with a second head that reads it is refused.
"""

from functools import partial
from typing import Any

from pretrain.config.model import HeadConfig, ModelConfig, StackConfig
from pretrain.families.config_json import (
    THEIR_ACTIVATIONS,
    Fields,
    Keys,
    build_config,
    refusal,
    write_keys,
)
from pretrain.families.decoders.gpt2 import GPT2_STACK
from pretrain.families.family import Family, Weight, affine
from pretrain.families.label_names import IMAGES, read_label_head, score_weights, write_label_names
from pretrain.families.sizes import Architecture, Size

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
VIT_STACK: Keys = {
    "num_hidden_layers": ("layers", 12),
    "hidden_size": ("width", 768),
    "num_attention_heads": ("heads", 12),
    "intermediate_size": ("ff_width", 3072),
    "layer_norm_eps": ("norm_eps", 1e-12),
    "hidden_dropout_prob": ("dropout", 0.0),
    "attention_probs_dropout_prob": ("attention_dropout", 0.0),
}
PATCHES: Keys = {
    "image_size": ("image", 224),
    "patch_size": ("size", 16),
    "num_channels": ("channels", 3),
}
_POOLER = "pooler.dense"
_NAMES = {"vit": "ViT", "deit": "DeiT"}
# Names of transformers 5 in memory; files keep those of its first release.
RENAMES = (
    # So written by transformers 5.
    (r"^decoder\.decoder_encoder\.layer\.", "decoder.decoder_layers."),
    (r"\.attention\.q_proj\.", ".attention.attention.query."),
    (r"\.attention\.k_proj\.", ".attention.attention.key."),
    (r"\.attention\.v_proj\.", ".attention.attention.value."),
    (r"\.attention\.o_proj\.", ".attention.output.dense."),
    (r"\.mlp\.fc1\.", ".intermediate.dense."),
    (r"\.mlp\.fc2\.", ".output.dense."),
)


def read_vit(values: dict[str, Any], names: frozenset[str], *, kind: str) -> ModelConfig:
    """Reads the config.json of a ViT or DeiT."""
    fields = Fields(values)
    stack = fields.read(VIT_STACK)
    has_pooler = f"{kind}.{_POOLER}.weight" in names
    if any(one.startswith("distillation_classifier.") for one in names):
        why = "no model of ours has the second head of a DeiT with its teacher"
        raise refusal("architectures", values.get("architectures"), why)
    labelled = fields.claims(f"{_NAMES[kind]}{IMAGES}") or "classifier.weight" in names
    fields.only("pooler_act", "tanh", "a pooler of ours has tanh")
    fields.only("pooler_output_size", stack["width"], "a pooler of ours is as wide as the model")
    stack |= read_common(fields) | {"position": "learned"}
    head = read_label_head(fields, dropout=0.0) if labelled else HeadConfig(kind="none")
    patches = fields.read(PATCHES) | {"registers": int(kind == "deit")}
    return build_config(
        input=patches,
        encoder=stack,
        head=head,
        pooler=has_pooler and not labelled,
        init_std=fields.number("initializer_range", 0.02),
        init_scaled=False,
    )


def read_common(fields: Fields) -> dict[str, Any]:
    """Returns the values of a stack that all of these models have."""
    given = {"activation": fields.activation("hidden_act", "gelu")}
    built_in = {"gated": False, "norm": "layer", "bias": True}
    return {**given, **built_in, "qkv_bias": fields.flag("qkv_bias", True)}


def write_vit(config: ModelConfig) -> dict[str, Any]:
    """Returns the config.json of a ViT or DeiT."""
    stack, patches = config.input_stack, config.input
    assert patches is not None, "a model of images"
    return {
        **write_keys(stack, VIT_STACK),
        **{key: getattr(patches, ours) for key, (ours, _) in PATCHES.items()},
        "hidden_act": THEIR_ACTIVATIONS[stack.activation],
        "qkv_bias": stack.has_qkv_bias,
        "initializer_range": config.init_std,
        **write_label_names(config.head),
    }


def vit_blocks(ours: str, theirs: str, stack: StackConfig) -> list[Weight]:
    """Returns the weights of all blocks; both names are prefixes of the number of a block."""
    width = stack.width
    block = {
        "attention_norm": {"layernorm_before": width},
        "attention.output": {"attention.output.dense": width},
        "feedforward_norm": {"layernorm_after": width},
        "feedforward.up": {"intermediate.dense": stack.ff_width},
        "feedforward.down": {"output.dense": width},
    }
    names = ("query", "key", "value")
    queries = {"attention.qkv": {f"attention.attention.{name}": width for name in names}}
    weights = []
    for number in range(stack.layers):
        place = (f"{ours}{number}.", f"{theirs}{number}.")
        weights += affine(*place, block, bias=True)
        weights += affine(*place, queries, bias=stack.has_qkv_bias)
    return weights


def vit_weights(config: ModelConfig, *, kind: str) -> list[Weight]:
    """Returns the weights of a ViT or DeiT, by the prefix of its tensors."""
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
    weights += vit_blocks("encoder.blocks.", f"{kind}.encoder.layer.", stack)
    weights += affine("encoder.", f"{kind}.", {"norm": {"layernorm": width}}, bias=True)
    if config.pooler:
        weights += affine("", f"{kind}.", {"pooler": {_POOLER: width}}, bias=True)
    if config.head.kind == "labels":
        weights += score_weights(config.head)
    return weights


def vit_renames(kind: str) -> tuple[tuple[str, str], ...]:
    """Returns old spellings under this prefix, or under `encoder`."""
    return ((r"^vision_encoder_decoder\.", ""), (rf"^({kind}\.|encoder\.|)layers\.", r"\1encoder.layer."), *RENAMES)


def _architecture(config: ModelConfig, *, kind: str) -> str:
    return _NAMES[kind] + (IMAGES if config.head.kind == "labels" else "Model")


FAMILIES = tuple(
    Family(
        model_type=kind,
        read_config=partial(read_vit, kind=kind),
        write_config=write_vit,
        architecture=partial(_architecture, kind=kind),
        weights=partial(vit_weights, kind=kind),
        ignored=(rf"{kind}\.pooler\..*", rf"{kind}\.embeddings\.mask_token"),
        renames=vit_renames(kind),
        prefix=f"{kind}.",
        reads="patches",
        sizes=sizes,
    )
    for kind, sizes in (("vit", _VIT_SIZES), ("deit", _DEIT_SIZES))
)
