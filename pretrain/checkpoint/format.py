"""Layout of a checkpoint folder, and its manifest.

    checkpoints/step-00001000/rank-00000.safetensors ...   fragments, one file a rank
    checkpoints/step-00001000/manifest.json                written last: state, files, parameters
    checkpoints/.tmp-step-00001000/                        being written; nothing reads it
    checkpoints/step-00001000.bad-damaged/                 set aside after a failed verification
    checkpoints/step-00001000.rolled-back/                 set aside when the run went back

A folder without a readable manifest is not a checkpoint. A model folder, which `pretrain import`
writes, is a checkpoint of weights alone (weights-00001.safetensors ...) with model.json and
tokenizer/.
"""

import json
import re
import zlib
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from pretrain.errors import CheckpointError, DiskError, disk_fix
from pretrain.utils.io import FileRecord, json_bytes, rename_dir
from pretrain.utils.safe_read import check_fields, parse_json, read_bounded

SCHEMA = 1
MANIFEST = "manifest.json"
MODEL_FILE = "model.json"
"""In a model folder: the model's config, settings of generation, and its origin."""
MAX_MANIFEST_BYTES = 2**28
"""About a hundred times the manifest of a thousand ranks."""
_STEP = re.compile(r"step-([0-9]{8,15})")
# Types of the fields that readers use.
_STATE = {"step": int, "tokens": int}
_FILE = {"num_bytes": int, "crc32s": list}
_MANIFEST = {"state": dict, "shapes": dict, "moments": list, "topology": dict, "scalars": dict}
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class NewerFormatError(CheckpointError):
    """A checkpoint of a format that this version does not read. It may well be good."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of `manifest.json`."""

    schema: int  # version of this format
    state: dict[str, Any]  # the training state (see `state.py`)
    shapes: dict[str, list[int]]  # shape of every parameter, by name
    moments: list[str]  # names of the optimizer moments saved for every parameter
    files: list[FileRecord]  # every other file of the folder
    # World size, engine and attempt that wrote it; for people, not needed to load.
    topology: dict[str, Any]
    # State of the engine that is no tensor, such as a loss scale; written where there is any.
    scalars: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Returns plain values for `write_json`, with a CRC32 over them."""
        content = asdict(self)
        if not self.scalars:
            del content["scalars"]
        return seal(content)


def seal(content: dict[str, Any]) -> dict[str, Any]:
    """Returns plain values in an envelope with a CRC32 over them."""
    return {"content": content, "crc32": zlib.crc32(json.dumps(content, sort_keys=True).encode())}


def unseal(written: bytes) -> dict[str, Any]:
    """Returns the envelope that a text is. Raises: ValueError: It is another, or damaged."""
    envelope = check_fields(parse_json(written), {"content": dict, "crc32": int})
    if envelope.get("crc32") != seal(envelope.get("content") or {})["crc32"]:
        raise ValueError("its CRC32 does not match")
    return envelope


def file_records(raw: list[Any]) -> list[FileRecord]:
    """Returns files with sizes and CRC32s as an envelope has them. Raises: ValueError, TypeError."""
    return [FileRecord(**check_fields(record, _FILE)) for record in raw]


def step_name(step: int) -> str:
    """Returns the folder name of a step's checkpoint."""
    return f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """Returns the step of a checkpoint folder by its name; None for any other name."""
    match = _STEP.fullmatch(path.name)
    return int(match.group(1)) if match else None


def set_aside(path: Path, why: str) -> None:
    """Renames a checkpoint to `step-N.WHY` or `step-N.WHY-2`, out of use. Raises: DiskError."""
    names = (f"{path.name}.{why}{'' if number == 1 else f'-{number}'}" for number in count(1))
    rename_dir(path, next(target for target in map(path.with_name, names) if not target.exists()))


def list_folders(folder: Path) -> list[Path]:
    """Returns folders with the name of a checkpoint, oldest first. Raises: DiskError."""
    try:
        folders = [path for path in folder.iterdir() if step_of(path) is not None] if folder.is_dir() else []
    except OSError as error:
        raise unseen(error) from error
    return sorted(folders, key=lambda path: step_of(path) or 0)


def list_checkpoints(folder: Path) -> list[Path]:
    """Returns committed checkpoints, oldest first, unverified. Raises: DiskError."""
    try:
        return [path for path in list_folders(folder) if (path / MANIFEST).is_file()]
    except OSError as error:
        raise unseen(error) from error


def unseen(error: OSError) -> DiskError:
    """Returns the error of a folder that may not be entered, or whose server is away."""
    return DiskError(
        f"cannot be looked into: {error.strerror}",
        where=str(error.filename),
        fix=disk_fix(error),
    )


def load_manifest(path: Path) -> Manifest:
    """Reads the manifest of a checkpoint folder, which must be as it was written, to the byte.

    Raises:
        CheckpointError: Missing, not JSON, damaged, or with fields missing or file names that leave
            the folder.
        NewerFormatError: The schema is another.
    """
    file = path / MANIFEST
    try:
        written = read_bounded(file, MAX_MANIFEST_BYTES)
        envelope = unseal(written)
        raw = envelope["content"]
        if raw["schema"] != SCHEMA:
            raise NewerFormatError(
                f"written in format {raw['schema']}, this version reads {SCHEMA}",
                where=str(file),
                fix="update pretrain",
            )
        if written != json_bytes(envelope):  # the CRC does not see a lost newline
            raise ValueError("it says the same, and is not as it was written")
        files = file_records(raw.pop("files"))
        manifest = Manifest(files=files, **check_fields(raw, _MANIFEST))
        check_fields(manifest.state, _STATE)
        for shape in manifest.shapes.values():
            if not all(type(length) is int and length >= 0 for length in shape):
                raise ValueError(f"{shape} is no shape")
    except FileNotFoundError:
        raise CheckpointError(
            "not a checkpoint (no manifest.json)",
            where=str(path),
            fix="check the path",
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise CheckpointError(
            f"the manifest is damaged ({reason})",
            where=str(file),
            fix="use another one",
        ) from None
    if not all(isinstance(record.name, str) and _FILE_NAME.fullmatch(record.name) for record in manifest.files):
        raise CheckpointError("a file name leaves the folder", where=str(file), fix="do not trust this checkpoint")
    return manifest
