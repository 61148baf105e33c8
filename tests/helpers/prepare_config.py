"""Configs of `prepare` for tests, by the options of the short form and what else a test changes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pretrain.config.load import short_prepare
from pretrain.config.prepare import PrepareConfig

SHORT = ("tokenizer", "vocab_size", "text_field", "split", "on_error")


def prepare_config(output: Path, inputs: Sequence[str | Path] = (), **changes: Any) -> PrepareConfig:
    """Returns a config: options of the short form, and top-level keys of the config over what these give."""
    short = {name: changes.pop(name) for name in SHORT if name in changes}
    base = short_prepare(output, [str(path) for path in inputs], **short)
    return PrepareConfig.model_validate(base.model_dump() | changes)


def labels_config(
    output: Path, path: Path, kind: str, *, fields: dict[str, str] | None = None, **changes: Any
) -> PrepareConfig:
    """Returns a config of labelled texts, of `kind` classes or tags, in one file; nothing held out."""
    values = {"output": str(output), "kind": kind, "inputs": [{"path": str(path), **(fields or {})}], "split": "hash:0"}
    return PrepareConfig.model_validate({**values, "tokenizer": {"kind": "bpe", "vocab_size": 300}, **changes})
