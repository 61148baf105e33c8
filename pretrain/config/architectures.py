"""Architectures: the keys that the models of a family share at any size, as published.

Where a paper and the released configuration differ, the released one is here. Sizes are in
`presets.py`.
"""

from typing import Any, NamedTuple

Values = dict[str, Any]


class Architecture(NamedTuple):
    """Values that the models of a family have at any size."""

    stacks: tuple[str, ...]  # two are given in full, so that a user may change either
    stack: Values  # keys of each stack
    ends: Values  # keys of the model besides its stacks


BOTH = ("encoder", "decoder")

GPT2_STACK = {
    "activation": "gelu_tanh",
    "gated": False,
    "norm": "layer",
    "bias": True,
    "position": "learned",
}
GPT2 = Architecture(("decoder",), GPT2_STACK, {"max_seq_len": 1024, "tied_embeddings": True})
"""Radford et al. 2019, 2.3. Dropout, 0.1 in the release, is 0: one pass over a corpus does not overfit."""

LLAMA_STACK = {
    "activation": "silu",
    "gated": True,
    "norm": "rms",
    "bias": False,
    "position": "rotary",
}
LLAMA = Architecture(("decoder",), LLAMA_STACK, {"max_seq_len": 4096, "tied_embeddings": False})
"""Touvron et al. 2023, 2.2."""

LLAMA3 = LLAMA._replace(stack=LLAMA_STACK | {"kv_heads": 8, "rope_theta": 500000.0})
"""Llama Team 2024, 3.2, table 3."""

QWEN2 = Architecture(
    ("decoder",),
    LLAMA_STACK | {"qkv_bias": True, "norm_eps": 1e-6, "rope_theta": 1000000.0},
    {"max_seq_len": 32768, "tied_embeddings": True},
)
"""Yang et al. 2024 (Qwen2), 2.2, table 1; Qwen2.5 has the same shapes."""

QWEN3 = Architecture(
    ("decoder",),
    LLAMA_STACK
    | {"qk_norm": True, "norm_eps": 1e-6, "rope_theta": 1000000.0}
    | {"kv_heads": 8, "head_width": 128},  # heads are 128 wide at any width of the model
    {"max_seq_len": 32768, "tied_embeddings": True},
)
"""Yang et al. 2025 (Qwen3), 2: a norm of each head instead of the bias of queries, keys and values."""

MODDED = Architecture(
    ("decoder",),
    {
        "activation": "relu2",
        "gated": False,
        "norm": "rms",
        "bias": False,
        "position": "rotary",
        "qk_norm": True,
        "value_residual": True,
        "value_embeddings": 2,
    },
    {"max_seq_len": 1024, "tied_embeddings": True, "init_output": "zero"},
)
"""Jordan et al. 2024 (modded-nanoGPT): what pays in short runs. No model of transformers is like it."""

MIXTRAL = Architecture(
    ("decoder",),
    LLAMA_STACK | {"kv_heads": 8, "rope_theta": 1000000.0, "experts": {"count": 8, "top_k": 2}},
    {"max_seq_len": 32768, "tied_embeddings": False},
)
"""Jiang et al. 2024 (Mixtral), 2, table 1; weights of the two chosen experts sum to 1."""

QWEN3_MOE = Architecture(
    ("decoder",),
    QWEN3.stack | {"kv_heads": 4},
    {"max_seq_len": 32768, "tied_embeddings": False},
)
"""Yang et al. 2025 (Qwen3), 2, table 2: of 128 experts a token chooses 8; none is shared."""


OLMO = Architecture(("decoder",), LLAMA_STACK | {"norm": "unweighted"}, {"max_seq_len": 2048, "tied_embeddings": False})
"""Groeneveld et al. 2024 (OLMo), 2.1, table 1: norms have no weights; the sizes of the first releases."""

OLMO2 = Architecture(
    ("decoder",),
    LLAMA_STACK | {"qk_norm": "whole", "norm_placement": "output", "norm_eps": 1e-6, "rope_theta": 500000.0},
    {"max_seq_len": 4096, "tied_embeddings": False},
)
"""OLMo team 2025 (OLMo 2), 2.1, table 1: norms of the outputs of sub-layers, and of all queries and keys."""

OLMOE = Architecture(
    ("decoder",),
    LLAMA_STACK | {"qk_norm": "whole"},
    {"max_seq_len": 4096, "tied_embeddings": False},
)
"""Muennighoff et al. 2024 (OLMoE), 2, table 1: the scores of the eight chosen experts are their weights."""

GPT_OSS_SCALING = {"kind": "yarn", "factor": 32.0, "original_max_seq_len": 4096, "truncate": False}
GPT_OSS = Architecture(
    ("decoder",),
    LLAMA_STACK
    | {"activation": "quick_gelu", "gate_limit": 7.0, "gate_shift": 1.0, "bias": True, "attention_sinks": True}
    | {"kv_heads": 8, "head_width": 64, "window": 128, "global_every": 2, "global_first": 1}
    | {"rope_theta": 150000.0, "rope_scaling": GPT_OSS_SCALING},
    {"max_seq_len": 131072, "tied_embeddings": False},
)
"""OpenAI 2025 (gpt-oss), 2.2, and as released: windows in every other layer, from the first."""

DEEPSEEK_V3 = Architecture(
    ("decoder",),
    LLAMA_STACK | {"norm_eps": 1e-6, "head_width": 192},
    {"max_seq_len": 163840, "tied_embeddings": False},
)
"""DeepSeek-AI 2024 (DeepSeek-V3), 2.1 and 4.2, and as released, after the extension of its context."""

STARCODER2 = Architecture(
    ("decoder",),
    GPT2_STACK | {"position": "rotary", "window": 4096},
    {"max_seq_len": 16384, "tied_embeddings": True},
)
"""Lozhkov et al. 2024, as released, with 16,384 positions; dropout, 0.1 in the release, is 0, as in GPT-2's."""

OLMO3 = Architecture(
    ("decoder",),
    OLMO2.stack | {"window": 4096, "global_every": 4, "global_first": 3, "rope_local_scaling": False},
    {"max_seq_len": 8192, "tied_embeddings": False},
)
"""OLMo team 2025 (OLMo 3), 3.2, before the extension of its context: windows in three of four layers."""

SMOLLM3 = Architecture(
    ("decoder",),
    LLAMA_STACK | {"norm_eps": 1e-6, "kv_heads": 4, "rope_theta": 5000000.0} | {"unrotated_layers": [*range(3, 36, 4)]},
    {"max_seq_len": 65536, "tied_embeddings": True},
)
"""Bakouch et al. 2025 (SmolLM 3), as released: every fourth layer without rotary positions."""

GRANITE = Architecture(
    ("decoder",),
    LLAMA_STACK | {"kv_heads": 8, "residual_scale": 0.22},
    {"max_seq_len": 4096, "tied_embeddings": True, "embedding_scale": 12.0},
)
"""Granite Team 2024 (Granite 3.0), as released: constant factors, so that rates transfer."""

PHI3 = Architecture(
    ("decoder",),
    LLAMA_STACK | {"window": 2047},
    {"max_seq_len": 4096, "tied_embeddings": False},
)
"""Abdin et al. 2024 (Phi-3), 2, in its version of 4,096 positions."""

GEMMA = Architecture(
    ("decoder",),
    LLAMA_STACK | {"activation": "gelu_tanh", "norm_eps": 1e-6, "norm_offset": True, "head_width": 256},
    {"max_seq_len": 8192, "tied_embeddings": True, "scaled_embeddings": True},
)
"""Gemma Team 2024, 2, table 1; the approximation of GELU as released."""

GEMMA2 = Architecture(
    ("decoder",),
    GEMMA.stack
    | {"norm_placement": "sandwich", "score_cap": 50.0, "score_factor": 256**-0.5}
    | {"window": 4096, "global_every": 2, "global_first": 1},
    GEMMA.ends | {"head": {"soft_cap": 30.0}},
)
"""Gemma Team 2024 (Gemma 2), 2, table 1."""

GEMMA3 = Architecture(
    ("decoder",),
    GEMMA.stack
    | {"norm_placement": "sandwich", "qk_norm": True, "score_factor": 256**-0.5}
    | {"rope_theta": 1000000.0, "rope_local_theta": 10000.0, "rope_local_scaling": False}
    | {"window": 1024, "global_every": 6, "global_first": 5},
    GEMMA.ends | {"max_seq_len": 131072},
)
"""Gemma Team 2025 (Gemma 3), 2, table 1; windows of the two smallest as released."""

NEOX = Architecture(
    ("decoder",),
    {
        "activation": "gelu",
        "gated": False,
        "norm": "layer",
        "bias": True,
        "position": "rotary",
        "rope_fraction": 0.25,
        "parallel": True,
    },
    {"max_seq_len": 2048, "tied_embeddings": False},
)
"""Black et al. 2022 (GPT-NeoX-20B), 2.1; Biderman et al. 2023 (Pythia), table 1."""

PHI = Architecture(
    ("decoder",),
    NEOX.stack | {"activation": "gelu_tanh", "parallel": "one_norm", "rope_fraction": 0.5},
    {"max_seq_len": 2048, "tied_embeddings": False, "head": {"bias": True}},
)
"""Li et al. 2023 (Phi-1.5), 2, as released."""

STABLELM = Architecture(
    ("decoder",),
    LLAMA_STACK | {"norm": "layer", "norm_bias": True, "rope_fraction": 0.25},
    {"max_seq_len": 4096, "tied_embeddings": False},
)
"""Bellagente et al. 2024 (Stable LM 2), 2.3, and its predecessor of 3B parameters, as released."""

FALCON = Architecture(
    ("decoder",),
    {
        "activation": "gelu",
        "gated": False,
        "norm": "layer",
        "norm_bias": True,
        "bias": False,
        "position": "rotary",
        "parallel": "one_norm",
    },
    {"max_seq_len": 2048, "tied_embeddings": True},
)
"""Almazrouei et al. 2023 (Falcon), 4; 40B and larger have two norms, as released."""

COHERE = Architecture(
    ("decoder",),
    LLAMA_STACK | {"norm": "layer", "parallel": "one_norm"},
    {"max_seq_len": 8192, "tied_embeddings": True, "head": {"scale": 0.0625}},
)
"""Command R and Aya 23 (Aryabumi et al. 2024, 3.1), as released."""

COHERE_PLUS = Architecture(
    ("decoder",),
    COHERE.stack | {"qk_norm": "heads", "rope_theta": 75000000.0},
    COHERE.ends | {"head": {"scale": 5 / 6}},
)
"""Command R+, as released."""

COHERE2 = Architecture(
    ("decoder",),
    COHERE.stack
    | {"window": 4096, "global_every": 4, "global_first": 3, "rope_theta": 50000.0}
    | {"unrotated_layers": [*range(3, 64, 4)]},
    COHERE.ends | {"head": {"scale": 0.25}},
)
"""Team Cohere 2025 (Command A), 2.1: layers without a window have no positions."""

BERT = Architecture(
    ("encoder",),
    {
        "activation": "gelu",
        "gated": False,
        "norm": "layer",
        "norm_eps": 1e-12,
        "norm_placement": "post",
        "input_norm": True,
        "bias": True,
        "position": "learned",
        "token_types": 2,
        "dropout": 0.1,
    },
    {
        "head": {"transform": True, "bias": True},
        "max_seq_len": 512,
        "tied_embeddings": True,
        "init_scaled": False,
    },
)
"""Devlin et al. 2019, 3 and appendix A.2; eps and initialization as released."""

ROBERTA = Architecture(
    ("encoder",),
    BERT.stack | {"norm_eps": 1e-5, "token_types": 1, "position_offset": "pad"},
    BERT.ends,
)
"""Liu et al. 2019, as released: positions begin after the id of padding, 1."""

XLM_ROBERTA = ROBERTA._replace(ends=ROBERTA.ends | {"family": "xlm-roberta"})
"""Conneau et al. 2020, 3, as released."""

DISTILBERT = BERT._replace(stack=BERT.stack | {"token_types": 0})
"""Sanh et al. 2019, 3."""

ELECTRA = BERT._replace(ends=BERT.ends | {"family": "electra"})
"""Clark et al. 2020, 3 and appendix A: a BERT but for the width of the smallest one's tables."""

MODERNBERT = Architecture(
    ("encoder",),
    {
        "activation": "gelu",
        "gated": True,
        "norm": "layer",
        "norm_eps": 1e-5,
        "input_norm": True,
        "bias": False,
        "position": "rotary",
        "rope_theta": 160000.0,
        "rope_local_theta": 10000.0,
        "global_every": 3,
        "window": 65,  # local attention of 128 tokens, 64 on each side
    },
    {"head": {"transform": True, "bias": True}, "max_seq_len": 8192, "tied_embeddings": True},
)
"""Warner et al. 2024, 2.1; thetas as released, after the extension to 8192 tokens."""

TRANSFORMER = Architecture(
    BOTH,
    {
        "activation": "relu",
        "gated": False,
        "norm": "layer",
        "norm_placement": "post",
        "bias": True,
        "position": "sinusoidal",
        "dropout": 0.1,
        "attention_dropout": 0.0,
    },
    # One embedding is input, output and head (3.4).
    {"max_seq_len": 1024, "tied_embeddings": True, "scaled_embeddings": True, "init": "xavier"},
)
"""Vaswani et al. 2017, 3; dropout by 5.4: on the embeddings and each sub-layer, not on attention weights."""

MARIAN = Architecture(
    BOTH,
    TRANSFORMER.stack | {"activation": "silu", "sinusoid": "halves"},
    TRANSFORMER.ends | {"head": {"bias": True}, "max_seq_len": 512},
)
"""Junczys-Dowmunt et al. 2018, as trained for OPUS-MT (Tiedemann and Thottingal 2020)."""

BART = Architecture(
    BOTH,
    MARIAN.stack | {"activation": "gelu", "position": "learned", "position_offset": 2, "input_norm": True},
    {"head": {"bias": True}, "max_seq_len": 1024, "tied_embeddings": True, "init_scaled": False},
)
"""Lewis et al. 2020, 2.1, as released."""

PLBART = BART._replace(ends=BART.ends | {"scaled_embeddings": True, "family": "plbart"})
"""Ahmad et al. 2021, as released: a BART of source code."""

MBART = Architecture(
    BOTH,
    BART.stack | {"norm_placement": "pre", "input_norm": "both"},
    BART.ends | {"scaled_embeddings": True},
)
"""Liu et al. 2020, 2.2, as released."""

T5 = Architecture(
    BOTH,
    {
        "activation": "relu",
        "gated": False,
        "norm": "rms",
        "norm_eps": 1e-6,
        "bias": False,
        "scaled_attention": False,
        "position": "relative",
        "relative_buckets": 32,
        "relative_max_distance": 128,
        "dropout": 0.1,
        "head_width": 64,
    },
    # The embedding, of deviation 1, is the head's too, whose input is divided by sqrt(D).
    {"head": {"scaled": True}, "max_seq_len": 512, "tied_embeddings": True, "init": "t5"},
)
"""Raffel et al. 2020, 2.1 and 3.1.2."""

T5_V1_1 = Architecture(
    BOTH,
    T5.stack | {"activation": "gelu_tanh", "gated": True, "dropout": 0.0},
    {"max_seq_len": 512, "tied_embeddings": False, "init": "t5"},
)
"""Shazeer 2020, 2. The release (T5 v1.1) had no dropout in pretraining; fine-tuning wants 0.1 again."""

MT5 = T5_V1_1._replace(ends=T5_V1_1.ends | {"family": "mt5"})
"""Xue et al. 2021, 3.2: T5 v1.1 for many languages."""

UMT5 = T5_V1_1._replace(stack=T5_V1_1.stack | {"relative_shared": False})
"""Chung et al. 2023, 4, as released: a relative bias in each layer."""


VIT = Architecture(
    ("encoder",),
    GPT2_STACK | {"activation": "gelu", "norm_eps": 1e-12},
    {"head": {"kind": "labels", "bias": True}},
)
"""Dosovitskiy et al. 2021, 3.1 and table 1; eps as released. `max_seq_len` follows from the input."""


IMAGENET = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
"""Normalization of pixels by the means of ImageNet's channels."""
