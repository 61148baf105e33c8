"""`pretrain inspect`: the facts of a shard folder, a run, a checkpoint, a model folder or a Hugging Face folder."""

import json
import math
from pathlib import Path
from typing import Any

from pretrain.checkpoint.best import read_best
from pretrain.checkpoint.layout import MANIFEST, list_folders, load_manifest, step_name
from pretrain.config.load import load_config
from pretrain.errors import CheckpointError, ConfigError, DataError
from pretrain.inspect.describe_checkpoint import (
    check_sizes,
    describe_checkpoint,
    describe_model,
    summary_of_files,
    verify_checkpoint,
)
from pretrain.run.folder import RunDir
from pretrain.shards.index import INDEX_NAME, check_shards, load_index


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
        return describe_checkpoint(path)
    if RunDir(path).exists():
        return _describe_run(RunDir(path))
    if (path / "config.json").is_file():
        return _describe_release(path)
    raise DataError("neither a shard folder, a run, a checkpoint nor a model", where=str(path), fix="check the path")


def verify(path: Path) -> dict[str, list[str]]:
    """Reads every byte of a checkpoint, a model folder, or all checkpoints of a run, and compares it with the CRC32s.

    Returns:
        What is wrong with each: a line for each bad file or chunk; none where it is whole.

    Raises:
        ConfigError: What is there carries no checksums of ours.
        CheckpointError: It is a run without a checkpoint.
    """
    if (path / MANIFEST).is_file():
        return {str(path): verify_checkpoint(path)}
    if (path / INDEX_NAME).is_file():
        raise ConfigError("a shard folder has its own proof", where=str(path), fix=f"run `pretrain data verify {path}`")
    if not RunDir(path).exists():
        raise ConfigError("it has no checksums to verify", where=str(path), fix="give a run, a checkpoint or a model")
    found = list_folders(RunDir(path).checkpoints)
    if not found:
        raise CheckpointError("this run has no checkpoint", where=str(path), fix="check the path")
    return {str(checkpoint): verify_checkpoint(checkpoint) for checkpoint in found}


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


def _describe_release(path: Path) -> dict[str, Any]:
    from pretrain.interop.read import open_release

    release = open_release(path)
    return {
        "kind": "Hugging Face model",
        "path": str(path),
        "model_type": release.family.model_type,
        "model": describe_model(release.config),
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
        "model": _model_of(run),
        **_describe_checkpoints(run),
        "versions": last.get("versions", {}),
    }


def _model_of(run: RunDir) -> str:
    try:
        return describe_model(load_config(run.config, import_extensions=False).model)
    except ConfigError:
        return "not known: config.yaml is missing or damaged"


def _describe_checkpoints(run: RunDir) -> dict[str, Any]:
    """Returns the names of a run's checkpoints, what is damaged at a glance, and where the newest other one stands."""
    found = list_folders(run.checkpoints)
    facts: dict[str, Any] = {"checkpoints": [path.name for path in found]}
    best = read_best(run.checkpoints)
    if best is not None:
        facts["best"] = {"checkpoint": step_name(best.step), best.metric: best.value}
    damaged = {}
    for path in reversed(found):
        try:
            manifest = load_manifest(path)
            check_sizes(path, manifest)
        except CheckpointError as error:
            damaged[path.name] = error.what
            continue
        state = {key: manifest.state[key] for key in ("step", "tokens") if key in manifest.state}
        facts["newest"] = {**state, **summary_of_files(path, manifest), "written_by": manifest.topology}
        break
    aside = sorted(path.name for path in run.checkpoints.glob("step-*.*")) if run.checkpoints.is_dir() else []
    return facts | ({"damaged": damaged} if damaged else {}) | ({"set_aside": aside} if aside else {})


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
