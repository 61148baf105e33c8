"""Models for CTranslate2, by its loaders of transformers' models.

    decoders -> Generator; two stacks -> Translator; encoders without a head -> Encoder

Its loaders read the sizes of a model and build the rest in, without a word: rules say which values
that is, and each family below is compared with ours by tests.
"""

import contextlib
import io
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pretrain.config.model import ModelConfig
from pretrain.errors import ConfigError
from pretrain.interop.runtimes.runtime import Exported, Rules, Runtime
from pretrain.utils.safe_read import parse_json

_VOCABULARIES = ("shared_vocabulary.json", "vocabulary.json")
_NEVER = -1e9
"""Score of a token that a release suppresses."""
_ACTIVATIONS = ("gelu", "gelu_tanh", "quick_gelu", "silu", "relu")
_GATED: Rules = {
    "head.kind": ("lm",),
    "decoder.activation": ("silu",),
    "decoder.window": (None,),
    "decoder.rope_scaling.kind": (None,),
}
_PAIR: Rules = {"encoder.activation": _ACTIVATIONS, "decoder.activation": _ACTIVATIONS}
_BARE: Rules = {"head.kind": ("none",), "encoder.activation": _ACTIVATIONS}


@dataclass(frozen=True, slots=True)
class _Layout:
    """A family as CTranslate2 has it: its loader, values that it has built in, the class of theirs."""

    loader: str
    rules: Rules
    loads: str = "AutoModelForCausalLM"


_SEQ2SEQ, _BASE = "AutoModelForSeq2SeqLM", "AutoModel"
_LAYOUTS = {
    "gpt2": _Layout("GPT2", {
        "head.kind": ("lm",), "decoder.norm_eps": (1e-5,), "decoder.scaled_attention": (True,),
        "decoder.activation": _ACTIVATIONS,
    }),
    "llama": _Layout("Llama", _GATED | {"decoder.bias": (False,)}),
    "mistral": _Layout("Mistral", _GATED),
    "qwen2": _Layout("Qwen2", _GATED),
    "qwen3": _Layout("Qwen3", _GATED),
    "gemma": _Layout("Gemma", _GATED | {
        "decoder.activation": ("gelu_tanh",), "decoder.qkv_bias": (False,),
        "tied_embeddings": (True,),
    }),
    "bart": _Layout("Bart", _PAIR, _SEQ2SEQ),
    "marian": _Layout("Bart", _PAIR, _SEQ2SEQ),  # that of Marian begins with zeros, and has no padding
    "t5": _Layout("T5", _PAIR, _SEQ2SEQ),
    "mt5": _Layout("T5", _PAIR, _SEQ2SEQ),
    "umt5": _Layout("UMT5", _PAIR, _SEQ2SEQ),
    "bert": _Layout("Bert", _BARE | {"pooler": (True,)}, _BASE),
    "roberta": _Layout("Roberta", _BARE, _BASE),
    "xlm-roberta": _Layout("Roberta", _BARE, _BASE),
    "distilbert": _Layout("DistilBert", _BARE | {"encoder.norm_eps": (1e-12,)}, _BASE),
}  # fmt: skip


def _check(exported: Exported) -> None:
    """Raises ConfigError for what depends on several keys, and where there is no tokenizer."""
    stack = exported.config.last_stack
    scale = stack.per_head_width**-0.5
    if exported.config.shape == "decoder" and abs((stack.score_scale or scale) / scale - 1) > 1e-6:
        key = f"decoder.score_factor={stack.score_scale}"
        raise ConfigError(
            f"{key}: CTranslate2 divides scores by the root of head_width",
            where="model",
            fix="export to hf",
        )
    has_own_width = stack.per_head_width * stack.heads != stack.width
    if exported.model_type in ("llama", "qwen2") and has_own_width:
        raise ConfigError(
            f"decoder.head_width={stack.head_width}: CTranslate2 computes width / heads",
            where="model",
            fix="export to hf",
        )
    if not exported.files:
        raise ConfigError(
            "CTranslate2 names tokens by a tokenizer, and there is none",
            where="tokenizer",
            fix="export to hf",
        )


def _load(exported: Exported) -> tuple[Any, Any]:
    """Returns transformers' model and tokenizer, which has a name for each row of the model."""
    import transformers

    config, options = exported.config, {"local_files_only": True}
    if exported.model_type in ("roberta", "xlm-roberta"):
        options["add_pooling_layer"] = config.pooler
    kind = getattr(transformers, _LAYOUTS[exported.model_type].loads)
    model = kind.from_pretrained(exported.folder, dtype="auto", **options)
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported.folder, local_files_only=True)
    assert config.vocab_size is not None
    if len(tokenizer) > config.vocab_size and _LAYOUTS[exported.model_type].loader != "Bart":  # which cuts it
        raise ConfigError(
            f"it has {len(tokenizer)} tokens, and the model {config.vocab_size}",
            where="tokenizer",
            fix="export to hf",
        )
    tokenizer.add_tokens([f"<unused_{number}>" for number in range(len(tokenizer), config.vocab_size)])
    return model, tokenizer


def _state(model: Any, config: ModelConfig, suppressed: tuple[int, ...]) -> None:
    """States in a model of two stacks what the loaders take from keys that transformers 5 reads otherwise."""
    model.config.normalize_before = False
    model.config.normalize_embedding = bool(config.last_stack.input_norm)
    model.config.tie_word_embeddings = config.head.scaled  # of a T5: it divides
    if suppressed:
        # Marian's padding above all, which has a score of 0 that no training has made.
        bias_V = getattr(model, "final_logits_bias", torch.zeros(1, config.vocab_size or 0))[0]
        bias_V[list(suppressed)] = _NEVER
        model.lm_head.bias = nn.Parameter(bias_V)


def _convert(exported: Exported, folder: Path) -> None:
    loaders = import_module("ctranslate2.converters.transformers")
    config, layout = exported.config, _LAYOUTS[exported.model_type]
    with contextlib.redirect_stderr(io.StringIO()), torch.no_grad():  # a bar of transformers
        model, tokenizer = _load(exported)
        if layout.loads == _SEQ2SEQ:
            _state(model, config, exported.suppressed)
        spec = getattr(loaders, f"{layout.loader}Loader")()(model, tokenizer)
        name = tokenizer.convert_ids_to_tokens
        if layout.loads == _BASE:
            table = model.embeddings.position_embeddings.weight
            spec.encoder.position_encodings.encodings = table[config.first_position("encoder") :]
        if config.decoder is not None and layout.loads == _SEQ2SEQ:
            spec.decoder.num_heads = np.int16(config.decoder.heads)  # theirs has those of the encoder
            spec.config.layer_norm_epsilon = config.decoder.norm_eps
            spec.config.decoder_start_token = name(config.special_tokens.start)
            spec.config.eos_token = name(config.special_tokens.eos)
    # A null ends its loader; the end of a text stands for what the tokenizer does not have.
    end = name(config.special_tokens.eos or 0)
    for key, value in spec.config.to_dict().items():
        if key.endswith("_token") and not value:
            setattr(spec.config, key, end)
    spec.validate()
    spec.optimize(quantization={"fp32": "float32", "bf16": "bfloat16"}[exported.dtype])
    spec.save(str(folder))


def _scores(folder: Path, config: ModelConfig, tokens_BT: Tensor) -> Tensor:
    """Returns logits or hidden states; of two stacks log-probabilities of tokens given those before [B, T-1]."""
    ctranslate2 = import_module("ctranslate2")
    options = {"device": "cpu", "compute_type": "float32"}
    if config.shape == "decoder":
        model = ctranslate2.Generator(str(folder), **options)
        scores = model.forward_batch(tokens_BT.tolist(), return_log_probs=False)
    elif config.shape == "encoder":
        scores = ctranslate2.Encoder(str(folder), **options).forward_batch(tokens_BT.tolist()).last_hidden_state
    else:
        file = next(folder / name for name in _VOCABULARIES if (folder / name).exists())
        names = parse_json(file.read_text())
        rows = [[names[number] for number in row] for row in tokens_BT.tolist()]
        model = ctranslate2.Translator(str(folder), **options)
        scored = model.score_batch(rows, [row[1:] for row in rows])
        scores = [row.log_probs[:-1] for row in scored]  # without the end
    return torch.from_numpy(np.array(scores, dtype=np.float32))


def _use(config: ModelConfig) -> str:
    kind = {"decoder": "Generator", "encoder": "Encoder"}.get(config.shape, "Translator")
    return f'import ctranslate2\n\nmodel = ctranslate2.{kind}("this folder")'


CTRANSLATE2 = Runtime(
    name="CTranslate2",
    packages=("ctranslate2",),
    dtypes=("fp32", "bf16"),
    families={model_type: layout.rules for model_type, layout in _LAYOUTS.items()},
    check=_check,
    convert=_convert,
    runner="ctranslate2",
    scores=_scores,
    use=_use,
)
