"""Writes a model as a Hugging Face folder: config, safetensors, generation settings, tokenizer, card.

    family chosen -> shards planned -> each weight read, converted, written -> the folder renamed

The folder is written under a temporary name and renamed when it is complete. One parameter is in
memory at a time: a shard is streamed, not built. The same weights give the same bytes.
"""

import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from pretrain import __version__
from pretrain.config.model import ModelConfig
from pretrain.errors import ConfigError
from pretrain.families.config_json import CONFIG, write_tokens
from pretrain.families.family import Family, Weight
from pretrain.families.label_names import IMAGES, TEXTS, WORDS
from pretrain.interop.choose import choose_family
from pretrain.interop.release_files import CARD, GENERATION, PREPROCESSOR, WEIGHTS, write_preprocessor
from pretrain.interop.tensors import FILE_NAME, Shape, constant_tensors, parameter_shapes, their_shapes, to_theirs
from pretrain.kinds.heads import HEADS
from pretrain.utils.io import make_dir, new_folder, write_chunks, write_file, write_json
from pretrain.utils.log import redact

MAX_SHARD_BYTES = 5_000_000_000

Reader = Callable[[str], Tensor]
"""Returns one whole parameter of ours by name."""

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_SAFETENSORS = {torch.float32: "F32", torch.bfloat16: "BF16"}

_UNIT_TASKS = {
    TEXTS: "text-classification",
    WORDS: "token-classification",
    IMAGES: "image-classification",
    **{record.hub_class: record.hub_task for record in HEADS.values() if record.hub_class},
}
"""Task of a class that scores something else than a vocabulary."""
_STACK_USAGES = {
    "decoder": ("text-generation", "AutoModelForCausalLM"),
    "encoder+decoder": ("translation", "AutoModelForSeq2SeqLM"),
    "encoder": ("fill-mask", "AutoModelForMaskedLM"),
}


def _usage(config: ModelConfig, architecture: str) -> tuple[str, str]:
    """Returns the task of a model, and the class that loads it."""
    # The class decides before the stacks: a classifier is an encoder with another task.
    for unit, task in _UNIT_TASKS.items():
        if architecture.endswith(unit):
            return task, f"AutoModel{unit}"
    if config.captions:
        return "image-to-text", "VisionEncoderDecoderModel"
    if config.input is not None:
        return "image-feature-extraction", "AutoModelForPreTraining" if config.restores else "AutoModel"
    if not config.head.record.scores_words:
        return "feature-extraction", "AutoModel"
    return _STACK_USAGES[config.shape]


_GENERATES = """inputs = tokenizer("A text", return_tensors="pt", return_token_type_ids=False)
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=64)[0], skip_special_tokens=True))"""
_CHATS = """turns = [{"role": "user", "content": "A question"}]
inputs = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=False)
print(tokenizer.decode(model.generate(inputs, max_new_tokens=64)[0], skip_special_tokens=True))"""
_ANSWERS = """inputs = tokenizer("A question", "A text with its answer", return_tensors="pt")
outputs = model(**inputs)  # start_logits and end_logits of each token"""
_USES = {"text-generation": _GENERATES, "translation": _GENERATES, "question-answering": _ANSWERS}
_SCORES = """inputs = tokenizer("A text", return_tensors="pt")
outputs = model(**inputs)"""
"""Lines of the card after the model and its tokenizer are loaded, by task; else `_SCORES`."""
_SEES = """outputs = model(**processor(image, return_tensors="pt"))  # image: of PIL, {mode}"""


_CAPTIONS = """inputs = processor(image, return_tensors="pt")  # image: of PIL, {mode}
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=64)[0], skip_special_tokens=True))"""


@dataclass(frozen=True, slots=True)
class About:
    """Facts of a model card beyond the model."""

    name: str = "Model"
    folder: str = "model"  # name of the export
    source: str = ""  # origin of the weights
    run_config: str = ""  # YAML
    metrics: dict[str, float] = field(default_factory=dict)
    chats: bool = False  # its tokenizer has a template of conversations
    library: str = "transformers"  # reads the files
    use: str = ""  # lines of the card that show how; empty: by transformers


@dataclass(frozen=True, slots=True)
class ExportReport:
    """Result of an export."""

    model_type: str
    architecture: str
    num_parameters: int  # values; tied ones once
    total_bytes: int  # of the weights
    files: list[str]


def write_release(
    config: ModelConfig,
    read: Reader,
    out: Path,
    *,
    dtype: str = "fp32",
    family: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    generation: Mapping[str, Any] | None = None,
    tokenizer_files: Sequence[tuple[str, bytes]] = (),
    further: Mapping[str, Any] = MappingProxyType({}),
    about: About | None = None,
    like: str = "",
    check: Callable[[Path, str, torch.dtype], None] | None = None,
) -> ExportReport:
    """Writes a folder that `AutoModelFor*.from_pretrained` loads.

    Args:
        config: The model, `vocab_size` filled in.
        read: Called once for each parameter, in the order of the files.
        out: The folder; must not exist, or be empty.
        dtype: fp32 or bf16, of all values.
        family: `model_type` to write; None: the first that represents the model exactly.
        max_shard_bytes: Size of a file; a larger parameter has a file for itself.
        generation: Further keys of generation_config.json.
        tokenizer_files: Names and contents, copied.
        further: Contents of further JSON files by their names, some in a folder.
        about: Facts of the run for the card.
        like: Class of transformers, or its ending, to be taken where several have the same tensors.
        check: Verifies the folder before it appears, given the class that loads it and its dtype.

    Raises:
        ConfigError: No family represents the model exactly, dtype is unknown, `out` is not empty.
        DiskError: The disk refused; nothing is left under `out`.
    """
    released, chosen, stored = choose_release(config, dtype, family)
    if released != config:
        read_ours, zeros = read, torch.zeros(config.head.num_scores)
        config, read = released, lambda name: zeros if name == "head.bias" else read_ours(name)
    constants = constant_tensors(chosen, config)
    config, architecture = _choose_class(config, chosen, read, like)
    plan = _ShardPlan(config, chosen, stored, max_shard_bytes, constants)
    described = {
        "architectures": [architecture],
        "model_type": chosen.model_type,
        "torch_dtype": str(stored).removeprefix("torch."),
    }
    documents = {CONFIG: chosen.write_config(config) | described} | _settings(config, generation or {})
    card = model_card(
        config, chosen, about or About(), architecture=architecture,
        num_parameters=plan.num_parameters, dtype=dtype, has_tokenizer=bool(tokenizer_files),
    )  # fmt: skip
    with new_folder(out) as temporary:
        plan.write(temporary, read)
        for name, document in (documents | dict(further)).items():
            make_dir((temporary / name).parent)
            write_json(temporary / name, document)
        write_file(temporary / CARD, card.encode())
        for name, content in tokenizer_files:
            assert FILE_NAME.fullmatch(name) and not (temporary / name).exists(), name
            write_file(temporary / name, content)
        files = sorted(path.name for path in temporary.iterdir())
        if check is not None:
            check(temporary, architecture, stored)
    return ExportReport(chosen.model_type, architecture, plan.num_parameters, plan.total_bytes, files)


def _settings(config: ModelConfig, generation: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the files beside config.json that a model needs, by name."""
    documents = {}
    if config.input is not None:
        documents[PREPROCESSOR] = write_preprocessor(config.input)
    if config.decoder is not None and config.head.record.scores_words:
        tokens = write_tokens(config.special_tokens, "start")
        ids = {key: number for key, number in tokens.items() if number is not None}
        documents[GENERATION] = ids | dict(generation)
        if config.encoder is None:  # its text begins with the prompt
            documents[GENERATION].pop("decoder_start_token_id", None)
    return documents


def choose_release(
    config: ModelConfig, dtype: str, family: str | None = None
) -> tuple[ModelConfig, Family, torch.dtype]:
    """Returns a model as released, the family that represents it exactly, and the dtype of its files.

    Raises:
        ConfigError: No family represents the model exactly, or dtype is unknown.
    """
    if dtype not in _DTYPES:
        raise ConfigError(f"dtype={dtype!r} is not known", fix=f"use {' or '.join(_DTYPES)}")
    released = as_released(config)
    return released, choose_family(released, family), _DTYPES[dtype]


_ALIKE = ((TEXTS, WORDS), ("ForMaskedLM", "ForCausalLM"), ("ForMaskedLM", "LMHeadModel"))
"""Endings of classes with the same tensors, that of a family first; no encoder is causal."""


def _choose_class(
    config: ModelConfig, family: Family, read: Reader, like: str
) -> tuple[ModelConfig, str]:  # fmt: skip
    """Returns the class of an export, `like` if it has the tensors, and the model as it has it.

    It may have no head where the model's adds nothing to the embedding.
    """
    architecture = family.architecture(config)
    for ending, other in _ALIKE:
        if architecture.endswith(ending) and like.endswith(other):
            return config, architecture.removesuffix(ending) + other
    none = config.head.model_copy(update={"kind": "none", "bias": False})
    bare = config.model_copy(update={"head": none})
    if like == architecture or like != family.architecture(bare):
        return config, architecture
    bare_weights = {weight.ours for weight in family.weights(bare)}
    head_weights = [weight for weight in family.weights(config) if weight.ours not in bare_weights]
    adds = any(not weight.optional or bool(read(weight.ours).any()) for weight in head_weights)
    return (config, architecture) if adds else (bare, like)


def as_released(config: ModelConfig) -> ModelConfig:
    """Returns the config with a bias, of zeros if new, in a head that scores no ids.

    Their decoders have none for labels.
    """
    is_bare = config.decoder is not None and config.head.record.names_labels
    if not config.head.num_scores or config.head.bias or is_bare:
        return config
    return config.model_copy(update={"head": config.head.model_copy(update={"bias": True})})


def made_from(source: str) -> str:
    """Returns the beginning of a card's sentence on the origin of weights; "": it is not known."""
    return f"Made from {source}, by pretrain" if source else "Made by pretrain"


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
    """Returns README.md of an export, with secrets of the environment removed."""
    task, auto_class = _usage(config, architecture)
    facts = {
        "architecture": f"{architecture} ({config.shape})",
        "parameters": f"{num_parameters:,}, {dtype}",
        **_describe_model(config),
    }
    parts = [
        f"---\nlibrary_name: {about.library}\npipeline_tag: {task}\ntags:\n- {family.model_type}\n---",
        f"# {about.name}",
        "\n".join(f"- {key}: {value}" for key, value in facts.items()),
    ]
    licence = "No licence is stated: the head of this file takes one, as `license: apache-2.0`."
    parts.append(f"{made_from(about.source)} {__version__}. {licence}")
    if about.use:
        parts.append(f"## Use\n\n```\n{about.use}\n```")
    else:
        call = _CHATS if about.chats else _USES.get(task, _SCORES)
        parts.append(f"## Use\n\n```python\n{_program(config, auto_class, about.folder, call, has_tokenizer)}\n```")
    if about.metrics:
        rows = "\n".join(f"| {name} | {value:.6g} |" for name, value in about.metrics.items())
        parts.append(f"## Metrics\n\n| metric | value |\n|---|---|\n{rows}")
    if about.run_config:
        config_lines = f"```yaml\n{about.run_config.strip()}\n```"
        summary = "<summary>Config of the run: what differs from the defaults</summary>"
        parts.append(f"<details>\n{summary}\n\n{config_lines}\n\n</details>")
    return redact("\n\n".join(parts) + "\n")


def _describe_model(config: ModelConfig) -> dict[str, Any]:
    stacks = filter(None, (config.encoder, config.decoder))
    layers = "+".join(str(stack.layers) for stack in stacks)
    facts: dict[str, Any] = {"layers, width, heads": f"{layers}, {config.last_stack.width}, {config.last_stack.heads}"}
    if config.input is None or config.captions:
        facts |= {"vocabulary": config.vocab_size, "longest sequence": config.max_seq_len}
    if config.input is not None:
        size = f"{config.input.image} x {config.input.image} x {config.input.channels}"
        facts |= {"image": size, "patch": f"{config.input.size} x {config.input.size}"}
    if config.head.labels:
        facts["labels"] = ", ".join(config.head.labels)
    return facts


def _program(config: ModelConfig, auto_class: str, folder: str, use: str, has_tokenizer: bool) -> str:
    """Returns lines of Python that load a model by transformers and use it."""
    classes = {"model": auto_class}
    if has_tokenizer:
        classes["tokenizer"] = "AutoTokenizer"
    if config.input is not None:
        classes["processor"] = "AutoImageProcessor"
    lines = [f"from transformers import {', '.join(classes.values())}", ""]
    lines.append(f'name = "{folder}"  # this folder, or its name on the hub')
    lines += [f"{name} = {loader}.from_pretrained(name)" for name, loader in classes.items()]
    if has_tokenizer and not config.captions:
        lines.append(use)
    if config.input is not None:
        call = _CAPTIONS if config.captions and has_tokenizer else _SEES
        lines.append(call.replace("{mode}", "L" if config.input.channels == 1 else "RGB"))
    return "\n".join(lines)


class _ShardPlan:
    """The file of each weight, decided from shapes; `total_bytes` is the size of all files."""

    def __init__(
        self,
        config: ModelConfig,
        family: Family,
        dtype: torch.dtype,
        max_shard_bytes: int,
        constants: Mapping[str, Tensor],
    ) -> None:
        self._dtype = dtype
        self._constants = constants
        self._prefix = family.prefix, family.written.get(config.head.kind, family.prefix)
        shapes = parameter_shapes(config)
        weights = family.weights(config)
        assert sorted(weight.ours for weight in weights) == sorted(shapes)
        self._shapes: dict[str, dict[str, Shape]] = {}
        self._shards: list[list[Weight]] = []
        self.total_bytes = self.num_parameters = room = 0
        for weight in weights:
            theirs = their_shapes(weight, shapes[weight.ours])
            self.num_parameters += sum(map(prod, theirs.values()))
            theirs |= dict.fromkeys((*weight.unread, *weight.copies), next(iter(theirs.values())))
            written = {self._written(name): shape for name, shape in theirs.items()}
            self._shapes[weight.ours] = written
            size = sum(prod(shape) for shape in theirs.values()) * dtype.itemsize
            if not self._shards or size > room:
                self._shards.append([])
                room = max_shard_bytes
            self._shards[-1].append(weight)
            self.total_bytes += size
            room -= size
        for name, values in constants.items():
            self._shapes[name] = {name: tuple(values.shape)}
            self._shards[-1].append(Weight(name, ((name, len(values)),)))
            self.total_bytes += values.numel() * dtype.itemsize

    def _written(self, name: str) -> str:
        prefix, written = self._prefix
        return written + name.removeprefix(prefix) if name.startswith(prefix) else name

    def write(self, folder: Path, read: Reader) -> None:
        """Writes every shard, and the index of several. Raises: DiskError."""
        if len(self._shards) == 1:
            self._write_shard(folder / WEIGHTS, self._shards[0], read)
            return
        place: dict[str, str] = {}
        stem, _, suffix = WEIGHTS.rpartition(".")
        for number, weights in enumerate(self._shards, start=1):
            name = f"{stem}-{number:05d}-of-{len(self._shards):05d}.{suffix}"
            self._write_shard(folder / name, weights, read)
            place |= {theirs: name for weight in weights for theirs in self._shapes[weight.ours]}
        index = {"metadata": {"total_size": self.total_bytes}, "weight_map": place}
        write_json(folder / f"{WEIGHTS}.index.json", index)

    def _write_shard(self, path: Path, weights: list[Weight], read: Reader) -> None:
        stored_as = _SAFETENSORS[self._dtype]
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for weight in weights:
            for name, shape in self._shapes[weight.ours].items():
                start = end
                end += prod(shape) * self._dtype.itemsize
                offsets = [start, end]
                header[name] = {"dtype": stored_as, "shape": shape, "data_offsets": offsets}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # the format aligns tensors to 8 bytes

        def chunks() -> Iterator[memoryview]:
            yield memoryview(struct.pack("<Q", len(text)) + text)
            for weight in weights:
                # One parameter at a time is in memory.
                constant = self._constants.get(weight.ours)
                made = [] if constant is None else [(weight.ours, constant)]
                made = made or to_theirs(weight, read(weight.ours))
                again = [(copy, made[0][1]) for copy in (*weight.unread, *weight.copies)]
                for name, tensor in [*made, *again]:
                    shape = self._shapes[weight.ours][self._written(name)]
                    assert tuple(tensor.shape) == shape, name
                    stored = tensor.detach().to(device="cpu", dtype=self._dtype).contiguous()
                    yield memoryview(stored.view(-1).view(torch.uint8).numpy())

        write_chunks(path, chunks())
