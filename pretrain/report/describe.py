"""`pretrain inspect`: the facts of a shard folder, a run, a checkpoint, a model folder or a Hugging Face folder."""

import json
import math
from pathlib import Path
from typing import Any

from pretrain.checkpoint.layout import MANIFEST, MODEL_FILE, list_checkpoints, load_manifest
from pretrain.errors import CheckpointError, DataError
from pretrain.index import INDEX_NAME, check_shards, load_index
from pretrain.rundir import RunDir


def describe(path: Path) -> dict[str, Any]:
    """Returns the facts of whatever `path` is.

    Raises:
        DataError: It is none of these, or its shards are damaged.
        CheckpointError: It is a checkpoint whose manifest is damaged, or files of which are missing or cut short.
        ConfigError: It is a run whose record is damaged.
    """
    if (path / INDEX_NAME).is_file():
        return _describe_shards(path)
    if (path / MANIFEST).is_file():
        return _describe_checkpoint(path)
    if RunDir(path).exists():
        return _describe_run(RunDir(path))
    if (path / "config.json").is_file():
        return _describe_release(path)
    raise DataError("neither a shard folder, a run, a checkpoint nor a model", where=str(path), fix="check the path")


def _describe_shards(path: Path) -> dict[str, Any]:
    index = load_index(path)
    check_shards(path, index)
    facts: dict[str, Any] = {"kind": "shards", "path": str(path), "vocab_size": index.vocab_size, "dtype": index.dtype}
    for name, split in index.splits.items():
        facts[name] = {
            "tokens": split.num_tokens,
            "documents": split.num_documents,
            "shards": len(split.shards),
            "bytes_per_token": round(split.num_bytes_text / max(split.num_tokens, 1), 3),
        }
    return facts


def _describe_checkpoint(path: Path) -> dict[str, Any]:
    manifest = load_manifest(path)
    for record in manifest.files:
        file = path / record.name
        if not file.is_file() or file.stat().st_size != record.num_bytes:
            raise CheckpointError("missing, or not of its size", where=str(file), fix="use another checkpoint")
    is_model = (path / MODEL_FILE).is_file()
    return {
        "kind": "model" if is_model else "checkpoint",
        "path": str(path),
        **({} if is_model else manifest.state),
        "parameters": sum(math.prod(shape) for shape in manifest.shapes.values()),
        "moments": manifest.moments,
        "bytes": sum(record.num_bytes for record in manifest.files),
        "written_by": manifest.topology,
    }


def _describe_release(path: Path) -> dict[str, Any]:
    from pretrain.interop.read import open_release

    release = open_release(path)
    return {
        "kind": "Hugging Face model",
        "path": str(path),
        "model_type": release.family.model_type,
        "shape": release.config.shape,
        "parameters": sum(math.prod(shape) for shape in release.shapes.values()),
        "dtype": release.dtype,
        "not_read": release.ignored,
    }


def _describe_run(run: RunDir) -> dict[str, Any]:
    record = run.read_record()
    last = record["attempts"][-1]
    return {
        "kind": "run",
        "path": str(run.path),
        "id": record["id"],
        "name": record["name"],
        "created": record["created"],
        "attempts": len(record["attempts"]),
        "last_attempt": last.get("reason", "running, or killed"),
        "checkpoints": [path.name for path in list_checkpoints(run.checkpoints)],
        "versions": last.get("versions", {}),
    }


def print_facts(facts: dict[str, Any], as_json: bool) -> None:
    """Prints facts as a table, or as JSON."""
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    for key, value in facts.items():
        table.add_row(f"[bold]{key}[/bold]", escape(_text(value)))
    Console().print(table)


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text(item)}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(str(item) for item in value) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)
