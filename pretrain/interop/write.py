"""The model card of an export: what the model is, how to load it, and the run that made it."""

import json
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pretrain.config.model import ModelConfig
from pretrain.errors import ConfigError
from pretrain.interop.choose import choose_family
from pretrain.interop.family import Family, Weight, parameter_shapes
from pretrain.interop.fields import CARD, CONFIG, GENERATION, WEIGHTS
from pretrain.interop.label_names import TEXTS, WORDS
from pretrain.interop.tensors import their_shapes, to_theirs
from pretrain.utils.io import new_folder, write_chunks, write_file, write_json
from pretrain.utils.log import redact


@dataclass(frozen=True, slots=True)
class About:
    """What a card says beyond the model itself.

    Attributes:
        name: Title.
        source: Where the weights came from, one line.
        run_config: The run's config as YAML; empty where there was none.
        metrics: The last values measured, by name.
    """

    name: str = "Model"
    source: str = ""
    run_config: str = ""
    metrics: dict[str, float] = field(default_factory=dict)


_TASKS = {"decoder": "text-generation", "encoder+decoder": "translation", "encoder": "fill-mask"}

_AUTO_CLASSES = {
    "decoder": "AutoModelForCausalLM",
    "encoder+decoder": "AutoModelForSeq2SeqLM",
    "encoder": "AutoModelForMaskedLM",
}

_LABELLING = {TEXTS: ("text-classification", f"AutoModel{TEXTS}"), WORDS: ("token-classification", f"AutoModel{WORDS}")}

_LOADED = ("model", "tokenizer")


def model_card(
    config: ModelConfig,
    family: Family,
    about: About,
    *,
    architecture: str,
    num_parameters: int,
    dtype: str,
    has_tokenizer: bool,
) -> str:
    """Returns README.md of an export. Secrets of the environment are blotted out.

    Args:
        config: The model.
        family: Family to export as.
        about: Name, source, config and metrics of the run.
        architecture: Class of transformers that it is exported as.
        num_parameters: Number of values in the files.
        dtype: Dtype of the exported values.
        has_tokenizer: Whether one lies beside them.
    """
    task, auto_class = _usage(config, architecture)
    parts = [
        f"---\nlibrary_name: transformers\npipeline_tag: {task}\ntags:\n- {family.model_type}\n---",
        f"# {about.name}",
        "\n".join(f"- {key}: {value}" for key, value in _model_facts(config, architecture, num_parameters, dtype)),
    ]
    if about.source:
        parts.append(f"Made from {about.source}.")
    classes = [auto_class, "AutoTokenizer"] if has_tokenizer else [auto_class]
    loads = "\n".join(f'{name} = {of}.from_pretrained("PATH")' for name, of in zip(_LOADED, classes, strict=False))
    parts.append(f"## Loading\n\n```python\nfrom transformers import {', '.join(classes)}\n\n{loads}\n```")
    if about.metrics:
        rows = "\n".join(f"| {name} | {value:.6g} |" for name, value in about.metrics.items())
        parts.append(f"## Metrics\n\n| metric | value |\n|---|---|\n{rows}")
    if about.run_config:
        parts.append(f"## Config of the run\n\n```yaml\n{about.run_config.strip()}\n```")
    return redact("\n\n".join(parts) + "\n")


def _usage(config: ModelConfig, architecture: str) -> tuple[str, str]:
    """Returns the task as the hub names it, and the class that loads the model for it."""
    for kind, usage in _LABELLING.items():
        if architecture.endswith(kind):
            return usage
    if config.head.kind == "none":
        return "feature-extraction", "AutoModel"
    return _TASKS[config.shape], _AUTO_CLASSES[config.shape]


def _model_facts(config: ModelConfig, architecture: str, num_parameters: int, dtype: str) -> list[tuple[str, Any]]:
    stack = config.last_stack
    layers = [str(part.layers) for part in (config.encoder, config.decoder) if part is not None]
    return [
        ("architecture", f"{architecture} ({config.shape})"),
        ("parameters", f"{num_parameters:,}, {dtype}"),
        ("layers, width, heads", f"{'+'.join(layers)}, {stack.width}, {stack.heads}"),
        ("vocabulary", config.vocab_size),
        ("longest sequence", config.max_seq_len),
        *([("labels", ", ".join(config.head.labels))] if config.head.labels else []),
    ]


# Writes a model as a Hugging Face folder: config, sharded safetensors, generation settings,
# tokenizer, card.
#
#     family chosen -> shards planned -> each weight read, converted, written -> the folder appears under its name
#
# The folder is written under a temporary name and renamed when it is whole. One parameter is in
# memory at a time: a shard is streamed, not built. The same weights give the same bytes.


MAX_SHARD_BYTES = 5_000_000_000

_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True)
class _Dtype:
    torch: torch.dtype
    safetensors: str
    hugging_face: str


_DTYPES = {"fp32": _Dtype(torch.float32, "F32", "float32"), "bf16": _Dtype(torch.bfloat16, "BF16", "bfloat16")}


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What an export holds.

    Attributes:
        model_type: Family of the model.
        architecture: Class of transformers that loads it.
        num_parameters: Number of values; tied ones once.
        total_bytes: Size of the weights.
        files: Names of all files.
    """

    model_type: str
    architecture: str
    num_parameters: int
    total_bytes: int
    files: list[str]


def write_release(
    config: ModelConfig,
    read: Callable[[str], Tensor],
    out: Path,
    *,
    dtype: str = "fp32",
    family: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    generation: Mapping[str, Any] | None = None,
    tokenizer_files: Sequence[tuple[str, bytes]] = (),
    about: About | None = None,
    labels_words: bool = False,
    check: Callable[[Path, str, torch.dtype], None] | None = None,
) -> ExportReport:
    """Writes a folder that `AutoModelFor*.from_pretrained` loads.

    Args:
        config: The model, `vocab_size` filled in.
        read: Returns one parameter of ours by name, whole; called once for each, in the order of the files.
        out: The folder; must not exist, or be empty.
        dtype: fp32 or bf16, of all values.
        family: `model_type` to write; None: the first that represents the model exactly.
        max_shard_bytes: A file gets no further parameter beyond this size; a larger one has a file for itself.
        generation: Further keys of generation_config.json.
        tokenizer_files: Names and contents, copied.
        about: What the card says of the run.
        labels_words: A head over labels is for words: where the family's class for texts has the same weights, the one
            for words is written.
        check: Looks at the folder before it appears, given also the class that loads it, and its dtype; may raise.

    Raises:
        ConfigError: No family represents the model exactly, the dtype is not known, or `out` holds something.
        DiskError: The disk refused; nothing is left under `out`.
    """
    config, read = _with_label_bias(config, read)
    chosen = choose_family(config, family)
    architecture = chosen.architecture(config)
    if labels_words:
        architecture = architecture.replace(TEXTS, WORDS)
    if dtype not in _DTYPES:
        raise ConfigError(f"dtype={dtype!r} is not known", fix=f"use {' or '.join(_DTYPES)}")
    plan = _ShardPlan(config, chosen, _DTYPES[dtype], max_shard_bytes)
    documents = _documents(config, chosen, architecture, _DTYPES[dtype], generation)
    card = model_card(
        config, chosen, about or About(), architecture=architecture,
        num_parameters=plan.num_parameters, dtype=dtype, has_tokenizer=bool(tokenizer_files),
    )  # fmt: skip
    with new_folder(out) as temporary:
        plan.write(temporary, read)
        for name, document in documents.items():
            write_json(temporary / name, document)
        write_file(temporary / CARD, card.encode())
        for name, content in tokenizer_files:
            assert _FILE_NAME.fullmatch(name) and not (temporary / name).exists(), name
            write_file(temporary / name, content)
        files = sorted(path.name for path in temporary.iterdir())
        if check is not None:
            check(temporary, architecture, _DTYPES[dtype].torch)
    return ExportReport(chosen.model_type, architecture, plan.num_parameters, plan.total_bytes, files)


def _with_label_bias(config: ModelConfig, read: Callable[[str], Tensor]) -> tuple[ModelConfig, Callable[[str], Tensor]]:
    """Gives a head over labels without a bias, which no class of theirs has, one of zeros: no score changes."""
    if config.head.kind != "labels" or config.head.bias:
        return config, read
    zeros = torch.zeros(len(config.head.labels))
    head = config.head.model_copy(update={"bias": True})
    return config.model_copy(update={"head": head}), lambda name: zeros if name == "head.bias" else read(name)


def _documents(
    config: ModelConfig, family: Family, architecture: str, dtype: _Dtype, generation: Mapping[str, Any] | None
) -> dict[str, dict[str, Any]]:
    """Returns the JSON files, generation_config.json for a model that generates."""
    described = family.write_config(config) | {
        "architectures": [architecture],
        "model_type": family.model_type,
        "torch_dtype": dtype.hugging_face,
    }
    if config.decoder is None or config.head.kind == "none":
        return {CONFIG: described}
    tokens = config.special_tokens
    known = {"bos_token_id": tokens.bos, "eos_token_id": tokens.eos, "pad_token_id": tokens.pad,
             "decoder_start_token_id": tokens.start}  # fmt: skip
    settings = {key: value for key, value in known.items() if value is not None}
    return {CONFIG: described, GENERATION: settings | dict(generation or {})}


class _ShardPlan:
    """Which weight goes to which file, decided from shapes.

    Attributes:
        num_parameters: Number of values in all files.
        total_bytes: Their size.
    """

    def __init__(self, config: ModelConfig, family: Family, dtype: _Dtype, max_shard_bytes: int) -> None:
        assert config.vocab_size is not None
        self._dtype = dtype
        # A base model's names lack the prefix that they have under a head.
        self._cut = len(family.prefix) if config.head.kind == "none" else 0
        shapes = parameter_shapes(config)
        weights = family.weights(config)
        assert sorted(weight.ours for weight in weights) == sorted(shapes)
        self._shapes: dict[str, dict[str, tuple[int, ...]]] = {}
        self._shards: list[list[Weight]] = []
        self.num_parameters, room = 0, 0
        for weight in weights:
            rows = config.vocab_size if weight.vocab else shapes[weight.ours][0]
            theirs = their_shapes(weight, (rows, *shapes[weight.ours][1:]))
            self._shapes[weight.ours] = {name[self._cut :]: shape for name, shape in theirs.items()}
            count = sum(prod(shape) for shape in theirs.values())
            self.num_parameters += count
            if not self._shards or count * dtype.torch.itemsize > room:
                self._shards.append([])
                room = max_shard_bytes
            self._shards[-1].append(weight)
            room -= count * dtype.torch.itemsize
        self.total_bytes = self.num_parameters * dtype.torch.itemsize

    def write(self, folder: Path, read: Callable[[str], Tensor]) -> None:
        """Writes every shard, and the index where there are several. Raises: DiskError."""
        if len(self._shards) == 1:
            self._write_shard(folder / WEIGHTS, self._shards[0], read)
            return
        place: dict[str, str] = {}
        for number, weights in enumerate(self._shards, start=1):
            stem, _, suffix = WEIGHTS.rpartition(".")
            name = f"{stem}-{number:05d}-of-{len(self._shards):05d}.{suffix}"
            self._write_shard(folder / name, weights, read)
            place |= {theirs: name for weight in weights for theirs in self._shapes[weight.ours]}
        write_json(
            folder / f"{WEIGHTS}.index.json", {"metadata": {"total_size": self.total_bytes}, "weight_map": place}
        )

    def _write_shard(self, path: Path, weights: list[Weight], read: Callable[[str], Tensor]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for weight in weights:
            for name, shape in self._shapes[weight.ours].items():
                start, end = end, end + prod(shape) * self._dtype.torch.itemsize
                header[name] = {"dtype": self._dtype.safetensors, "shape": shape, "data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)

        def chunks() -> Iterator[memoryview]:
            yield memoryview(struct.pack("<Q", len(text)) + text)
            for weight in weights:
                for name, tensor in to_theirs(weight, read(weight.ours)):
                    assert tuple(tensor.shape) == self._shapes[weight.ours][name[self._cut :]], name
                    stored = tensor.detach().to(device="cpu", dtype=self._dtype.torch).contiguous()
                    yield memoryview(stored.view(-1).view(torch.uint8).numpy())

        write_chunks(path, chunks())
