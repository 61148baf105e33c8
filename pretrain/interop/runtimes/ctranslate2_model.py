"""Models for CTranslate2, by its converter of transformers' models.

Its loaders read the sizes of a model and build the rest in, without a word: rules say which values
that is, and each family below is compared with ours by tests.
"""

import contextlib
import io
import json
from importlib import import_module
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pretrain.errors import ConfigError
from pretrain.interop.runtimes.runtime import Exported, Rules, Runtime
from pretrain.utils.io import write_json

_CONFIG = "config.json"
_VOCABULARY = "vocabulary.json"
_GATED: Rules = {
    "head.kind": ("lm",),
    "decoder.activation": ("silu",),
    "decoder.window": (None,),
    "decoder.rope_scaling.kind": (None,),
}
_RULES: dict[str, Rules] = {
    "gpt2": {
        "head.kind": ("lm",), "decoder.norm_eps": (1e-5,), "decoder.scaled_attention": (True,),
        "decoder.activation": ("gelu", "gelu_tanh", "quick_gelu", "silu", "relu"),
    },
    "llama": _GATED | {"decoder.bias": (False,)},
    "mistral": _GATED,
    "qwen2": _GATED,
    "qwen3": _GATED,
    "gemma": _GATED | {
        "decoder.activation": ("gelu_tanh",), "decoder.qkv_bias": (False,),
        "tied_embeddings": (True,),
    },
}  # fmt: skip
"""Rules of the decoders that are compared."""


def _check(exported: Exported) -> None:
    """Raises ConfigError for what depends on several keys, and where there is no tokenizer."""
    stack = exported.config.last_stack
    scale = stack.per_head_width**-0.5
    if abs((stack.score_scale or scale) / scale - 1) > 1e-6:
        found = f"decoder.score_factor={stack.score_scale}"
        what = f"{found}: CTranslate2 divides scores by the root of head_width"
        raise ConfigError(what, where="model", fix="export to hf")
    has_own_width = stack.per_head_width * stack.heads != stack.width
    if exported.model_type in ("llama", "qwen2") and has_own_width:
        what = f"decoder.head_width={stack.head_width}: CTranslate2 computes width / heads"
        raise ConfigError(what, where="model", fix="export to hf")
    if not exported.files:
        what = "CTranslate2 names tokens by a tokenizer, and there is none"
        raise ConfigError(what, where="tokenizer", fix="export to hf")


def _convert(exported: Exported, folder: Path) -> None:
    kind = {"fp32": "float32", "bf16": "bfloat16"}[exported.dtype]
    made = folder / "converted"  # a folder that exists would be removed first
    with contextlib.redirect_stderr(io.StringIO()):  # a bar of transformers
        import_module("ctranslate2.converters").TransformersConverter(str(exported.folder)).convert(
            str(made), quantization=kind
        )
    for file in made.iterdir():
        file.rename(folder / file.name)
    made.rmdir()
    # A null ends its loader; the end of a text stands for what the tokenizer does not have.
    described = json.loads((folder / _CONFIG).read_text())
    tokens = json.loads((folder / _VOCABULARY).read_text())
    end = tokens[exported.config.special_tokens.eos or 0]
    write_json(folder / _CONFIG, {key: end if key.endswith("_token") and not value else value
                                  for key, value in described.items()})  # fmt: skip


def _scores(folder: Path, tokens_BT: Tensor) -> Tensor:
    """Returns the logits of CTranslate2."""
    ctranslate2 = import_module("ctranslate2")
    model = ctranslate2.Generator(str(folder), device="cpu", compute_type="float32")
    found = model.forward_batch(tokens_BT.tolist(), return_log_probs=False)
    return torch.from_numpy(np.array(found))


CTRANSLATE2 = Runtime(
    name="CTranslate2",
    packages=("ctranslate2",),
    dtypes=("fp32", "bf16"),
    families=_RULES,
    check=_check,
    convert=_convert,
    runner="ctranslate2",
    scores=_scores,
    use='import ctranslate2\n\nmodel = ctranslate2.Generator("this folder")',
)
