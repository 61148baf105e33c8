"""GGUF files for llama.cpp, by the `gguf` package: its writer, and its names of tensors.

    config, tokenizer -> keys; tensors of the Hugging Face folder -> its names, in its layout

One tensor is in memory at a time. Values that llama.cpp has built into a family are rules here;
that it computes the same as ours within them is tested for each, with usual and unusual values.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pretrain.config.model import ModelConfig
from pretrain.errors import ConfigError
from pretrain.interop.runtimes.gguf_vocabulary import read_vocabulary
from pretrain.interop.runtimes.runtime import Exported, Rules, Runtime
from pretrain.interop.tensors import TensorFolder
from pretrain.model.parts.rotary import rotary_frequencies

FILE = "model.gguf"
_EXPERTS = re.compile(r"(.*\.layers\.\d+)\.\w+\.experts\.(\d+)\.(\w+)\.weight")
_EXPERT_PARTS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


def _granite_keys(config: ModelConfig) -> dict[str, Any]:
    stack = config.last_stack
    return {
        "logit_scale": 1 / config.head.scale,
        "residual_scale": stack.residual_scale,
        "embedding_scale": config.embedding_scale,
        "attention.scale": stack.score_scale or stack.per_head_width**-0.5,
    }


def _gemma_keys(config: ModelConfig) -> dict[str, Any]:
    caps = {"attn": config.last_stack.score_cap, "final": config.head.soft_cap}
    keys = {f"{key}_logit_softcapping": cap for key, cap in caps.items() if cap is not None}
    return keys | _window_keys(config)


def _window_keys(config: ModelConfig) -> dict[str, Any]:
    stack = config.last_stack
    windows = [window is not None for window in stack.windows]
    keys = {"attention.sliding_window": stack.window, "attention.sliding_window_pattern": windows}
    return keys | {"rope.freq_base_swa": stack.rope_local_theta or stack.rope_theta}


def _pair_keys(config: ModelConfig) -> dict[str, Any]:
    assert config.encoder is not None
    return {
        "block_count": config.encoder.layers,
        "decoder_block_count": config.last_stack.layers,
        "attention.relative_buckets_count": config.last_stack.relative_buckets,
        "decoder_start_token_id": config.special_tokens.start,
    }


def _expert_keys(config: ModelConfig) -> dict[str, Any]:
    stack = config.last_stack
    assert stack.experts is not None
    counts = {"expert_count": stack.experts.count, "expert_used_count": stack.experts.top_k}
    return counts | {"expert_feed_forward_length": stack.expert_width}


@dataclass(frozen=True, slots=True)
class _Layout:
    """A family as llama.cpp has it.

    Attributes:
        arch: The name there.
        rules: Keys that it has built in.
        pairs: Rotation is of neighbouring rows of a head, where Hugging Face has halves.
        offset: Added to the weights of norms, which Hugging Face stores without it.
        transposed: Names of matrices that are [in, out] in the Hugging Face folder.
        own_head: A tied head is stored again.
        square: Heads have the width of the model together.
        factors: Frequencies may be divided one by one (`llama3`).
        keys: Further keys.
    """

    arch: str
    rules: Rules
    pairs: bool = False
    offset: float = 0.0
    transposed: str = "$"
    own_head: bool = False
    square: bool = False
    factors: bool = False
    keys: Callable[[ModelConfig], dict[str, Any]] = lambda config: {}


_WINDOWS: Rules = {
    "head.kind": ("lm",),
    "decoder.activation": ("silu",),
    "decoder.rope_scaling.kind": (None, "linear"),
}
_DENSE: Rules = _WINDOWS | {"decoder.window": (None,)}
_LLAMA: Rules = _DENSE | {"decoder.rope_scaling.kind": (None, "linear", "llama3")}
_BARE: Rules = {f"decoder.{key}": (False,) for key in ("qkv_bias", "output_bias", "bias")}
_GELU: Rules = {"decoder.activation": ("gelu_tanh",)}
_TIED: Rules = {"tied_embeddings": (True,)}
_SUM: Rules = {"decoder.experts.normalize": (True,)}
_NO_SUM: Rules = {"decoder.experts.normalize": (False,)}
_T5: Rules = {"head.kind": ("lm",)}
_T5 |= {f"{name}.relative_max_distance": (128,) for name in ("encoder", "decoder")}
_CONV1D = r".*\.(c_attn|c_proj|c_fc)\.weight"

_LAYOUTS = {
    "llama": _Layout("llama", _LLAMA, pairs=True, factors=True),
    "mistral": _Layout("llama", _LLAMA, pairs=True, factors=True),
    "mixtral": _Layout("llama", _LLAMA, pairs=True, factors=True, keys=_expert_keys),
    "qwen2": _Layout("qwen2", _DENSE, square=True),
    "qwen3": _Layout("qwen3", _DENSE | _BARE),
    "qwen3_moe": _Layout("qwen3moe", _DENSE | _BARE | _SUM, keys=_expert_keys),
    "gemma": _Layout("gemma", _DENSE | _BARE | _GELU | _TIED, offset=1.0),
    "gemma2": _Layout("gemma2", _WINDOWS | _BARE | _GELU | _TIED, offset=1.0, keys=_gemma_keys),
    "gemma3_text": _Layout("gemma3", _WINDOWS | _BARE | _GELU, offset=1.0, keys=_gemma_keys),
    "gpt2": _Layout("gpt2", {"head.kind": ("lm",)} | _GELU, transposed=_CONV1D),
    "phi3": _Layout("phi3", _DENSE, square=True),
    "olmo": _Layout("olmo", _DENSE | _BARE, pairs=True),
    "olmo2": _Layout("olmo2", _DENSE | _BARE, own_head=True),
    "olmo3": _Layout("olmo2", _WINDOWS | _BARE, own_head=True, keys=_window_keys),
    "olmoe": _Layout("olmoe", _DENSE | _NO_SUM, own_head=True, keys=_expert_keys),
    "smollm3": _Layout("smollm3", _DENSE | _BARE, pairs=True),
    "granite": _Layout("granite", _LLAMA, pairs=True, factors=True, keys=_granite_keys),
    "t5": _Layout("t5", _T5, own_head=True, keys=_pair_keys),
    "mt5": _Layout("t5", _T5, own_head=True, keys=_pair_keys),
    "umt5": _Layout("t5", _T5, own_head=True, keys=_pair_keys),
    "starcoder2": _Layout("starcoder2", _DENSE | _GELU | {"decoder.bias": (True,)}, square=True),
}
_LARGEST = {("gemma2", 46), ("gemma3_text", 62)}
"""Models of 27 billion parameters, which llama.cpp knows by their layers, with another scale."""


def _check(exported: Exported) -> None:
    """Raises ConfigError for what depends on several keys, and for the tokenizer."""
    config, kind = exported.config, exported.model_type
    if config.encoder is None:
        wrong = _decoder_differences(config, kind)
    else:
        wrong = _pair_differences(config)
    if reasons := [reason for reason, is_so in wrong.items() if is_so]:
        raise ConfigError(
            f"{reasons[0]}: llama.cpp has another value built into a {kind}",
            where="model",
            fix="export to hf",
        )
    assert config.vocab_size is not None
    special, checks = config.special_tokens, exported.checks
    read_vocabulary(exported.files, special, config.vocab_size, checks=checks)


def _pair_differences(config: ModelConfig) -> dict[str, bool]:
    """Returns values of a model of two stacks, and whether llama.cpp has others."""
    stack = config.last_stack
    usual = "gelu_tanh" if stack.gated else "relu"
    return {
        f"decoder.activation={stack.activation}": stack.activation != usual,
        f"decoder.layers={stack.layers}": stack.layers > config.input_stack.layers,
        "special_tokens.start=null": config.special_tokens.start is None,
    }


def _decoder_differences(config: ModelConfig, kind: str) -> dict[str, bool]:
    """Returns values of a decoder, and whether llama.cpp has others."""
    stack = config.last_stack
    head_width = stack.width // stack.heads if (kind, stack.layers) in _LARGEST else stack.per_head_width
    scale = stack.score_scale or stack.per_head_width**-0.5
    unrotated = list(range(3, stack.layers, 4)) if kind == "smollm3" else []
    has_windows = any(window is not None for window in stack.windows)
    return {
        f"decoder.score_factor={scale}, not {head_width**-0.5:.6g}": kind != "granite"
        and abs(scale / head_width**-0.5 - 1) > 1e-6,
        f"decoder.unrotated_layers={sorted(stack.unrotated_layers)}": sorted(stack.unrotated_layers) != unrotated,
        "decoder.window=null": kind in ("gemma2", "gemma3_text", "olmo3") and not has_windows,
        "decoder.score_cap=null": kind == "gemma2" and stack.score_cap is None,
        "head.soft_cap=null": kind == "gemma2" and config.head.soft_cap is None,
        f"decoder.kv_heads={stack.kv_heads}": kind == "olmoe" and stack.num_kv_heads != stack.heads,
        f"decoder.head_width={stack.head_width}": _LAYOUTS[kind].square
        and stack.per_head_width * stack.heads != stack.width,
    }


def _keys(config: ModelConfig, layout: _Layout) -> dict[str, Any]:
    """Returns the keys of GGUF below the name of the architecture."""
    stack = config.last_stack
    keys: dict[str, Any] = {
        "block_count": stack.layers,
        "context_length": config.max_seq_len,
        "embedding_length": stack.width,
        "feed_forward_length": stack.ff_width,
        "attention.head_count": stack.heads,
        "attention.head_count_kv": stack.num_kv_heads,
        "attention.key_length": stack.per_head_width,
        "attention.value_length": stack.per_head_width,
        f"attention.layer_norm_{'rms_' if stack.norm == 'rms' else ''}epsilon": stack.norm_eps,
        "vocab_size": config.vocab_size,
    }
    if stack.position == "rotary":
        keys |= {"rope.freq_base": stack.rope_theta, "rope.dimension_count": stack.rotary_width}
    scaling = stack.rope_scaling
    if scaling is not None and scaling.kind == "linear":
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": scaling.factor}
    return keys | layout.keys(config)


_Parts = tuple[str, str, list[str]]
"""Name of a tensor of GGUF, that in the map of `gguf`, and the tensors that it is made of."""


def _tensors(config: ModelConfig, layout: _Layout, files: TensorFolder) -> Iterator[_Parts]:
    gguf = import_module("gguf")
    arches = gguf.MODEL_ARCH_NAMES
    arch = next(arch for arch, name in arches.items() if name == layout.arch)
    layers = max(config.input_stack.layers, config.last_stack.layers)
    names = gguf.get_tensor_name_map(arch, layers)
    parts_by_name: dict[str, dict[int, str]] = {}
    for name in files.facts:
        expert = _EXPERTS.fullmatch(name)
        if expert is None:
            parts_by_name[name] = {0: name}
            continue
        # Experts are one tensor of three dimensions.
        layer, number, part = expert.groups()
        merged = f"{layer}.mlp.experts.{_EXPERT_PARTS.get(part, part)}.weight"
        parts_by_name.setdefault(merged, {})[int(number)] = name
    for name, parts in parts_by_name.items():
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert theirs is not None, name
        yield theirs, name, [parts[number] for number in sorted(parts)]
        if layout.own_head and config.tied_embeddings and theirs == "token_embd.weight":
            yield "output.weight", name, list(parts.values())


def _converted(config: ModelConfig, layout: _Layout, files: TensorFolder, made: _Parts) -> Tensor:
    """Returns a tensor as llama.cpp reads it, fp32."""
    theirs, name, parts = made
    tensor = torch.stack([files.load(part).float() for part in parts])
    tensor = tensor if len(parts) > 1 or ".experts." in name else tensor[0]
    stack = config.last_stack
    if theirs == "output.weight" and config.head.scaled:
        tensor = tensor * config.last_stack.width**-0.5  # there the head does not divide its input
    if layout.offset and name.endswith("norm.weight"):
        tensor = tensor + layout.offset
    if re.fullmatch(layout.transposed, name):
        tensor = tensor.t()
    heads = {"q_proj": stack.heads, "k_proj": stack.num_kv_heads}.get(name.split(".")[-2])
    if layout.pairs and heads is not None:
        halves = tensor.unflatten(0, (heads, 2, -1))
        tensor = halves.transpose(1, 2).flatten(0, 2)
    return tensor.contiguous()


def _frequency_factors(config: ModelConfig, layout: _Layout) -> dict[str, Tensor]:
    """Returns the divisors of rotary frequencies by the tensor's name; empty: none."""
    stack = config.last_stack
    if not layout.factors or stack.rope_scaling is None or stack.rope_scaling.kind != "llama3":
        return {}
    plain = rotary_frequencies(stack.rotary_width, stack.rope_theta, None)
    scaled = rotary_frequencies(stack.rotary_width, stack.rope_theta, stack.rope_scaling)
    return {"rope_freqs.weight": (plain / scaled).float()}


def _convert(exported: Exported, folder: Path) -> None:
    gguf = import_module("gguf")
    config, layout = exported.config, _LAYOUTS[exported.model_type]
    assert config.vocab_size is not None
    files = TensorFolder(exported.folder)
    writer = gguf.GGUFWriter(folder / FILE, layout.arch)
    writer.add_type("model")
    writer.add_name(exported.name)
    vocabulary = read_vocabulary(exported.files, config.special_tokens, config.vocab_size, checks=False)
    keys = {f"{layout.arch}.{key}": value for key, value in _keys(config, layout).items()}
    keys |= {f"tokenizer.{key}": value for key, value in vocabulary.items()}
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in keys.items():
        adders.get(type(value), writer.add_array)(key, value)
    factors = _frequency_factors(config, layout)

    def stored(name: str, values: Tensor) -> tuple[np.ndarray[Any, Any], Any]:
        # Vectors, and routers, stay in fp32: llama.cpp has no kernels for others.
        halves = exported.dtype == "bf16" and values.ndim > 1 and "ffn_gate_inp" not in name
        kinds = gguf.GGMLQuantizationType
        kind = kinds.BF16 if halves else kinds.F32
        return gguf.quants.quantize(values.numpy(), kind), kind

    tensors = list(_tensors(config, layout, files))
    try:
        for theirs, name, parts in tensors:
            facts = [files.facts[part].shape for part in parts]
            shape = (len(parts), *facts[0]) if ".experts." in name else facts[0]
            if re.fullmatch(layout.transposed, name):
                shape = tuple(reversed(shape))
            values, kind = stored(theirs, torch.empty(shape))
            of_values = (values.shape, values.dtype, values.nbytes)
            writer.add_tensor_info(theirs, *of_values, raw_dtype=kind)
        for theirs, tensor in factors.items():
            writer.add_tensor_info(theirs, tensor.shape, np.dtype(np.float32), 4 * tensor.numel())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for made in tensors:
            tensor = _converted(config, layout, files, made)
            writer.write_tensor_data(stored(made[0], tensor)[0])
        for tensor in factors.values():
            writer.write_tensor_data(tensor.numpy())
    finally:
        writer.close()


def _scores(folder: Path, config: ModelConfig, tokens_BT: Tensor) -> Tensor:
    """Returns the logits of llama.cpp, with a cache in fp32."""
    llama_cpp = import_module("llama_cpp")
    F32 = llama_cpp.GGML_TYPE_F32
    model = llama_cpp.Llama(
        str(folder / FILE), n_ctx=tokens_BT.shape[1], n_gpu_layers=0, logits_all=True,
        verbose=False,
        type_k=F32, type_v=F32,
    )  # fmt: skip
    rows = []
    for row in tokens_BT.tolist():
        model.reset()
        if config.encoder is not None:
            source = (llama_cpp.llama_token * len(row))(*row)
            llama_cpp.llama_encode(model.ctx, llama_cpp.llama_batch_get_one(source, len(row)))
        model.eval(row)
        rows.append(torch.from_numpy(np.array(model.scores[: len(row)])))
    model.close()
    return torch.stack(rows)


LLAMA_CPP = Runtime(
    name="llama.cpp",
    packages=("gguf",),
    dtypes=("fp32", "bf16"),
    families={model_type: layout.rules for model_type, layout in _LAYOUTS.items()},
    check=_check,
    convert=_convert,
    runner="llama_cpp",
    scores=_scores,
    use=lambda config: f"llama-cli -m {FILE}",
)
