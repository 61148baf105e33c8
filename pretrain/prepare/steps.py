"""The steps of `prepare` that read the input, each for one share of the parts.

The other shares wait for the files that the first one makes for all: shares may start in any order,
but have to run together, or the first one first. The first waits for the hashes of the others'
documents only.
"""

import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from pretrain.errors import LockedError
from pretrain.prepare.duplicates import (
    DUPLICATES_DIR,
    HashTask,
    find_first,
    first_path,
    hashes_path,
    remove_hashes,
)
from pretrain.prepare.filters import Document
from pretrain.prepare.labelling import LABELS_NAME, LabelSet, check_labels, sort_labels
from pretrain.prepare.part import read_part
from pretrain.prepare.part_record import nothing_to_train_on
from pretrain.prepare.pool import run_task
from pretrain.prepare.prepare_job import PrepareJob
from pretrain.prepare.split import TRAIN
from pretrain.prepare.text_pieces import TextPiece, divide
from pretrain.shards.index import LABELLED
from pretrain.tokenizer import dump_tokenizer, tokenizer_hash, train_tokenizer
from pretrain.utils.io import write_file, write_json

WAIT_S = 600.0
POLL_S = 0.5

_log = logging.getLogger(__name__)


def find_duplicates(job: PrepareJob) -> None:
    """Finds the first of equal documents, over all parts. Raises: See `run_task`, `_wait_for`."""
    is_first = job.share.is_first
    wanted = [first_path(job.folder, part) for part in (job.parts if is_first else job.own_parts)]
    temporaries = [f"{part.name}.hashes.tmp-*" for part in job.own_parts]
    for pattern in [*temporaries, *(["*.first.tmp-*"] if is_first else [])]:
        for temporary in (job.folder / DUPLICATES_DIR).glob(pattern):
            temporary.unlink()
    if not all(path.exists() for path in wanted):
        todo = [part for part in job.own_parts if not hashes_path(job.folder, part).exists()]
        phase = "looking for duplicates"
        task = HashTask(job.config)
        run_task(task, job.own_parts, todo, phase, job.progress, job.processes, job.share)
        if is_first:
            hashes = [hashes_path(job.folder, part) for part in job.parts]
            _wait_for(hashes, "the hashes of the other parts")
            find_first(job.folder, job.parts)
        _wait_for(wanted, "what --part 1 makes of the hashes of all parts")
    if is_first:
        remove_hashes(job.folder)


def make_tokenizer(job: PrepareJob) -> str:
    """Writes tokenizer.json, or waits for it; returns its hash. Raises: DataError: no training text."""
    path = job.tokenizer_path
    if job.share.is_first and not path.exists():
        content = job.given
        if content is None:
            content = dump_tokenizer(train_tokenizer(_train_texts(job), job.config.tokenizer))
        write_file(path, content)
    _wait_for([path], "the tokenizer, which --part 1 makes")
    return tokenizer_hash(path)


def make_labels(job: PrepareJob) -> LabelSet | None:
    """Returns the labels of labelled documents: the given ones, or those that the first share finds."""
    if job.config.kind not in LABELLED:
        return None
    if job.config.labels:
        check_labels(job.config.labels)
        return LabelSet(tuple(job.config.labels), is_given=True)
    path = job.folder / LABELS_NAME
    if job.share.is_first and not path.exists():
        documents = (document for document, _ in _train_pieces(job, "reading the labels"))
        names = (str(label.name) for document in documents for label in document.labels)
        write_json(path, sort_labels(names))
    _wait_for([path], "the labels, which --part 1 finds")
    return LabelSet(tuple(json.loads(path.read_bytes())), is_given=False)


def _train_texts(job: PrepareJob) -> Iterator[str]:
    """Yields the training text of a tokenizer, both sides of pairs. Raises: DataError: there is none."""
    config = job.config.tokenizer
    # A character that the sample lacks has no token at all.
    sample_bytes = None if config.kind == "char" else config.sample_bytes
    is_empty = True
    for _, pieces in _train_pieces(job, "reading for the tokenizer", sample_bytes):
        is_empty = False
        yield from (piece.text for piece in pieces if piece.text)
    if is_empty:
        raise nothing_to_train_on()


def _train_pieces(
    job: PrepareJob, phase: str, sample_bytes: int | None = None
) -> Iterator[tuple[Document, list[TextPiece]]]:
    """Yields documents of the training split that are kept, with their pieces in it."""
    done_bytes = 0
    num_documents = 0
    for part in job.parts:
        room = sys.maxsize
        # A sample is the beginning of each part, in proportion to its size.
        if sample_bytes is not None:
            room = -(-sample_bytes * part.num_bytes // job.num_bytes)
        for document in read_part(job.config, part, Counter()):
            pieces = [piece for piece in divide(document, job.rule) if piece.split == TRAIN]
            if pieces:
                yield document, [piece._replace(text=piece.text[:room]) for piece in pieces]
                num_documents += 1
                room -= len(document.utf8) + len((document.source or "").encode())
            if room <= 0:
                break
        done_bytes += part.num_bytes
        job.progress(phase, done_bytes, job.num_bytes, num_documents)


def _wait_for(paths: Sequence[Path], what: str) -> None:
    """Waits for files of other shares, for WAIT_S seconds after each that appears. Raises: LockedError: timed out."""
    missing = [path for path in paths if not path.exists()]
    if missing:
        _log.info("waiting for %s (%d of %d files)", what, len(missing), len(paths))
    deadline = time.monotonic() + WAIT_S
    while missing:
        if time.monotonic() >= deadline:
            files = f"{len(missing)} files, such as {missing[0].name}"
            raise LockedError(
                f"timed out after {WAIT_S:.0f} s waiting for {what} ({files})",
                where=str(missing[0].parent),
                fix="start the other parts and run this command again; what is finished is kept",
            )
        time.sleep(POLL_S)
        left = [path for path in missing if not path.exists()]
        if len(left) < len(missing):
            missing = left
            deadline = time.monotonic() + WAIT_S
