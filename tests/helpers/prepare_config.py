"""Configs of `prepare` for tests, by the options of the short form and what else a test changes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pretrain.config.load_prepare import short_prepare
from pretrain.config.prepare import PrepareConfig

SHORT = ("tokenizer", "vocab_size", "text_field", "split")


def prepare_config(output: Path, inputs: Sequence[str | Path] = (), **changes: Any) -> PrepareConfig:
    """Returns a config: options of the short form, and top-level keys of the config over what these give."""
    short = {name: changes.pop(name) for name in SHORT if name in changes}
    base = short_prepare(output, [str(path) for path in inputs], **short)
    return PrepareConfig.model_validate(base.model_dump() | changes)
