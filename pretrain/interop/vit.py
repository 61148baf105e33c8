"""ViT (Dosovitskiy et al. 2021) and DeiT (Touvron et al. 2021): encoders of image patches.

With a head over labels, or without one and with or without the pooler. The distillation token of a
DeiT is a register of ours; the class with a second head that reads it is refused.
"""

from functools import partial
from typing import Any

from pretrain.config.model import HeadConfig, ModelConfig
from pretrain.interop.family import Family, Weight, affine
from pretrain.interop.fields import THEIR_ACTIVATIONS, Fields, Keys, build_config, refusal, write_keys
from pretrain.interop.label_names import IMAGES, label_weights, read_label_head, write_label_names

_STACK: Keys = {
    "num_hidden_layers": ("layers", 12),
    "hidden_size": ("width", 768),
    "num_attention_heads": ("heads", 12),
    "intermediate_size": ("ff_width", 3072),
    "layer_norm_eps": ("norm_eps", 1e-12),
    "hidden_dropout_prob": ("dropout", 0.0),
    "attention_probs_dropout_prob": ("attention_dropout", 0.0),
}
_PATCHES: Keys = {
    "image_size": ("image", 224),
    "patch_size": ("size", 16),
    "num_channels": ("channels", 3),
}
_POOLER = "pooler.dense"


def _read_config(values: dict[str, Any], names: frozenset[str], *, kind: str) -> ModelConfig:
    name = {"vit": "ViT", "deit": "DeiT"}[kind]
    fields = Fields(values)
    stack = fields.read(_STACK)
    has_pooler = f"{kind}.{_POOLER}.weight" in names
    if any(one.startswith("distillation_classifier.") for one in names):
        why = "no model of ours has the second head of a DeiT with its teacher"
        raise refusal("architectures", values.get("architectures"), why)
    labelled = fields.claims(f"{name}{IMAGES}") or "classifier.weight" in names
    fields.only("pooler_act", "tanh", "a pooler of ours has tanh")
    fields.only("pooler_output_size", stack["width"], "a pooler of ours is as wide as the model")
    stack |= {
        "activation": fields.activation("hidden_act", "gelu"),
        "gated": False,
        "norm": "layer",
        "bias": True,
        "qkv_bias": fields.flag("qkv_bias", True),
        "position": "learned",
    }
    head = read_label_head(fields, dropout=0.0) if labelled else HeadConfig(kind="none")
    patches = fields.read(_PATCHES) | {"registers": int(kind == "deit")}
    return build_config(
        input=patches,
        encoder=stack,
        head=head,
        pooler=has_pooler and not labelled,
        init_std=fields.number("initializer_range", 0.02),
        init_scaled=False,
    )


def _write_config(config: ModelConfig, *, kind: str) -> dict[str, Any]:
    stack, patches = config.last_stack, config.input
    assert patches is not None, "a model of images"
    return {
        **write_keys(stack, _STACK),
        **{key: getattr(patches, ours) for key, (ours, _) in _PATCHES.items()},
        "hidden_act": THEIR_ACTIVATIONS[stack.activation],
        "qkv_bias": stack.has_qkv_bias,
        "initializer_range": config.init_std,
        **write_label_names(config.head),
    }


def _weights(config: ModelConfig, *, kind: str) -> list[Weight]:
    stack, patches = config.last_stack, config.input
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
        Weight(
            "encoder.position.weight",
            ((f"{tables}position_embeddings", config.max_seq_len),),
            shape=(1, config.max_seq_len, width),
        ),
    ]
    block = {
        "attention_norm": {"layernorm_before": width},
        "attention.output": {"attention.output.dense": width},
        "feedforward_norm": {"layernorm_after": width},
        "feedforward.up": {"intermediate.dense": stack.ff_width},
        "feedforward.down": {"output.dense": width},
    }
    names = ("query", "key", "value")
    queries = {"attention.qkv": {f"attention.attention.{name}": width for name in names}}
    for number in range(stack.layers):
        ours, theirs = f"encoder.blocks.{number}.", f"{kind}.encoder.layer.{number}."
        weights += affine(ours, theirs, block, bias=True)
        weights += affine(ours, theirs, queries, bias=stack.has_qkv_bias)
    weights += affine("encoder.", f"{kind}.", {"norm": {"layernorm": width}}, bias=True)
    if config.pooler:
        weights += affine("", f"{kind}.", {"pooler": {_POOLER: width}}, bias=True)
    if config.head.kind == "labels":
        weights += label_weights(config.head)
    return weights


def _family(kind: str, name: str) -> Family:
    """Returns a family by its `model_type` and the name of its classes."""
    return Family(
        model_type=kind,
        read_config=partial(_read_config, kind=kind),
        write_config=partial(_write_config, kind=kind),
        architecture=lambda config: f"{name}{IMAGES if config.head.kind == 'labels' else 'Model'}",
        weights=partial(_weights, kind=kind),
        ignored=(rf"{kind}\.pooler\..*", rf"{kind}\.embeddings\.mask_token"),
        # Names of transformers 5 in memory; files keep those of its first release.
        renames=(
            (rf"^({kind}\.|)layers\.", r"\1encoder.layer."),
            (r"\.attention\.q_proj\.", ".attention.attention.query."),
            (r"\.attention\.k_proj\.", ".attention.attention.key."),
            (r"\.attention\.v_proj\.", ".attention.attention.value."),
            (r"\.attention\.o_proj\.", ".attention.output.dense."),
            (r"\.mlp\.fc1\.", ".intermediate.dense."),
            (r"\.mlp\.fc2\.", ".output.dense."),
        ),
        prefix=f"{kind}.",
        reads="patches",
    )


VIT = _family("vit", "ViT")
DEIT = _family("deit", "DeiT")
