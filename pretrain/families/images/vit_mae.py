"""Masked autoencoders of images (He et al. 2022): a ViT of the patches that are seen, and a decoder.

A MAE is read with its decoder. Its tables of positions are constants, which files of theirs have
and a model of ours computes; share of hidden patches and normalised pixels are of our objective.
"""

from functools import partial
from typing import Any

from pretrain.config.model import HeadConfig, ModelConfig
from pretrain.families.config_json import Fields, Keys, refusal
from pretrain.families.family import Weight, affine
from pretrain.families.images.vit import (
    IMAGENET,
    VIT_BLOCK,
    VIT_BUILT_IN,
    VIT_KEYS,
    vit_embeddings,
    vit_names,
    vit_renames,
    vit_size,
)
from pretrain.families.sizes import Size
from pretrain.families.stack_tables import StackNames, Table, table_family

_KEYS: Keys = {
    **VIT_KEYS,
    "decoder_num_hidden_layers": ("decoder.layers", 8),
    "decoder_hidden_size": ("decoder.width", 512),
    "decoder_num_attention_heads": ("decoder.heads", 16),
    "decoder_intermediate_size": ("decoder.ff_width", 2048),
}


def _size(vit: Size, layers: int = 8, width: int = 512, heads: int = 16) -> Size:
    """Returns the autoencoder of a ViT, with the decoder of He et al. 2022, 4, or another."""
    encoder = vit.values["encoder"] | {"position": "sinusoidal_2d"}
    size = {"layers": layers, "width": width, "heads": heads, "ff_width": 4 * width}
    head = {"kind": "pixels", "bias": True}
    return vit.over(encoder=encoder, decoder=encoder | size, head=head)


_SIZES = {
    # He et al. 2022, 4 and table 1, as released.
    "vit_mae-b16": _size(vit_size(12, 768, 12, 224, 16, of=(None, 111_655_680), **IMAGENET)),
    "vit_mae-l16": _size(vit_size(24, 1024, 16, 224, 16, of=(None, 329_239_296), **IMAGENET)),
    "vit_mae-h14": _size(vit_size(32, 1280, 16, 224, 14, of=(None, 656_613_964), **IMAGENET)),
    "vit_mae-tiny": _size(vit_size(2, 64, 4, 16, 4), 1, 32, 4),
}


def _read(fields: Fields, names: frozenset[str], found: dict[str, Any]) -> dict[str, Any]:
    if not any(name.startswith("decoder.") for name in names):
        why = "the encoder alone; only a ViTMAEForPreTraining, which has its decoder too, is read"
        raise refusal("architectures", fields.values.get("architectures"), why)
    return {"model.head": HeadConfig(kind="pixels", bias=True)}


def _ends(config: ModelConfig) -> list[Weight]:
    if config.input is None or config.decoder is None:
        return []
    width = config.decoder.width
    weights = [Weight("mask.weight", (("decoder.mask_token", 1),), shape=(1, 1, width))]
    weights += affine("", "decoder.", {"bridge": {"decoder_embed": width}}, bias=True)
    head = {"head": {"decoder_pred": config.input.patch_values}}
    return weights + affine("", "decoder.", head, bias=True)


def _sinusoids(config: ModelConfig) -> dict[str, int]:
    encoder = {"vit.embeddings.position_embeddings": config.input_stack.width}
    return encoder | ({"decoder.decoder_pos_embed": config.last_stack.width} if config.restores else {})


_DECODER = StackNames(
    "decoder.decoder_layers.{}.", VIT_BLOCK, after={"norm": "decoder.decoder_norm"}
)  # fmt: skip
_TABLE = Table(
    model_type="vit_mae", name="ViTMAE",
    unit=lambda config: "ForPreTraining" if config.restores else "",
    keys=_KEYS, built_in=VIT_BUILT_IN | {"position": "sinusoidal_2d"}, read=_read,
    embeddings=partial(vit_embeddings, "vit"),
    stacks={"encoder": vit_names("vit"), "decoder": _DECODER}, ends=_ends,
)  # fmt: skip
FAMILIES = (
    table_family(
        _TABLE, ignored=(r"vit\.pooler\..*", r"vit\.embeddings\.mask_token"),
        renames=vit_renames("vit"), prefix="vit.", sinusoids=_sinusoids, reads="patches",
        sizes=_SIZES,
    ),
)  # fmt: skip
