"""Adapters of a run as a folder that peft reads, beside the exported model that they belong to.

    ours                                  theirs, a module of Hugging Face each
    qkv: A [r, in], B [q + k + v, r]      q_proj: A, B[:q]   k_proj: A, B[q : q + k]   v_proj: A, B[q + k :]
    qkv of GPT-2, which is fused there    c_attn: A, B

The product of a row range of B with A is that row range of the product, so nothing is lost. What was trained beside
adapters in full has no place in such a folder.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pretrain.artifact.adapters import Merged
from pretrain.artifact.what import open_what
from pretrain.config.load import load_config
from pretrain.config.model import ModelConfig
from pretrain.errors import ConfigError
from pretrain.interop.choose import choose_family
from pretrain.interop.family import Family
from pretrain.utils.io import new_folder, write_file, write_json

_TASKS = {"decoder": "CAUSAL_LM", "encoder+decoder": "SEQ_2_SEQ_LM", "encoder": None}


@dataclass(frozen=True, slots=True)
class ExportedAdapter:
    """What was written.

    Attributes:
        model_type: Family of the model that the adapters belong to.
        rank: Of each.
        modules: How many of theirs have one.
        num_parameters: Values in the file.
    """

    model_type: str
    rank: int
    modules: int
    num_parameters: int


def export_adapter(what: Path, out: Path, *, family: str | None = None) -> ExportedAdapter:
    """Writes the adapters of a LoRA run for `PeftModel.from_pretrained`, over an export of its `init.from`.

    Args:
        what: A run with `finetune.kind=lora`, or a checkpoint of one.
        out: The folder; must not exist, or be empty.
        family: `model_type` of the model under them; None: the first that represents it exactly.

    Raises:
        ConfigError: There are no adapters; more than adapters was trained; or no family represents the model.
        CheckpointError: No intact checkpoint, or the model under it is gone.
        DiskError: The disk refused; nothing is left under `out`.
    """
    described = open_what(what)
    merged, config = described.merged, described.config
    if merged is None or described.run is None:
        raise ConfigError("has no adapters", where=str(what), fix="leave --adapter out")
    if merged.replaced or merged.base.num_added:
        beside = ", ".join(merged.replaced) or f"{merged.base.num_added} added tokens"
        raise ConfigError(
            f"peft's folder holds adapters alone, and the run has {beside} too",
            where=str(what),
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


def _tensors(merged: Merged, family: Family, config: ModelConfig) -> tuple[dict[str, Tensor], list[str], bool]:
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
