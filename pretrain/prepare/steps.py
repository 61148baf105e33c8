"""The steps of `prepare` that read the input, each for one share of the parts; and how shares wait for each other.

What the first share makes for all, the others wait for: shares may start in any order, but have to run together, or
the first one first. The only thing that the first waits for is the hashes of the others' documents.
"""

import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from pretrain.errors import DataError, LockedError
from pretrain.prepare.duplicates import DUPLICATES_DIR, HashSettings, find_first, first_path, hashes_path, remove_hashes
from pretrain.prepare.filters import FilterRule, select
from pretrain.prepare.input_parts import InputPart, Share
from pretrain.prepare.labelling import LABELS_NAME, LabelSet, check_labels, find_labels
from pretrain.prepare.output import load_records
from pretrain.prepare.part import PartRecord, PartSettings
from pretrain.prepare.pool import hash_parts, run_parts
from pretrain.prepare.prepare_job import PrepareJob
from pretrain.prepare.progress import Progress
from pretrain.prepare.readers.dispatch import Reader
from pretrain.prepare.split import TRAIN, SplitRule
from pretrain.prepare.text_pieces import divide
from pretrain.shards.index import LABELLED
from pretrain.tokenizer import dump_tokenizer, is_cut_safe, load_tokenizer, tokenizer_hash, train_tokenizer
from pretrain.utils.io import write_json

WAIT_S = 600.0

POLL_S = 0.5

_log = logging.getLogger(__name__)


def wait_for(paths: Sequence[Path], what: str) -> None:
    """Waits until other shares have made these files, as long as there come more of them every WAIT_S seconds.

    Raises:
        LockedError: None came for so long.
    """
    missing = [path for path in paths if not path.exists()]
    if missing:
        _log.info("waiting for %s (%d of %d files)", what, len(missing), len(paths))
    deadline = time.monotonic() + WAIT_S
    while missing:
        if time.monotonic() >= deadline:
            raise LockedError(
                f"waited {WAIT_S:.0f} s for {what}, in vain ({len(missing)} files, such as {missing[0].name})",
                where=str(missing[0].parent),
                fix="start the other parts and run this command again; what is finished is kept",
            )
        time.sleep(POLL_S)
        left = [path for path in missing if not path.exists()]
        if len(left) < len(missing):
            missing, deadline = left, time.monotonic() + WAIT_S


def find_duplicates(job: PrepareJob, share: Share, progress: Progress, processes: int) -> None:
    """Finds which documents came first, of all parts together. Raises: See `run_task`, `wait_for`."""
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
        _hash_own(job, share, progress, processes)
        if share.is_first:
            wait_for([hashes_path(job.folder, part) for part in job.parts], "the hashes of the other parts")
            find_first(job.folder, job.parts)
        wait_for(wanted, "what --part 1 makes of the hashes of all parts")
    if share.is_first:
        remove_hashes(job.folder)


def _hash_own(job: PrepareJob, share: Share, progress: Progress, processes: int) -> None:
    own = share.own(job.parts)
    todo = [part for part in own if not hashes_path(job.folder, part).exists()]
    total_bytes = sum(part.num_bytes for part in own)
    earlier_bytes = total_bytes - sum(part.num_bytes for part in todo)

    def tick(num_bytes: int, num_documents: int) -> None:
        progress("looking for duplicates", earlier_bytes + num_bytes, total_bytes, num_documents)

    hash_parts(HashSettings(job.folder, job.reader, job.filters), todo, processes, tick, share)


def make_tokenizer(job: PrepareJob, progress: Progress) -> bytes:
    """Returns the content of tokenizer.json."""
    if job.given is not None:
        return job.given
    config = job.config.tokenizer
    # A character that the sample lacks could not be said at all.
    sample_bytes = None if config.kind == "char" else config.sample_bytes
    texts = train_texts(job.parts, job.reader, job.rule, job.filters, job.first_of, sample_bytes, progress)
    return dump_tokenizer(train_tokenizer(texts, config))


def make_labels(job: PrepareJob, share: Share, progress: Progress) -> LabelSet | None:
    """Returns the labels of labelled documents: the given ones, or those that the first share finds.

    Raises:
        DataError: There are none, or too many.
        LockedError: See `wait_for`.
    """
    if job.config.kind not in LABELLED:
        return None
    if job.config.labels:
        check_labels(job.config.labels)
        return LabelSet(tuple(job.config.labels), is_given=True)
    path = job.folder / LABELS_NAME
    if share.is_first and not path.exists():
        write_json(path, find_labels(job.parts, job.reader, job.rule, job.filters, job.first_of, progress))
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
    total_bytes = sum(part.num_bytes for part in own)
    earlier_bytes = total_bytes - sum(part.num_bytes for part in todo)
    earlier_documents = sum(record.num_documents for record in records.values())

    def tick(num_bytes: int, num_documents: int) -> None:
        progress("tokenizing", earlier_bytes + num_bytes, total_bytes, earlier_documents + num_documents)

    run_parts(settings, tokenizer_path, todo, processes, tick, share)
    written = load_records(job.folder, own, settings.tokenizer_sha256)
    progress("tokenizing", total_bytes, total_bytes, sum(record.num_documents for record in written.values()))


# What a tokenizer is trained on: text of the training split, spread over the whole input, the same
# on every run.


def train_texts(
    parts: Sequence[InputPart],
    reader: Reader,
    rule: SplitRule,
    filters: FilterRule,
    first_of: Callable[[InputPart], np.ndarray | None],
    sample_bytes: int | None,
    progress: Progress,
) -> Iterator[str]:
    """Yields training text: the beginning of each part, in proportion to its size; both sides of pairs.

    Args:
        parts: The whole input.
        reader: Reads it.
        rule: The split; what it holds out is not seen here either.
        filters: What they leave out is not seen.
        first_of: Of a part, which documents came first (see `select`); the others are not seen.
        sample_bytes: About how much text in all, UTF-8. None: all of it.
        progress: Called after each part.

    Raises:
        DataError: There is none, or malformed input.
    """
    total_bytes = sum(part.num_bytes for part in parts)
    done_bytes = num_documents = 0
    for part in parts:
        room = sys.maxsize if sample_bytes is None else -(-sample_bytes * part.num_bytes // total_bytes)
        for document in select(reader.read(part.slices), filters, first_of(part), Counter()):
            pieces = [piece for piece in divide(document, rule) if piece.split == TRAIN]
            if pieces:
                yield from (piece.text[:room] for piece in pieces if piece.text)
                num_documents += 1
                room -= len(document.utf8) + len((document.source or "").encode())
            if room <= 0:
                break
        done_bytes += part.num_bytes
        progress("reading for the tokenizer", done_bytes, total_bytes, num_documents)
    if not num_documents:
        raise DataError("there is no text to train on", fix="give more text, or hold out less with --split")
