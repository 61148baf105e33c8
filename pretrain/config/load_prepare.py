"""What `pretrain prepare` is told, as a file or as options, to one PrepareConfig.

load_prepare   CONFIG [a.b=c ...]
short_prepare  --input ... --output ... --tokenizer ..., the short form
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pretrain.config.load import load_section, parse_section
from pretrain.config.prepare import PrepareConfig
from pretrain.config.yaml_nodes import Located
from pretrain.errors import ConfigError

TRAINED = ("bpe", "wordpiece", "unigram", "char")

_PLACES = {
    "split": "--split",
    "inputs.0.text_field": "--text-field",
    "inputs.0.max_document_bytes": "--max-document-bytes",
    "tokenizer.vocab_size": "--vocab-size",
}


def load_prepare(source: str | Path, overrides: Sequence[str] = ()) -> PrepareConfig:
    """Loads a YAML file with `a.b=c` items laid over it. Raises: ConfigError, with a line for every problem."""
    return load_section(PrepareConfig, source, overrides)


def short_prepare(
    output: str | Path,
    inputs: Sequence[str] = (),
    *,
    tokenizer: str = "bpe",
    vocab_size: int | None = None,
    text_field: str = "text",
    max_document_bytes: int | None = None,
    split: str = "hash:0.01",
) -> PrepareConfig:
    """Returns the config that the options of the short form stand for.

    Args:
        output: The shard folder.
        inputs: Files, folders, globs and URLs. Empty: the running Python's standard library.
        tokenizer: A kind that is trained, or what `tokenizer.path` takes.
        vocab_size: Of a trained tokenizer; not of `char`.
        text_field: Key of the text in a record.
        max_document_bytes: A longer document or line is refused. None: the default of an input.
        split: `hash:F` or `tail:F`.

    Raises:
        ConfigError: Values that cannot be.
    """
    is_trained = tokenizer in TRAINED
    if vocab_size is not None and (not is_trained or tokenizer == "char"):
        raise ConfigError(f"vocab_size={vocab_size} does not go with tokenizer={tokenizer}", fix="leave it out")
    chosen: dict[str, Any] = {"kind": tokenizer} if is_trained else {"kind": "given", "path": tokenizer}
    one: dict[str, Any] = {"path": list(inputs), "text_field": text_field}
    if max_document_bytes is not None:
        one["max_document_bytes"] = max_document_bytes
    values: dict[str, Any] = {
        "output": str(output),
        "inputs": [one] if inputs else [],
        "tokenizer": {**chosen, "vocab_size": vocab_size},
        "split": split,
    }
    return parse_section(PrepareConfig, Located(values, dict(_PLACES)), "pretrain prepare")
