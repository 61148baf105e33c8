"""Opens a Hugging Face folder as a model of ours: config first, then names and shapes, then tensors one by one.

    config.json -> family -> ModelConfig -> names and shapes compared -> Release.read(our name) -> Tensor

Nothing is read before everything fits. One parameter is in memory at a time, whatever the size of the model.
"""

import re
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pretrain.config.model import ModelConfig
from pretrain.errors import CheckpointError, ConfigError
from pretrain.interop import FAMILIES
from pretrain.interop.family import Family, Weight, parameter_shapes
from pretrain.interop.fields import CONFIG, read_object
from pretrain.interop.tensors import Shape, TensorFolder, from_theirs, their_shapes

_READABLE = ("fp64", "fp32", "fp16", "bf16")
_SHOWN = 8
"""Names of a list that are written out in an error."""


class Release:
    """A model as it was released: its config in our terms, and its tensors on disk.

    Built by `open_release`.

    Attributes:
        folder: Where it lies.
        family: Model family.
        config: Model config in our format.
        dtype: That of most of its values: fp64, fp32, fp16 or bf16.
        shapes: Shape of each parameter of ours, padding of the vocabulary included.
        ignored: Tensors that are not read, as the files spell them.
    """

    def __init__(
        self, folder: Path, family: Family, config: ModelConfig, files: TensorFolder, spelled: dict[str, str]
    ) -> None:
        self.folder, self.family, self.config = folder, family, config
        self.shapes = parameter_shapes(config)
        self._weights = {weight.ours: weight for weight in family.weights(config)}
        read = {theirs for weight in self._weights.values() for theirs, _ in weight.theirs}
        unread = {name for name in spelled if name not in read and _is_ignored(family, name)}
        self.ignored = sorted(spelled[name] for name in unread)
        self._files = files
        self._spelled = {name: raw for name, raw in spelled.items() if name not in unread}
        assert self._weights.keys() == self.shapes.keys(), self._weights.keys() ^ self.shapes.keys()
        self._twins: dict[str, list[str]] = {}
        for alias, name in family.aliases(config).items():
            if alias in self._spelled:
                self._twins.setdefault(name, []).append(alias)
        self._check()
        self.dtype = self._count_dtypes()

    def names(self) -> list[str]:
        """Returns the names of our parameters."""
        return list(self.shapes)

    def read(self, name: str) -> Tensor:
        """Reads one parameter of ours.

        Returns:
            A new fp32 tensor of `shapes[name]`; the vocabulary's padding is zeros.

        Raises:
            CheckpointError: A tensor that the family ties is there twice, with different values.
        """
        weight = self._weights[name]
        tensors = [self._load(theirs).float() for theirs, _ in weight.theirs]
        return from_theirs(weight, tensors, self.shapes[name])

    def _load(self, name: str) -> Tensor:
        spellings = [spelling for spelling in (name, *self._twins.get(name, ())) if spelling in self._spelled]
        first, *others = (self._files.load(self._spelled[spelling]) for spelling in spellings)
        for spelling, other in zip(spellings[1:], others, strict=True):
            if not torch.equal(first, other):
                raise CheckpointError(
                    f"{spellings[0]} and {spelling} differ, but tie_word_embeddings says that they are one",
                    where=str(self.folder),
                    fix="set tie_word_embeddings=false in config.json if they are two",
                )
        return first

    def _check(self) -> None:
        """Compares names, shapes and dtypes with those that the config calls for. Raises: CheckpointError."""
        wanted: dict[str, Shape] = {}
        for weight in self._weights.values():
            wanted |= their_shapes(weight, self._shape_in_theirs(weight))
        twin_of = {twin: name for name, twins in self._twins.items() for twin in twins}
        misshapen, unexpected = [], []
        for name, raw in sorted(self._spelled.items()):
            fact, shape = self._files.facts[raw], wanted.get(twin_of.get(name, name))
            if shape is None:
                unexpected.append(raw)
            elif fact.shape != shape:
                misshapen.append(f"{raw} is {list(fact.shape)}, should be {list(shape)}")
            elif fact.dtype not in _READABLE:
                misshapen.append(f"{raw} is of dtype {fact.dtype}, should be one of {', '.join(_READABLE)}")
        missing = sorted(name for name in wanted if name not in self._spelled and name not in self._twins)
        found = {"missing": missing, "unexpected": unexpected, "misshapen": misshapen}
        if any(found.values()):
            text = "; ".join(f"{len(names)} {kind}: {_listed(names)}" for kind, names in found.items() if names)
            raise CheckpointError(
                f"the tensors are not those of {CONFIG} ({self.family.model_type}): {text}",
                where=str(self.folder),
                fix=f"give the {CONFIG} that belongs to these weights",
            )

    def _shape_in_theirs(self, weight: Weight) -> Shape:
        """Our shape, with the rows that theirs has."""
        rows = sum(count for _, count in weight.theirs)
        shape = self.shapes[weight.ours]
        assert rows == shape[0] or (weight.vocab and rows < shape[0]), f"{weight.ours} {shape}: {rows} rows in theirs"
        return (rows, *shape[1:])

    def _count_dtypes(self) -> str:
        counts: Counter[str] = Counter()
        for raw in self._spelled.values():
            counts[self._files.facts[raw].dtype] += prod(self._files.facts[raw].shape)
        return counts.most_common(1)[0][0]


def open_release(folder: Path) -> Release:
    """Opens a folder that `save_pretrained` wrote, or that was downloaded.

    Raises:
        CheckpointError: A file is missing or damaged, or the tensors are not those of the config; lists what is
            missing, unexpected and misshapen.
        ConfigError: A model type that is not known here, or a config that none of ours represents exactly.
    """
    values = read_object(folder / CONFIG)
    try:
        family = find_family(values)
        files = TensorFolder(folder)
        spelled = _spell(family, list(files.facts), folder)
        config = family.read_config(values, frozenset(spelled))
    except ConfigError as error:
        raise ConfigError(error.what, where=str(folder / CONFIG), fix=error.fix) from None
    return Release(folder, family, config, files, spelled)


def find_family(values: dict[str, Any]) -> Family:
    """Returns the family of a config.json. Raises: ConfigError, which lists the known ones."""
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ConfigError(f"model_type={model_type!r} is not known", where=CONFIG, fix=f"known: {', '.join(FAMILIES)}")
    if values.get("quantization_config") is not None:
        raise ConfigError("the weights are quantized (quantization_config)", where=CONFIG, fix="use the original ones")
    return FAMILIES[model_type]


def _spell(family: Family, names: list[str], folder: Path) -> dict[str, str]:
    """Returns, for each tensor's name as the family's `weights` spells it, the name in the files."""
    spelled: dict[str, str] = {}
    for raw in names:
        name = raw
        for pattern, replacement in family.renames:
            name = re.sub(pattern, replacement, name)
        if name in spelled:
            raise CheckpointError(f"{raw} and {spelled[name]} are one tensor", where=str(folder), fix="remove one")
        spelled[name] = raw
    if any(name.startswith(family.prefix) for name in spelled):
        return spelled
    return {family.prefix + name: raw for name, raw in spelled.items()}


def _is_ignored(family: Family, name: str) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in family.ignored)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
