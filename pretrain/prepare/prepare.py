"""`pretrain prepare`: raw text -> tokenizer -> token shards, restartable and the same bytes however it is run.

    check config, list inputs       before anything is written (prepare_job.py)
    lock, claim the folder          prepare.json: the identity of the folder; another one is refused
    duplicates/                     where asked for: deduplication (duplicates.py)
    tokenizer.json                  trained on a sample of the training documents, or the given one
    labels.json                     of labelled documents: the label names of the training split
    parts, over processes           each its own shards and record (part.py, pool.py); finished ones are kept
    statistics.json, data_card.md   (statistics.py)
    index.json                      last: merges the records in part order

Several commands, each with its share of the parts, may fill one folder from as many machines. A killed run is continued
by the same command. Malformed input ends it with one line and removes its output, which corrected input could not use.
Not here: shuffling (`data/order.py` permutes when training reads).
"""

import contextlib
import json
import logging
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from pretrain.config.prepare import PrepareConfig
from pretrain.errors import ConfigError, DataError
from pretrain.prepare import output
from pretrain.prepare.convert.convert import CONVERSION_NAME, convert_tokens
from pretrain.prepare.convert.convert_job import ConvertOptions
from pretrain.prepare.filters import EMPTY, UNDECODABLE
from pretrain.prepare.input_parts import WHOLE, Share, parse_share
from pretrain.prepare.labelling import LabelSet
from pretrain.prepare.output import claim_lock, lock_folder
from pretrain.prepare.part import PartRecord
from pretrain.prepare.pool import name_failures, num_cores
from pretrain.prepare.prepare_job import PrepareJob, plan_job
from pretrain.prepare.progress import Progress, no_progress, progress_bar
from pretrain.prepare.split import SPLITS, TRAIN, VALIDATION
from pretrain.prepare.statistics import collect_statistics, count_left_out, write_statistics
from pretrain.prepare.steps import find_duplicates, make_labels, make_tokenizer, wait_for, write_parts
from pretrain.shards.index import INDEX_NAME, DataIndex, SplitIndex, build_split, load_index, write_index
from pretrain.tokenizer import eos_id, load_tokenizer, token_dtype, tokenizer_hash, vocabulary_size
from pretrain.utils.io import make_dir, write_file

_log = logging.getLogger(__name__)


def prepare(config: PrepareConfig, progress: Progress = no_progress, *, processes: int | None = None) -> DataIndex:
    """Makes `config.output` a complete shard folder and returns its index. Does nothing if it is one already.

    Throughput is that of `tokenizers`: about 3 MB/s of text a core.

    Args:
        config: Config of the folder.
        progress: Progress callback.
        processes: Worker processes; None: one a core. No effect on the output.

    Raises:
        ConfigError: Invalid values, or others than those the folder was begun with.
        DataError: Inputs that are missing, malformed, empty, or others than those the folder was begun with; or a
            worker was killed.
        LockedError: Another process prepares the same folder.
        DiskError: The disk refused. Finished parts are kept: the same command continues.
    """
    index = prepare_share(config, WHOLE, progress, processes=processes)
    assert index is not None, "there are no others to wait for"
    return index


def prepare_share(
    config: PrepareConfig, share: Share, progress: Progress = no_progress, *, processes: int | None = None
) -> DataIndex | None:
    """Prepares one share of a folder, which other machines fill too; its output stays after an error.

    Returns:
        The index, which the last share to finish writes; None: others have not finished.

    Raises:
        LockedError: Timed out waiting for files of other shares (see `wait_for`); else as `prepare`.
    """
    if processes is not None and processes < 1:
        raise ConfigError(f"processes={processes} must be at least 1", fix="leave it out for one a core")
    job = plan_job(config)
    folder = make_dir(job.folder)
    with lock_folder(folder, share):
        with claim_lock(folder):
            output.claim_folder(folder, job.identity, job.files, is_first=share.is_first)
            index = _complete_index(folder, share)
        if index is not None:
            _log.info("%s is complete: nothing to do", folder)
            return index
        with name_failures(folder):
            try:
                return _build(job, share, progress, processes or num_cores())
            except DataError:
                if share.is_whole:
                    output.discard_output(folder)
                raise


def _complete_index(folder: Path, share: Share) -> DataIndex | None:
    """Returns the index of a complete folder; where files of it are missing, removes the index."""
    if not (folder / INDEX_NAME).exists():
        return None
    index, damage = output.check_complete(folder)
    if index is not None:
        return index
    if not share.is_whole:
        raise DataError(
            f"the folder was complete, and is damaged: {damage}", fix="repair it by the command without --part"
        )
    if damage == output.OTHER_TOKENIZER:
        (folder / output.TOKENIZER_NAME).unlink()
    _log.warning("%s; making what is missing again", damage)
    (folder / INDEX_NAME).unlink()
    return None


def _build(job: PrepareJob, share: Share, progress: Progress, processes: int) -> DataIndex | None:
    if job.config.filter.deduplicate:
        find_duplicates(job, share, progress, processes)
    tokenizer_path = job.folder / output.TOKENIZER_NAME
    if share.is_first and not tokenizer_path.exists():
        write_file(tokenizer_path, make_tokenizer(job, progress))
    wait_for([tokenizer_path], "the tokenizer, which --part 1 makes")
    sha256 = tokenizer_hash(tokenizer_path)
    labels = make_labels(job, share, progress)
    own = share.own(job.parts)
    records = output.load_records(job.folder, own, sha256)
    output.remove_leftovers(job.folder, own, records)
    write_parts(job, share, tokenizer_path, labels, records, progress, processes)
    with claim_lock(job.folder):
        if (job.folder / INDEX_NAME).exists():
            return load_index(job.folder)
        records = output.load_records(job.folder, job.parts, sha256)
        assert records.keys() >= {part.number for part in own}, "every part that was written has a record"
        if len(records) < len(job.parts):
            return None
        return _write_index(job, tokenizer_path, labels, [records[part.number] for part in job.parts])


def _write_index(
    job: PrepareJob, tokenizer_path: Path, labels: LabelSet | None, records: Sequence[PartRecord]
) -> DataIndex:
    """Merges the records, in part order; writes statistics, and last the index."""
    splits: dict[str, SplitIndex] = {}
    for name in SPLITS:
        written = [record.splits[name] for record in records]
        split = build_split([s for w in written for s in w.shards], sum(w.num_bytes_text for w in written))
        if split.num_documents:
            splits[name] = split
    _log_left_out(records)
    if TRAIN not in splits:
        raise DataError("there is no text to train on", fix="give more text, or hold out less with --split")
    if VALIDATION not in splits and job.rule.fraction:
        _log.warning("split %s held out nothing: there is no validation split", job.config.split)
    tokenizer, sha256 = load_tokenizer(tokenizer_path), tokenizer_hash(tokenizer_path)
    size, names = vocabulary_size(tokenizer), () if labels is None else labels.names
    index = DataIndex(sha256, size, token_dtype(size), eos_id(tokenizer), splits, job.config.kind, names)
    formats = [file.format for file in job.files]
    write_statistics(job.folder, collect_statistics(formats, job.num_bytes, index, tokenizer, records))
    write_index(job.folder, index)
    return index


def _log_left_out(records: Sequence[PartRecord]) -> None:
    left_out = count_left_out(records)
    named = {"empty documents": left_out.pop(EMPTY), "files that are not UTF-8": left_out.pop(UNDECODABLE)}
    named |= {f"documents: {reason.replace('_', ' ')}": count for reason, count in left_out.items()}
    for what, count in named.items():
        if count:
            _log.info("skipped %d %s", count, what)


def run_prepare(config: PrepareConfig, part: str, processes: int | None) -> str:
    """Prepares one share, `i/n`, of a config; returns what to print. Raises: As `prepare_share`."""
    share = parse_share(part)
    with _shown() as progress:
        index = prepare_share(config, share, progress, processes=processes)
    if index is None:
        return f"{config.output}: part {share} is done; the last one to finish writes the index"
    return _summarize(config.output, index.splits)


def run_convert(options: ConvertOptions, processes: int | None) -> str:
    """Re-shards the tokens of another system; returns what to print. Raises: As `convert_tokens`."""
    with _shown() as progress:
        index = convert_tokens(options, progress, processes=processes)
    proof = json.loads((options.output / CONVERSION_NAME).read_text())["after"]
    summary = _summarize(str(options.output), index.splits)
    return f"{summary}\nsha256 of all tokens, before and after: {proof['sha256']}"


@contextlib.contextmanager
def _shown() -> Iterator[Progress]:
    """Shows progress, and a message after Ctrl-C."""
    try:
        with progress_bar() as progress:
            yield progress
    except KeyboardInterrupt:
        print("interrupted; finished parts are kept: the same command continues", file=sys.stderr)
        raise


def _summarize(folder: str, splits: dict[str, SplitIndex]) -> str:
    train, validation = splits["train"], splits.get("validation")
    held_out = f", {validation.num_tokens:,} validation tokens" if validation else ""
    documents = sum(split.num_documents for split in splits.values())
    tokens = sum(split.num_tokens for split in splits.values())
    bytes_per_token = sum(split.num_bytes_text for split in splits.values()) / tokens
    return (
        f"{folder}: {train.num_tokens:,} training tokens{held_out}, {documents:,} documents, "
        f"{bytes_per_token:.2f} bytes per token"
    )
