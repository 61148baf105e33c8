"""Return of a run's newest checkpoint, with its records, from a bucket to a machine that has none.

    survey  ->  newest first: records, files, with their CRC32s, beside  ->  records  ->  one rename

A file that is not what was written is fetched once more; what is damaged then is passed over for an
older checkpoint. Without any, an error: a run that has uploaded one never starts over by itself.
"""

import shutil
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from pretrain.checkpoint.format import MANIFEST, file_records, load_manifest, step_name, unseal
from pretrain.checkpoint.objects import (
    OWNER,
    RECORD_NAMES,
    RECORDS,
    TABLE,
    Bucket,
    check_free,
    check_listed,
    number_of_step,
    survey,
    whole_of,
)
from pretrain.errors import CheckpointError, ConfigError, DiskError
from pretrain.run.folder import RunDir
from pretrain.utils.io import (
    FileRecord,
    make_dir,
    publish_dir,
    remove_tree,
    rename_dir,
    write_chunks,
    write_file,
)

MAX_TABLE_BYTES = 2**20


def fetch(bucket: Bucket, job: dict[str, Any], tell: Callable[..., None]) -> dict[str, Any]:
    """Fetches the newest whole checkpoint that the run folder lacks; returns its step, or None.

    `job`: `folder` of the run, `step` of its newest checkpoint, `run` (its id; None where it has
    never saved), `begun` (its id even so), `process` (this owner), `rollbacks` that it knows of.

    Raises:
        LockedError: Another live process has the folder, or may have it and has saved nothing.
        CheckpointError: The bucket has another run, or no checkpoint of it is whole.
        LaunchError: The answers of the store contradict each other.
        OSError: The store or the disk refused.
    """
    there, owner = survey(bucket)
    check_listed(bucket, there, owner, job["step"])
    whole = whole_of(there)
    runs = {job["run"], job.get("begun")}
    check_free(bucket, owner, whole, job.get("process"), runs, has_saved=job["run"] is not None)
    if owner is None and whole:
        tell(note=f"{bucket.url}/{OWNER} is missing: the newest checkpoint in the listing is taken")
    run = owner["run"] if owner else job["run"]
    damaged = []
    for name in sorted(whole, key=number_of_step, reverse=True):
        if number_of_step(name) <= job["step"]:
            return {"step": None}
        place = Path(job["folder"]) / "checkpoints"
        temporary = [place / f".tmp-{name}-{kind}" for kind in ("fetched", RECORDS)]
        try:
            if _Step(bucket, name, whole[name], tell).fetch(job, run, *temporary):
                return {"step": number_of_step(name)}
        except CheckpointError as error:
            damaged.append(error.what)
            tell(note=f"{bucket.url}/{name} is damaged ({error.what}); trying an older one")
        finally:
            for folder in temporary:
                with suppress(DiskError):  # it has another name now, or waits for the next start
                    remove_tree(folder)
    if damaged and not job["step"]:
        raise CheckpointError(
            f"this run has uploaded checkpoints, and none can be used ({damaged[0]})",
            where=bucket.url,
            fix="restore one, or start over under another run.name",
        )
    return {"step": None}


class _Step:
    """A checkpoint in the bucket, with the sizes by name that the listing has."""

    def __init__(
        self,
        bucket: Bucket,
        name: str,
        names: dict[str, int],
        tell: Callable[..., None],
    ) -> None:
        self._bucket, self._name, self._names, self._tell = bucket, name, names, tell
        self._received = self._total = 0

    def fetch(self, job: dict[str, Any], run: str | None, parts: Path, records: Path) -> bool:
        """Makes the checkpoint and the records of its run local; returns whether it did.

        It does not where the checkpoint is of before a rollback, which nothing has been uploaded
        after. `parts`, `records`: temporary folders. Raises: CheckpointError: It is damaged, or of
        another run.
        """
        for folder in (parts, records):
            with suppress(DiskError):  # of a fetch that was cut off
                remove_tree(folder)
            make_dir(folder)
        try:
            files, table = self._load_tables(parts)
        except CheckpointError:  # one wrong answer is no damage
            files, table = self._load_tables(parts)
        self._total = sum(file.num_bytes for file in (*files, *table))
        if self._total > (free := shutil.disk_usage(parts).free):
            raise DiskError(
                f"{self._name} has {self._total:,} bytes, and {free:,} are free",
                where=str(parts.parent),
                fix="make room",
            )
        for record in table:
            self._receive(f"{RECORDS}/", records, record, is_checked=TABLE in self._names)
        try:
            fetched = RunDir(records).read_record()
        except ConfigError as error:
            raise CheckpointError(error.what) from None
        if run not in (None, fetched["id"]):
            raise CheckpointError(f"of another run, {fetched['id']}")
        if (fetched.get("rollbacks") or [])[: len(job["rollbacks"])] != job["rollbacks"]:
            return False
        for file in files:
            self._receive("", parts, file, is_checked=True)
        for record in table:
            rename_dir(records / record.name, Path(job["folder"]) / record.name)
        publish_dir(parts, parts.with_name(self._name))
        return True

    def _load_tables(self, parts: Path) -> tuple[list[FileRecord], list[FileRecord]]:
        manifest = self._bucket.read_manifest(self._name, self._names)
        write_file(parts / MANIFEST, manifest)
        loaded = load_manifest(parts)
        is_of_step = step_name(loaded.state.get("step") or 0) == self._name
        if not is_of_step or len({MANIFEST, *(file.name for file in loaded.files)}) <= len(loaded.files):
            raise CheckpointError("its manifest is of another")
        return loaded.files, self._load_table(manifest)

    def _load_table(self, manifest: bytes) -> list[FileRecord]:
        """Returns the records; by their listed sizes alone in a checkpoint of an older version."""
        if TABLE not in self._names:
            listed = [record for record in RECORD_NAMES if f"{RECORDS}/{record}" in self._names]
            return [FileRecord(record, self._names[f"{RECORDS}/{record}"], []) for record in listed]
        try:
            table = f"{self._name}/{TABLE}"
            written = self._bucket.read_listed(table, self._names[TABLE], MAX_TABLE_BYTES)
            content = unseal(written)["content"]
            files = file_records(content["files"])
            if content["manifest"] != zlib.crc32(manifest):
                raise ValueError("it is of another manifest")
            # And no others, which might be of another's making.
            if len({file.name for file in files} & {*RECORD_NAMES}) < len(files):
                raise ValueError("it has another file")
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{TABLE} is damaged ({error})") from None
        return files

    def _receive(self, place: str, folder: Path, file: FileRecord, *, is_checked: bool) -> None:
        """Fetches a file, once more where it is not what was written. Raises: CheckpointError."""
        size = self._names.get(place + file.name, 0)
        if size != file.num_bytes:
            raise CheckpointError(f"{file.name} has {size:,} bytes instead of {file.num_bytes:,}")
        for _ in range(2):
            pieces = self._bucket.pieces(f"{self._name}/{place}{file.name}", size, self._count)
            if write_chunks(folder / file.name, pieces) == file or not is_checked:
                return
            (folder / file.name).unlink()
        raise CheckpointError(f"{file.name} is not what was written")

    def _count(self, num_bytes: int) -> None:
        self._received += num_bytes
        self._tell(done=self._received, total=self._total)
