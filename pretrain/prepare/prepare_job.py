"""The job of one `pretrain prepare`: all checks and plans before anything is written."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pretrain.config.prepare import PrepareConfig
from pretrain.errors import ConfigError, DataError
from pretrain.prepare.input_parts import InputFile, InputPart, Share, plan_part_bytes, plan_parts
from pretrain.prepare.inputs.listing import list_inputs
from pretrain.prepare.normalize import check_normalize
from pretrain.prepare.output import TOKENIZER_NAME
from pretrain.prepare.progress import Progress
from pretrain.prepare.split import SplitRule, parse_split
from pretrain.tokenizer import (
    DEFAULT_VOCAB_SIZE,
    TRAINED_KINDS,
    check_tokenizer,
    eos_id,
    parse_tokenizer,
    read_given,
)

# Goes up when the same config would give other bytes.
FORMAT = 1


@dataclass(frozen=True)
class PrepareJob:
    """A checked config and its plan, of one share.

    Attributes:
        config: Config of the folder.
        share: Share of the parts.
        progress: Progress callback.
        processes: Worker processes; None: one a core.
        files: Input files, as listed.
        parts: Units of work, of all shares.
        rule: Split.
        given: Content of a given tokenizer.json.
        identity: Identity of a folder without its files, by dotted key: equal for equal bytes.
    """

    config: PrepareConfig
    share: Share
    progress: Progress
    processes: int | None
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
    def tokenizer_path(self) -> Path:
        """File of the tokenizer."""
        return self.folder / TOKENIZER_NAME

    @property
    def num_bytes(self) -> int:
        """Input bytes as stored."""
        return sum(part.num_bytes for part in self.parts)

    @cached_property
    def own_parts(self) -> list[InputPart]:
        """Parts of the share."""
        return self.share.own(self.parts)


def plan_job(config: PrepareConfig, share: Share, progress: Progress, processes: int | None) -> PrepareJob:
    """Checks a config and lists its input. Raises: ConfigError, DataError, LaunchError."""
    rule = parse_split(config.split, config.seed)
    if rule.kind == "tail" and config.kind != "text":
        what = f"split={config.split} cuts texts in two, which kind={config.kind} does not allow"
        raise ConfigError(what, fix="use hash:F")
    least = config.filter.min_chars
    most = config.filter.max_chars
    if most is not None and most < least:
        what = f"filter.max_chars={most} is less than filter.min_chars={least}"
        raise ConfigError(what, fix="raise the first or lower the second")
    if Path(config.output).is_file():
        raise ConfigError("a file, not a folder", where=config.output, fix="use another --output")
    for one in config.inputs:
        if one.normalize is not None:
            check_normalize(one.normalize)
    check_tokenizer(config.tokenizer)
    given = None
    if config.tokenizer.kind == "given":
        given = read_given(config.tokenizer)
        eos_id(parse_tokenizer(given, str(config.tokenizer.path)))
    files = list_inputs(config.inputs, config.kind)
    part_bytes = config.part_bytes or plan_part_bytes(files)
    parts = plan_parts(files, part_bytes)
    identity = _identity(config, given) | {"part_bytes": part_bytes}
    job = PrepareJob(config, share, progress, processes, files, parts, rule, given, identity)
    if not job.num_bytes:
        what = f"the input is empty ({len(files)} files, 0 bytes)"
        raise DataError(what, fix="give files with text in them")
    return job


def _identity(config: PrepareConfig, given: bytes | None) -> dict[str, Any]:
    """Returns {dotted key: value} of all that the output depends on, without the files."""
    exclude: dict[str, Any] = {"output": True, "inputs": {"__all__": {"path", "paired_path"}}}
    values = config.model_dump(mode="json", exclude=exclude)
    if config.tokenizer.kind in TRAINED_KINDS and config.tokenizer.kind != "char":
        values["tokenizer"]["vocab_size"] = config.tokenizer.vocab_size or DEFAULT_VOCAB_SIZE
    if given is not None:
        values["tokenizer"]["path"] = f"sha256:{hashlib.sha256(given).hexdigest()}"
    return {**dict(_leaves(values)), "format": FORMAT}


def _leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in pairs:
        name = f"{prefix}{key}"
        is_list_of_trees = isinstance(value, list) and value and isinstance(value[0], dict)
        if isinstance(value, dict) or is_list_of_trees:
            yield from _leaves(value, f"{name}.")
        else:
            yield name, value
