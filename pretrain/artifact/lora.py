"""Low-rank adapters beside linear layers (Hu et al. 2022), by peft.

    X = W x   ->   W x + alpha / rank * B A dropout(x)      W frozen, A [rank, in] drawn, B [out, rank] zeros

A fused layer has one adapter: queries, keys and values share A, as rows of one matrix do. So the update of each has the
rank asked for, with fewer values than three adapters.
"""

import logging
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from pretrain.artifact.model_path import open_source
from pretrain.artifact.source import TOKENIZER_FOLDER, MergedModel, ModelSource, is_adapter, name_without_adapter
from pretrain.config.finetune import FinetuneConfig, check_patterns, matches
from pretrain.config.load import load_config
from pretrain.config.model import ModelConfig
from pretrain.config.prepare import TokenizerConfig
from pretrain.errors import ConfigError, DataError, LaunchError
from pretrain.interop.choose import choose_family
from pretrain.interop.family import Family
from pretrain.model.build import seeded_by_name
from pretrain.model.stack import Stack
from pretrain.tokenizer import parse_tokenizer
from pretrain.tokenizer.file import read_given
from pretrain.utils.io import new_folder, write_file, write_json

log = logging.getLogger(__name__)


def add_adapters(model: nn.Module, config: FinetuneConfig) -> list[str]:
    """Adds an adapter to every layer of `config.targets`, and freezes all other parameters, in place.

    Args:
        model: Model on any device, the meta device too; values of adapters are not set.
        config: Fine-tuning config of kind `lora`.

    Returns:
        The names of the layers.

    Raises:
        ConfigError: A pattern names no linear layer of a block.
        LaunchError: peft is missing.
    """
    linear = [name for name, part in model.named_modules() if type(part) is nn.Linear and ".blocks." in name]
    for pattern in config.targets:
        if not any(matches(name, [pattern]) for name in linear):
            kinds = sorted({name.split(".blocks.")[1].partition(".")[2] for name in linear})
            raise ConfigError(
                f"finetune.targets: {pattern!r} is no linear layer of a block",
                fix=f"use *.{' or *.'.join(kinds)}, or '*' for all",
            )
    layers = [name for name in linear if matches(name, config.targets)]
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise LaunchError(f"finetune.kind=lora needs the peft package: {error}", fix="install it") from None
    adapters = LoraConfig(r=config.rank, lora_alpha=config.alpha, lora_dropout=config.dropout, target_modules=layers)
    inject_adapter_in_model(adapters, model, low_cpu_mem_usage=next(model.parameters()).is_meta)
    if config.dropout:
        for part in model.modules():
            if isinstance(part, Stack):
                part.recompute.draws_noise = True
    return layers


def initial_adapter(name: str, shape: torch.Size, seed: int) -> Tensor:
    """Draws one matrix of an adapter, fp32, on the CPU: A as `nn.Linear` is by torch and peft, B zeros."""
    assert is_adapter(name)
    weight = torch.zeros(shape)
    if ".lora_A." in name:
        bound = shape[1] ** -0.5
        weight.uniform_(-bound, bound, generator=seeded_by_name(name, seed))
    return weight


# Export of adapters as a folder that peft reads, over an export of the base model.
#
#     ours                                  theirs, a module of Hugging Face each
#     qkv: A [r, in], B [q + k + v, r]      q_proj: A, B[:q]   k_proj: A, B[q : q + k]   v_proj: A, B[q + k :]
#     qkv of GPT-2, which is fused there    c_attn: A, B
#
# A row range of B times A is that row range of the product: the split is exact. Parameters that were trained in full
# besides adapters cannot be stored in such a folder.

_TASKS = {"decoder": "CAUSAL_LM", "encoder+decoder": "SEQ_2_SEQ_LM", "encoder": None}


@dataclass(frozen=True, slots=True)
class ExportedAdapter:
    """What was written.

    Attributes:
        model_type: Family of the model that the adapters belong to.
        rank: Rank of each adapter.
        modules: How many of theirs have one.
        num_parameters: Values in the file.
    """

    model_type: str
    rank: int
    modules: int
    num_parameters: int


def export_adapter(path: Path, out: Path, *, family: str | None = None) -> ExportedAdapter:
    """Writes the adapters of a LoRA run for `PeftModel.from_pretrained`, over an export of its `init.from`.

    Args:
        path: A run with `finetune.kind=lora`, or a checkpoint of one.
        out: The folder; must not exist, or be empty.
        family: `model_type` of the model under them; None: the first that represents it exactly.

    Raises:
        ConfigError: There are no adapters; more than adapters was trained; or no family represents the model.
        CheckpointError: No intact checkpoint, or the model under it is gone.
        DiskError: The disk refused; nothing is left under `out`.
    """
    described = open_source(path)
    merged, config = described.merged, described.config
    if merged is None or described.run is None:
        raise ConfigError("has no adapters", where=str(path), fix="leave --adapter out")
    if merged.replaced or merged.base.num_added:
        beside = ", ".join(merged.replaced) or f"{merged.base.num_added} added tokens"
        raise ConfigError(
            f"peft's folder holds adapters alone, and the run has {beside} too",
            where=str(path),
            fix="leave --adapter out: adapters are merged then",
        )
    assert isinstance(config, ModelConfig)
    chosen = choose_family(config, family)
    tensors, modules, transposed = _tensors(merged, chosen, config)
    run = load_config(described.run.config, import_extensions=False)
    facts = {
        "peft_type": "LORA",
        "task_type": _TASKS[config.shape],
        "base_model_name_or_path": run.init.from_,
        "r": run.finetune.rank,
        "lora_alpha": run.finetune.alpha,
        "lora_dropout": run.finetune.dropout,
        "target_modules": modules,
        "fan_in_fan_out": transposed,
        "bias": "none",
        "inference_mode": True,
    }
    from safetensors.torch import save

    with new_folder(out) as folder:
        write_json(folder / "adapter_config.json", facts)
        write_file(folder / "adapter_model.safetensors", save(tensors, metadata={"format": "pt"}))
    count = sum(tensor.numel() for tensor in tensors.values())
    return ExportedAdapter(chosen.model_type, run.finetune.rank, len(modules), count)


def _tensors(merged: MergedModel, family: Family, config: ModelConfig) -> tuple[dict[str, Tensor], list[str], bool]:
    """Returns tensors by peft's names, the modules of theirs, and whether these store weights as [in, out]."""
    tensors: dict[str, Tensor] = {}
    modules, transposed = [], False
    for weight in family.weights(config):
        layer = weight.ours.removesuffix(".weight")
        if layer not in merged.layers or weight.ours == layer:
            continue
        a, b = merged.matrices(layer)
        parts = torch.split(b, [rows for _, rows in weight.theirs])
        for (name, _), part in zip(weight.theirs, parts, strict=True):
            module = name.removesuffix(".weight")
            modules.append(module)
            tensors[f"base_model.model.{module}.lora_A.weight"] = a.clone()
            tensors[f"base_model.model.{module}.lora_B.weight"] = part.contiguous()
        transposed = transposed or weight.transposed
    return tensors, modules, transposed


def freeze(model: nn.Module, patterns: Collection[str]) -> int:
    """Freezes parameters by name, in place; returns how many values that is.

    A frozen parameter is in no group of the optimizer, and has neither moments nor an fp32 copy.

    Raises:
        ConfigError: A pattern names no parameter, or nothing is left to be trained.
    """
    names = [name for name, _ in model.named_parameters()]
    check_patterns("init.freeze", patterns, names)
    for name, parameter in model.named_parameters():
        if matches(name, patterns):
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(f"init.freeze={list(patterns)} leaves nothing to train", fix="name fewer parameters")
    return sum(parameter.numel() for parameter in model.parameters() if not parameter.requires_grad)


def train_beside(model: nn.Module, anew: Collection[str], patterns: Collection[str]) -> list[str]:
    """Lets parameters be trained beside adapters: those that begin anew, and those that are named. Returns the names.

    Raises:
        ConfigError: A pattern names no parameter.
    """
    names = {name: name_without_adapter(name) for name, _ in model.named_parameters() if not is_adapter(name)}
    check_patterns("finetune.also", patterns, list(names.values()))
    chosen = []
    for name, own in names.items():
        if own in anew or matches(own, patterns):
            model.get_parameter(name).requires_grad_(True)
            chosen.append(own)
    return chosen


def check_tokens(source: ModelSource, data: Path) -> None:
    """Compares the tokenizer of a model with that of the data, which may have further tokens.

    Args:
        source: The model; one without a tokenizer fits any.
        data: The tokenizer.json of the data.

    Raises:
        DataError: A token has another number in the data, or none.
    """
    theirs = _tokenizer_of(source)
    if theirs is None:
        return
    ours = parse_tokenizer(data.read_bytes(), str(data)).get_vocab(with_added_tokens=True)
    known = sorted(theirs.get_vocab(with_added_tokens=True).items(), key=lambda item: item[1])
    different = [(token, number) for token, number in known if ours.get(token) != number]
    if different:
        token, number = different[0]
        found = ours.get(token, "none")
        raise DataError(
            f"the tokenizer of the data is not that of {source.path}: {token!r} has the number {number} there "
            f"and {found} here, and {len(different) - 1} others differ",
            where=str(data),
            fix=f"prepare them with tokenizer: {{kind: given, path: {source.path}}}, or say init.check_tokenizer=false",
        )


def _tokenizer_of(source: ModelSource) -> Tokenizer | None:
    files = dict(source.load_tokenizer_files())
    if not files:
        return None
    content = files.get("tokenizer.json")
    if content is None:
        folder = source.path / TOKENIZER_FOLDER
        path = folder if folder.is_dir() else source.path
        content = read_given(TokenizerConfig(kind="given", path=str(path)))
    return parse_tokenizer(content, str(source.path))
