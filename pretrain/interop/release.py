"""Opens a Hugging Face folder as a model of ours: config, names and shapes, then tensors one by one.

    name on the hub -> fetch_release -> folder
    config.json -> family -> ModelConfig -> names and shapes compared -> Release.read -> Tensor

Config, weights, tokenizer and generation settings are fetched, never code.
No tensor is read before everything fits. One parameter is in memory at a time.
"""

import logging
import re
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pretrain.config.model import ModelConfig, PatchesConfig
from pretrain.errors import CheckpointError, ConfigError
from pretrain.families import FAMILIES
from pretrain.families.config_json import CONFIG, Fields
from pretrain.families.family import Family, Weight
from pretrain.families.label_names import check_head
from pretrain.interop.nearest_family import unknown_model_type
from pretrain.interop.release_files import (
    GENERATION,
    PICKLED_WEIGHTS,
    PREPROCESSOR,
    WEIGHTS,
    read_object,
    read_preprocessor,
)
from pretrain.interop.sentence_folder import FILES, read_sentence_folder
from pretrain.interop.tensors import Shape, TensorFolder, constant_tensors, from_theirs, parameter_shapes, their_shapes
from pretrain.tokenizer.released import SETTINGS_FILES, VOCABULARY_FILES
from pretrain.utils.foreign_files import name_model
from pretrain.utils.hub import fetch_files, is_hub_name
from pretrain.utils.units import listed

log = logging.getLogger(__name__)

_READABLE = ("fp64", "fp32", "fp16", "bf16")
BUFFERS = r"(.*\.)?(inv_freq|original_inv_freq|(cos|sin)_cached|position_ids|token_type_ids)"
"""Constants that models of theirs save beside their weights."""
_WITH_SECOND_HEAD = "ForPreTraining"
"""Ending of classes that may predict more than a model of ours does, as BERT's the next sentence."""
_SHOWN = 8
"""Names of a list that are written out in an error."""


def fetch_release(name_or_dir: str) -> Path:
    """Returns the folder of a Hugging Face model.

    Args:
        name_or_dir: A folder; or a name on the hub, `owner/model`, which is fetched: safetensors,
            or without them the `.bin` files.

    Raises:
        ConfigError: Neither a folder nor a name; or the hub has no such model, or refuses access.
        LaunchError: The hub cannot be reached, and the cache lacks the model.
        DiskError: No room for it.
    """
    path = Path(name_or_dir).expanduser()
    foreign = None if (path / CONFIG).is_file() or not name_or_dir else name_model(path)
    if foreign is not None:
        raise ConfigError(foreign[0], where=name_or_dir, fix=foreign[1])
    if name_or_dir and path.is_dir():
        return path
    if path.is_file() or not is_hub_name(name_or_dir):
        raise ConfigError(
            f"{name_or_dir!r} is neither a folder nor a name on the Hugging Face hub",
            fix="check the path",
        )
    for weights in (WEIGHTS, PICKLED_WEIGHTS):
        # In one file or in shards; a repository may have the same weights in other layouts too.
        stem, _, suffix = weights.rpartition(".")
        layouts = [weights, f"{weights}.index.json", f"{stem}-*-of-*.{suffix}"]
        settings = (CONFIG, GENERATION, PREPROCESSOR, *SETTINGS_FILES, *VOCABULARY_FILES, *FILES)
        folder = fetch_files(name_or_dir, [*settings, *layouts])
        if any(folder.glob("*.safetensors")):
            break
    return folder


class Release:
    """A released model: its config in our terms, and its tensors on disk. Built by `open_release`.

    Attributes:
        dtype: Dtype of most of its values: fp64, fp32, fp16 or bf16.
        shapes: Shape of each parameter of ours, padding of the vocabulary included.
        ignored: Tensors that are not read, as the files spell them.
        architecture: Class that config.json names; empty: none.
    """

    def __init__(
        self,
        folder: Path,
        family: Family,
        config: ModelConfig,
        files: TensorFolder,
        architecture: str,
    ) -> None:
        self.folder, self.family, self.config = folder, family, config
        self.architecture = architecture
        self.shapes = parameter_shapes(config)
        self._weights = {weight.ours: weight for weight in family.weights(config)}
        assert self._weights.keys() == self.shapes.keys(), self._weights.keys() ^ self.shapes.keys()
        weights = self._weights.values()
        self._copies = {copy: one.theirs[0][0] for one in weights for copy in one.copies}
        self._constants = constant_tensors(family, config)
        self._files = files
        self._name_tensors()
        self._check()
        counts: Counter[str] = Counter()
        for raw in self._spelled.values():
            counts[files.facts[raw].dtype] += prod(files.facts[raw].shape)
        self.dtype = counts.most_common(1)[0][0]

    def pool(self, config: ModelConfig | None) -> None:
        """Takes the config of a model of vectors, which leaves a pooler out; None: it is none."""
        if config is not None:
            self.config = config
            self.shapes = {name: self.shapes[name] for name in parameter_shapes(config)}

    def _name_tensors(self) -> None:
        """Finds the names of tensors in the files, their twins, and what is not read."""
        read = {theirs for weight in self._weights.values() for theirs, _ in weight.theirs}
        unused = {theirs for weight in self._weights.values() for theirs in weight.unread}
        aliases = {alias: name for alias, name in self.family.aliases.items() if alias not in read}
        aliases |= self._copies
        patterns = [re.compile(pattern) for pattern in (*self.family.ignored, BUFFERS)]
        spelled = self._spell(read | unused | aliases.keys() | self._constants.keys(), patterns)
        unread = self._unread({name: spelled[name] for name in spelled.keys() - read}, patterns) | (
            spelled.keys() & unused
        )
        self.ignored = sorted(spelled[name] for name in unread)
        self._spelled = {name: raw for name, raw in spelled.items() if name not in unread}
        self._twin_of = {alias: name for alias, name in aliases.items() if alias in self._spelled}

    def _unread(self, spelled: dict[str, str], patterns: list[re.Pattern[str]]) -> set[str]:
        unread = {name for name in spelled if any(pattern.fullmatch(name) for pattern in patterns)}
        if self._files.listed:
            # Of an index what it does not list is read only where it is needed.
            unread |= {name for name, raw in spelled.items() if raw not in self._files.listed}
        return unread

    def read(self, name: str) -> Tensor:
        """Reads one parameter of ours.

        Returns:
            A new fp32 tensor of `shapes[name]`; the vocabulary's padding is zeros.

        Raises:
            CheckpointError: A shared tensor is stored twice, with different values.
        """
        weight = self._weights[name]
        if weight.optional and weight.theirs[0][0] not in self._spelled:
            return torch.zeros(self.shapes[name])
        tensors = [self._load(theirs).float() for theirs, _ in weight.theirs]
        return from_theirs(weight, tensors, self.shapes[name])

    def _load(self, name: str) -> Tensor:
        twins = [alias for alias, tied in self._twin_of.items() if tied == name]
        first, *rest = [spelling for spelling in (name, *twins) if spelling in self._spelled]
        tensor = self._files.load(self._spelled[first])
        for other in rest:
            if not torch.equal(tensor, self._files.load(self._spelled[other])):
                if other in self._copies:
                    raise CheckpointError(
                        f"{first} and {other} differ, and are one in models of {self.family.model_type}",
                        where=str(self.folder),
                        fix="fetch the model again",
                    )
                raise CheckpointError(
                    f"{first} and {other} differ, but tie_word_embeddings says that they are one",
                    where=str(self.folder),
                    fix="set tie_word_embeddings=false in config.json if they are two",
                )
        return tensor

    def _spell(self, names: set[str], ignored: list[re.Pattern[str]]) -> dict[str, str]:
        """Returns names in the files by names in the family's `weights`; one of two equal ones.

        Raises: CheckpointError: Two names are one tensor, with different values.
        """
        spelled: dict[str, str] = {}
        for raw in self._files.facts:
            forms = _forms(self.family, raw)
            of_weights = (one for one in forms if one in names)
            of_ignored = (one for one in forms if any(pattern.fullmatch(one) for pattern in ignored))
            name = next(of_weights, None) or next(of_ignored, forms[0])
            if name not in spelled:
                spelled[name] = raw
            elif not torch.equal(self._files.load(raw), self._files.load(spelled[name])):
                raise CheckpointError(
                    f"{raw} and {spelled[name]} are one tensor, with different values",
                    where=str(self.folder),
                    fix="remove one",
                )
        return spelled

    def _check(self) -> None:
        """Compares names, shapes and dtypes with the config's. Raises: CheckpointError."""
        wanted: dict[str, Shape] = {name: tuple(values.shape) for name, values in self._constants.items()}
        for weight in self._weights.values():
            wanted |= self._expected(weight)
        misshapen = []
        unexpected = []
        for name, raw in sorted(self._spelled.items()):
            fact = self._files.facts[raw]
            expected = wanted.get(self._twin_of.get(name, name))
            if expected is None:
                unexpected.append(raw)
            elif fact.shape != expected:
                misshapen.append(f"{raw} is {list(fact.shape)}, should be {list(expected)}")
            elif fact.dtype not in _READABLE:
                misshapen.append(f"{raw} is of dtype {fact.dtype}, should be one of {', '.join(_READABLE)}")
        there = self._spelled.keys() | set(self._twin_of.values())
        there |= {one.theirs[0][0] for one in self._weights.values() if one.optional}
        missing = sorted(wanted.keys() - there)
        problems = {"missing": missing, "unexpected": unexpected, "misshapen": misshapen}
        parts = [f"{len(names)} {kind}: {listed(names, _SHOWN)}" for kind, names in problems.items() if names]
        if parts:
            fix = f"give the {CONFIG} that belongs to these weights"
            if missing and set(missing) <= self.family.aliases.keys():
                fix = "set tie_word_embeddings=true in it if the scores are those of the embedding"
            raise CheckpointError(
                f"the tensors are not those of {CONFIG} ({self.family.model_type}): {'; '.join(parts)}",
                where=str(self.folder),
                fix=self._files.advise(missing) or fix,
            )
        self._check_constants()

    def _expected(self, weight: Weight) -> dict[str, Shape]:
        """Returns the shapes of tensors of theirs, of any rows where `Weight.shape` says so."""
        shapes = their_shapes(weight, self.shapes[weight.ours])
        is_cut_anywhere = weight.shape is not None and weight.shape[0] == -1
        if weight.shape is None or not is_cut_anywhere or not shapes.keys() <= self._spelled.keys():
            return shapes
        there = {name: self._files.facts[self._spelled[name]].shape for name in shapes}
        rows = sum(shape[0] for shape in shapes.values())
        fits = rows == sum(shape[0] for shape in there.values() if shape[1:] == weight.shape[1:])
        return there if fits else shapes

    def _check_constants(self) -> None:
        for name, values in self._constants.items():
            # Values up to 1, in 16 bits.
            if not torch.allclose(self._load(name).float(), values, rtol=0, atol=1e-2):
                raise CheckpointError(
                    f"{self._spelled[name]} has other values than the fixed ones of {self.family.model_type}",
                    where=str(self.folder),
                    fix="no model of ours has learned ones there",
                )


def open_release(folder: Path) -> Release:
    """Opens a folder that `save_pretrained` wrote, or that was downloaded.

    Raises:
        CheckpointError: A file is missing or damaged, or the tensors are not those of the config;
            lists what is missing, unexpected and misshapen.
        ConfigError: An unknown model type, or a config that none of ours represents exactly.
    """
    values = read_object(folder / CONFIG)
    try:
        family = _find_family(values)
        files = TensorFolder(folder, _scale_block(values))
        names = frozenset(form for raw in files.facts for form in _forms(family, raw))
        config = family.read_config(values, names)
        check_head(values, config)
        if config.input is not None:
            # Normalisation of pixels is a part of our model, and of their processor.
            patches = config.input.model_dump() | read_preprocessor(folder)
            config = config.model_copy(update={"input": PatchesConfig.model_validate(patches)})
        # An export is of this family, where several represent the model.
        config = config.model_copy(update={"family": family.model_type})
    except ConfigError as error:
        raise ConfigError(error.what, where=str(folder / CONFIG), fix=error.fix) from None
    release = Release(folder, family, config, files, next(iter(Fields(values).classes), ""))
    release.pool(read_sentence_folder(folder, config))
    read_as = family.architecture(config)
    if release.architecture.endswith(_WITH_SECOND_HEAD) and release.architecture != read_as:
        text = "%s: a %s is read, and exported, as %s, without %s"
        log.warning(text, folder, release.architecture, read_as, ", ".join(release.ignored))
    return release


def _find_family(values: dict[str, Any]) -> Family:
    """Returns the family of a config.json. Raises: ConfigError, which names the nearest."""
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise unknown_model_type(values)
    return FAMILIES[model_type]


def _scale_block(values: dict[str, Any]) -> tuple[int, int] | None:
    """Returns the rows and columns that share a scale, of weights in FP8; None: they are not quantized.

    Raises: ConfigError: They are quantized otherwise.
    """
    fields = Fields(values)
    if values.get("quantization_config") is None:
        return None
    method = Fields(fields.section("quantization_config"))
    block = [1, 1] if method.values.get("weight_block_size") is None else method.numbers("weight_block_size")
    is_fp8 = method.values.get("quant_method") == "fp8"
    if not is_fp8 or len(block) != 2 or not all(size >= 1 for size in block):
        raise ConfigError(
            "the weights are quantized (quantization_config), and in FP8 with scales alone can be read",
            where=CONFIG,
            fix="use the original ones",
        )
    return int(block[0]), int(block[1])


def _forms(family: Family, raw: str) -> list[str]:
    """Returns names that a tensor may have in `weights`: the raw one, with the prefix, without it.

    As `from_pretrained`, which adds or drops the prefix of each name that the model lacks otherwise.
    """
    prefixes = [prefix for prefix in (family.prefix, *family.written.values()) if prefix]
    forms = [raw, *(raw.removeprefix(prefix) for prefix in prefixes)]
    for pattern, replacement in family.renames:
        forms = [re.sub(pattern, replacement, form) for form in forms]
    return [forms[0], family.prefix + forms[0], *forms[1:]]
