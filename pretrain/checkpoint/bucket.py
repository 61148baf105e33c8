"""Checkpoints of a run in a bucket: the process that uploads one, or fetches the newest.

    URL/owner.json                             run, its attempt that may write here, newest step
    URL/step-00001000/records/run.json ...     records of the run at that moment
    URL/step-00001000/rank-00000.safetensors   files of the checkpoint, byte for byte
    URL/step-00001000/records.json             run, sizes and CRC32s of the records, CRC32 of the manifest
    URL/step-00001000/manifest.json            last: before it there is no checkpoint

    upload   leftovers of this step removed  ->  records, files  ->  listed again  ->  owner
             ->  manifest  ->  read again  ->  owner, with the step
             ->  old checkpoints of this run removed, each manifest first
    fetch    newest first: records, files, with their CRC32s, beside  ->  records  ->  one rename

A process of its own (`python -m pretrain.checkpoint.bucket`), as packages of a network cannot
disturb a training process then: its job is JSON on stdin, its progress and result are JSON lines on
stdout. Unless it is waited for, it has the lowest priority. It ends with the process that started
it, and after `SILENT_S` without progress. Imports no torch. Requests are in objects.py.
"""

import errno
import json
import logging
import os
import signal
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pretrain.checkpoint.format import (
    MANIFEST,
    file_records,
    load_manifest,
    seal,
    step_name,
    unseal,
)
from pretrain.checkpoint.objects import (
    OWNER,
    RECORD_NAMES,
    RECORDS,
    TABLE,
    Bucket,
    Folders,
    check_free,
    check_listed,
    check_owner,
    number_of_step,
    survey,
    whole_of,
    write_owner,
)
from pretrain.checkpoint.restore import MAX_TABLE_BYTES, fetch
from pretrain.checkpoint.retention import find_obsolete
from pretrain.errors import CheckpointError, PretrainError
from pretrain.utils.io import CRC_CHUNK_BYTES, json_bytes
from pretrain.utils.process import die_with
from pretrain.utils.remote import Waits, describe
from pretrain.utils.safe_read import MAX_RECORD_BYTES, check_fields, parse_json

RECORD = f"{RECORDS}/run.json"
SILENT_S = 900
"""Without progress for so long, the process ends: longer than all retries of one request."""
_FIXES = {
    errno.ENOENT: "create the bucket, or correct checkpoint.upload",
    errno.EACCES: "give credentials in the environment that may read, write, list and delete",
    errno.EIO: "start again when the store answers",
}


def upload(bucket: Bucket, job: dict[str, Any], tell: Callable[..., None]) -> dict[str, Any]:
    """Uploads a committed checkpoint, if it is not there, and removes old ones; returns the bytes.

    `job`: `checkpoint` (path; None: only take possession), `owner` (facts of the attempt),
    `is_first` (of this attempt), `keep`, `keep_every_steps`, `best` (steps, best first).

    Raises:
        LockedError: Another attempt writes there.
        CheckpointError: Another run's checkpoints are there, or the store has not kept what was
            written.
        LaunchError: The answers of the store contradict each other.
        OSError: The store or the disk refused.
    """
    if job["is_first"]:
        _take(bucket, job)
    if job["checkpoint"] is None:
        return {"bytes": 0}
    checkpoint = Path(job["checkpoint"])
    folder = checkpoint.name
    step = number_of_step(folder)
    there, owner = survey(bucket)
    if owner is None:  # it was removed
        _take(bucket, job)
    else:
        check_owner(bucket, job["owner"], owner)
        check_listed(bucket, there, owner, step)
    manifest = (checkpoint / MANIFEST).read_bytes()
    run = job["owner"]["run"]
    mine = _Mine(bucket, run, _read_records(checkpoint.parent.parent), tell)
    expected = {record.name: record.num_bytes for record in load_manifest(checkpoint).files}
    found = there.pop(folder, {})
    is_there = found.items() >= expected.items() and MANIFEST in found
    # Else a damaged record would stay, and every fetch pass the checkpoint over.
    is_there = is_there and _has_records(bucket, folder, found, run)
    if is_there and bucket.read_manifest(folder, found) == manifest:
        _settle(mine, there, job, step)
        return {"bytes": 0}
    # Of an upload that was cut off, or of the same step before a rollback.
    if not mine.remove(folder, found):
        raise CheckpointError(
            f"{folder} is not known to be of this run",
            where=bucket.url,
            fix=f"if no other run needs it, remove it and {OWNER}, and start again",
        )
    table = json_bytes(seal(_table(run, mine.records, manifest)))
    small = {f"{RECORDS}/{name}": content for name, content in mine.records.items()}
    small[TABLE] = table
    sizes = expected | {name: len(content) for name, content in small.items()}
    total, sent = sum(sizes.values()), 0

    def count(num_bytes: int) -> None:
        nonlocal sent
        sent += num_bytes
        tell(done=sent, total=total)

    # Records first: a leftover says whose it is.
    for name, content in small.items():
        bucket.write(f"{folder}/{name}", content)
        count(len(content))
    for name in expected:
        bucket.put(checkpoint / name, f"{folder}/{name}", count)
    _check_there(bucket, folder, sizes)
    check_owner(bucket, job["owner"], bucket.owner())
    _remove_undone(mine, there, job, step)
    bucket.write(f"{folder}/{MANIFEST}", manifest)
    if bucket.read_manifest(folder, {MANIFEST: len(manifest)}) != manifest:
        raise CheckpointError(
            "the store does not give back the manifest that it has taken",
            where=bucket.url,
            fix="see to the bucket",
        )
    _settle(mine, there, job, step)
    return {"bytes": total}


def _read_records(run: Path) -> dict[str, bytes]:
    """Returns the records of a run, read once: training continues, and changes them."""
    return {name: (run / name).read_bytes() for name in RECORD_NAMES if (run / name).is_file()}


def _table(run: str, records: dict[str, bytes], manifest: bytes) -> dict[str, Any]:
    starts = {name: range(0, len(content), CRC_CHUNK_BYTES) for name, content in records.items()}
    files = [
        {"name": name, "num_bytes": len(content), "crc32s": [
            zlib.crc32(content[start : start + CRC_CHUNK_BYTES]) for start in starts[name]
        ]}
        for name, content in records.items()
    ]  # fmt: skip
    return {"run": run, "manifest": zlib.crc32(manifest), "files": files}


class _Mine:
    """Removal of what is proved to be of this run, and the records that are uploaded now."""

    def __init__(
        self,
        bucket: Bucket,
        run: str,
        records: dict[str, bytes],
        tell: Callable[..., None],
    ) -> None:
        self.bucket, self.records, self._run, self._tell = bucket, records, run, tell
        self._rollbacks = _object_of(records.get("run.json", b"")).get("rollbacks") or []

    def remove(self, folder: str, names: dict[str, int]) -> bool:
        # Cut off before its records came. A listing may also lack a manifest that is there.
        is_leftover = RECORD not in names and MANIFEST not in names
        is_leftover = is_leftover and self.bucket.read(f"{folder}/{MANIFEST}") is None
        if is_leftover or self.is_mine(folder, names):
            self.bucket.remove(folder, names)
            return True
        self._tell(note=f"{self.bucket.url}/{folder} is not known to be of this run, and stays")
        return False

    def is_undone(self, folder: str, names: dict[str, int]) -> bool:
        """Returns whether a checkpoint is of a course that this run has rolled back."""
        record = _read_record(self.bucket, folder, names)
        before, now = record.get("rollbacks") or [], self._rollbacks
        if not isinstance(before, list) or record.get("id") != self._run:
            return False
        return len(before) < len(now) and now[: len(before)] == before

    def is_complete(self, folder: str, names: dict[str, int]) -> bool:
        try:
            content = unseal(self.bucket.read_manifest(folder, names))["content"]
            sizes = {file.name: file.num_bytes for file in file_records(content["files"])}
        except (CheckpointError, ValueError, KeyError, TypeError):
            return False
        return names.items() >= sizes.items() and self.is_mine(folder, names)

    def is_mine(self, folder: str, names: dict[str, int]) -> bool:
        return _read_run(self.bucket, folder, names) == self._run


def _read_run(bucket: Bucket, folder: str, names: dict[str, int]) -> Any:
    record = _read_record(bucket, folder, names)
    if "id" in record or TABLE not in names:
        return record.get("id")
    return _read_table(bucket, folder, names).get("run")


def _read_table(bucket: Bucket, folder: str, names: dict[str, int]) -> dict[str, Any]:
    try:
        table = bucket.read_listed(f"{folder}/{TABLE}", names[TABLE], MAX_TABLE_BYTES)
        content: dict[str, Any] = unseal(table)["content"]
    except (CheckpointError, ValueError):
        return {}
    return content


def _has_records(bucket: Bucket, folder: str, names: dict[str, int], run: str) -> bool:
    if _read_record(bucket, folder, names).get("id") != run:
        return False
    if TABLE not in names:  # of an older version
        return True
    try:
        files = file_records(_read_table(bucket, folder, names)["files"])
    except (ValueError, KeyError, TypeError):
        return False
    return names.items() >= {f"{RECORDS}/{one.name}": one.num_bytes for one in files}.items()


def _read_record(bucket: Bucket, folder: str, names: dict[str, int]) -> dict[str, Any]:
    """Returns run.json of a checkpoint there; an empty object where it is absent or another value."""
    size = names.get(RECORD, 0)
    if size > MAX_RECORD_BYTES:
        return {}
    return _object_of(bucket.read_listed(f"{folder}/{RECORD}", size, size))


def _object_of(content: bytes) -> dict[str, Any]:
    try:
        return check_fields(parse_json(content), {})
    except ValueError:
        return {}


def _take(bucket: Bucket, job: dict[str, Any]) -> None:
    """Takes possession of the folder, which may have checkpoints of this run alone."""
    there, found = survey(bucket)
    owner, whole = job["owner"], whole_of(there)
    newest = max(whole, key=number_of_step, default="")
    if found is None and newest:  # owner.json was removed
        found = {"run": _read_run(bucket, newest, whole[newest])}
    check_free(bucket, found, whole, owner.get("process"), {owner["run"]}, has_saved=True)
    write_owner(bucket, owner, (found or {}).get("step") or number_of_step(newest))


def _check_there(bucket: Bucket, folder: str, sizes: dict[str, int]) -> None:
    listed = bucket.list().get(folder, {})
    for name, size in sizes.items():
        if listed.get(name) != size:
            raise CheckpointError(
                f"{folder}/{name} has {listed.get(name, 0):,} bytes there instead of {size:,}",
                where=bucket.url,
                fix="see to the bucket",
            )


def _newer(there: Folders, step: int) -> list[str]:
    return [name for name in whole_of(there) if number_of_step(name) > step]


def _remove_undone(mine: _Mine, there: Folders, job: dict[str, Any], step: int) -> None:
    """Removes checkpoints of a course that was rolled back; one stays until this one has come."""
    undone = [name for name in _newer(there, step) if mine.is_undone(name, there[name])]
    whole = {name: names for name, names in whole_of(there).items() if name not in undone}
    rest = [number_of_step(name) for name, names in whole.items() if undone and mine.is_mine(name, names)]
    if undone and rest:
        write_owner(mine.bucket, job["owner"], max(rest))  # it names none that is gone
        for name in undone:
            mine.remove(name, there.pop(name))


def _settle(mine: _Mine, there: Folders, job: dict[str, Any], step: int) -> None:
    """Notes the newest step, which `there` lacks, and removes obsolete checkpoints and leftovers."""
    newest = step_name(step)
    mine_newer = [name for name in _newer(there, step) if mine.is_mine(name, there[name])]
    stay = [name for name in mine_newer if not mine.is_undone(name, there[name])]
    write_owner(mine.bucket, job["owner"], max([step, *map(number_of_step, stay)]))
    current = (whole_of(there).keys() - _newer(there, step)) | {newest}
    folders = [Path(name) for name in sorted(current)]

    def is_valid(path: Path) -> bool:
        return path.name == newest or mine.is_complete(path.name, there[path.name])

    policy = (job["keep"], job["keep_every_steps"])
    obsolete = {path.name for path in find_obsolete(folders, *policy, is_valid)}
    best = next((name for step in job["best"] if (name := step_name(step)) in current), None)
    for name, names in there.items():
        if name not in current.union(stay) or name in obsolete - {best}:
            mine.remove(name, names)


def _tell(**facts: Any) -> None:
    signal.alarm(SILENT_S)
    print(json.dumps(facts), flush=True)


class _Notes(logging.Handler):
    """Passes warnings, such as about a retry, on to the process that started this one."""

    def emit(self, record: logging.LogRecord) -> None:
        _tell(note=record.getMessage())


def main() -> None:
    """Does the job of stdin; the last line of stdout has its `result`, or says why it `failed`."""
    # Signals of a terminal and of Slurm come to whole groups and steps: the run decides.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    die_with(int(sys.argv[1]))
    job = parse_json(sys.stdin.read())
    works = {"upload": upload, "fetch": fetch}
    os.nice(job.get("nice", 0))
    logging.getLogger("pretrain").addHandler(_Notes(logging.WARNING))
    _tell()
    try:
        bucket = Bucket(job["url"], Waits(total_s=job["patience_s"]))
        result = works[job["kind"]](bucket, job, _tell)
    except PretrainError as error:
        _tell(failed=error.what, where=error.where, fix=error.fix, kind=type(error).__name__)
    except OSError as error:
        where = str(error.filename or job["url"])
        fix = _FIXES.get(error.errno or 0, "see to the store")
        _tell(failed=error.strerror or describe(error), where=where, fix=fix, kind="OSError")
    else:
        _tell(result=result)


if __name__ == "__main__":
    main()
