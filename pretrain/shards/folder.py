"""What is fetched of a remote folder before any shard: its index, its tokenizer, what it was made from, and sizes.

    URL/index.json -> CACHE/folders/HASH OF ITS BYTES/index.json; tokenizer.json and prepare.json beside it

So the index of a folder in the cache never changes: where it was replaced, it is another folder. Beside it lies what
belongs to it: links to its shards, the lengths of their documents, bins.
"""

import hashlib
import logging
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pretrain.errors import DataError
from pretrain.shards.cache import ShardCache
from pretrain.shards.download import read_small, unavailable
from pretrain.shards.index import INDEX_NAME, load_index
from pretrain.shards.store import Patience
from pretrain.shards.transport import TransientError, Transport
from pretrain.utils.io import write_file
from pretrain.utils.remote import AbandonedError, Attempts

TOKENIZER_NAME = "tokenizer.json"
IDENTITY_NAME = "prepare.json"
QUESTIONS = 16
"""Files that the server is asked about at a time."""

_log = logging.getLogger(__name__)


def fetch_folder(
    transport: Transport, cache: ShardCache, patience: Patience, stop: Callable[[], bool]
) -> tuple[Path, int]:
    """Fetches index, tokenizer and any prepare.json; returns their folder and the descriptor that keeps it.

    Raises:
        DataError: They are not there, or not what they should be; or the server has been away for too long.
        DiskError: The disk refused.
        AbandonedError: `stop` said so.
    """
    content = read_small(transport, INDEX_NAME, patience=patience, abandoned=stop)
    folder, descriptor = cache.hold_folder(hashlib.sha256(content).hexdigest()[:32])
    try:
        # Written whenever it is fetched, that is seldom: so it is whole, whatever happened to this folder before.
        write_file(folder / INDEX_NAME, content)
        _fetch_tokenizer(transport, folder, patience, stop)
        _fetch_identity(transport, folder, patience, stop)
    except BaseException:
        os.close(descriptor)
        raise
    return folder, descriptor


def _fetch_tokenizer(transport: Transport, folder: Path, patience: Patience, stop: Callable[[], bool]) -> None:
    try:
        index = load_index(folder)
    except DataError as error:
        raise DataError(error.what, where=f"{transport.url}/{INDEX_NAME}", fix=error.fix) from None
    tokenizer = folder / TOKENIZER_NAME
    if tokenizer.is_file():
        return
    content = read_small(transport, TOKENIZER_NAME, patience=patience, abandoned=stop)
    found = hashlib.sha256(content).hexdigest()
    if found != index.tokenizer_sha256:
        raise DataError(
            f"is not the tokenizer of the index: its sha256 is {found} instead of {index.tokenizer_sha256}",
            where=f"{transport.url}/{TOKENIZER_NAME}",
            fix="upload the tokenizer that the shards were made with",
        )
    write_file(tokenizer, content)


def _fetch_identity(transport: Transport, folder: Path, patience: Patience, stop: Callable[[], bool]) -> None:
    """Fetches what says how the text was normalised. Training goes on without: a folder may have none."""
    if (folder / IDENTITY_NAME).is_file():
        return
    try:
        content = read_small(transport, IDENTITY_NAME, patience=patience, abandoned=stop)
    except DataError as error:
        # Where files may not be listed, S3 says of one that is missing that it is forbidden.
        _log.info("how the text was normalised is not known: %s", error)
        return
    write_file(folder / IDENTITY_NAME, content)


def check_remote(
    transport: Transport, sizes: Iterable[tuple[str, int]], patience: Patience, stop: Callable[[], bool]
) -> None:
    """Asks for the size of files, given by name and the size that they should have.

    Raises:
        DataError: Some are not there or have another size; one line that lists all of them.
        AbandonedError: `stop` said so.
    """

    def complaint(pair: tuple[str, int]) -> str:
        name, size = pair
        found = _ask(transport, name, patience, stop)
        if isinstance(found, DataError):
            return f"{name} {found.what}"
        return "" if found in (None, size) else f"{name} has {found} bytes, not {size}"

    with ThreadPoolExecutor(QUESTIONS) as pool:
        bad = [text for text in pool.map(complaint, sizes) if text]
    if bad:
        raise DataError(", ".join(bad), where=transport.url, fix="upload these files again")


def _ask(transport: Transport, name: str, patience: Patience, stop: Callable[[], bool]) -> int | DataError | None:
    attempts = Attempts(patience, stop)
    while True:
        if stop():
            raise AbandonedError
        try:
            return transport.num_bytes(name)
        except TransientError as error:
            if not attempts.again():
                raise unavailable(f"{transport.url}/{name}", error, patience) from None
        except DataError as error:
            return error
