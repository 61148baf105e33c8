"""Objects of a run's folder in a bucket, by requests whose answers may be wrong.

    Bucket           list, read and pieces (of a size known before), write, put, remove
    survey           owner.json between two listings, which must agree
    check_listed     the step that owner.json names is in the listing
    check_free       no other run, and no other live process, has the folder
    check_owner      owner.json names this attempt

An answer may be that of a proxy (a page of HTML with status 200), of a cache (an old listing), cut
off, or without end: it is bounded before it is read, and absence is not concluded from one answer.
"""

import errno
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from pretrain.checkpoint.format import MANIFEST, MAX_MANIFEST_BYTES, step_name, step_of
from pretrain.errors import CheckpointError, LaunchError, LockedError
from pretrain.run.owner import owner_of, why_gone
from pretrain.utils.io import json_bytes
from pretrain.utils.remote import Waits, call_remote, filesystem
from pretrain.utils.safe_read import check_fields, parse_json

OWNER = "owner.json"
RECORDS = "records"
TABLE = "records.json"
RECORD_NAMES = (
    "config.yaml", "run.json", "metrics.jsonl", "audit.jsonl", "evaluations.jsonl",
    "tokenizer.json", "normalize.json", "reference.safetensors",
)  # fmt: skip
PART_BYTES = 2**24
"""Part of a multipart upload; s3fs sends up to ten at once."""
RANGE_BYTES = 2**23
MAX_OWNER_BYTES = 2**16
MAX_ANSWER_BYTES = 2**24
"""Limit of one answer: twice a range, ten times a page of a thousand of the longest names."""
MAX_LIST_BYTES = 2**26
"""Limit of all pages of a listing: 200,000 files or more."""
MIN_PAGE_BYTES = 2**16
"""A page counts as this much at least: a listing without end has a thousand pages at most."""
_OWNER = {"run": str, "attempt": str, "host": str, "step": int, "process": dict}
_SEE = "see whether a proxy or a cache answers in place of the store, or another attempt writes there, and start again"

Folders = dict[str, dict[str, int]]
"""Size by file name of each step's folder."""


class Bucket:
    """Folder of a run on s3 or gs. Methods raise OSError where the store refuses."""

    def __init__(self, url: str, waits: Waits) -> None:
        self.url = url
        self.waits = waits
        self._files = filesystem(url)
        self._root = self._files._strip_protocol(url)

    def list(self) -> Folders:
        """Returns size by file name of each step's folder."""
        folders: Folders = {}
        for path, size in self._call("", self._find, MAX_LIST_BYTES).items():
            folder, slash, name = path.partition("/")
            if slash and step_of(Path(folder)) is not None:
                folders.setdefault(folder, {})[name] = size
        return folders

    def _find(self) -> dict[str, int]:
        entries = self._files.find(self._root, detail=True)
        entries.pop(self._root, None)  # s3fs looks for a file of that name where a listing is empty
        if not all(path.startswith(f"{self._root}/") for path in entries):
            raise ConnectionError("a listing of another folder")
        start = len(self._root) + 1
        return {path[start:]: int(facts["size"]) for path, facts in entries.items()}

    def owner(self) -> dict[str, Any] | None:
        """Returns owner.json, or None. Raises: LaunchError: It is something else."""
        content = self.read(OWNER)
        if content is None:
            return None
        try:
            record = check_fields(parse_json(content), _OWNER)
            if not record.get("run") or (record.get("step") or 0) < 0:
                raise ValueError("names no run")
        except ValueError as error:
            proxy = "see whether a proxy answers in place of the store"
            raise LaunchError(
                f"cannot be read ({error})",
                where=f"{self.url}/{OWNER}",
                fix=f"{proxy}; if the file is damaged, remove it",
            ) from None
        return record

    def read(self, name: str) -> bytes | None:
        """Returns the first 64 KiB of a file; None where there is none."""
        read = partial(self._files.cat_file, f"{self._root}/{name}", start=0, end=MAX_OWNER_BYTES)
        content: bytes | None = None
        with suppress(FileNotFoundError):
            content = self._call(name, read)
        return content

    def read_manifest(self, folder: str, names: dict[str, int]) -> bytes:
        """Returns the manifest of a listed folder. Raises: CheckpointError: It is too large."""
        return self.read_listed(f"{folder}/{MANIFEST}", names[MANIFEST], MAX_MANIFEST_BYTES)

    def read_listed(self, name: str, size: int, most_bytes: int) -> bytes:
        """Returns a file of a listed size. Raises: CheckpointError: It is larger than it may be."""
        if size > most_bytes:
            raise CheckpointError(
                f"{name} has {size:,} bytes, more than {most_bytes:,}",
                where=self.url,
            )
        return b"".join(self.pieces(name, size))

    def pieces(self, name: str, size: int, tell: Callable[[int], Any] = int) -> Iterator[memoryview]:
        """Yields the bytes of a file of a listed size, each range until it has come."""
        for start in range(0, size, RANGE_BYTES):
            end = min(start + RANGE_BYTES, size)
            try:
                piece = self._call(name, partial(self._range, name, start, end))
            except OSError as refusal:  # of the store: an OSError would be taken for the disk's
                raise LaunchError(
                    f"cannot be fetched: {refusal.strerror}",
                    where=f"{self.url}/{name}",
                    fix=_SEE,
                ) from None
            tell(len(piece))
            yield memoryview(piece)

    def _range(self, name: str, start: int, end: int) -> bytes:
        content: bytes = self._files.cat_file(f"{self._root}/{name}", start=start, end=end)
        if len(content) != end - start:
            raise ConnectionError(f"{len(content):,} bytes where {end - start:,} are asked for")
        return content

    def write(self, name: str, content: bytes) -> None:
        """Writes a file, in parts where it is large; it appears whole."""
        path, options = f"{self._root}/{name}", {"chunksize": PART_BYTES}
        self._call(name, lambda: self._files.pipe_file(path, content, **options))

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
        """Removes files of a folder, its manifest first: what is left is no checkpoint.

        Raises: LaunchError: The manifest is still there.
        """
        for name in sorted(names, key=lambda name: name != MANIFEST):
            path = f"{folder}/{name}"
            with suppress(FileNotFoundError):
                self._call(path, partial(self._files.rm_file, f"{self._root}/{path}"))
            if name == MANIFEST and self.read(path) is not None:
                raise LaunchError(
                    "is there after its removal",
                    where=f"{self.url}/{path}",
                    fix=_SEE,
                )

    def _call(self, name: str, call: Callable[[], Any], most_bytes: float = float("inf")) -> Any:
        def bounded() -> Any:
            try:
                with _answers_bounded(most_bytes):
                    return call()
            except (LookupError, TypeError, ValueError, AttributeError) as error:
                # s3fs and gcsfs look into an answer without a check of its kind.
                raise ConnectionError(
                    errno.EPROTO,
                    f"no answer of a store ({type(error).__name__}: {error})",
                ) from error

        return call_remote(f"{self.url}/{name}", bounded, self.waits)


@contextmanager
def _answers_bounded(most_bytes: float) -> Iterator[None]:
    """Limits each answer that aiohttp, below s3fs and gcsfs, collects, and all of a call."""
    import aiohttp

    read = aiohttp.StreamReader.read
    room = most_bytes

    async def read_bounded(self: aiohttp.StreamReader, n: int = -1) -> bytes:
        nonlocal room
        if n >= 0:
            return await read(self, n)
        pieces, size = [], 0
        room -= MIN_PAGE_BYTES
        while piece := await self.readany():
            pieces.append(piece)
            size += len(piece)
            if size > min(MAX_ANSWER_BYTES, room):
                pieces.clear()  # an error keeps its frames, and is asked for again
                break
        if size > min(MAX_ANSWER_BYTES, room):
            raise ConnectionError("an answer without end")
        room -= size
        return b"".join(pieces)

    aiohttp.StreamReader.read = read_bounded  # type: ignore[method-assign]
    try:
        yield
    finally:
        aiohttp.StreamReader.read = read  # type: ignore[method-assign]


def whole_of(there: Folders) -> Folders:
    """Returns the folders that have a manifest."""
    return {name: names for name, names in there.items() if MANIFEST in names}


def survey(bucket: Bucket) -> tuple[Folders, dict[str, Any] | None]:
    """Returns the folders there, and owner.json. Raises: LaunchError: Two answers differ."""
    first, owner, there = bucket.list(), bucket.owner(), bucket.list()
    if whole_of(first) != whole_of(there):
        newest = " and ".join(_newest(listed) for listed in (first, there))
        raise LaunchError(f"two listings differ ({newest})", where=bucket.url, fix=_SEE)
    if owner is None and there and bucket.owner() is not None:
        raise LaunchError(
            "is there, and was not a moment ago",
            where=f"{bucket.url}/{OWNER}",
            fix=_SEE,
        )
    return there, owner


def check_listed(bucket: Bucket, there: Folders, owner: dict[str, Any] | None, known: int) -> None:
    """Checks that the newest step by owner.json is there, or `known` here. Raises: LaunchError."""
    step = (owner or {}).get("step") or 0
    if step > known and step_name(step) not in whole_of(there):
        problem = f"{OWNER} names step {step}, and the listing has {_newest(there)}"
        fix = f"start again when the store lists it; if it was removed on purpose, remove {OWNER}"
        raise LaunchError(problem, where=bucket.url, fix=fix)


def _newest(there: Folders) -> str:
    return max(whole_of(there), key=number_of_step, default="no checkpoint")


def number_of_step(folder: str) -> int:
    """Returns the step of a folder's name."""
    return step_of(Path(folder)) or 0


def check_free(
    bucket: Bucket,
    owner: dict[str, Any] | None,
    whole: Folders,
    process: Any,
    runs: set[str],
    *,
    has_saved: bool,
) -> None:
    """Checks that no other live process, and no other run, has the folder.

    Args:
        owner: Content of owner.json.
        process: This one, as an `Owner`'s fields.
        runs: Ids of the run here.
        has_saved: Else the run here may become that of the bucket.

    Raises:
        LockedError: A process that lives has it, or one that may live and has saved nothing yet.
        CheckpointError: It has the checkpoints of another run.
        LaunchError: It may have them: there is an owner of an older version, and nothing else.
    """
    if owner is None:
        return
    theirs = owner_of(owner.get("process"))
    us = owner_of(process)
    who = str(theirs or f"an attempt on {owner.get('host') or 'an unknown machine'}")
    gone = ""
    if theirs and us:
        gone = why_gone(theirs, us)
        if theirs.machine == us.machine and not gone:
            if (theirs.pid, theirs.process_start) == (us.pid, us.process_start):
                return
            fix = "wait for it, stop it, or give another run.name"
            raise LockedError(f"in use by {who}", where=bucket.url, fix=fix)
    if owner["run"] in runs:
        return
    if whole or owner.get("step"):
        if has_saved:
            raise CheckpointError(
                f"has the checkpoints of another run, {owner['run']}",
                where=bucket.url,
                fix="give another checkpoint.upload or run.name",
            )
    elif "step" not in owner:
        purpose = "if it has saved none, or they were removed on purpose, remove it"
        raise LaunchError(
            f"names run {owner['run']}, and the listing has no checkpoint of it",
            where=f"{bucket.url}/{OWNER}",
            fix=f"start again when the store lists them; {purpose}",
        )
    elif not gone:
        ended = f"if that one has ended, remove {OWNER} there"
        raise LockedError(
            f"in use by {who}, run {owner['run']}, which has saved nothing yet",
            where=bucket.url,
            fix=f"end one of the two, or give another run.name; {ended}",
        )


def check_owner(bucket: Bucket, owner: dict[str, Any], found: dict[str, Any] | None) -> None:
    """Checks that owner.json, as it was `found`, names this attempt: a bucket has no lease.

    Raises:
        LockedError: It names another one, in a second answer too.
        LaunchError: Two answers differ, or there is none.
    """
    if found is not None and all(found.get(key) == owner[key] for key in ("run", "attempt")):
        return
    if found is None or bucket.owner() != found:
        raise LaunchError(
            "does not name this attempt any more",
            where=f"{bucket.url}/{OWNER}",
            fix=_SEE,
        )
    is_same = found["run"] == owner["run"]
    whose = "another attempt of the run" if is_same else f"another run, {found['run']}"
    raise LockedError(
        f"{whose}, on {found.get('host') or 'an unknown machine'}, writes there since then",
        where=bucket.url,
        fix="end one of them",
    )


def write_owner(bucket: Bucket, owner: dict[str, Any], step: int) -> None:
    """Writes owner.json, with the newest step there. Raises: LaunchError: It is not read back."""
    content = json_bytes(owner | {"step": step})
    bucket.write(OWNER, content)
    if bucket.read(OWNER) != content:
        raise LaunchError(
            "is not read back as it was written",
            where=f"{bucket.url}/{OWNER}",
            fix=_SEE,
        )
