"""The steps of `prepare` that read the input, each for one share of the parts.

The other shares wait for the files that the first one makes for all: shares may start in any order, but have to run
together, or the first one first. The first waits for the hashes of the others' documents only.
"""

import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from pretrain.errors import DataError, LockedError
from pretrain.prepare.duplicates import DUPLICATES_DIR, HashTask, find_first, first_path, hashes_path, remove_hashes
from pretrain.prepare.filters import Document, select
from pretrain.prepare.input_parts import InputPart, Share
from pretrain.prepare.labelling import LABELS_NAME, LabelSet, check_labels, sort_labels
from pretrain.prepare.output import load_records
from pretrain.prepare.part import PartRecord, PartSettings
from pretrain.prepare.pool import PartTask, run_task
from pretrain.prepare.prepare_job import PrepareJob
from pretrain.prepare.progress import Progress
from pretrain.prepare.split import TRAIN
from pretrain.prepare.text_pieces import TextPiece, divide
from pretrain.shards.index import LABELLED
from pretrain.tokenizer import dump_tokenizer, is_cut_safe, load_tokenizer, tokenizer_hash, train_tokenizer
from pretrain.utils.io import write_json

WAIT_S = 600.0
POLL_S = 0.5

_log = logging.getLogger(__name__)


def wait_for(paths: Sequence[Path], what: str) -> None:
    """Waits for files of other shares, for WAIT_S seconds after each that appears. Raises: LockedError: timed out."""
    missing = [path for path in paths if not path.exists()]
    if missing:
        _log.info("waiting for %s (%d of %d files)", what, len(missing), len(paths))
    deadline = time.monotonic() + WAIT_S
    while missing:
        if time.monotonic() >= deadline:
            raise LockedError(
                f"timed out after {WAIT_S:.0f} s waiting for {what} ({len(missing)} files, such as {missing[0].name})",
                where=str(missing[0].parent),
                fix="start the other parts and run this command again; what is finished is kept",
            )
        time.sleep(POLL_S)
        left = [path for path in missing if not path.exists()]
        if len(left) < len(missing):
            missing, deadline = left, time.monotonic() + WAIT_S


def find_duplicates(job: PrepareJob, share: Share, progress: Progress, processes: int) -> None:
    """Finds the first of equal documents, over all parts. Raises: See `run_task`, `wait_for`."""
    own = share.own(job.parts)
    firsts = [first_path(job.folder, part) for part in job.parts]
    wanted = firsts if share.is_first else [first_path(job.folder, part) for part in own]
    for path in (hashes_path(job.folder, part) for part in own):
        for temporary in path.parent.glob(f"{path.name}.tmp-*"):
            temporary.unlink()
    if share.is_first:
        for temporary in (job.folder / DUPLICATES_DIR).glob("*.first.tmp-*"):
            temporary.unlink()
    if not all(path.exists() for path in wanted):
        todo = [part for part in own if not hashes_path(job.folder, part).exists()]
        task = HashTask(job.folder, job.reader, job.filters)
        _run_own(job, task, todo, share, "looking for duplicates", progress, processes)
        if share.is_first:
            wait_for([hashes_path(job.folder, part) for part in job.parts], "the hashes of the other parts")
            find_first(job.folder, job.parts)
        wait_for(wanted, "what --part 1 makes of the hashes of all parts")
    if share.is_first:
        remove_hashes(job.folder)


def _run_own(
    job: PrepareJob,
    task: PartTask,
    todo: Sequence[InputPart],
    share: Share,
    phase: str,
    progress: Progress,
    processes: int,
    earlier_documents: int = 0,
) -> None:
    """Runs a task on the share's parts that are left to do; progress counts the finished ones too."""
    total_bytes = sum(part.num_bytes for part in share.own(job.parts))
    earlier_bytes = total_bytes - sum(part.num_bytes for part in todo)

    def tick(num_bytes: int, num_documents: int) -> None:
        progress(phase, earlier_bytes + num_bytes, total_bytes, earlier_documents + num_documents)

    run_task(task, todo, processes, tick, share)


def make_tokenizer(job: PrepareJob, progress: Progress) -> bytes:
    """Returns the content of tokenizer.json."""
    if job.given is not None:
        return job.given
    config = job.config.tokenizer
    # A character that the sample lacks has no token at all.
    sample_bytes = None if config.kind == "char" else config.sample_bytes
    return dump_tokenizer(train_tokenizer(_train_texts(job, sample_bytes, progress), config))


def _train_texts(job: PrepareJob, sample_bytes: int | None, progress: Progress) -> Iterator[str]:
    """Yields the training text of a tokenizer, both sides of pairs. Raises: DataError: there is none."""
    is_empty = True
    for _, pieces in _train_pieces(job, "reading for the tokenizer", progress, sample_bytes):
        is_empty = False
        yield from (piece.text for piece in pieces if piece.text)
    if is_empty:
        raise DataError("there is no text to train on", fix="give more text, or hold out less with --split")


def make_labels(job: PrepareJob, share: Share, progress: Progress) -> LabelSet | None:
    """Returns the labels of labelled documents: the given ones, or those that the first share finds."""
    if job.config.kind not in LABELLED:
        return None
    if job.config.labels:
        check_labels(job.config.labels)
        return LabelSet(tuple(job.config.labels), is_given=True)
    path = job.folder / LABELS_NAME
    if share.is_first and not path.exists():
        documents = _train_pieces(job, "reading the labels", progress)
        write_json(path, sort_labels(str(label.name) for document, _ in documents for label in document.labels))
    wait_for([path], "the labels, which --part 1 finds")
    return LabelSet(tuple(json.loads(path.read_bytes())), is_given=False)


def write_parts(
    job: PrepareJob,
    share: Share,
    tokenizer_path: Path,
    labels: LabelSet | None,
    records: dict[int, PartRecord],
    progress: Progress,
    processes: int,
) -> None:
    """Tokenises the share's parts that have no record yet. Raises: See `run_task`."""
    settings = PartSettings(
        folder=job.folder,
        tokenizer_path=tokenizer_path,
        rule=job.rule,
        reader=job.reader,
        cut_long=job.config.kind != "tags" and is_cut_safe(load_tokenizer(tokenizer_path)),
        shard_tokens=job.config.shard_tokens,
        tokenizer_sha256=tokenizer_hash(tokenizer_path),
        filters=job.filters,
        deduplicate=job.config.filter.deduplicate,
        end_of_document=job.config.end_of_document,
        labels=labels,
    )
    own = share.own(job.parts)
    todo = [part for part in own if part.number not in records]
    earlier_documents = sum(record.num_documents for record in records.values())
    _run_own(job, settings, todo, share, "tokenizing", progress, processes, earlier_documents)
    written = load_records(job.folder, own, settings.tokenizer_sha256).values()
    total_bytes = sum(part.num_bytes for part in own)
    progress("tokenizing", total_bytes, total_bytes, sum(record.num_documents for record in written))


def _train_pieces(
    job: PrepareJob, phase: str, progress: Progress, sample_bytes: int | None = None
) -> Iterator[tuple[Document, list[TextPiece]]]:
    """Yields documents of the training split, with their pieces in it; duplicates and filtered ones are left out.

    Args:
        job: Job, whose whole input is read.
        phase: Name of the step, for progress.
        progress: Called after each part.
        sample_bytes: UTF-8 bytes of text in all, about: the beginning of each part, in proportion to its size.
            None: all of it.

    Raises:
        DataError: Malformed input.
    """
    done_bytes = num_documents = 0
    for part in job.parts:
        room = sys.maxsize if sample_bytes is None else -(-sample_bytes * part.num_bytes // job.num_bytes)
        for document in select(job.reader.read(part.slices), job.filters, job.first_of(part), Counter()):
            pieces = [piece for piece in divide(document, job.rule) if piece.split == TRAIN]
            if pieces:
                yield document, [piece._replace(text=piece.text[:room]) for piece in pieces]
                num_documents += 1
                room -= len(document.utf8) + len((document.source or "").encode())
            if room <= 0:
                break
        done_bytes += part.num_bytes
        progress(phase, done_bytes, job.num_bytes, num_documents)
