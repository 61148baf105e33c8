"""Models without a class in transformers: nanoGPT's, modded-nanoGPT's, and the Transformer of 2017."""

from pretrain.families.decoders.gpt2 import GPT2
from pretrain.families.decoders.llama import LLAMA_STACK
from pretrain.families.sizes import BOTH, Architecture, Sizes

_MODDED = Architecture(
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
_HYBRID = Architecture(
    ("decoder",),
    LLAMA_STACK | {"mixers": ["delta", "delta", "delta", "attention"]},
    {"max_seq_len": 1024, "tied_embeddings": True},
)
"""Three layers of the gated delta rule to one of attention, otherwise a LLaMA."""
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

SIZES: Sizes = {
    # nanoGPT's settings of character-level Shakespeare for a CPU.
    "gpt-shakespeare": GPT2.size(
        4, 128, 4, 512, max_seq_len=64, vocab_multiple=1, activation="gelu", bias=False
    ),
    # The quickstart's vocabulary.
    "modded-2m": _MODDED.size(4, 128, 4, 528, of=(2048, 1_590_667)),
    # Vaswani et al. 2017, table 3; 0.3 is the dropout of the English-German model.
    "transformer-base": TRANSFORMER.size(6, 512, 8, 2048, of=(37000, 63_082_496)),
    "transformer-big": TRANSFORMER.size(6, 1024, 16, 4096, of=(37000, 214_245_376), dropout=0.3),
    "hybrid-1m": _HYBRID.size(
        4, 128, 4, 352, of=(2048, 1_172_264), delta={"heads": 4, "key_width": 24, "value_width": 48}
    ),
    "hybrid-tiny": _HYBRID.size(4, 64, 4, 192, kv_heads=2, max_seq_len=128),
    # Wu et al. 2021: of their sizes the best for the 29,000 sentences of Multi30k.
    "transformer-tiny": TRANSFORMER.size(4, 128, 4, 256, dropout=0.3),
}  # fmt: skip
