"""The facts of a checkpoint or a model folder: where it stands, its model, what wrote it, and whether it is whole."""

import json
import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pydantic

from pretrain.checkpoint.layout import MANIFEST, MODEL_FILE, Manifest, load_manifest
from pretrain.config.load import load_config
from pretrain.config.recurrent import AnyModelConfig, parse_model
from pretrain.errors import CheckpointError, ConfigError
from pretrain.run.folder import RunDir
from pretrain.utils.checksum import find_damage


def describe_checkpoint(path: Path) -> dict[str, Any]:
    """Returns the facts of a checkpoint or a model folder; reads its manifest, and the sizes of its files.

    Raises:
        CheckpointError: The manifest is damaged, or files are missing or not of their size.
    """
    manifest = load_manifest(path)
    check_sizes(path, manifest)
    is_model = (path / MODEL_FILE).is_file()
    return {
        "kind": "model" if is_model else "checkpoint",
        "path": str(path),
        **({} if is_model else {key: manifest.state[key] for key in sorted(manifest.state, key=_place)}),
        **summary_of_files(path, manifest),
        "model": _find_model(path, is_model),
        "parameters": sum(math.prod(shape) for shape in manifest.shapes.values()),
        "moments": manifest.moments,
        **({"scalars": manifest.scalars} if manifest.scalars else {}),
        "written_by": manifest.topology,
    }


def _place(key: str) -> tuple[bool, bool, str]:
    """Sorts what a state holds: where the run stands first, hashes last."""
    return key.endswith("hash"), key not in ("step", "tokens"), key


def summary_of_files(path: Path, manifest: Manifest) -> dict[str, Any]:
    """Returns when a checkpoint was written, and how much it is."""
    written = datetime.fromtimestamp((path / MANIFEST).stat().st_mtime, UTC)
    num_bytes = sum(record.num_bytes for record in manifest.files)
    return {"saved": written.isoformat(timespec="seconds"), "files": len(manifest.files), "bytes": num_bytes}


def check_sizes(path: Path, manifest: Manifest) -> None:
    """Looks for every file, and at its size. Raises: CheckpointError, which names the first that is not as it was."""
    for record in manifest.files:
        file = path / record.name
        if not file.is_file() or file.stat().st_size != record.num_bytes:
            raise CheckpointError("missing, or not of its size", where=str(file), fix="use another checkpoint")


def verify_checkpoint(path: Path) -> list[str]:
    """Reads every byte of a checkpoint; returns a line for each bad file, or each bad 16 MiB of one."""
    try:
        files = load_manifest(path).files
    except CheckpointError as error:
        return [f"{MANIFEST}: {error.what}"]
    return [problem for record in files for problem in find_damage(path / record.name, record)]


def describe_model(config: AnyModelConfig) -> str:
    """Returns a model's shape in a line: its stacks, its vocabulary and its longest sequence."""
    stacks = []
    for name in ("encoder", "decoder"):
        stack = getattr(config, name)
        if stack is None:
            continue
        if config.kind == "recurrent":
            stacks.append(f"{name} of {stack.layers} {stack.cell} layers, width {stack.width}")
        else:
            keys = f" ({stack.num_kv_heads} of keys)" if stack.num_kv_heads != stack.heads else ""
            stacks.append(f"{name} of {stack.layers} layers, width {stack.width}, {stack.heads} heads{keys}")
    vocabulary = f"vocabulary {config.vocab_size:,}, " if config.vocab_size else ""
    return f"{'; '.join(stacks)}; {vocabulary}up to {config.max_seq_len:,} tokens"


def _find_model(path: Path, is_model: bool) -> str:
    """Returns the shape of a checkpoint's model, which its run's config tells, or its own `model.json`."""
    try:
        if is_model:
            facts = json.loads((path / MODEL_FILE).read_text(encoding="utf-8"))
            return describe_model(parse_model(facts["model"]))
        config = RunDir(path.resolve().parent.parent).config
        return describe_model(load_config(config, import_extensions=False).model)
    except (ConfigError, OSError, ValueError, KeyError, TypeError, pydantic.ValidationError):
        return f"not known: {MODEL_FILE if is_model else 'config.yaml of the run'} is missing or damaged"
