"""A model on disk, described but not loaded: its config, a reader of each weight, tokenizer and generation settings.

`ModelSource` is any model; `AdaptedModel` is one read as another architecture; `MergedModel` is one with LoRA adapters.
"""

import hashlib
import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pretrain.checkpoint.format import load_manifest
from pretrain.checkpoint.load import WeightReader
from pretrain.config.recurrent import AnyModelConfig
from pretrain.config.run import RunConfig
from pretrain.errors import CheckpointError
from pretrain.generate.constraints import Codec
from pretrain.interop.family import parameter_shapes
from pretrain.interop.generation import GenerationDefaults
from pretrain.run.folder import RunDir

TOKENIZER_FOLDER = "tokenizer"

TokenizerFiles = list[tuple[str, bytes]]


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model on disk.

    Attributes:
        path: The checkpoint or folder that holds its weights.
        config: The model; `vocab_size` and, where they are known, its special tokens are filled in.
        read: Returns one parameter by name, fp32, whole.
        shapes: Shape of every parameter that can be read, by name.
        load_codec: Loads the tokenizer. Raises DataError where there is none.
        load_tokenizer_files: Returns (name, content) of the files that Hugging Face reads the tokenizer from; empty
            where there is none.
        generation: Settings that the model's makers generate with.
        run: The run that it came from; None where it was imported.
        read_part: Fills a 1-D tensor with the elements of a parameter from an offset on, and reads no more; None where
            a parameter is read whole or not at all.
        merged: The adapters that `read` merges, and the model under them; None where there are none.
    """

    path: Path
    config: AnyModelConfig
    read: Callable[[str], Tensor]
    shapes: Mapping[str, tuple[int, ...]]
    load_codec: Callable[[], Codec]
    load_tokenizer_files: Callable[[], TokenizerFiles]
    generation: GenerationDefaults
    run: RunDir | None = None
    read_part: Callable[[str, int, Tensor], None] | None = None
    merged: "MergedModel | None" = None

    @property
    def names(self) -> frozenset[str]:
        """Every parameter that can be read."""
        return frozenset(self.shapes)


# Transfer to another architecture: a larger vocabulary or another head; any other difference is an error.
#
#   same name, same shape        copied
#   embeddings, scores of ids    new tokens get the mean of the existing rows, so that they are as likely as an
#                                average token (Hewitt 2021, "Initializing New Word Embeddings")
#   another head                 initialised
HEAD_PARTS = ("head.", "pooler.")
SCORES = ("head.weight", "head.bias")

Shape = tuple[int, ...]


class AdaptedModel:
    """The weights of one model, read as those of another architecture.

    Args:
        source: Model to read weights from.
        model: Config of the new model; `vocab_size` and labels are filled in.
        shapes: Shape of every parameter of the new model.

    Attributes:
        source: Model to read weights from.
        shapes: Shape of every parameter of the new model.
        anew: Names of parameters that are initialised, not read.
        left: Shape of each parameter of `source` that is not used.
        num_added: Tokens that the vocabulary of `source` lacks.

    Raises:
        CheckpointError: A parameter outside of the head has another shape, or none.
    """

    def __init__(self, source: "ModelSource", model: AnyModelConfig, shapes: Mapping[str, Shape]) -> None:
        self.source, self.shapes = source, shapes
        theirs = source.config
        assert model.vocab_size is not None and theirs.vocab_size is not None
        self._old, self._new = theirs.vocab_size, model.vocab_size
        self.num_added = max(0, self._new - self._old)
        is_lm = model.head.kind == theirs.head.kind == "lm"
        self._tables = {"embedding.weight", *(SCORES if is_lm else ())}
        may_lack = HEAD_PARTS if model.head.kind == "labels" or model.head.kind != theirs.head.kind else ()
        same_scores = is_lm or (model.head.kind == theirs.head.kind and model.head.labels == theirs.head.labels)
        self.anew: set[str] = set()
        for name, shape in self.shapes.items():
            if self._fits(name, shape) and (name not in SCORES or same_scores):
                continue
            if not name.startswith(may_lack or ("\0",)):
                raise self._refusal(name, shape)
            self.anew.add(name)
        self.left = {n: shape for n, shape in source.shapes.items() if n not in self.shapes or n in self.anew}
        self._crcs: dict[str, int] = {}
        self._last: tuple[str, Tensor] | None = None

    def _fits(self, name: str, shape: Shape) -> bool:
        theirs = self.source.shapes.get(name)
        if theirs is not None and name in self._tables and self._new >= self._old:
            return theirs[1:] == shape[1:]
        return theirs == shape

    def _refusal(self, name: str, shape: Shape) -> CheckpointError:
        theirs = self.source.shapes.get(name)
        found = "no such parameter" if theirs is None else f"shape {list(theirs)}"
        return CheckpointError(
            f"{name} has shape {list(shape)} in this model, in the checkpoint {found}",
            where=str(self.source.path),
            fix="use the config that the checkpoint was trained with, or leave the keys of model out",
        )

    def __contains__(self, name: str) -> bool:
        return name in self.shapes and name not in self.anew

    def read(self, name: str) -> Tensor:
        """Returns one parameter, fp32, whole. Raises: CheckpointError."""
        weight, shape = self.source.read(name), self.shapes[name]
        if name in self._tables and (self.num_added or weight.shape != shape):
            weight = self._grow(weight, shape)
        self._crcs[name] = zlib.crc32(memoryview(weight.contiguous().view(-1).numpy()))
        return weight

    def read_part(self, name: str, offset: int, out: Tensor) -> None:
        """Fills a 1-D tensor with elements of a parameter, by ranges where it can. Raises: CheckpointError."""
        if (
            self.source.read_part is not None
            and self.source.shapes[name] == self.shapes[name]
            and not self._grows(name)
        ):
            self.source.read_part(name, offset, out)
            return
        if self._last is None or self._last[0] != name:
            self._last = (name, self.read(name).view(-1))
        out.copy_(self._last[1][offset : offset + out.numel()])

    def _grows(self, name: str) -> bool:
        return bool(self.num_added) and name in self._tables

    def _grow(self, weight: Tensor, shape: Shape) -> Tensor:
        grown = torch.zeros(shape)
        known = weight[: self._old]
        grown[: self._old] = known
        if self.num_added:
            grown[self._old : self._new] = known.mean(dim=0, dtype=torch.float64).float()
        return grown

    def fingerprint(self) -> str:
        """Returns a sha256 over the CRC32 of every copied parameter; reads those not read so far."""
        for name in self.shapes:
            if name in self and name not in self._crcs:
                self.read(name)
        text = "".join(f"{name} {self.shapes[name]} {self._crcs[name]}\n" for name in sorted(self._crcs))
        return hashlib.sha256(text.encode()).hexdigest()

    def describe(self) -> list[str]:
        """Returns a description of the transfer, line by line."""
        sizes = {name: math.prod(self.shapes[name]) for name in self.shapes if name in self}
        line = f"weights are those of {self.source.path}: {len(sizes)} parameters, {sum(sizes.values()):,} values"
        if self.anew:
            line = f"weights are those of {self.source.path}, but for these, which begin anew: " + _listed(
                {name: self.shapes[name] for name in self.anew}
            )
        lines = [line + (f"; left there: {_listed(self.left)}" if self.left else "")]
        if self.num_added:
            tables = ", ".join(sorted(self._tables & self.shapes.keys()))
            lines.append(f"{self.num_added} tokens are new to the model of {self._old:,}: their rows of {tables} are "
                         f"the mean of the others")  # fmt: skip
        return lines


def _listed(shapes: Mapping[str, Shape]) -> str:
    names = sorted(shapes)
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(f"{name} {list(shapes[name])}" for name in names[:8]) + more


# Checkpoints of adapters. Names are peft's, but for `base_layer`, which says only that a layer has an adapter.
#
#   X.lora_A.default.weight [r, in], X.lora_B.default.weight [out, r]   X.weight + alpha / r * B A (Hu 2022, 4.1)
#   any other parameter of the checkpoint                               in place of the model's own
A_SUFFIX, B_SUFFIX = ".lora_A.default.weight", ".lora_B.default.weight"


def is_adapter(name: str) -> bool:
    """Whether a parameter is one of an adapter's two matrices."""
    return name.endswith((A_SUFFIX, B_SUFFIX))


def name_without_adapter(name: str) -> str:
    """Returns the name that a parameter has in a model without adapters."""
    return name.replace(".base_layer.", ".")


class MergedModel:
    """A model with adapters merged into it.

    Args:
        base: Base model of the adapters.
        trained: Checkpoint of the adapters.
        scale: Factor of the product of an adapter's matrices, alpha / rank.

    Attributes:
        base: Base model of the adapters.
        shapes: Shape of every parameter.
        layers: Names of the layers that have an adapter.
        replaced: Names of the parameters that were trained in full.
    """

    def __init__(self, base: AdaptedModel, trained: WeightReader, scale: float) -> None:
        self.base, self.shapes, self.scale = base, base.shapes, scale
        self._trained = trained
        self.layers = [name.removesuffix(A_SUFFIX) for name in trained.shapes if name.endswith(A_SUFFIX)]
        self._full = {name_without_adapter(name): name for name in trained.shapes if not is_adapter(name)}
        self.replaced = sorted(self._full)

    def matrices(self, layer: str) -> tuple[Tensor, Tensor]:
        """Returns A [r, in] and B [out, r] of a layer."""
        return self._trained.read(layer + A_SUFFIX), self._trained.read(layer + B_SUFFIX)

    def read(self, name: str) -> Tensor:
        """Returns one parameter, fp32, whole. Raises: CheckpointError."""
        if name in self._full:
            return self._trained.read(self._full[name])
        weight, layer = self.base.read(name), name.removesuffix(".weight")
        if layer not in self.layers:
            return weight
        a, b = self.matrices(layer)
        return weight + self.scale * (b @ a)


def merge_adapters(checkpoint: Path, config: RunConfig, open_other: "Callable[[Path], ModelSource]") -> MergedModel:
    """Opens a checkpoint of adapters with its base model; reads the base model once to verify its hash.

    Args:
        checkpoint: Checkpoint folder.
        config: Config of its run.
        open_other: `open_source`, which imports this module.

    Raises:
        CheckpointError: The base model is missing or has changed.
    """
    assert config.init.from_ is not None
    start = Path(config.init.from_)
    if not start.exists():
        raise CheckpointError(
            f"holds adapters of {start}, and there is nothing there",
            where=str(checkpoint),
            fix="put that model back, or call this from the folder that the run was started in",
        )
    base = AdaptedModel(open_other(start), config.model, parameter_shapes(config.model))
    check_base(str(load_manifest(checkpoint).state.get("base_hash", "")), base, str(checkpoint))
    return MergedModel(base, WeightReader(checkpoint), config.finetune.scale)


def check_base(saved: str, base: AdaptedModel, where: str) -> None:
    """Verifies that the base model has the weights that the adapters were trained with. Raises: CheckpointError."""
    found = base.fingerprint()
    if saved != found:
        raise CheckpointError(
            f"its adapters were trained beside other weights than those of {base.source.path} (sha256 {saved[:12]} -> "
            f"{found[:12]})",
            where=where,
            fix="put back the model that init.from named when the run began",
        )
