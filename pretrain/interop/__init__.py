"""Families of Hugging Face models by the `model_type` of their config.json.

An export takes the first that represents a model exactly.
"""

from pretrain.interop.bert import BERT, DISTILBERT, ELECTRA, ROBERTA, XLM_ROBERTA
from pretrain.interop.decoders.deepseek import DEEPSEEK_V3
from pretrain.interop.decoders.gemma import GEMMA, GEMMA2, GEMMA3
from pretrain.interop.decoders.gpt2 import GPT2
from pretrain.interop.decoders.gpt_oss import GPT_OSS
from pretrain.interop.decoders.llama import (
    GRANITE,
    LLAMA,
    MISTRAL,
    MIXTRAL,
    OLMO,
    OLMO2,
    OLMO3,
    OLMOE,
    PHI3,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    SMOLLM3,
)
from pretrain.interop.decoders.neox import COHERE, COHERE2, FALCON, GPT_NEOX, PHI, STABLELM, STARCODER2
from pretrain.interop.family import Family
from pretrain.interop.label_names import with_heads
from pretrain.interop.marian import BART, MARIAN, MBART, PLBART
from pretrain.interop.modernbert import MODERNBERT
from pretrain.interop.t5 import MT5, T5, UMT5
from pretrain.interop.vit import CAPTIONER, DEIT, MAE, VIT

_LABELLING = (
    *(GPT2, LLAMA, MISTRAL, MIXTRAL, QWEN2, QWEN3, QWEN3_MOE, OLMO, OLMO2, OLMO3, SMOLLM3, PHI3, GPT_OSS),
    *(DEEPSEEK_V3, STARCODER2, GEMMA, GEMMA2, GEMMA3, GPT_NEOX, PHI, STABLELM, FALCON),
)
"""Decoders of which transformers has a class of labelled texts."""
_ANSWERING = {one.model_type: one.prefix for one in (GPT2, MISTRAL, MIXTRAL, GPT_NEOX, FALCON)}
_ANSWERING |= {one.model_type: "transformer." for one in (LLAMA, QWEN2, QWEN3, QWEN3_MOE, SMOLLM3)}
"""Those of which it has a class of answers in texts, and the prefix of the stack there."""
_ALL = (
    *(with_heads(one, _ANSWERING.get(one.model_type)) for one in _LABELLING),
    *(GRANITE, COHERE, COHERE2, OLMOE, BERT, ROBERTA, XLM_ROBERTA, DISTILBERT, ELECTRA, MODERNBERT),
    *(T5, MT5, UMT5, MARIAN, BART, PLBART, MBART, VIT, DEIT, MAE, CAPTIONER),
)
FAMILIES: dict[str, Family] = {family.model_type: family for family in _ALL}
