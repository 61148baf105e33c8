"""Low-rank adapters of linear layers (Hu et al. 2022), by peft: training and export; frozen parameters.

    W x  ->  W x + alpha / rank * B A dropout(x)      W frozen, A [rank, in] drawn, B [out, rank] zeros

With `finetune.quantize` W is in 4 bits (`quantized.py`). With `finetune.dora` (Liu et al. 2024) the
sum's matrix has rows of the norms m, trained too, which begin as those of W.

A fused layer has one adapter: queries, keys and values share A, as rows of one matrix do. So the
update of each has the full rank, with fewer values than three adapters. An export has one adapter
for each module of Hugging Face that the layer is made of:

    qkv: A [r, in], B [q + k + v, r]   ->   q_proj: A, B[:q]   k_proj: A, B[q : q + k]   ...
    qkv of GPT-2, which is fused there ->   c_attn: A, B

A row range of B times A is that row range of the product: the split is exact.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pretrain.artifact.model_path import is_release, open_source
from pretrain.artifact.quantized import QuantizedLinear
from pretrain.artifact.source import (
    MAGNITUDE_SUFFIX,
    TOKENIZER_FOLDER,
    MergedModel,
    ModelSource,
    is_adapter,
    name_without_adapter,
)
from pretrain.config.finetune import FinetuneConfig, check_patterns, matches
from pretrain.config.load import load_config
from pretrain.config.model import ModelConfig
from pretrain.errors import ConfigError, DataError, LaunchError, install_fix
from pretrain.families.family import Family, Weight
from pretrain.interop.choose import choose_family
from pretrain.interop.release_files import CARD
from pretrain.model.build import seeded_by_name
from pretrain.model.stack import Stack
from pretrain.tokenizer.file import parse_tokenizer, read_release
from pretrain.tokenizer.released import compare_texts, probe_texts
from pretrain.utils.io import new_folder, write_file, write_json

_TASKS = {"decoder": "CAUSAL_LM", "encoder+decoder": "SEQ_2_SEQ_LM", "encoder": None}


def add_adapters(model: nn.Module, config: FinetuneConfig) -> list[str]:
    """Adds an adapter to each layer of `config.targets`, and freezes all other parameters, in place.

    The model may be on the meta device; values of adapters are not set. Returns the layers' names.

    Raises:
        ConfigError: A pattern matches no linear layer of a block, or the rank is more than that of every layer.
        LaunchError: peft is missing.
    """
    layers = _adapted_layers(model, config)
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise LaunchError(
            f"finetune.kind=lora needs the peft package: {error}",
            fix=install_fix(),
        ) from None
    adapters = LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        use_dora=config.dora,
        target_modules=layers,
    )
    inject_adapter_in_model(adapters, model, low_cpu_mem_usage=next(model.parameters()).is_meta)
    for name in layers if config.quantize != "none" else ():
        adapted: Any = model.get_submodule(name)
        adapted.base_layer = QuantizedLinear(adapted.base_layer)
    if config.dropout:
        # Recomputed activations must draw the same dropout again.
        for part in model.modules():
            if isinstance(part, Stack):
                part.draws_noise = True
    return layers


def _adapted_layers(model: nn.Module, config: FinetuneConfig) -> list[str]:
    """Returns the names of the layers of `config.targets`. Raises: ConfigError."""
    modules = {name: part for name, part in model.named_modules() if ".blocks." in name}
    linear = [name for name, part in modules.items() if type(part) is nn.Linear]
    for pattern in config.targets:
        if not any(matches(name, [pattern]) for name in linear):
            kinds = sorted({name.split(".blocks.")[1].partition(".")[2] for name in linear})
            raise ConfigError(
                f"finetune.targets: {pattern!r} is no linear layer of a block",
                fix=f"use *.{' or *.'.join(kinds)}, or '*' for all",
            )
    layers = [name for name in linear if matches(name, config.targets)]
    full_rank = max(min(modules[name].weight.shape) for name in layers)
    if config.rank > full_rank:
        raise ConfigError(
            f"finetune.rank={config.rank} is more than the rank of any layer, {full_rank} at most",
            fix="lower it: 8 to 64 are usual",
        )
    return layers


def initial_adapter(name: str, shape: torch.Size, seed: int) -> Tensor:
    """Returns a matrix of an adapter, fp32, on the CPU: A drawn as torch does `nn.Linear`, B zeros."""
    assert is_adapter(name) and not name.endswith(MAGNITUDE_SUFFIX)
    weight = torch.zeros(shape)
    if ".lora_A." in name:
        bound = shape[1] ** -0.5
        weight.uniform_(-bound, bound, generator=seeded_by_name(name, seed))
    return weight


@dataclass(frozen=True, slots=True)
class ExportedAdapter:
    """Result of an export of adapters."""

    model_type: str
    rank: int
    modules: int  # modules of theirs with an adapter
    num_parameters: int


def export_adapter(path: Path, out: Path, *, family: str | None = None) -> ExportedAdapter:
    """Writes the adapters of a LoRA run for `PeftModel.from_pretrained`, over an export of its `init.from`.

    `family` is the `model_type` of the base model; None: the first that represents it exactly.

    Raises:
        ConfigError: No adapters; other parameters were trained; no family represents the model.
        CheckpointError: No intact checkpoint, or the base model is missing.
    """
    described = open_source(path)
    merged = described.merged
    config = described.config
    if merged is None or described.run is None:
        raise ConfigError("has no adapters", where=str(path), fix="leave --adapter out")
    _check_alone(merged, path)
    assert isinstance(config, ModelConfig)
    chosen = choose_family(config, family)
    adapted = {f"{layer}.weight" for layer in merged.layers}
    weights = [weight for weight in chosen.weights(config) if weight.ours in adapted]
    tensors = dict(chain.from_iterable(_their_adapters(merged, weight) for weight in weights))
    modules = [name.removesuffix(".weight") for weight in weights for name, _ in weight.theirs]
    run = load_config(described.run.config, extensions="ignore")
    start = merged.base.source
    base = str(start.path) if is_release(start.path) else None  # peft can load no other
    facts = {
        "peft_type": "LORA",
        "task_type": _TASKS[config.shape],
        "base_model_name_or_path": base,
        "r": run.finetune.rank,
        "lora_alpha": run.finetune.alpha,
        "lora_dropout": run.finetune.dropout,
        "use_dora": run.finetune.dora,
        "target_modules": modules,
        # GPT-2 stores weights as [in, out], and peft must know.
        "fan_in_fan_out": any(weight.transposed for weight in weights),
        "bias": "none",
        "inference_mode": True,
    }
    from safetensors.torch import save

    with new_folder(out) as folder:
        write_json(folder / "adapter_config.json", facts)
        write_file(folder / "adapter_model.safetensors", save(tensors, metadata={"format": "pt"}))
        write_file(folder / CARD, _adapter_card(out.name, start, chosen, chosen.architecture(config)).encode())
        for name, content in described.load_tokenizer_files():
            write_file(folder / name, content)
    count = sum(tensor.numel() for tensor in tensors.values())
    return ExportedAdapter(chosen.model_type, run.finetune.rank, len(modules), count)


def _check_alone(merged: MergedModel, path: Path) -> None:
    if merged.replaced or merged.base.num_added:
        further = ", ".join(merged.replaced) or f"{merged.base.num_added} added tokens"
        raise ConfigError(
            f"peft's folder holds adapters alone, and the run has {further} too",
            where=str(path),
            fix="leave --adapter out: adapters are merged then",
        )


def _their_adapters(merged: MergedModel, weight: Weight) -> Iterator[tuple[str, Tensor]]:
    """Yields the matrices of a layer's adapters by name, for each module that it is made of."""
    layer = weight.ours.removesuffix(".weight")
    a, b = merged.matrices(layer)
    sizes = [rows for _, rows in weight.theirs]
    parts = torch.split(b, sizes)
    magnitude = merged.magnitude(layer)
    norms = [None] * len(parts) if magnitude is None else torch.split(magnitude, sizes)
    for (name, _), part, norm in zip(weight.theirs, parts, norms, strict=True):
        module = f"base_model.model.{name.removesuffix('.weight')}"
        yield f"{module}.lora_A.weight", a.clone()
        yield f"{module}.lora_B.weight", part.contiguous()
        if norm is not None:
            yield f"{module}.lora_magnitude_vector", norm.clone()


def _adapter_card(name: str, start: ModelSource, family: Family, architecture: str) -> str:
    """Returns README.md of exported adapters: the base model that they fit, and how both are loaded."""
    folder, place = start.path.name, start.path.name
    base = f"`{folder}`"
    if not is_release(start.path):
        if start.run is not None:
            folder = start.run.path.name
            place = f"{folder}/{start.path.resolve().relative_to(start.run.path.resolve())}"
        folder += "-exported"
        base = f"an export of `{place}`: `pretrain export {place} {folder} --family {family.model_type}`"
    return f"""---
library_name: peft
tags:
- lora
- {family.model_type}
---

# {name}

Adapters of {base}.

```python
from peft import PeftModel
from transformers import AutoTokenizer, {architecture}

base = {architecture}.from_pretrained("{folder}")  # the folder of that model, or its name on the hub
model = PeftModel.from_pretrained(base, "{name}")
tokenizer = AutoTokenizer.from_pretrained("{name}")
```
"""


def freeze(model: nn.Module, patterns: Collection[str]) -> int:
    """Freezes parameters by name, in place; returns the number of frozen values.

    Raises: ConfigError, where a pattern matches no parameter, or nothing is left to train.
    """
    names = [name for name, _ in model.named_parameters()]
    check_patterns("init.freeze", patterns, names)
    for name, parameter in model.named_parameters():
        if matches(name, patterns):
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            f"init.freeze={list(patterns)} leaves nothing to train",
            fix="name fewer parameters",
        )
    return sum(parameter.numel() for parameter in model.parameters() if not parameter.requires_grad)


def train_beside(model: nn.Module, anew: Collection[str], patterns: Collection[str]) -> list[str]:
    """Unfreezes the parameters in `anew` and those that a pattern matches; returns their names."""
    parameters = [name for name, _ in model.named_parameters() if not is_adapter(name)]
    names = {name: name_without_adapter(name) for name in parameters}
    check_patterns("finetune.also", patterns, list(names.values()))
    chosen = []
    for name, parameter in names.items():
        if parameter in anew or matches(parameter, patterns):
            model.get_parameter(name).requires_grad_(True)
            chosen.append(parameter)
    return chosen


def check_tokens(source: ModelSource, data: Path) -> None:
    """Compares the tokenizer of a model, if any, with the tokenizer.json of the data.

    Raises: DataError, where a token has another number in the data, or none.
    """
    files = dict(source.load_tokenizer_files())
    if not files:
        return
    content = files.get("tokenizer.json")
    if content is None:
        folder = source.path / TOKENIZER_FOLDER
        path = folder if folder.is_dir() else source.path
        content = read_release(str(path))
    theirs = parse_tokenizer(content, str(source.path))
    ours = parse_tokenizer(data.read_bytes(), str(data))
    numbers = ours.get_vocab(with_added_tokens=True)
    entries = sorted(theirs.get_vocab(with_added_tokens=True).items(), key=lambda item: item[1])
    different = [(token, number) for token, number in entries if numbers.get(token) != number]
    text = ""
    if different:
        token, number = different[0]
        text = f"{token!r} has the number {number} in {source.path} and {numbers.get(token, 'none')}"
        text += f" in {data.parent}, and {len(different) - 1} others differ"
    elif (difference := compare_texts(ours, theirs, probe_texts(theirs))) is not None:
        text = f"{difference.text!r} is {difference.theirs} in {source.path} and {difference.ours}"
        text += f" in {data.parent}"
    if text:
        option = f"tokenizer: {{kind: given, path: {source.path}}}"
        raise DataError(
            f"the tokenizer of the data is not that of {source.path}: {text}",
            where=str(data),
            fix=f"prepare them with {option}, or say init.check_tokenizer=false",
        )
