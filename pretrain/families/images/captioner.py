"""Captions of images: a `VisionEncoderDecoderModel` whose encoder is a ViT or DeiT, and its decoder a GPT-2.

The decoder has cross attention. Nothing reads the pooler of the encoder, which is left out.
"""

from dataclasses import replace
from typing import Any

from pretrain.config.model import HeadConfig, ModelConfig
from pretrain.families.config_json import Fields, build_config, refusal, write_tokens
from pretrain.families.decoders.gpt2 import CROSS_GPT2, GPT2
from pretrain.families.family import Family, Weight, affine
from pretrain.families.images.vit import DEIT, VIT, vit_renames, vit_size
from pretrain.families.sizes import Size

_ENCODERS = {"vit": VIT, "deit": DEIT}


def _size(vit: Size, gpt2: Size) -> Size:
    return vit.over(**gpt2.values, head={"kind": "lm"})._replace(of=gpt2.of)


_SIZES = {
    # A ViT whose states a GPT-2 reads by cross attention, as released for captions of images.
    "vit_gpt2-b16": _size(
        vit_size(12, 768, 12, 224, 16), GPT2.size(12, 768, 12, 3072, of=(50257, 238_605_312))
    ),
    "vit_gpt2-tiny": _size(vit_size(2, 64, 4, 16, 4), GPT2.size(2, 64, 4, 256, max_seq_len=128)),
}  # fmt: skip


def _read_config(values: dict[str, Any], names: frozenset[str]) -> ModelConfig:
    fields = Fields(values)
    parts = {name: fields.section(name) for name in ("encoder", "decoder")}
    model_types = {"encoder": tuple(_ENCODERS), "decoder": ("gpt2",)}
    for name, kinds in model_types.items():
        model_type = parts[name].get("model_type")
        if model_type not in kinds:
            why = f"only {' or '.join(kinds)} can be represented"
            raise refusal(f"{name}.model_type", model_type, why)
    kind = parts["encoder"]["model_type"]
    of_decoder = parts["decoder"]
    why = "keys and values would have the width of the encoder"
    Fields(of_decoder).only("cross_attention_hidden_size", None, why)
    encoder = _ENCODERS[kind].read_config(parts["encoder"] | {"architectures": None}, frozenset())
    decoder = CROSS_GPT2.read_config(of_decoder | {"architectures": ["GPT2LMHeadModel"]}, names)
    token_ids = {key: value for key, value in values.items() if key.endswith("_token_id")}
    tokens = Fields(of_decoder | token_ids).special_tokens(bos=50256, eos=50256, start=None)
    if tokens.start is None:
        tokens = tokens.model_copy(update={"start": tokens.bos})
    both = {"input": encoder.input, "encoder": encoder.encoder, "special_tokens": tokens}
    of_text = decoder.model_dump(exclude_unset=True)
    return build_config(**of_text | {name: part.model_dump() for name, part in both.items() if part})


def _write_config(config: ModelConfig) -> dict[str, Any]:
    patches = config.input
    kind = "deit" if patches is not None and patches.registers else "vit"
    of_encoder = VIT.write_config(config.model_copy(update={"head": HeadConfig(kind="none")}))
    of_decoder = {"model_type": "gpt2", "is_decoder": True, "add_cross_attention": config.captions}
    return {
        "encoder": {"model_type": kind, **of_encoder},
        "decoder": CROSS_GPT2.write_config(config) | of_decoder,
        "is_encoder_decoder": True,
        "tie_word_embeddings": False,  # the decoder's is the one that counts
        **write_tokens(config.special_tokens, "start"),
    }


def _weights(config: ModelConfig) -> list[Weight]:
    kind = "deit" if config.input is not None and config.input.registers else "vit"
    weights = []
    for weight in _ENCODERS[kind].weights(config.model_copy(update={"pooler": False})):
        ours = weight.ours.replace("embedding.", "patches.", 1)
        theirs = tuple((name.replace(f"{kind}.", "encoder.", 1), rows) for name, rows in weight.theirs)
        weights.append(replace(weight, ours=ours, theirs=theirs))
    if config.has_bridge:
        bridge = {"bridge": {"enc_to_dec_proj": config.last_stack.width}}
        weights += affine("", "", bridge, bias=True)
    for weight in CROSS_GPT2.weights(config) if config.captions else ():
        theirs = tuple((f"decoder.{name}", rows) for name, rows in weight.theirs)
        weights.append(replace(weight, theirs=theirs))
    return weights


FAMILIES = (
    Family(
        model_type="vision-encoder-decoder",
        read_config=_read_config,
        write_config=_write_config,
        architecture=lambda config: "VisionEncoderDecoderModel",
        weights=_weights,
        aliases={"decoder.lm_head.weight": "decoder.transformer.wte.weight"},
        ignored=(
            r"encoder\.pooler\..*",
            r"encoder\.embeddings\.mask_token",
            r"decoder\.transformer\.h\.\d+\.(attn|crossattention)\.(masked_)?bias",
        ),
        renames=vit_renames("vit"),
        reads="patches",
        sizes=_SIZES,
    ),
)
