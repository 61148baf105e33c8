"""Checkpoints of a run in a bucket: the process that uploads one, or fetches the newest.

    URL/owner.json                             run, and its attempt that may write here
    URL/step-00001000/rank-00000.safetensors   files of the checkpoint, byte for byte
    URL/step-00001000/records/run.json ...     records of the run at that moment
    URL/step-00001000/manifest.json            last: before it there is no checkpoint

    upload   leftovers of this step removed  ->  files  ->  listed again  ->  owner  ->  manifest
             ->  read again  ->  old checkpoints removed, each manifest first
    fetch    newest first: files with their CRC32s, into .tmp-step-N  ->  records  ->  one rename

A process of its own (`python -m pretrain.checkpoint.bucket`), as packages of a network cannot
disturb a training process then: its job is JSON on stdin, its progress and result are JSON lines on
stdout. It has the lowest priority, ends with the process that started it, and after
`SILENT_S` without progress. Imports no torch.
"""

import errno
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

from pretrain.checkpoint.format import MANIFEST, load_manifest, step_name, step_of
from pretrain.checkpoint.retention import find_obsolete
from pretrain.errors import CheckpointError, DiskError, LaunchError, PretrainError
from pretrain.utils.io import json_bytes, make_dir, publish_dir, remove_tree, write_chunks, write_file
from pretrain.utils.process import die_with
from pretrain.utils.remote import RemoteAttempts, Waits, call_remote, describe, filesystem, open_url
from pretrain.utils.safe_read import parse_json

OWNER = "owner.json"
RECORDS = "records"
RECORD_NAMES = (
    "config.yaml", "run.json", "metrics.jsonl", "audit.jsonl", "evaluations.jsonl", "tokenizer.json", "normalize.json",
    "reference.safetensors",
)  # fmt: skip
SILENT_S = 900
"""Without progress for so long, the process ends: longer than all retries of one request."""
PART_BYTES = 2**24
"""Part of a multipart upload; s3fs sends up to ten at once."""
RANGE_BYTES = 2**23
_FIXES = {
    errno.ENOENT: "create the bucket, or correct checkpoint.upload",
    errno.EACCES: "give credentials in the environment that may read, write, list and delete",
    errno.EIO: "start again when the store answers",
}


class Bucket:
    """Folder of a run on s3 or gs. Methods raise OSError where the store refuses."""

    def __init__(self, url: str, waits: Waits) -> None:
        self.url = url
        self.waits = waits
        self._files = filesystem(url)
        self._root = self._files._strip_protocol(url)

    def list(self) -> dict[str, dict[str, int]]:
        """Returns size by file name of each step's folder."""
        found = self._call("", lambda: self._files.find(self._root, detail=True))
        folders: dict[str, dict[str, int]] = {}
        for path, facts in found.items():
            folder, slash, name = path.removeprefix(f"{self._root}/").partition("/")
            if slash and step_of(Path(folder)) is not None:
                folders.setdefault(folder, {})[name] = facts["size"]
        return folders

    def read(self, name: str) -> bytes | None:
        """Returns a small file; None where there is none."""
        try:
            return self._call(name, lambda: self._files.cat_file(f"{self._root}/{name}"))
        except FileNotFoundError:
            return None

    def write(self, name: str, content: bytes) -> None:
        """Writes a small file, in one request."""
        self._call(name, lambda: self._files.pipe_file(f"{self._root}/{name}", content))

    def put(self, path: Path, name: str, sent: Callable[[int], object]) -> None:
        """Uploads a file, in parts where it is large; it appears whole."""
        from fsspec.callbacks import Callback

        class Sent(Callback):
            def relative_update(self, inc: int = 1) -> None:
                sent(inc)

        target = f"{self._root}/{name}"
        options = {"callback": Sent(), "chunksize": PART_BYTES}
        self._call(name, lambda: self._files.put_file(str(path), target, **options))

    def remove(self, folder: str, names: Iterable[str]) -> None:
        """Removes files of a folder, its manifest first: what is left is no checkpoint."""
        for name in sorted(names, key=lambda name: name != MANIFEST):
            path = f"{folder}/{name}"
            with suppress(FileNotFoundError):
                self._call(path, partial(self._files.rm_file, f"{self._root}/{path}"))

    def pieces(self, name: str, size: int, received: Callable[[int], object]) -> Iterator[memoryview]:
        """Yields the bytes of a file, continued where a connection has broken off."""
        url = f"{self.url}/{name}"
        attempts = RemoteAttempts(url, self.waits)
        position = 0
        while position < size:
            try:
                with closing(open_url(url, position, size=size)) as stream:
                    while piece := stream.read(RANGE_BYTES):
                        attempts.succeed()
                        position += len(piece)
                        received(len(piece))
                        yield memoryview(piece)
            except Exception as error:
                reason = attempts.explain(error)
                try:
                    attempts.wait(reason)
                except OSError as refusal:  # of the store: an OSError would be taken for the disk's
                    raise LaunchError(f"cannot be fetched: {refusal.strerror}", where=url) from None

    def _call(self, name: str, call: Callable[[], Any]) -> Any:
        return call_remote(f"{self.url}/{name}", call, self.waits)


def upload(bucket: Bucket, job: dict[str, Any], tell: Callable[..., None]) -> dict[str, Any]:
    """Uploads a committed checkpoint, if it is not there, and removes old ones; returns the bytes.

    `job`: `checkpoint` (path; None: only take possession), `owner` (facts of the attempt),
    `is_first` (of this attempt), `keep`, `keep_every_steps`, `best` (steps, best first).

    Raises:
        CheckpointError: Another attempt writes there, or the store has not kept what was written.
        OSError: The store or the disk refused.
    """
    if job["is_first"]:
        bucket.write(OWNER, json_bytes(job["owner"]))
    if job["checkpoint"] is None:
        return {"bytes": 0}
    _check_owner(bucket, job["owner"])
    checkpoint = Path(job["checkpoint"])
    manifest = (checkpoint / MANIFEST).read_bytes()
    folder, there = checkpoint.name, bucket.list()
    if MANIFEST in there.get(folder, {}) and bucket.read(f"{folder}/{MANIFEST}") == manifest:
        _retain(bucket, there, job, folder)
        return {"bytes": 0}
    # Of an upload that was cut off, or of the same step before a rollback.
    bucket.remove(folder, there.pop(folder, {}))
    expected = {record.name: record.num_bytes for record in load_manifest(checkpoint).files}
    files = {name: checkpoint / name for name in expected}
    run = checkpoint.parent.parent
    files |= {f"{RECORDS}/{name}": run / name for name in RECORD_NAMES if (run / name).is_file()}
    sizes = {name: path.stat().st_size for name, path in files.items()}
    total = sum(sizes.values())
    sent = 0

    def count(num_bytes: int) -> None:
        nonlocal sent
        sent += num_bytes
        tell(done=sent, total=total)

    for name, path in files.items():
        bucket.put(path, f"{folder}/{name}", count)
    _check_there(bucket, folder, expected)
    _check_owner(bucket, job["owner"])
    # Newer ones are of a course that was rolled back. The last one stays until this one has come.
    step = step_of(checkpoint) or 0
    whole = [name for name, names in there.items() if MANIFEST in names]
    undone = [name for name in whole if (step_of(Path(name)) or 0) > step]
    if len(undone) < len(whole):
        for name in undone:
            bucket.remove(name, there.pop(name))
    bucket.write(f"{folder}/{MANIFEST}", manifest)
    if bucket.read(f"{folder}/{MANIFEST}") != manifest:
        what = "the store does not give back the manifest that it has taken"
        raise CheckpointError(what, where=bucket.url, fix="see to the bucket")
    _retain(bucket, there, job, folder)
    return {"bytes": total}


def _check_owner(bucket: Bucket, owner: dict[str, Any]) -> None:
    """Checks that no later attempt has taken the folder: a bucket has no lease."""
    found = parse_json(bucket.read(OWNER) or b"{}")
    if found != owner:
        host = found.get("host", "an unknown machine")
        what = f"another attempt of the run, on {host}, writes there since then"
        raise CheckpointError(what, where=bucket.url, fix="end one of them")


def _check_there(bucket: Bucket, folder: str, sizes: dict[str, int]) -> None:
    found = bucket.list().get(folder, {})
    for name, size in sizes.items():
        if found.get(name) != size:
            what = f"{folder}/{name} has {found.get(name, 0):,} bytes there instead of {size:,}"
            raise CheckpointError(what, where=bucket.url, fix="see to the bucket")


def _retain(bucket: Bucket, there: dict[str, dict[str, int]], job: dict[str, Any], newest: str) -> None:
    """Removes obsolete checkpoints and leftovers; `there` may have the newest one or not."""
    step = step_of(Path(newest)) or 0
    whole = {name for name, names in there.items() if MANIFEST in names}
    current = {name for name in whole if (step_of(Path(name)) or 0) <= step} | {newest}
    found = [Path(name) for name in sorted(current)]
    policy = (job["keep"], job["keep_every_steps"])
    obsolete = {path.name for path in find_obsolete(found, *policy, lambda path: True)}
    best = next((name for step in job["best"] if (name := step_name(step)) in current), None)
    for name, names in there.items():
        if name not in current or name in obsolete - {best}:
            bucket.remove(name, names)


def fetch(bucket: Bucket, job: dict[str, Any], tell: Callable[..., None]) -> dict[str, Any]:
    """Fetches the newest whole checkpoint that the run folder lacks; returns its step, or None.

    `job`: `folder` of the run, `step` of its newest checkpoint, `run` (its id, None without one),
    `rollbacks` that it knows of.

    Raises:
        CheckpointError: The bucket has another run, or no checkpoint of it is whole.
        OSError: The store or the disk refused.
    """
    there = bucket.list()
    owner = parse_json(bucket.read(OWNER) or b"{}")
    if job["run"] is not None and owner.get("run", job["run"]) != job["run"]:
        fix = "give another checkpoint.upload or run.name, or remove what is there"
        what = f"has the checkpoints of another run, {owner['run']}"
        raise CheckpointError(what, where=bucket.url, fix=fix)
    whole = {step_of(Path(name)) or 0: names for name, names in there.items() if MANIFEST in names}
    damaged = []
    for step in sorted(whole, reverse=True):
        if step <= job["step"]:
            return {"step": None}
        record = parse_json(bucket.read(f"{step_name(step)}/{RECORDS}/run.json") or b"{}")
        if record.get("rollbacks", [])[: len(job["rollbacks"])] != job["rollbacks"]:
            continue  # of before a rollback, which nothing has been uploaded after
        if problem := _fetch_step(bucket, step, whole[step], Path(job["folder"]), tell):
            damaged.append(problem)
            tell(note=f"{bucket.url}/{step_name(step)} is damaged ({problem}); trying an older one")
            continue
        return {"step": step}
    if damaged and not job["step"]:
        what = f"this run has uploaded checkpoints, and none can be used ({damaged[0]})"
        fix = "restore one, or start over under another run.name"
        raise CheckpointError(what, where=bucket.url, fix=fix)
    return {"step": None}


def _fetch_step(
    bucket: Bucket, step: int, names: dict[str, int], folder: Path, tell: Callable[..., None]
) -> str | None:
    """Makes a checkpoint and the records of its run local; returns what is wrong with it, if any."""
    name = step_name(step)
    final = folder / "checkpoints" / name
    temporary = make_dir(final.parent) / f".tmp-{name}-fetched"
    with suppress(DiskError):  # of a fetch that was cut off
        remove_tree(temporary)
    make_dir(temporary)
    write_file(temporary / MANIFEST, bucket.read(f"{name}/{MANIFEST}") or b"")
    try:
        files = load_manifest(temporary).files
    except CheckpointError as error:
        return error.what
    total = sum(file.num_bytes for file in files)
    received = 0

    def count(num_bytes: int) -> None:
        nonlocal received
        received += num_bytes
        tell(done=received, total=total)

    for file in files:
        if names.get(file.name) != file.num_bytes:
            return f"{file.name} has {names.get(file.name, 0):,} bytes instead of {file.num_bytes:,}"
        pieces = bucket.pieces(f"{name}/{file.name}", file.num_bytes, count)
        if write_chunks(temporary / file.name, pieces) != file:
            return f"{file.name} is not what was written"
    for record in RECORD_NAMES:  # and no others, which might be of another's making
        if f"{RECORDS}/{record}" in names:
            write_file(folder / record, bucket.read(f"{name}/{RECORDS}/{record}") or b"")
    publish_dir(temporary, final)
    return None


def _tell(**facts: Any) -> None:
    signal.alarm(SILENT_S)
    print(json.dumps(facts), flush=True)


class _Notes(logging.Handler):
    """Passes warnings, such as those of a retry, on to the process that started this one."""

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
    if job["kind"] == "upload":
        os.nice(19)
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
