"""ViT (Dosovitskiy et al. 2021), DeiT (Touvron et al. 2021) and MAE (He et al. 2022), of patches.

ViT and DeiT have a head over labels, or none, with or without the pooler. The distillation token of
a DeiT is a register of ours; the class with a second head that reads it is refused. A MAE is read
with its decoder. Its tables of positions are constants, which files of theirs have and a model of
ours computes; share of hidden patches and normalised pixels are of our objective.
"""

from functools import partial
from typing import Any

from torch import Tensor

from pretrain.config.model import HeadConfig, ModelConfig, StackConfig
from pretrain.interop.family import Family, Weight, affine
from pretrain.interop.fields import THEIR_ACTIVATIONS, Fields, Keys, build_config, refusal, write_keys
from pretrain.interop.label_names import IMAGES, label_weights, read_label_head, write_label_names
from pretrain.model.position import sinusoids_2d

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
_DECODER: Keys = {
    "decoder_num_hidden_layers": ("layers", 8),
    "decoder_hidden_size": ("width", 512),
    "decoder_num_attention_heads": ("heads", 16),
    "decoder_intermediate_size": ("ff_width", 2048),
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
    stack |= _common(fields) | {"position": "learned"}
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


def _common(fields: Fields) -> dict[str, Any]:
    """Returns the values of a stack that all of these models have."""
    given = {"activation": fields.activation("hidden_act", "gelu")}
    built_in = {"gated": False, "norm": "layer", "bias": True}
    return {**given, **built_in, "qkv_bias": fields.flag("qkv_bias", True)}


def _read_mae(values: dict[str, Any], names: frozenset[str]) -> ModelConfig:
    fields = Fields(values)
    if not any(name.startswith("decoder.") for name in names):
        why = "the encoder alone; only a ViTMAEForPreTraining, which has its decoder too, is read"
        raise refusal("architectures", values.get("architectures"), why)
    encoder = fields.read(_STACK) | _common(fields) | {"position": "sinusoidal_2d"}
    return build_config(
        input=fields.read(_PATCHES),
        encoder=encoder,
        decoder=encoder | fields.read(_DECODER),
        head=HeadConfig(kind="pixels", bias=True),
        init_std=fields.number("initializer_range", 0.02),
        init_scaled=False,
    )


def _write_config(config: ModelConfig) -> dict[str, Any]:
    stack, patches = config.input_stack, config.input
    assert patches is not None, "a model of images"
    return {
        **write_keys(stack, _STACK),
        **{key: getattr(patches, ours) for key, (ours, _) in _PATCHES.items()},
        "hidden_act": THEIR_ACTIVATIONS[stack.activation],
        "qkv_bias": stack.has_qkv_bias,
        "initializer_range": config.init_std,
        **write_label_names(config.head),
        **(write_keys(config.last_stack, _DECODER) if config.restores else {}),
    }


def _blocks(ours: str, theirs: str, stack: StackConfig) -> list[Weight]:
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


def _weights(config: ModelConfig, *, kind: str) -> list[Weight]:
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
        length = config.max_seq_len
        table = ((f"{tables}position_embeddings", length),)
        weights.append(Weight("encoder.position.weight", table, shape=(1, length, width)))
    weights += _blocks("encoder.blocks.", f"{kind}.encoder.layer.", stack)
    weights += affine("encoder.", f"{kind}.", {"norm": {"layernorm": width}}, bias=True)
    if config.pooler:
        weights += affine("", f"{kind}.", {"pooler": {_POOLER: width}}, bias=True)
    if config.head.kind == "labels":
        weights += label_weights(config.head)
    return weights


def _mae_weights(config: ModelConfig) -> list[Weight]:
    weights = _weights(config, kind="vit")
    if config.input is None or config.decoder is None:
        return weights
    decoder = config.decoder
    width = decoder.width
    weights.append(Weight("mask.weight", (("decoder.mask_token", 1),), shape=(1, 1, width)))
    weights += affine("", "decoder.", {"bridge": {"decoder_embed": width}}, bias=True)
    weights += _blocks("decoder.blocks.", "decoder.decoder_layers.", decoder)
    weights += affine("decoder.", "decoder.", {"norm": {"decoder_norm": width}}, bias=True)
    head = {"head": {"decoder_pred": config.input.patch_values}}
    return weights + affine("", "decoder.", head, bias=True)


def _mae_tables(config: ModelConfig) -> dict[str, Tensor]:
    """Returns the vectors of positions of both stacks, [1, T, D]."""
    grid, before = (config.input.grid, config.input.num_before) if config.input else (0, 0)
    found = {"vit.embeddings.position_embeddings": config.input_stack.width}
    found |= {"decoder.decoder_pos_embed": config.last_stack.width} if config.restores else {}
    return {name: sinusoids_2d(grid, width, before)[None] for name, width in found.items()}


def _family(kind: str, name: str, **differs: Any) -> Family:
    """Returns a family by the prefix of its tensors and the name of its classes."""
    usual: dict[str, Any] = {
        "model_type": kind,
        "read_config": partial(_read_config, kind=kind),
        "architecture": lambda config: name + (IMAGES if config.head.kind == "labels" else "Model"),
        "weights": partial(_weights, kind=kind),
    }
    return Family(
        write_config=_write_config,
        ignored=(rf"{kind}\.pooler\..*", rf"{kind}\.embeddings\.mask_token"),
        # Names of transformers 5 in memory; files keep those of its first release.
        renames=(
            (rf"^({kind}\.|)layers\.", r"\1encoder.layer."),
            # So written by transformers 5.
            (r"^decoder\.decoder_encoder\.layer\.", "decoder.decoder_layers."),
            (r"\.attention\.q_proj\.", ".attention.attention.query."),
            (r"\.attention\.k_proj\.", ".attention.attention.key."),
            (r"\.attention\.v_proj\.", ".attention.attention.value."),
            (r"\.attention\.o_proj\.", ".attention.output.dense."),
            (r"\.mlp\.fc1\.", ".intermediate.dense."),
            (r"\.mlp\.fc2\.", ".output.dense."),
        ),
        prefix=f"{kind}.",
        reads="patches",
        **(usual | differs),
    )


VIT = _family("vit", "ViT")
DEIT = _family("deit", "DeiT")
MAE = _family(
    "vit",
    "ViTMAE",
    model_type="vit_mae",
    read_config=_read_mae,
    architecture=lambda config: f"ViTMAE{'ForPreTraining' if config.restores else 'Model'}",
    weights=_mae_weights,
    constants=_mae_tables,
)
