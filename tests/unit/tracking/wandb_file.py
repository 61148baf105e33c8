"""Reads the rows of a `.wandb` file: a LevelDB log (32 KiB blocks, 7-byte record headers) of protobuf records."""

import json
import struct
from pathlib import Path
from typing import Any

_BLOCK_BYTES = 32768
_FILE_HEADER_BYTES = 7
_FULL, _LAST = 1, 4


def read_history(run_dir: Path) -> list[dict[str, Any]]:
    """Returns the history rows of every offline run under `run_dir`, in order of start, without wandb's own keys."""
    return [row for path in sorted((run_dir / "wandb").glob("offline-run-*/*.wandb")) for row in _rows(path)]


def _rows(path: Path) -> list[dict[str, Any]]:
    from wandb.proto import wandb_internal_pb2

    data, place, payload, rows = path.read_bytes(), _FILE_HEADER_BYTES, b"", []
    while place + 7 <= len(data):
        left = _BLOCK_BYTES - place % _BLOCK_BYTES
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        payload += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (_FULL, _LAST):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(payload)
            payload = b""
            if record.WhichOneof("record_type") == "history":
                items = {item.key or ".".join(item.nested_key): item.value_json for item in record.history.item}
                rows.append({key: json.loads(text) for key, text in items.items() if not key.startswith("_")})
    return rows
