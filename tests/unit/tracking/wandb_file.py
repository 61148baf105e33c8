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
    rows = []
    for record in read_records(run_dir, "history"):
        items = {item.key or ".".join(item.nested_key): item.value_json for item in record.history.item}
        rows.append({key: json.loads(text) for key, text in items.items() if not key.startswith("_")})
    return rows


def read_records(run_dir: Path, kind: str) -> list[Any]:
    """Returns the records of a kind (`run`, `history`, `alert`) of every offline run, in order of start."""
    paths = sorted((run_dir / "wandb").glob("offline-run-*/*.wandb"))
    return [record for path in paths for record in _records(path) if record.WhichOneof("record_type") == kind]


def _records(path: Path) -> list[Any]:
    from wandb.proto import wandb_internal_pb2

    data, place, payload, records = path.read_bytes(), _FILE_HEADER_BYTES, b"", []
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
            records.append(record)
    return records
