"""Masked autoencoders of images (He et al. 2022): a ViT of the patches that are seen, and a decoder of all.

A MAE is read with its decoder. Its tables of positions are constants, which files of theirs have
and a model of ours computes; share of hidden patches and normalised pixels are of our objective.
"""

from typing import Any

from pretrain.config.model import HeadConfig, ModelConfig
from pretrain.families.config_json import Fields, Keys, build_config, refusal, write_keys
from pretrain.families.family import Family, Weight, affine
from pretrain.families.images.vit import (
    IMAGENET,
    PATCHES,
    VIT_STACK,
    read_common,
    vit_blocks,
    vit_renames,
    vit_size,
    vit_weights,
    write_vit,
)
from pretrain.families.sizes import Size

_DECODER: Keys = {
    "decoder_num_hidden_layers": ("layers", 8),
    "decoder_hidden_size": ("width", 512),
    "decoder_num_attention_heads": ("heads", 16),
    "decoder_intermediate_size": ("ff_width", 2048),
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


def _read_config(values: dict[str, Any], names: frozenset[str]) -> ModelConfig:
    fields = Fields(values)
    if not any(name.startswith("decoder.") for name in names):
        why = "the encoder alone; only a ViTMAEForPreTraining, which has its decoder too, is read"
        raise refusal("architectures", values.get("architectures"), why)
    encoder = fields.read(VIT_STACK) | read_common(fields) | {"position": "sinusoidal_2d"}
    return build_config(
        input=fields.read(PATCHES),
        encoder=encoder,
        decoder=encoder | fields.read(_DECODER),
        head=HeadConfig(kind="pixels", bias=True),
        init_std=fields.number("initializer_range", 0.02),
        init_scaled=False,
    )


def _write_config(config: ModelConfig) -> dict[str, Any]:
    decoder = write_keys(config.last_stack, _DECODER) if config.restores else {}
    return write_vit(config) | decoder


def _weights(config: ModelConfig) -> list[Weight]:
    weights = vit_weights(config, kind="vit")
    if config.input is None or config.decoder is None:
        return weights
    decoder = config.decoder
    width = decoder.width
    weights.append(Weight("mask.weight", (("decoder.mask_token", 1),), shape=(1, 1, width)))
    weights += affine("", "decoder.", {"bridge": {"decoder_embed": width}}, bias=True)
    weights += vit_blocks("decoder.blocks.", "decoder.decoder_layers.", decoder)
    weights += affine("decoder.", "decoder.", {"norm": {"decoder_norm": width}}, bias=True)
    head = {"head": {"decoder_pred": config.input.patch_values}}
    return weights + affine("", "decoder.", head, bias=True)


def _sinusoids(config: ModelConfig) -> dict[str, int]:
    encoder = {"vit.embeddings.position_embeddings": config.input_stack.width}
    return encoder | ({"decoder.decoder_pos_embed": config.last_stack.width} if config.restores else {})


FAMILIES = (
    Family(
        model_type="vit_mae",
        read_config=_read_config,
        write_config=_write_config,
        architecture=lambda config: f"ViTMAE{'ForPreTraining' if config.restores else 'Model'}",
        weights=_weights,
        ignored=(r"vit\.pooler\..*", r"vit\.embeddings\.mask_token"),
        renames=vit_renames("vit"),
        prefix="vit.",
        sinusoids=_sinusoids,
        reads="patches",
        sizes=_SIZES,
    ),
)
