"""The job of a conversion, checked before anything is written: the source, its cut into parts, its splits."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pretrain.config.prepare import TokenizerConfig
from pretrain.errors import ConfigError, DataError
from pretrain.prepare.convert import FORMATS
from pretrain.prepare.convert.token_file import ReadOptions, TokenFile
from pretrain.prepare.input_parts import InputFile, InputPart, plan_part_bytes, plan_parts
from pretrain.prepare.split import TRAIN, VALIDATION, SplitRule, parse_split
from pretrain.tokenizer import eos_id, read_given, vocabulary_size
from pretrain.tokenizer.file import parse_tokenizer

DEFAULT_SPLIT = "hash:0.01"
FORMAT = 2
"""Goes up when the same options would give other bytes."""

_VALIDATION_NAME = re.compile(r"(?:^|[^a-z])(?:val|valid|validation)(?:[^a-z]|$)")


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """Options of a conversion.

    Attributes:
        output: Shard folder.
        kind: Key of `FORMATS`.
        source: Files, folders and globs of this machine.
        tokenizer: Tokenizer that made the tokens: a tokenizer.json, a folder of Hugging Face, or a name on its hub.
        eos_id: End-of-document token. None: the tokenizer's.
        split: `hash:F`: by the hash of a document's tokens. `files`: files, or folders, named val, valid or validation
            are held out. `auto`: `files` where there are such and others, else `hash:0.01`.
        seed: Salt of the hash split.
        append_eos: True: documents that do not end with `eos_id` get it.
        boundaries: See ReadOptions.
        dtype: See ReadOptions.
        column: See ReadOptions.
        shard_tokens: A part starts a new shard at this many tokens.
        part_bytes: Bytes of the source in one unit of work. None: chosen by its size.
    """

    output: Path
    kind: str
    source: tuple[str, ...]
    tokenizer: str
    eos_id: int | None = None
    split: str = "auto"
    seed: int = 0
    append_eos: bool = False
    boundaries: str = "auto"
    dtype: str | None = None
    column: str = "tokens"
    shard_tokens: int = 2**27
    part_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class ConvertJob:
    """A checked source and its plan.

    Attributes:
        options: Options of the conversion.
        tokenizer: Content of the tokenizer.json.
        files: Files of the source, in order.
        parts: Units of work.
        splits: Split by path, of files with a split in their name.
        rule: Split of the documents of the other files.
        read: Options of the format's reader.
        identity: Identity of the output without its source.
    """

    options: ConvertOptions
    tokenizer: bytes
    files: Sequence[TokenFile]
    parts: list[InputPart]
    splits: dict[str, str]
    rule: SplitRule
    read: ReadOptions
    identity: dict[str, Any]

    @property
    def num_bytes(self) -> int:
        """Bytes of the source, as stored."""
        return sum(part.num_bytes for part in self.parts)

    @property
    def listing(self) -> list[InputFile]:
        """All files that the output is made from, each once."""
        listed = [side for opened in self.files for side in (opened.file, *opened.companions)]
        return list({side.path: side for side in listed}.values())


def plan_job(options: ConvertOptions) -> ConvertJob:
    """Opens the source and checks everything that can be checked before its tokens are read.

    Raises:
        ConfigError: Options that cannot be.
        DataError: A source or a tokenizer that is missing or damaged.
        LaunchError: A tokenizer that cannot be fetched.
    """
    if options.kind not in FORMATS:
        raise ConfigError(f"from={options.kind!r} is not a format of tokens", fix=f"use one of {', '.join(FORMATS)}")
    for name, value in (("shard_tokens", options.shard_tokens), ("part_bytes", options.part_bytes)):
        if value is not None and value < 1:
            raise ConfigError(f"{name}={value} must be at least 1", fix="leave it out")
    content = read_given(TokenizerConfig(kind="given", path=options.tokenizer))
    tokenizer = parse_tokenizer(content, options.tokenizer)
    read = ReadOptions(
        vocab_size=vocabulary_size(tokenizer),
        eos_id=eos_id(tokenizer) if options.eos_id is None else options.eos_id,
        dtype=options.dtype,
        boundaries=options.boundaries,
        column=options.column,
    )
    files = FORMATS[options.kind](options.source, read)
    stored = [opened.file for opened in files]
    if len({file.path for file in stored}) < len(stored):
        raise DataError("names a file twice", where=", ".join(options.source), fix="name each once")
    splits, rule = plan_split(stored, options.split, options.seed)
    part_bytes = options.part_bytes or plan_part_bytes(stored)
    identity = asdict(options) | {
        "tokenizer": f"sha256:{hashlib.sha256(content).hexdigest()}",
        "eos_id": read.eos_id,
        "part_bytes": part_bytes,
        "format": FORMAT,
        "from": options.kind,
    }
    for name in ("output", "source", "kind"):
        del identity[name]
    return ConvertJob(options, content, files, plan_parts(stored, part_bytes), splits, rule, read, identity)


def plan_split(files: Sequence[InputFile], split: str, seed: int) -> tuple[dict[str, str], SplitRule]:
    """Returns the split of each file whose name decides, and the rule for the documents of the others.

    Raises:
        ConfigError: `split` is none of ConvertOptions.
    """
    held_out = {file.path for file in files if _is_validation(Path(file.path))}
    if split == "files" or (split == "auto" and 0 < len(held_out) < len(files)):
        return {file.path: VALIDATION if file.path in held_out else TRAIN for file in files}, parse_split("hash:0", 0)
    rule = parse_split(DEFAULT_SPLIT if split == "auto" else split, seed)
    if rule.kind != "hash":
        raise ConfigError(f"split={split!r} cuts texts, not tokens", fix="use hash:F or files")
    return {}, rule


def _is_validation(path: Path) -> bool:
    return any(_VALIDATION_NAME.search(name.lower()) for name in (path.name, path.parent.name))
