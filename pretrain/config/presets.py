"""Presets: named models as data over `ModelConfig`, in sizes as published, and a tiny one of each family.

Contexts are those of training, not what a method of inference stretches them to.
"""

import difflib
from typing import Any

from pretrain.config.architectures import (
    BART,
    BERT,
    COHERE,
    COHERE2,
    COHERE_PLUS,
    DEEPSEEK_V3,
    DISTILBERT,
    ELECTRA,
    FALCON,
    GEMMA,
    GEMMA2,
    GEMMA3,
    GPT2,
    GPT_OSS,
    GRANITE,
    IMAGENET,
    LLAMA,
    LLAMA3,
    MARIAN,
    MBART,
    MIXTRAL,
    MODDED,
    MODERNBERT,
    MT5,
    NEOX,
    OLMO,
    OLMO2,
    OLMO3,
    OLMOE,
    PHI,
    PHI3,
    PLBART,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    ROBERTA,
    SMOLLM3,
    STABLELM,
    STARCODER2,
    T5,
    T5_V1_1,
    TRANSFORMER,
    UMT5,
    VIT,
    XLM_ROBERTA,
    Architecture,
    Values,
)
from pretrain.config.yaml_nodes import merge
from pretrain.errors import ConfigError

_ENDS = ("max_seq_len", "tied_embeddings", "vocab_multiple")
_EIGHTFOLD = {"kind": "linear", "factor": 8.0}


def _model(family: Architecture, layers: int, width: int, heads: int, ff_width: int, **other: Any) -> Values:
    """Returns a model of a family: its size, and other keys of its stacks or of the model."""
    size = {"layers": layers, "width": width, "heads": heads, "ff_width": ff_width}
    ends = {name: other.pop(name) for name in _ENDS if name in other}
    return dict.fromkeys(family.stacks, family.stack | size | other) | family.ends | ends


def _experts(count: int, top_k: int, width: int) -> Values:
    """Returns experts of a width of their own, with the balance loss of Qwen3's release."""
    return {"count": count, "top_k": top_k, "width": width, "balance_weight": 0.001}


def _chosen_by_bias(count: int, top_k: int, width: int, **other: int) -> Values:
    """Returns experts of sigmoid scores, balanced by a bias, whose weights sum to 2.5 (DeepSeek-V3)."""
    kinds = {"scores": "sigmoid", "balance": "bias", "scale": 2.5}
    return {"count": count, "top_k": top_k, "width": width, **kinds, **other}


def _granite(*size: int, score_factor: float, divisor: float, **other: Any) -> Values:
    """Returns a Granite, whose logits are divided by a number."""
    return _model(GRANITE, *size, score_factor=score_factor, **other) | {"head": {"scale": 1 / divisor}}


def _vit(layers: int, width: int, heads: int, image: int, patch: int, **patches: Any) -> Values:
    """Returns a ViT; its feed-forward layers are four times as wide as the model."""
    patches = {"kind": "patches", "image": image, "size": patch} | patches
    return _model(VIT, layers, width, heads, 4 * width) | {"input": patches}


def _byt5(encoder: int, decoder: int, width: int, heads: int, ff_width: int, **other: Any) -> Values:
    """Returns a ByT5, whose stacks have different numbers of layers."""
    values = _model(T5_V1_1, encoder, width, heads, ff_width, **other)
    return values | {"decoder": values["decoder"] | {"layers": decoder}}


def _mae(vit: Values, layers: int = 8, width: int = 512, heads: int = 16) -> Values:
    """Returns the autoencoder of a ViT, with the decoder of He et al. 2022, 4, or another."""
    encoder = vit["encoder"] | {"position": "sinusoidal_2d"}
    size = {"layers": layers, "width": width, "heads": heads, "ff_width": 4 * width}
    ends = {"decoder": encoder | size, "head": {"kind": "pixels", "bias": True}}
    return vit | ends | {"encoder": encoder}


def _llama3_long(*size: int, tied: bool, factor: float) -> Values:
    """Returns a Llama 3.1 or 3.2, whose rotary frequencies were rescaled to 131,072 tokens."""
    scaling = {"kind": "llama3", "factor": factor, "original_max_seq_len": 8192}
    scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    ends = {"max_seq_len": 131072, "tied_embeddings": tied}
    return _model(LLAMA3, *size, rope_scaling=scaling, **ends)


PRESETS: dict[str, Values] = {
    # Radford et al. 2019, table 2; named by what is really in the released checkpoints.
    "gpt2-124m": _model(GPT2, 12, 768, 12, 3072),
    "gpt2-350m": _model(GPT2, 24, 1024, 16, 4096),
    "gpt2-774m": _model(GPT2, 36, 1280, 20, 5120),
    "gpt2-1.5b": _model(GPT2, 48, 1600, 25, 6400),
    "gpt2-tiny": _model(GPT2, 2, 64, 4, 256, max_seq_len=128),
    # nanoGPT's settings of character-level Shakespeare for a CPU.
    "gpt-shakespeare": _model(GPT2, 4, 128, 4, 512, max_seq_len=64, vocab_multiple=1, activation="gelu", bias=False),
    # Touvron et al. 2023 (Llama 2), 2.2: grouped queries in the largest only.
    "llama2-7b": _model(LLAMA, 32, 4096, 32, 11008),
    "llama2-13b": _model(LLAMA, 40, 5120, 40, 13824),
    "llama2-70b": _model(LLAMA, 80, 8192, 64, 28672, kv_heads=8),
    "llama3-8b": _model(LLAMA3, 32, 4096, 32, 14336, max_seq_len=8192),
    "llama3-70b": _model(LLAMA3, 80, 8192, 64, 28672, max_seq_len=8192),
    "llama3.1-8b": _llama3_long(32, 4096, 32, 14336, tied=False, factor=8.0),
    "llama3.1-70b": _llama3_long(80, 8192, 64, 28672, tied=False, factor=8.0),
    "llama3.2-1b": _llama3_long(16, 2048, 32, 8192, tied=True, factor=32.0),
    # Llama 3.2 1B, at the context of its training before the rotary frequencies were rescaled.
    "llama-1b": _model(LLAMA3, 16, 2048, 32, 8192, max_seq_len=8192, tied_embeddings=True),
    # 5.05M parameters with a vocabulary of 8192, and the quickstart's, 1.6M with one of 2048.
    "llama-5m": _model(LLAMA, 4, 256, 4, 704, max_seq_len=1024, tied_embeddings=True, kv_heads=2),
    "modded-2m": _model(MODDED, 4, 128, 4, 528),
    "llama-tiny": _model(LLAMA, 2, 64, 4, 192, max_seq_len=128, kv_heads=2),
    # Jiang et al. 2023, table 1. Of its 32,768 positions a layer sees the last 4096.
    "mistral-7b": _model(LLAMA, 32, 4096, 32, 14336, max_seq_len=32768, kv_heads=8, window=4096),
    "mistral-tiny": _model(LLAMA, 2, 64, 4, 192, max_seq_len=128, kv_heads=2, window=16),
    # Jiang et al. 2024; the larger one as released.
    "mixtral-8x7b": _model(MIXTRAL, 32, 4096, 32, 14336),
    "mixtral-8x22b": _model(MIXTRAL, 56, 6144, 48, 16384, max_seq_len=65536),
    "mixtral-tiny": _model(MIXTRAL, 2, 64, 4, 96, max_seq_len=128, kv_heads=2, experts={"count": 4, "top_k": 2}),
    "qwen2-0.5b": _model(QWEN2, 24, 896, 14, 4864, kv_heads=2),
    "qwen2-1.5b": _model(QWEN2, 28, 1536, 12, 8960, kv_heads=2),
    "qwen2-7b": _model(QWEN2, 28, 3584, 28, 18944, tied_embeddings=False, kv_heads=4),
    # The release of this size has another eps than the smaller ones.
    "qwen2-72b": _model(QWEN2, 80, 8192, 64, 29568, tied_embeddings=False, kv_heads=8, norm_eps=1e-5),
    "qwen2-tiny": _model(QWEN2, 2, 64, 4, 192, max_seq_len=128, kv_heads=2),
    # Yang et al. 2025, table 1.
    "qwen3-0.6b": _model(QWEN3, 28, 1024, 16, 3072),
    "qwen3-1.7b": _model(QWEN3, 28, 2048, 16, 6144),
    "qwen3-4b": _model(QWEN3, 36, 2560, 32, 9728),
    "qwen3-8b": _model(QWEN3, 36, 4096, 32, 12288, tied_embeddings=False),
    "qwen3-14b": _model(QWEN3, 40, 5120, 40, 17408, tied_embeddings=False),
    "qwen3-32b": _model(QWEN3, 64, 5120, 64, 25600, tied_embeddings=False),
    "qwen3-tiny": _model(QWEN3, 2, 64, 4, 192, max_seq_len=128, kv_heads=2, head_width=24),
    # Yang et al. 2025, table 2; by the names of their releases.
    "qwen3_moe-30b-a3b": _model(QWEN3_MOE, 48, 2048, 32, 6144, experts=_experts(128, 8, 768)),
    "qwen3_moe-235b-a22b": _model(QWEN3_MOE, 94, 4096, 64, 12288, experts=_experts(128, 8, 1536)),
    "qwen3_moe-tiny": _model(
        QWEN3_MOE, 2, 64, 4, 192, max_seq_len=128, kv_heads=2, head_width=24, experts=_experts(8, 2, 48)
    ),
    # Groeneveld et al. 2024, table 1.
    "olmo-1b": _model(OLMO, 16, 2048, 16, 8192, tied_embeddings=True),
    "olmo-7b": _model(OLMO, 32, 4096, 32, 11008),
    "olmo-tiny": _model(OLMO, 2, 64, 4, 192, max_seq_len=128, kv_heads=2),
    # OLMo team 2025, table 1; the eps of the releases.
    "olmo2-1b": _model(OLMO2, 16, 2048, 16, 8192),
    "olmo2-7b": _model(OLMO2, 32, 4096, 32, 11008),
    "olmo2-13b": _model(OLMO2, 40, 5120, 40, 13824),
    "olmo2-32b": _model(OLMO2, 64, 5120, 40, 27648, kv_heads=8),
    "olmo2-tiny": _model(OLMO2, 2, 64, 4, 192, max_seq_len=128, kv_heads=2),
    # Muennighoff et al. 2024, table 1: 6.9B parameters, 1.3B of which meet a token.
    "olmoe-1b-7b": _model(
        OLMOE, 16, 2048, 16, 1024, experts={"count": 64, "top_k": 8, "normalize": False, "z_loss": 0.001}
    ),
    "olmoe-tiny": _model(OLMOE, 2, 64, 4, 48, max_seq_len=128, experts={"count": 8, "top_k": 2, "normalize": False}),
    # OpenAI 2025, table 1: 20.9B and 116.8B parameters.
    "gpt_oss-20b": _model(GPT_OSS, 24, 2880, 64, 2880, experts={"count": 32, "top_k": 4}),
    "gpt_oss-120b": _model(GPT_OSS, 36, 2880, 64, 2880, experts={"count": 128, "top_k": 4}),
    "gpt_oss-tiny": _model(
        GPT_OSS, 2, 64, 4, 48, max_seq_len=128, kv_heads=2, head_width=24, window=16, experts={"count": 4, "top_k": 2}
    ),
    # DeepSeek-AI 2024, 4.2: 671B parameters, 37B of which meet a token; without its module of further tokens.
    "deepseek_v3-671b": _model(
        DEEPSEEK_V3,
        61,
        7168,
        128,
        18432,
        latent={"query_rank": 1536, "kv_rank": 512, "rope_width": 64, "value_width": 128},
        experts=_chosen_by_bias(256, 8, 2048, shared=1, first=3, groups=8, top_groups=4),
        rope_scaling={
            "kind": "yarn",
            "factor": 40.0,
            "original_max_seq_len": 4096,
            "attention_factor": 1.0,
            "score_mscale": 1.0,
        },
    ),
    "deepseek_v3-tiny": _model(
        DEEPSEEK_V3,
        2,
        64,
        4,
        192,
        max_seq_len=128,
        head_width=24,
        latent={"query_rank": 32, "kv_rank": 24, "rope_width": 8, "value_width": 16},
        experts=_chosen_by_bias(8, 2, 48, shared=1, first=1, groups=4, top_groups=2),
    ),
    # Periods of the rotary embeddings as released.
    "starcoder2-3b": _model(STARCODER2, 30, 3072, 24, 12288, kv_heads=2, rope_theta=999999.4420358813),
    "starcoder2-7b": _model(STARCODER2, 32, 4608, 36, 18432, kv_heads=4, rope_theta=1000000.0),
    "starcoder2-tiny": _model(STARCODER2, 2, 64, 4, 256, max_seq_len=128, kv_heads=2, window=16),
    # OLMo team 2025 (OLMo 3), table 1.
    "olmo3-7b": _model(OLMO3, 32, 4096, 32, 11008),
    "olmo3-32b": _model(OLMO3, 64, 5120, 40, 27648, kv_heads=8),
    "olmo3-tiny": _model(OLMO3, 4, 64, 4, 192, max_seq_len=128, kv_heads=2, window=16),
    "smollm3-3b": _model(SMOLLM3, 36, 2048, 16, 11008),
    "smollm3-tiny": _model(SMOLLM3, 4, 64, 4, 192, max_seq_len=128, kv_heads=2),
    # Granite Team 2024, table 2; factors of the scores and of the logits as released.
    "granite3-2b": _granite(40, 2048, 32, 8192, score_factor=0.015625, divisor=8.0),
    "granite3-8b": _granite(40, 4096, 32, 12800, score_factor=0.0078125, divisor=16.0),
    "granite-tiny": _granite(2, 64, 4, 192, score_factor=0.125, divisor=8.0, kv_heads=2, max_seq_len=128),
    "phi3-mini": _model(PHI3, 32, 3072, 32, 8192),
    "phi3-medium": _model(PHI3, 40, 5120, 40, 17920, kv_heads=10),
    "phi3-tiny": _model(PHI3, 2, 64, 4, 192, max_seq_len=128, kv_heads=2, window=None, rope_fraction=0.5),
    # Gemma Team 2024, table 1: one key-value head in the smaller one.
    "gemma-2b": _model(GEMMA, 18, 2048, 8, 16384, kv_heads=1),
    "gemma-7b": _model(GEMMA, 28, 3072, 16, 24576),
    "gemma-tiny": _model(GEMMA, 2, 64, 4, 192, max_seq_len=128, kv_heads=1, head_width=24),
    "gemma2-2b": _model(GEMMA2, 26, 2304, 8, 9216, kv_heads=4),
    "gemma2-9b": _model(GEMMA2, 42, 3584, 16, 14336, kv_heads=8),
    "gemma2-27b": _model(GEMMA2, 46, 4608, 32, 36864, kv_heads=16, head_width=128, score_factor=144**-0.5),
    "gemma2-tiny": _model(GEMMA2, 2, 64, 4, 192, max_seq_len=128, kv_heads=2, head_width=24, window=16),
    # Gemma Team 2025, table 1, without the encoder of images; of the larger ones the longer context.
    "gemma3-270m": _model(GEMMA3, 18, 640, 4, 2048, kv_heads=1, window=512, max_seq_len=32768),
    "gemma3-1b": _model(GEMMA3, 26, 1152, 4, 6912, kv_heads=1, window=512, max_seq_len=32768),
    "gemma3-4b": _model(GEMMA3, 34, 2560, 8, 10240, kv_heads=4, rope_scaling=_EIGHTFOLD),
    "gemma3-12b": _model(GEMMA3, 48, 3840, 16, 15360, kv_heads=8, rope_scaling=_EIGHTFOLD),
    "gemma3-27b": _model(
        GEMMA3,
        62,
        5376,
        32,
        21504,
        kv_heads=16,
        head_width=128,
        score_factor=168**-0.5,
        rope_scaling=_EIGHTFOLD,
    ),
    "gemma3-tiny": _model(GEMMA3, 6, 64, 4, 192, max_seq_len=128, kv_heads=2, head_width=24, window=16),
    # Biderman et al. 2023, table 1; embeddings not counted in their names' sizes.
    "pythia-70m": _model(NEOX, 6, 512, 8, 2048),
    "pythia-160m": _model(NEOX, 12, 768, 12, 3072),
    "pythia-410m": _model(NEOX, 24, 1024, 16, 4096),
    "pythia-1b": _model(NEOX, 16, 2048, 8, 8192),
    "pythia-1.4b": _model(NEOX, 24, 2048, 16, 8192),
    "pythia-2.8b": _model(NEOX, 32, 2560, 32, 10240),
    "pythia-6.9b": _model(NEOX, 32, 4096, 32, 16384),
    "pythia-12b": _model(NEOX, 36, 5120, 40, 20480),
    "gpt_neox-tiny": _model(NEOX, 2, 64, 4, 256, max_seq_len=128),
    "phi-1.5": _model(PHI, 24, 2048, 32, 8192),
    "phi-2": _model(PHI, 32, 2560, 32, 10240, rope_fraction=0.4),
    "phi-tiny": _model(PHI, 2, 64, 4, 256, max_seq_len=128),
    "stablelm-3b": _model(STABLELM, 32, 2560, 32, 6912),
    "stablelm2-1.6b": _model(STABLELM, 24, 2048, 32, 5632, qkv_bias=True),
    "stablelm2-12b": _model(STABLELM, 40, 5120, 32, 13824, kv_heads=8, parallel="one_norm", qk_norm="heads"),
    "stablelm-tiny": _model(STABLELM, 2, 64, 4, 192, max_seq_len=128, kv_heads=2),
    # Almazrouei et al. 2023, table 8.
    "falcon-7b": _model(FALCON, 32, 4544, 71, 18176, kv_heads=1),
    "falcon-40b": _model(FALCON, 60, 8192, 128, 32768, kv_heads=8, parallel=True),
    "falcon-tiny": _model(FALCON, 2, 64, 4, 256, max_seq_len=128, kv_heads=1),
    "cohere-aya-8b": _model(COHERE, 32, 4096, 32, 14336, kv_heads=8),
    "cohere-r-35b": _model(COHERE, 40, 8192, 64, 22528, rope_theta=8000000.0, max_seq_len=131072),
    "cohere-r-plus": _model(COHERE_PLUS, 64, 12288, 96, 33792, kv_heads=8, max_seq_len=131072),
    "cohere-tiny": _model(COHERE, 2, 64, 4, 192, max_seq_len=128, kv_heads=2),
    "cohere2-r7b": _model(COHERE2, 32, 4096, 32, 14336, kv_heads=8),
    "cohere2-tiny": _model(COHERE2, 4, 64, 4, 192, max_seq_len=128, kv_heads=2, window=16),
    "bert-base": _model(BERT, 12, 768, 12, 3072),
    "bert-large": _model(BERT, 24, 1024, 16, 4096),
    # Turc et al. 2019, table 1.
    "bert-tiny": _model(BERT, 2, 128, 2, 512),
    # Liu et al. 2019, 4.1; Conneau et al. 2020, 3.
    "roberta-base": _model(ROBERTA, 12, 768, 12, 3072),
    "roberta-large": _model(ROBERTA, 24, 1024, 16, 4096),
    "roberta-tiny": _model(ROBERTA, 2, 64, 4, 256, max_seq_len=128),
    "xlm-roberta-base": _model(XLM_ROBERTA, 12, 768, 12, 3072),
    "xlm-roberta-large": _model(XLM_ROBERTA, 24, 1024, 16, 4096),
    "xlm-roberta-tiny": _model(XLM_ROBERTA, 2, 64, 4, 256, max_seq_len=128),
    # Sanh et al. 2019, 3.
    "distilbert-base": _model(DISTILBERT, 6, 768, 12, 3072),
    "distilbert-tiny": _model(DISTILBERT, 2, 64, 4, 256, max_seq_len=128),
    # Clark et al. 2020, table 6.
    "electra-small": _model(ELECTRA, 12, 256, 4, 1024, embedding_width=128),
    "electra-base": _model(ELECTRA, 12, 768, 12, 3072),
    "electra-large": _model(ELECTRA, 24, 1024, 16, 4096),
    "electra-tiny": _model(ELECTRA, 2, 64, 4, 256, max_seq_len=128, embedding_width=32),
    # Warner et al. 2024, 2.1.3.
    "modernbert-base": _model(MODERNBERT, 22, 768, 12, 1152),
    "modernbert-large": _model(MODERNBERT, 28, 1024, 16, 2624),
    "modernbert-tiny": _model(MODERNBERT, 4, 64, 4, 96, window=9, max_seq_len=128),
    # Vaswani et al. 2017, table 3; 0.3 is the dropout of the English-German model.
    "transformer-base": _model(TRANSFORMER, 6, 512, 8, 2048),
    "transformer-big": _model(TRANSFORMER, 6, 1024, 16, 4096, dropout=0.3),
    # Wu et al. 2021: of their sizes the best for the 29,000 sentences of Multi30k.
    "transformer-tiny": _model(TRANSFORMER, 4, 128, 4, 256, dropout=0.3),
    "marian-base": _model(MARIAN, 6, 512, 8, 2048),
    "marian-tiny": _model(MARIAN, 2, 64, 4, 256, max_seq_len=128),
    # Lewis et al. 2020, 2.1, Ahmad et al. 2021 and Liu et al. 2020, as released.
    "bart-base": _model(BART, 6, 768, 12, 3072),
    "bart-large": _model(BART, 12, 1024, 16, 4096),
    "bart-tiny": _model(BART, 2, 64, 4, 256, max_seq_len=128),
    "plbart-base": _model(PLBART, 6, 768, 12, 3072, attention_dropout=0.1),
    "plbart-tiny": _model(PLBART, 2, 64, 4, 256, max_seq_len=128),
    "mbart-large": _model(MBART, 12, 1024, 16, 4096),
    "mbart-tiny": _model(MBART, 2, 64, 4, 256, max_seq_len=128),
    # Raffel et al. 2020, 3.7.
    "t5-small": _model(T5, 6, 512, 8, 2048),
    "t5-base": _model(T5, 12, 768, 12, 3072),
    "t5-large": _model(T5, 24, 1024, 16, 4096),
    "t5-3b": _model(T5, 24, 1024, 32, 16384, head_width=128),
    "t5-11b": _model(T5, 24, 1024, 128, 65536, head_width=128),
    "t5-tiny": _model(T5, 2, 64, 4, 192, head_width=24, max_seq_len=128),
    # Sizes of the v1.1 release: XL and XXL stand for 3B and 11B, wider, with fewer heads.
    "t5-v1.1-small": _model(T5_V1_1, 8, 512, 6, 1024),
    "t5-v1.1-base": _model(T5_V1_1, 12, 768, 12, 2048),
    "t5-v1.1-large": _model(T5_V1_1, 24, 1024, 16, 2816),
    "t5-v1.1-xl": _model(T5_V1_1, 24, 2048, 32, 5120),
    "t5-v1.1-xxl": _model(T5_V1_1, 24, 4096, 64, 10240),
    # Xue et al. 2021, 3.2, as released.
    "mt5-small": _model(MT5, 8, 512, 6, 1024),
    "mt5-base": _model(MT5, 12, 768, 12, 2048),
    "mt5-large": _model(MT5, 24, 1024, 16, 2816),
    "mt5-xl": _model(MT5, 24, 2048, 32, 5120),
    "mt5-xxl": _model(MT5, 24, 4096, 64, 10240),
    "mt5-tiny": _model(MT5, 2, 64, 4, 96, head_width=24, max_seq_len=128),
    # Chung et al. 2023, as released.
    "umt5-small": _model(UMT5, 8, 512, 6, 1024),
    "umt5-base": _model(UMT5, 12, 768, 12, 2048),
    "umt5-xl": _model(UMT5, 24, 2048, 32, 5120),
    "umt5-xxl": _model(UMT5, 24, 4096, 64, 10240),
    "umt5-tiny": _model(UMT5, 2, 64, 4, 96, head_width=24, max_seq_len=128),
    # Xue et al. 2022, table 2: of bytes, with three times as many layers in the encoder.
    "byt5-small": _byt5(12, 4, 1472, 6, 3584),
    "byt5-base": _byt5(18, 6, 1536, 12, 3968),
    "byt5-large": _byt5(36, 12, 1536, 16, 3840),
    "byt5-xl": _byt5(36, 12, 2560, 32, 6720),
    "byt5-xxl": _byt5(36, 12, 4672, 64, 12352),
    "byt5-tiny": _byt5(3, 1, 64, 4, 96, head_width=24, max_seq_len=128),
    # Dosovitskiy et al. 2021, table 1: patches of 16, 32 and 14 pixels; Ti and S: Steiner et al. 2022, table 2.
    "vit-ti16": _vit(12, 192, 3, 224, 16),
    "vit-s16": _vit(12, 384, 6, 224, 16),
    "vit-s32": _vit(12, 384, 6, 224, 32),
    "vit-b16": _vit(12, 768, 12, 224, 16),
    "vit-b32": _vit(12, 768, 12, 224, 32),
    "vit-l16": _vit(24, 1024, 16, 224, 16),
    "vit-l32": _vit(24, 1024, 16, 224, 32),
    "vit-h14": _vit(32, 1280, 16, 224, 14),
    "vit-tiny": _vit(2, 64, 4, 16, 4),
    # Touvron et al. 2021, table 1; the distillation token is a register.
    "deit-ti16": _vit(12, 192, 3, 224, 16, registers=1, **IMAGENET),
    "deit-s16": _vit(12, 384, 6, 224, 16, registers=1, **IMAGENET),
    "deit-b16": _vit(12, 768, 12, 224, 16, registers=1, **IMAGENET),
    "deit-tiny": _vit(2, 64, 4, 16, 4, registers=1),
    # He et al. 2022, 4 and table 1, as released.
    "vit_mae-b16": _mae(_vit(12, 768, 12, 224, 16, **IMAGENET)),
    "vit_mae-l16": _mae(_vit(24, 1024, 16, 224, 16, **IMAGENET)),
    "vit_mae-h14": _mae(_vit(32, 1280, 16, 224, 14, **IMAGENET)),
    "vit_mae-tiny": _mae(_vit(2, 64, 4, 16, 4), 1, 32, 4),
    # A ViT whose states a GPT-2 reads by cross attention, as released for captions of images.
    "vit_gpt2-b16": (_vit(12, 768, 12, 224, 16) | _model(GPT2, 12, 768, 12, 3072) | {"head": {"kind": "lm"}}),
    "vit_gpt2-tiny": (_vit(2, 64, 4, 16, 4) | _model(GPT2, 2, 64, 4, 256, max_seq_len=128) | {"head": {"kind": "lm"}}),
    "t5-v1.1-tiny": _model(T5_V1_1, 2, 64, 4, 96, head_width=24, max_seq_len=128),
}
"""Values of `model:` by name, without `vocab_size`. Modules under `extend` may add entries."""


def expand_preset(model: Values) -> Values:
    """Lays the keys of a `model:` section over its preset; returns a section without one unchanged.

    Mappings are merged key by key (`model: {preset: llama-5m, decoder: {layers: 8}}`); any other value replaces that
    of the preset: `decoder: null` removes a stack. Values are not checked here.

    Raises:
        ConfigError: Unknown preset; names the nearest ones.
    """
    name = model.get("preset")
    if not isinstance(name, str):
        return model
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=3, cutoff=0.4) or sorted(PRESETS)
        raise ConfigError(f"unknown model.preset {name!r}", fix=f"use {' or '.join(near)}")
    return merge(PRESETS[name], model)
