"""The shard folder while it is made: its identity, finished parts, leftovers of a killed run, and locks.

    prepare.json      config and listing of the inputs, written first: the identity of the folder
    tokenizer.json    next; parts depend on it
    labels.json       of labelled documents, where no labels are given; parts depend on it
    duplicates/*      where asked for; parts depend on it
    parts/*.json      one record a finished part
    statistics.json, data_card.md, lengths.png
    index.json        written last: with it the folder is complete

A run continues a folder of the same identity and refuses any other.
"""

import contextlib
import fcntl
import json
import logging
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pretrain.errors import ConfigError, DataError, DiskError, LockedError
from pretrain.prepare.duplicates import DUPLICATES_DIR
from pretrain.prepare.input_parts import WHOLE, InputFile, InputPart, Share
from pretrain.prepare.labelling import LABELS_NAME
from pretrain.prepare.part import PARTS_DIR, PartRecord, load_record, record_path
from pretrain.prepare.split import SPLITS
from pretrain.shards.index import INDEX_NAME, DataIndex, check_shards, load_index
from pretrain.tokenizer import tokenizer_hash
from pretrain.utils.io import make_dir, take_flock, write_json

IDENTITY_NAME = "prepare.json"
TOKENIZER_NAME = "tokenizer.json"
OTHER_TOKENIZER = f"{TOKENIZER_NAME} is not the one that made the shards"
STATISTICS_NAME = "statistics.json"
CARD_NAME = "data_card.md"
PICTURE_NAME = "lengths.png"

_STATISTICS = (STATISTICS_NAME, CARD_NAME, PICTURE_NAME)

MAX_SHOWN = 8
_ELSEWHERE = "use another --output, or delete this folder to prepare it anew"


def claim_folder(folder: Path, options: dict[str, Any], files: Sequence[InputFile], *, is_first: bool = True) -> None:
    """Writes `prepare.json`, or checks that the folder was begun with the same options and inputs.

    Removes temporary files of a killed run first: their names, which have a process id, may come again; those of the
    tokenizer and the labels in the first share only, which makes them. Shares call it under `claim_lock`.

    Raises:
        ConfigError: Other options, or a folder of other content.
        DataError: Other inputs.
        DiskError: The disk refused.
    """
    for name in (IDENTITY_NAME, INDEX_NAME, *_STATISTICS, *([TOKENIZER_NAME, LABELS_NAME] if is_first else [])):
        for temporary in folder.glob(f"{name}.tmp-*"):
            temporary.unlink()
    path = folder / IDENTITY_NAME
    inputs = [_input_line(side) for file in files for side in (file, file.pair) if side]
    if not path.exists():
        strangers = sorted(entry.name for entry in folder.iterdir() if not is_lock(entry.name))
        if strangers:
            raise ConfigError(
                f"the folder is not empty and was not begun by `pretrain prepare` (it holds {strangers[0]})",
                where=str(folder),
                fix="use another --output",
            )
        write_json(path, {"options": options, "inputs": inputs})
        return
    try:
        before = json.loads(path.read_bytes())
        _compare_options(folder, before["options"], options)
        _compare_inputs(folder, before["inputs"], inputs)
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"cannot be read: {error}", where=str(path), fix=_ELSEWHERE) from error


def _input_line(file: InputFile) -> str:
    return f"{file.size} {file.version} {file.shown if file.is_remote else Path(file.path).absolute()}"


def _compare_options(folder: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    names = [name for name in sorted(before.keys() | now.keys()) if before.get(name) != now.get(name)]
    if names:
        shown = [f"{name} was {before.get(name)!r} and is now {now.get(name)!r}" for name in names[:MAX_SHOWN]]
        changes = ", ".join(shown) + (f", and {len(names) - MAX_SHOWN} more" if len(names) > MAX_SHOWN else "")
        raise ConfigError(f"begun with other options: {changes}", where=str(folder), fix=_ELSEWHERE)


def _compare_inputs(folder: Path, before: list[str], now: list[str]) -> None:
    if before == now:
        return
    old, new = _by_path(before), _by_path(now)
    changes = {
        "new": sorted(new.keys() - old.keys()),
        "gone": sorted(old.keys() - new.keys()),
        "changed": sorted(path for path in old.keys() & new.keys() if old[path] != new[path]),
    }
    named = ", ".join(f"{len(paths)} {kind} ({paths[0]})" for kind, paths in changes.items() if paths)
    raise DataError(f"begun with other inputs: {named or 'their order changed'}", where=str(folder), fix=_ELSEWHERE)


def _by_path(lines: list[str]) -> dict[str, tuple[str, str]]:
    rows = (line.split(" ", 2) for line in lines)
    return {path: (size, version) for size, version, path in rows}


def load_records(folder: Path, parts: Iterable[InputPart], tokenizer_sha256: str) -> dict[int, PartRecord]:
    """Returns the records of the parts finished with this tokenizer, by number."""
    found = ((part.number, load_record(folder, part, tokenizer_sha256)) for part in parts)
    return {number: record for number, record in found if record is not None}


def remove_leftovers(folder: Path, parts: Sequence[InputPart], records: dict[int, PartRecord]) -> None:
    """Removes every file of `parts` that is in no record."""
    kept = {record_path(folder, part) for part in parts if part.number in records}
    for record in records.values():
        for split in record.splits.values():
            kept.update(folder / name for shard in split.shards for name in shard.sizes)
    own = {part.name for part in parts}
    for name in (PARTS_DIR, *SPLITS):
        for path in (folder / name).glob("part-*"):
            if path not in kept and _part_name(path) in own:
                path.unlink()
    make_dir(folder / PARTS_DIR)


def _part_name(path: Path) -> str:
    """Returns `part-00007` of `part-00007-0000.tar`."""
    return "-".join(path.name.split(".")[0].split("-")[:2])


def check_complete(folder: Path) -> tuple[DataIndex | None, str]:
    """Returns the index of a folder whose files are complete; else None, and the damage."""
    try:
        index = load_index(folder)
        check_shards(folder, index)
        if tokenizer_hash(folder / TOKENIZER_NAME) == index.tokenizer_sha256:
            return index, ""
        return None, OTHER_TOKENIZER
    except (DataError, OSError) as error:
        return None, str(error)


def discard_output(folder: Path) -> None:
    """Removes the output of an unfinished run, the identity last."""
    (folder / INDEX_NAME).unlink(missing_ok=True)
    for name in (PARTS_DIR, DUPLICATES_DIR, *SPLITS):
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in (*_STATISTICS, LABELS_NAME, TOKENIZER_NAME):
        (folder / name).unlink(missing_ok=True)
    (folder / IDENTITY_NAME).unlink(missing_ok=True)


# Locks of a shard folder: one `prepare` may write it, or one for each part of n; after a kill, none before the last
# worker has ended. All are flocks, which the operating system releases at the end of a process.
#
#     .prepare.lock      exclusive: `prepare`; shared, with n in it: `--part i/n`
#     .prepare-i.lock    exclusive: `--part i/n`
#     .workers.lock, .workers-i.lock    shared: each worker process; a start waits for them
#     .claim.lock        exclusive, for a moment: writers of common files: the n above, prepare.json, the index

PREPARE_LOCK = ".prepare.lock"
WORKERS_LOCK = ".workers.lock"
CLAIM_LOCK = ".claim.lock"
ORPHAN_WAIT_S = 30.0
CLAIM_WAIT_S = 600.0

_LOCK_NAME = re.compile(r"\.(prepare|workers|claim)(-\d+)?\.lock")

_log = logging.getLogger(__name__)


def is_lock(name: str) -> bool:
    """True for the name of a lock file."""
    return _LOCK_NAME.fullmatch(name) is not None


@contextlib.contextmanager
def lock_folder(folder: Path, share: Share = WHOLE) -> Iterator[None]:
    """Locks an existing shard folder for one `prepare`, or for one share of it. Raises: LockedError, DiskError."""
    with contextlib.ExitStack() as stack:
        descriptor = _open(folder, PREPARE_LOCK, stack)
        if share.is_whole:
            _hold(descriptor, folder, "another `pretrain prepare`")
        else:
            _hold_with_others(descriptor, folder, share)
            _hold(_open(folder, f".prepare-{share.number}.lock", stack), folder, f"another `--part {share}`")
        names = {WORKERS_LOCK, _workers_name(share)}
        if share.is_whole:
            names |= {path.name for path in folder.glob(".workers-*.lock")}
        for name in sorted(names):
            workers = _open(folder, name, stack)
            if not _flock(workers, fcntl.LOCK_EX, wait_s=ORPHAN_WAIT_S):
                what = "workers of an earlier `pretrain prepare` are still running"
                raise LockedError(what, where=str(folder), fix="end them first")
            _flock(workers, fcntl.LOCK_UN, wait_s=0)
        yield


@contextlib.contextmanager
def claim_lock(folder: Path) -> Iterator[None]:
    """Locks the common files of all shares. Raises: LockedError, DiskError."""
    with contextlib.ExitStack() as stack:
        if not _flock(_open(folder, CLAIM_LOCK, stack), fcntl.LOCK_EX, wait_s=CLAIM_WAIT_S):
            raise LockedError(
                f"timed out waiting for {CLAIM_LOCK}", where=str(folder), fix="end the process that holds it"
            )
        yield


def hold_as_worker(folder: Path, share: Share = WHOLE) -> None:
    """Takes the lock of a worker on `folder` until this process ends."""
    name = _workers_name(share)
    _flock(os.open(folder / name, os.O_RDWR | os.O_CREAT, 0o644), fcntl.LOCK_SH, wait_s=ORPHAN_WAIT_S)


def _workers_name(share: Share) -> str:
    return WORKERS_LOCK if share.is_whole else f".workers-{share.number}.lock"


def _open(folder: Path, name: str, stack: contextlib.ExitStack) -> int:
    try:
        descriptor = os.open(folder / name, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise DiskError(
            f"cannot write here: {error.strerror or error}", where=str(folder), fix="free space or fix permissions"
        ) from error
    stack.callback(os.close, descriptor)
    return descriptor


def _hold(descriptor: int, folder: Path, who: str) -> None:
    if not _flock(descriptor, fcntl.LOCK_EX, wait_s=0):
        raise _taken(descriptor, folder, who)
    _write_owner(descriptor, str(os.getpid()))


def _hold_with_others(descriptor: int, folder: Path, share: Share) -> None:
    """Takes the shared lock of parts of the same n: parts of another n would write the same files."""
    mine = f"of {share.of}"
    # The first one has it exclusively until its n is written; the others wait here.
    with claim_lock(folder):
        if _flock(descriptor, fcntl.LOCK_EX, wait_s=0):
            _write_owner(descriptor, mine)
        if not _flock(descriptor, fcntl.LOCK_SH, wait_s=0):
            raise _taken(descriptor, folder, "another `pretrain prepare`")
    if (owner := _read_owner(descriptor)) != mine:
        raise LockedError(
            f"`--part {share}` does not go with the parts {owner} that are being prepared here",
            where=str(folder),
            fix="use the same n for all, or wait for them to end",
        )


def _taken(descriptor: int, folder: Path, who: str) -> LockedError:
    owner = _read_owner(descriptor)
    named = f"parts {owner}" if owner.startswith("of ") else f"process {owner or 'unknown'}"
    return LockedError(
        f"{who} ({named}) is writing this folder",
        where=str(folder),
        fix="wait for it to end, or use another --output",
    )


def _read_owner(descriptor: int) -> str:
    return os.pread(descriptor, 32, 0).decode(errors="replace").strip()


def _write_owner(descriptor: int, owner: str) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{owner}\n".encode(), 0)


def _flock(descriptor: int, operation: int, wait_s: float) -> bool:
    """Tries for up to `wait_s`; returns True if the lock is taken, also on a file system without locks."""
    try:
        return take_flock(descriptor, operation, wait_s)
    except OSError as error:
        _log.warning("this file system has no locks (%s): do not run another `prepare` here", error.strerror)
        return True
