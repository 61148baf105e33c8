"""The job of one `pretrain prepare`: all checks and plans before anything is written."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.config.prepare import PrepareConfig
from pretrain.errors import ConfigError, DataError
from pretrain.prepare.duplicates import load_first
from pretrain.prepare.filters import FilterRule
from pretrain.prepare.input_parts import InputFile, InputPart, plan_part_bytes, plan_parts
from pretrain.prepare.inputs.listing import list_inputs
from pretrain.prepare.normalize import check_normalize
from pretrain.prepare.readers.dispatch import Reader
from pretrain.prepare.split import SplitRule, parse_split
from pretrain.tokenizer import DEFAULT_VOCAB_SIZE, TRAINED_KINDS, check_tokenizer, eos_id, read_given
from pretrain.tokenizer.file import parse_tokenizer

FORMAT = 1
"""Goes up when the same config would give other bytes."""


@dataclass(frozen=True)
class PrepareJob:
    """A checked config and its plan.

    Attributes:
        config: Config of the folder.
        files: Input files, as listed.
        parts: Units of work.
        rule: Split.
        given: Content of a given tokenizer.json.
        identity: Identity of a folder without its files, by dotted key: equal for equal bytes.
    """

    config: PrepareConfig
    files: list[InputFile]
    parts: list[InputPart]
    rule: SplitRule
    given: bytes | None
    identity: dict[str, Any]

    @property
    def folder(self) -> Path:
        """Shard folder."""
        return Path(self.config.output)

    @property
    def num_bytes(self) -> int:
        """Input bytes as stored."""
        return sum(part.num_bytes for part in self.parts)

    @cached_property
    def filters(self) -> FilterRule:
        """Filters of documents."""
        return FilterRule(self.config.filter)

    @cached_property
    def reader(self) -> Reader:
        """Reader of the input."""
        return Reader(tuple(self.config.inputs), self.config.kind, self.filters.fields)

    def first_of(self, part: InputPart) -> np.ndarray | None:
        """Returns a mask of the first of equal documents of a part; None: duplicates stay."""
        return load_first(self.folder, part) if self.config.filter.deduplicate else None


def plan_job(config: PrepareConfig) -> PrepareJob:
    """Checks a config and lists its input.

    Raises:
        ConfigError: Invalid values.
        DataError: Inputs that are missing or empty, or an invalid tokenizer.
        LaunchError: A package of an input is not installed, or the hub cannot be reached.
    """
    rule = parse_split(config.split, config.seed)
    if rule.kind == "tail" and config.kind != "text":
        raise ConfigError(
            f"split={config.split} cuts texts in two, which kind={config.kind} does not allow", fix="use hash:F"
        )
    if config.filter.max_chars is not None and config.filter.max_chars < config.filter.min_chars:
        raise ConfigError(
            f"filter.max_chars={config.filter.max_chars} is less than filter.min_chars={config.filter.min_chars}",
            fix="raise the first or lower the second",
        )
    if Path(config.output).is_file():
        raise ConfigError("a file, not a folder", where=config.output, fix="use another --output")
    for one in config.inputs:
        if one.normalize is not None:
            check_normalize(one.normalize)
    check_tokenizer(config.tokenizer)
    given = read_given(config.tokenizer) if config.tokenizer.kind == "given" else None
    if given is not None:
        eos_id(parse_tokenizer(given, str(config.tokenizer.path)))
    files = list_inputs(config.inputs, config.kind)
    part_bytes = config.part_bytes or plan_part_bytes(files)
    job = PrepareJob(
        config, files, plan_parts(files, part_bytes), rule, given, _identity(config, given) | {"part_bytes": part_bytes}
    )
    if not job.num_bytes:
        raise DataError(f"the input is empty ({len(files)} files, 0 bytes)", fix="give files with text in them")
    return job


def _identity(config: PrepareConfig, given: bytes | None) -> dict[str, Any]:
    """Returns {dotted key: value} of all that the output depends on, without the files."""
    values = config.model_dump(mode="json", exclude={"output": True, "inputs": {"__all__": {"path", "paired_path"}}})
    if config.tokenizer.kind in TRAINED_KINDS and config.tokenizer.kind != "char":
        values["tokenizer"]["vocab_size"] = config.tokenizer.vocab_size or DEFAULT_VOCAB_SIZE
    if given is not None:
        values["tokenizer"]["path"] = f"sha256:{hashlib.sha256(given).hexdigest()}"
    return {**dict(_leaves(values)), "format": FORMAT}


def _leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in pairs:
        name = f"{prefix}{key}"
        if isinstance(value, dict) or (isinstance(value, list) and value and isinstance(value[0], dict)):
            yield from _leaves(value, f"{name}.")
        else:
            yield name, value
