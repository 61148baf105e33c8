"""`pretrain prepare`: raw text -> tokenizer -> token shards, restartable, always the same bytes.

Images, which have no tokenizer, are prepared in images.py.

    check config, list inputs       before anything is written (steps.py)
    lock, claim the folder          prepare.json: the identity of the folder; another one is refused
    duplicates/                     where asked for: deduplication (duplicates.py)
    tokenizer.json                  trained on a sample of the training documents, or the given one
    labels.json                     of labelled documents: the label names of the training split
    parts, over processes           each its own shards and record (part.py, pool.py); finished ones are kept
    statistics.json, data_card.md   (statistics.py)
    index.json                      last: merges the records in part order

Several commands, each with its share of the parts, may fill one folder from as many machines. A
killed run is continued by the same command. Malformed input ends it with one line and removes its
output, which corrected input could not use. Not here: shuffling (`data/order.py` permutes when
training reads).
"""

import contextlib
import logging
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from pretrain.config.prepare import PrepareConfig
from pretrain.kinds.layouts import LAYOUTS
from pretrain.preparation.convert.convert import convert_tokens
from pretrain.preparation.convert.convert_part import ConvertOptions
from pretrain.preparation.filters import limit_of
from pretrain.preparation.images import prepare_images, summarize
from pretrain.preparation.input_parts import WHOLE, Share, parse_share
from pretrain.preparation.labelling import LabelSet
from pretrain.preparation.output import CONVERSION_NAME, claim_lock, fill_folder
from pretrain.preparation.part import start_tokenizing
from pretrain.preparation.part_record import PartRecord, load_records, merge_bad, merge_splits
from pretrain.preparation.pool import WorkerPool
from pretrain.preparation.progress import Progress, no_progress, progress_bar
from pretrain.preparation.split import TRAIN, VALIDATION
from pretrain.preparation.statistics import learned_share, write_statistics
from pretrain.preparation.steps import PrepareJob, find_duplicates, make_labels, make_tokenizer, plan_job
from pretrain.shards.index import INDEX_NAME, DataIndex, SplitIndex, load_index, write_index
from pretrain.tokenizer.file import load_tokenizer
from pretrain.tokenizer.roles import eos_id, start_id, token_dtype, vocabulary_size
from pretrain.utils.safe_read import parse_json
from pretrain.utils.status_line import status_line
from pretrain.utils.units import plural

_log = logging.getLogger(__name__)


def prepare(
    config: PrepareConfig,
    progress: Progress = no_progress,
    *,
    share: Share = WHOLE,
    processes: int | None = None,
) -> DataIndex | None:
    """Prepares one share of `config.output`; returns the index, None if other shares have not finished.

    Throughput is that of `tokenizers`: about 3 MB/s of text a core. `processes` are one a core, if
    None, and have no effect on the output.

    Raises:
        ConfigError: Invalid values, or others than those the folder was begun with.
        DataError: Inputs that are missing, malformed, empty, or others than those the folder was
            begun with; or a worker was killed.
        LockedError: Another process prepares the same share, or timed out waiting for files of
            other shares.
        DiskError: The disk refused. Finished parts are kept: the same command continues.
    """
    if LAYOUTS[config.kind].images:
        return prepare_images(config, progress, share=share, processes=processes)
    job = plan_job(config, WorkerPool(Path(config.output), progress, processes, share))
    return fill_folder(job.folder, share, job.identity, job.files, processes, lambda: _build(job))


def _build(job: PrepareJob) -> DataIndex | None:
    if job.config.filter.deduplicate or job.config.filter.near_duplicates:
        find_duplicates(job)
    sha256 = make_tokenizer(job)
    labels = make_labels(job)
    start = partial(start_tokenizing, job.config, job.tested, labels)
    job.pool.write_parts(start, job.own_parts, sha256, "tokenizing")
    with claim_lock(job.folder):
        if (job.folder / INDEX_NAME).exists():
            return load_index(job.folder)
        records = load_records(job.folder, job.parts, sha256)
        if len(records) < len(job.parts):
            return None
        return _write_index(job, sha256, labels, [records[part.number] for part in job.parts])


def _write_index(job: PrepareJob, sha256: str, labels: LabelSet | None, records: Sequence[PartRecord]) -> DataIndex:
    """Merges the records, in part order; writes statistics, and last the index."""
    merge_bad(records, limit_of(job.config, job.num_bytes))
    splits = merge_splits(records)
    _warn_of_split(job, splits)
    tokenizer = load_tokenizer(job.tokenizer_path)
    size = vocabulary_size(tokenizer)
    if job.given is None and size < (job.config.tokenizer.vocab_size or 0):
        text = "the vocabulary has %d entries, not the %d asked for: the text has no more that are worth one"
        _log.warning(text, size, job.config.tokenizer.vocab_size)
    index = DataIndex(
        tokenizer_sha256=sha256,
        vocab_size=size,
        dtype=token_dtype(size),
        eos_id=eos_id(tokenizer, job.config.tokenizer.eos),
        splits=splits,
        kind=job.config.kind,
        labels=() if labels is None else labels.names,
        begin_id=start_id(tokenizer) if job.config.tokenizer.begin else None,
    )
    formats = [file.format for file in job.files]
    write_statistics(job.folder, formats, job.num_bytes, index, tokenizer, records)
    learned_share(job.folder, TRAIN)
    write_index(job.folder, index)
    return index


def _warn_of_split(job: PrepareJob, splits: dict[str, SplitIndex]) -> None:
    """Says that a validation split is missing or a single document, with its remedy."""
    num_documents = splits[VALIDATION].num_documents if VALIDATION in splits else 0
    if num_documents > 1 or not job.rule.fraction or job.rule.kind == "tail":
        return
    text = "held out one document, whose loss says little"
    if not num_documents:
        text = "held out nothing, without which runs train and are not evaluated: no val_loss, no checkpoint.best"
    fix = (
        "--split tail:0.05, the end of each text"
        if LAYOUTS[job.config.kind].running_text
        else f"--split {job.rule.larger}"
    )
    _log.warning("split %s %s; to hold out more, prepare another --output with %s", job.config.split, text, fix)


def run_prepare(config: PrepareConfig, part: str, processes: int | None) -> str:
    """Prepares one share, `i/n`, of a config; returns the text to print."""
    share = parse_share(part)
    with _shown("image" if LAYOUTS[config.kind].images else "document") as progress:
        index = prepare(config, progress, share=share, processes=processes)
    if index is None:
        return f"{config.output}: part {share} is done; the last one to finish writes the index"
    if index.has_images:
        return summarize(config.output, index)
    is_tail = config.split.startswith("tail") and not any(one.split for one in config.inputs)
    summary = _summarize(config.output, index.splits, is_tail=is_tail)
    learned = learned_share(Path(config.output), TRAIN)
    return summary if learned is None else f"{summary}, {learned:.1%} of these learned"


def run_convert(options: ConvertOptions, processes: int | None) -> str:
    """Re-shards the tokens of another system; returns the text to print."""
    with _shown("document") as progress:
        index = convert_tokens(options, progress, processes=processes)
    proof = parse_json((options.output / CONVERSION_NAME).read_text())["after"]
    summary = _summarize(str(options.output), index.splits)
    return f"{summary}\nsha256 of all tokens, before and after: {proof['sha256']}"


@contextlib.contextmanager
def _shown(sample: str) -> Iterator[Progress]:
    """Shows progress in samples, documents or images, and a message after Ctrl-C."""
    status_line().enter("listing the inputs")
    try:
        with progress_bar(sample) as progress:
            yield progress
    except KeyboardInterrupt:
        raise KeyboardInterrupt("interrupted; finished parts are kept: the same command continues") from None


def _summarize(folder: str, splits: dict[str, SplitIndex], *, is_tail: bool = False) -> str:
    """Returns the line at the end; `is_tail`: every document is in both splits."""
    validation = splits.get(VALIDATION)
    held_out = f" {validation.num_tokens:,} validation tokens," if validation else ""
    nums_documents = [split.num_documents for split in splits.values()]
    documents = max(nums_documents) if is_tail else sum(nums_documents)
    tokens = sum(split.num_tokens for split in splits.values())
    bytes_per_token = sum(split.num_bytes_text for split in splits.values()) / tokens
    return (
        f"{folder}: {splits[TRAIN].num_tokens:,} training tokens,{held_out} {plural(documents, 'document')}, "
        f"{bytes_per_token:.2f} bytes per token"
    )
