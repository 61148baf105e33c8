"""ViT (Dosovitskiy et al. 2021), DeiT (Touvron et al. 2021) and MAE (He et al. 2022), of patches.

ViT and DeiT have a head over labels, or none, with or without the pooler. The distillation token of
a DeiT is a register of ours; the class with a second head that reads it is refused. A MAE is read
with its decoder. Its tables of positions are constants, which files of theirs have and a model of
ours computes; share of hidden patches and normalised pixels are of our objective.

A `VisionEncoderDecoderModel` is read where its encoder is a ViT or DeiT, and its decoder a GPT-2
with cross attention. Nothing reads the pooler of its encoder, which is left out.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from pretrain.config.model import HeadConfig, ModelConfig, StackConfig
from pretrain.interop.decoders.gpt2 import gpt2_weights, read_gpt2, write_gpt2
from pretrain.interop.family import Family, Weight, affine
from pretrain.interop.fields import THEIR_ACTIVATIONS, Fields, Keys, build_config, refusal, write_keys, write_tokens
from pretrain.interop.label_names import IMAGES, read_label_head, score_weights, write_label_names
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
        length = config.positions_of("encoder")
        table = ((f"{tables}position_embeddings", length),)
        weights.append(Weight("encoder.position.weight", table, shape=(1, length, width)))
    weights += _blocks("encoder.blocks.", f"{kind}.encoder.layer.", stack)
    weights += affine("encoder.", f"{kind}.", {"norm": {"layernorm": width}}, bias=True)
    if config.pooler:
        weights += affine("", f"{kind}.", {"pooler": {_POOLER: width}}, bias=True)
    if config.head.kind == "labels":
        weights += score_weights(config.head)
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


def _read_captioner(values: dict[str, Any], names: frozenset[str]) -> ModelConfig:
    fields = Fields(values)
    parts = {name: fields.section(name) for name in ("encoder", "decoder")}
    known = {"encoder": ("vit", "deit"), "decoder": ("gpt2",)}
    for name, kinds in known.items():
        found = parts[name].get("model_type")
        if found not in kinds:
            why = f"only {' or '.join(kinds)} can be represented"
            raise refusal(f"{name}.model_type", found, why)
    kind = parts["encoder"]["model_type"]
    of_decoder = parts["decoder"]
    why = "keys and values would have the width of the encoder"
    Fields(of_decoder).only("cross_attention_hidden_size", None, why)
    encoder = _read_config(parts["encoder"] | {"architectures": None}, frozenset(), kind=kind)
    decoder = read_gpt2(of_decoder | {"architectures": ["GPT2LMHeadModel"]}, names, cross=True)
    given = {key: value for key, value in values.items() if key.endswith("_token_id")}
    tokens = Fields(of_decoder | given).special_tokens(bos=50256, eos=50256, start=None)
    if tokens.start is None:
        tokens = tokens.model_copy(update={"start": tokens.bos})
    both = {"input": encoder.input, "encoder": encoder.encoder, "special_tokens": tokens}
    of_text = decoder.model_dump(exclude_unset=True)
    return build_config(**of_text | {name: part.model_dump() for name, part in both.items() if part})


def _write_captioner(config: ModelConfig) -> dict[str, Any]:
    patches = config.input
    kind = "deit" if patches is not None and patches.registers else "vit"
    of_encoder = _write_config(config.model_copy(update={"head": HeadConfig(kind="none")}))
    of_decoder = {"model_type": "gpt2", "is_decoder": True, "add_cross_attention": config.captions}
    return {
        "encoder": {"model_type": kind, **of_encoder},
        "decoder": write_gpt2(config) | of_decoder,
        "is_encoder_decoder": True,
        "tie_word_embeddings": False,  # the decoder's is the one that counts
        **write_tokens(config.special_tokens, "start"),
    }


def _captioner_weights(config: ModelConfig) -> list[Weight]:
    kind = "deit" if config.input is not None and config.input.registers else "vit"
    weights = []
    for weight in _weights(config.model_copy(update={"pooler": False}), kind=kind):
        ours = weight.ours.replace("embedding.", "patches.", 1)
        theirs = tuple((name.replace(f"{kind}.", "encoder.", 1), rows) for name, rows in weight.theirs)
        weights.append(replace(weight, ours=ours, theirs=theirs))
    if config.has_bridge:
        bridge = {"bridge": {"enc_to_dec_proj": config.last_stack.width}}
        weights += affine("", "", bridge, bias=True)
    for weight in gpt2_weights(config) if config.captions else ():
        theirs = tuple((f"decoder.{name}", rows) for name, rows in weight.theirs)
        weights.append(replace(weight, theirs=theirs))
    return weights


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
        "write_config": _write_config,
        "ignored": (rf"{kind}\.pooler\..*", rf"{kind}\.embeddings\.mask_token"),
        "prefix": f"{kind}.",
    }
    return Family(
        # Names of transformers 5 in memory; files keep those of its first release.
        renames=(
            (r"^vision_encoder_decoder\.", ""),
            (rf"^({kind}\.|encoder\.|)layers\.", r"\1encoder.layer."),
            # So written by transformers 5.
            (r"^decoder\.decoder_encoder\.layer\.", "decoder.decoder_layers."),
            (r"\.attention\.q_proj\.", ".attention.attention.query."),
            (r"\.attention\.k_proj\.", ".attention.attention.key."),
            (r"\.attention\.v_proj\.", ".attention.attention.value."),
            (r"\.attention\.o_proj\.", ".attention.output.dense."),
            (r"\.mlp\.fc1\.", ".intermediate.dense."),
            (r"\.mlp\.fc2\.", ".output.dense."),
        ),
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
CAPTIONER = _family(
    "vit",
    "",
    model_type="vision-encoder-decoder",
    read_config=_read_captioner,
    write_config=_write_captioner,
    architecture=lambda config: "VisionEncoderDecoderModel",
    weights=_captioner_weights,
    aliases={"decoder.lm_head.weight": "decoder.transformer.wte.weight"},
    ignored=(
        r"encoder\.pooler\..*",
        r"encoder\.embeddings\.mask_token",
        r"decoder\.transformer\.h\.\d+\.(attn|crossattention)\.(masked_)?bias",
    ),
    prefix="",
)
