"""Families of Hugging Face models by the `model_type` of their config.json, and their sizes by name.

A family is one file: what its models share, those that were released, and the correspondence of
their config.json and tensors to ours. No torch here. An export takes the first family that
represents a model exactly.
"""

from pretrain.families import unreleased
from pretrain.families.decoders import (
    cohere,
    deepseek,
    falcon,
    gemma,
    gpt2,
    gpt_neox,
    gpt_oss,
    granite,
    llama,
    mistral,
    olmo,
    opt,
    phi,
    qwen,
    smollm3,
    stablelm,
    starcoder2,
)
from pretrain.families.dialects import (
    arcee,
    cwm,
    dots1,
    ernie4_5,
    exaone4,
    glm,
    gptj,
    helium,
    minimax_m2,
    seed_oss,
)
from pretrain.families.encoders import bert, distilbert, electra, megatron_bert, modernbert, roberta
from pretrain.families.family import Family
from pretrain.families.hybrids import bamba, granite_hybrid, lfm2, mamba2, olmo_hybrid, qwen_next
from pretrain.families.images import captioner, vit, vit_mae
from pretrain.families.sizes import Size, Values
from pretrain.families.two_stacks import bart, marian, pegasus, t5

_DECODERS = (
    *(gpt2, llama, mistral, qwen, olmo, smollm3, phi, gpt_oss, deepseek, starcoder2, gemma),
    *(gpt_neox, stablelm, falcon, granite, cohere, arcee, cwm, ernie4_5, seed_oss, helium),
    *(glm, exaone4, dots1, minimax_m2, gptj, opt, olmo_hybrid, qwen_next, bamba, lfm2, granite_hybrid),
    mamba2,
)
_OTHERS = (
    *(bert, roberta, distilbert, electra, megatron_bert, modernbert, t5, marian, bart, pegasus),
    *(vit, vit_mae, captioner),
)
FAMILIES: dict[str, Family] = {
    family.model_type: family for one in (*_DECODERS, *_OTHERS) for family in one.FAMILIES
}  # fmt: skip
SIZES: dict[str, Size] = {
    name: size for family in FAMILIES.values() for name, size in family.sizes.items()
} | dict(unreleased.SIZES)  # fmt: skip
PRESETS: dict[str, Values] = {name: size.values for name, size in SIZES.items()}
"""Values of `model:` by name, without `vocab_size`. Modules under `extend` may add entries."""
