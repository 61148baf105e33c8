"""The shard folder while it is made: its identity, its common files, and its locks.

    prepare.json      config and listing of the inputs, written first: the identity of the folder
    tokenizer.json    next; parts depend on it; images have none
    labels.json       of labelled documents, where no labels are given; parts depend on it
    duplicates/*      where asked for; parts depend on it
    parts/*.json      one record a finished part (part_record.py)
    conversion.json   of converted tokens: their hash
    statistics.json, data_card.md, lengths.png
    index.json        written last: with it the folder is complete

A run continues a folder of the same identity and refuses any other.

One `prepare` may write a folder, or one for each part of n; after a kill, none before the last
worker has ended. The locks are flocks, which the operating system releases at the end of a
process; a complete folder has none of the files:

    .prepare.lock      exclusive: `prepare`; shared, with n in it: `--part i/n`
    .prepare-i.lock    exclusive: `--part i/n`
    .workers.lock, .workers-i.lock    shared: each worker process; a start waits for them
    .claim.lock        exclusive, for a moment: writers of common files: the n above, prepare.json, the index
"""

import fcntl
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from pretrain.errors import ConfigError, DataError, LockedError
from pretrain.preparation.duplicates import DUPLICATES_DIR
from pretrain.preparation.filters import TooManyBadError
from pretrain.preparation.input_parts import WHOLE, InputFile, Share
from pretrain.preparation.labelling import LABELS_NAME
from pretrain.preparation.part_record import PARTS_DIR
from pretrain.preparation.split import SPLITS
from pretrain.preparation.statistics import CARD_NAME, PICTURE_NAME, STATISTICS_NAME
from pretrain.shards.index import INDEX_NAME, DataIndex, check_shards, load_index
from pretrain.tokenizer.file import tokenizer_hash
from pretrain.utils.io import disk_error, make_dir, take_flock, write_json
from pretrain.utils.safe_read import check_fields, read_json

IDENTITY_NAME = "prepare.json"
TOKENIZER_NAME = "tokenizer.json"
CONVERSION_NAME = "conversion.json"
PREPARE_LOCK = ".prepare.lock"
WORKERS_LOCK = ".workers.lock"
CLAIM_LOCK = ".claim.lock"
ORPHAN_WAIT_S = 30.0
CLAIM_WAIT_S = 600.0
MAX_SHOWN_CHARS = 60
MAX_SHOWN = 8

_DERIVED = (INDEX_NAME, STATISTICS_NAME, CARD_NAME, PICTURE_NAME, CONVERSION_NAME)
# Files that parts depend on.
_NEEDED = (LABELS_NAME, TOKENIZER_NAME)
_LOCK_NAME = re.compile(r"\.(prepare|workers|claim)(-\d+)?\.lock")
_OTHER_TOKENIZER = f"{TOKENIZER_NAME} is not the one that made the shards"
_ELSEWHERE = "use another --output, or delete this folder to prepare it anew"

_log = logging.getLogger(__name__)


def fill_folder(
    folder: Path,
    share: Share,
    identity: dict[str, Any],
    files: Sequence[InputFile],
    processes: int | None,
    build: Callable[[], DataIndex | None],
) -> DataIndex | None:
    """Locks and claims a folder; returns its index, which `build` writes if it is incomplete.

    `identity` are the options that the output depends on; `processes` is only checked.
    """
    if processes is not None and processes < 1:
        raise ConfigError(
            f"processes={processes} must be at least 1",
            fix="leave it out for one a core",
        )
    with ExitStack() as stack:
        if not folder.exists():
            stack.callback(_remove_if_empty, folder)
        make_dir(folder)
        stack.enter_context(lock_folder(folder, share))
        with claim_lock(folder):
            _claim_folder(folder, identity, files, is_first=share.is_first)
            index = _complete_index(folder, share)
        if index is not None:
            _log.info("%s is complete: nothing to do", folder)
            return index
        with _name_failures(folder):
            try:
                return build()
            except TooManyBadError:
                raise
            except DataError:
                # Corrected input could not use it; the other shares still write theirs.
                if share.is_whole:
                    _discard_output(folder)
                raise


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


@contextmanager
def _name_failures(folder: Path) -> Iterator[None]:
    """Turns the death of a worker and failed reads into a DataError with its fix."""
    try:
        yield
    except BrokenProcessPool as error:
        raise DataError(
            "a worker process died, most likely killed for want of memory",
            where=str(folder),
            fix="run the same command again with fewer --processes; finished parts are kept",
        ) from error
    except OSError as error:
        if error.filename is None:
            raise
        raise DataError(
            f"cannot be read: {error.strerror}",
            where=str(error.filename),
            fix="fix the access problem and run the same command again; finished parts are kept",
        ) from error


def _claim_folder(folder: Path, options: dict[str, Any], files: Sequence[InputFile], *, is_first: bool) -> None:
    """Writes `prepare.json`, or compares it with the same options and inputs."""
    # Temporary files of a killed run: their names, which have a process id, may come again. Those of
    # the tokenizer and the labels belong to the first share, which makes them.
    for name in (IDENTITY_NAME, *_DERIVED, *(_NEEDED if is_first else ())):
        for temporary in folder.glob(f"{name}.tmp-*"):
            temporary.unlink()
    path = folder / IDENTITY_NAME
    inputs = [_input_line(side) for file in files for side in (file, file.pair) if side]
    if not path.exists():
        names = sorted(entry.name for entry in folder.iterdir())
        strangers = [name for name in names if not _LOCK_NAME.fullmatch(name)]
        if strangers:
            begun = f"was not begun by `pretrain prepare` (it holds {strangers[0]})"
            raise ConfigError(
                f"the folder is not empty and {begun}",
                where=str(folder),
                fix="use another --output",
            )
        write_json(path, {"options": options, "inputs": inputs})
        return
    try:
        before = check_fields(read_json(path), {"options": dict, "inputs": list})
        _compare_options(folder, before["options"], options)
        _compare_inputs(folder, before["inputs"], inputs)
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"cannot be read: {error}", where=str(path), fix=_ELSEWHERE) from error


def begun_option(folder: Path, name: str) -> Any:
    """Returns an option, by its dotted key, with which a folder was begun; None: it was not."""
    try:
        identity = check_fields(read_json(folder / IDENTITY_NAME), {"options": dict})
        return identity["options"].get(name)
    except (OSError, ValueError, KeyError, AttributeError):
        return None  # where the file is damaged, the claim of the folder says so


def _input_line(file: InputFile) -> str:
    place = file.shown if file.is_remote else Path(file.path).absolute()
    return f"{file.size} {file.version} {place}"


def _compare_options(folder: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    # An earlier form of `on_error`, which parts do not depend on.
    names = sorted(name for name in before.keys() | now.keys() if not name.endswith(".undecodable"))
    changes = [
        f"{name} was {_shortened(before.get(name))} and is now {_shortened(now.get(name))}"
        for name in names
        if before.get(name) != now.get(name)
    ]
    if changes:
        num_more = len(changes) - MAX_SHOWN
        shown = ", ".join(changes[:MAX_SHOWN]) + (f", and {num_more} more" if num_more > 0 else "")
        raise ConfigError(f"begun with other options: {shown}", where=str(folder), fix=_ELSEWHERE)


def _shortened(value: Any) -> str:
    """Returns the value of an option for a message; a chat template has thousands of characters."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}..."


def _compare_inputs(folder: Path, before: list[str], now: list[str]) -> None:
    if before == now:
        return
    old = _by_path(before)
    new = _by_path(now)
    changes = {
        "new": sorted(new.keys() - old.keys()),
        "gone": sorted(old.keys() - new.keys()),
        "changed": sorted(path for path in old.keys() & new.keys() if old[path] != new[path]),
    }
    named = [f"{len(paths)} {kind} ({paths[0]})" for kind, paths in changes.items() if paths]
    raise DataError(
        f"begun with other inputs: {', '.join(named) or 'their order changed'}",
        where=str(folder),
        fix=_ELSEWHERE,
    )


def _by_path(lines: list[str]) -> dict[str, tuple[str, str]]:
    rows = (line.split(" ", 2) for line in lines)
    return {path: (size, version) for size, version, path in rows}


def _complete_index(folder: Path, share: Share) -> DataIndex | None:
    """Returns the index of a complete folder; where files of it are missing, removes the index."""
    if not (folder / INDEX_NAME).exists():
        return None
    try:
        index = load_index(folder)
        check_shards(folder, index)
        if not index.has_tokenizer or tokenizer_hash(folder / TOKENIZER_NAME) == index.tokenizer_sha256:
            return index
        damage = _OTHER_TOKENIZER
    except (DataError, OSError) as error:
        damage = str(error)
    if not share.is_whole:
        raise DataError(
            f"the folder was complete, and is damaged: {damage}",
            fix="repair it by the command without --part",
        )
    if damage == _OTHER_TOKENIZER:
        (folder / TOKENIZER_NAME).unlink()
    _log.warning("%s; making what is missing again", damage)
    (folder / INDEX_NAME).unlink()
    return None


def _discard_output(folder: Path) -> None:
    """Removes the output of an unfinished run, the index first and the identity last."""
    for name in _DERIVED:
        (folder / name).unlink(missing_ok=True)
    for name in (PARTS_DIR, DUPLICATES_DIR, *SPLITS):
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in (*_NEEDED, IDENTITY_NAME):
        (folder / name).unlink(missing_ok=True)


@contextmanager
def lock_folder(folder: Path, share: Share = WHOLE) -> Iterator[None]:
    """Locks an existing folder for one `prepare`, or one share; a complete or empty one keeps no locks.

    Raises: LockedError, DiskError.
    """
    with ExitStack() as stack:
        if share.is_whole:
            descriptor = _hold(folder, PREPARE_LOCK, "another `pretrain prepare`", stack)
        else:
            descriptor = _hold_with_others(folder, share, stack)
            _hold(folder, f".prepare-{share.number}.lock", f"another `--part {share}`", stack)
        names = {WORKERS_LOCK, _workers_name(share)}
        if share.is_whole:
            names |= {path.name for path in folder.glob(".workers-*.lock")}
        for name in sorted(names):
            workers = _open(folder, name, stack)
            if not _flock(workers, fcntl.LOCK_EX, wait_s=ORPHAN_WAIT_S):
                raise LockedError(
                    "workers of an earlier `pretrain prepare` are still running",
                    where=str(folder),
                    fix="end them first",
                )
            _flock(workers, fcntl.LOCK_UN, wait_s=0)
        try:
            yield
        finally:
            held = [path.name for path in folder.glob("*")]
            if all(map(_LOCK_NAME.fullmatch, held)) or (folder / INDEX_NAME).exists():
                with claim_lock(folder):
                    if _flock(descriptor, fcntl.LOCK_EX, wait_s=0):  # no other share is at work
                        for path in folder.glob(".*.lock"):
                            path.unlink()


@contextmanager
def claim_lock(folder: Path) -> Iterator[None]:
    """Locks the common files of all shares. Raises: LockedError, DiskError."""
    with ExitStack() as stack:
        if not _take(folder, CLAIM_LOCK, stack, wait_s=CLAIM_WAIT_S)[1]:
            raise LockedError(
                f"timed out waiting for {CLAIM_LOCK}",
                where=str(folder),
                fix="end the process that holds it",
            )
        yield


def hold_as_worker(folder: Path, share: Share = WHOLE) -> None:
    """Takes the lock of a worker on `folder` until this process ends."""
    descriptor = os.open(folder / _workers_name(share), os.O_RDWR | os.O_CREAT, 0o644)
    _flock(descriptor, fcntl.LOCK_SH, wait_s=ORPHAN_WAIT_S)


def _workers_name(share: Share) -> str:
    return WORKERS_LOCK if share.is_whole else f".workers-{share.number}.lock"


def _open(folder: Path, name: str, stack: ExitStack) -> int:
    try:
        descriptor = os.open(folder / name, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise disk_error("write here", folder, error) from error
    stack.callback(os.close, descriptor)
    return descriptor


def _take(folder: Path, name: str, stack: ExitStack, wait_s: float) -> tuple[int, bool]:
    """Locks a file exclusively; returns its descriptor, and whether it has the lock."""
    while True:
        descriptor = _open(folder, name, stack)
        if not _flock(descriptor, fcntl.LOCK_EX, wait_s):
            return descriptor, False
        # The owner before may have removed the file meanwhile: then this lock guards nothing.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), (folder / name).stat()):
                return descriptor, True


def _hold(folder: Path, name: str, who: str, stack: ExitStack) -> int:
    descriptor, is_ours = _take(folder, name, stack, wait_s=0)
    if not is_ours:
        raise _taken(descriptor, folder, who)
    _write_owner(descriptor, str(os.getpid()))
    return descriptor


def _hold_with_others(folder: Path, share: Share, stack: ExitStack) -> int:
    """Takes the shared lock of parts of the same n; parts of another n write the same files."""
    mine = f"of {share.of}"
    # The first one has it exclusively until its n is written; the others wait here.
    with claim_lock(folder):
        descriptor = _open(folder, PREPARE_LOCK, stack)
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
    return descriptor


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
    """Tries for up to `wait_s`; returns True if it is taken, or the file system has no locks."""
    try:
        return take_flock(descriptor, operation, wait_s)
    except OSError as error:
        _log.warning("this file system has no locks (%s): do not run another `prepare` here", error.strerror)
        return True
