"""`pretrain prepare`: raw text -> tokenizer -> token shards, restartable and the same bytes however it is run.

    check options, list inputs      nothing is written before they are sound
    lock, claim the folder          prepare.json: what this folder is made from; another identity is refused
    tokenizer.json                  trained on a sample of the training documents, or the given one
    parts, over processes           each its own shards and record (part.py, pool.py); finished ones are kept
    index.json                      last: merges the records in part order

A run that is killed anywhere is continued by the same command. Malformed input ends it with one line and takes back
what was written: nothing of it could be used, because mended input is other input. Not here: shuffling (order.py
permutes when training reads), and any other process's folder.
"""

import logging
import os
from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pretrain.config.prepare import InputConfig
from pretrain.data import output
from pretrain.data.inputs.listing import list_inputs
from pretrain.data.lock import lock_folder
from pretrain.data.part import PartRecord, PartSettings
from pretrain.data.pool import run_parts
from pretrain.data.progress import Progress, no_progress
from pretrain.data.readers.reader import Reader
from pretrain.data.sample import train_texts
from pretrain.data.sources import InputFile, Part, plan_part_bytes, plan_parts
from pretrain.data.split import SPLITS, TRAIN, VALIDATION, SplitRule, parse_split
from pretrain.data.tokenizer import (
    check_bpe_size,
    dump_tokenizer,
    eos_id,
    load_tokenizer,
    token_dtype,
    tokenizer_hash,
    train_bpe,
    train_char,
    vocabulary_size,
)
from pretrain.errors import ConfigError, DataError
from pretrain.index import INDEX_NAME, DataIndex, SplitIndex, build_split, check_shards, load_index, write_index
from pretrain.io import make_dir, write_file

DEFAULT_VOCAB_SIZE = 8192
FORMAT = 1
"""Goes up when the same options would give other bytes."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PrepareOptions:
    """What to prepare, and how.

    Attributes:
        output: The shard folder.
        inputs: Files, folders and globs. Empty: the running Python's standard library.
        tokenizer: `bpe`, `char`, or the path of a tokenizer.json.
        vocab_size: Of a `bpe` tokenizer; None: 8192. The other kinds have their own.
        text_field: Key of the text in a jsonl line.
        split: `hash:F` or `tail:F`, see split.py.
        seed: Salt of the hash split.
        processes: Worker processes, one core each; None: one a core. No effect on the output.
        part_bytes: Input bytes of one unit of work; None: by the size of the input.
        shard_tokens: A part starts a new shard at this many tokens.
        sample_bytes: Training text that a `bpe` tokenizer is trained on, taken evenly from the whole input.
    """

    output: Path
    inputs: tuple[str, ...] = ()
    tokenizer: str = "bpe"
    vocab_size: int | None = None
    text_field: str = "text"
    split: str = "hash:0.01"
    seed: int = 0
    processes: int | None = None
    part_bytes: int | None = None
    shard_tokens: int = 2**27
    sample_bytes: int = 64 * 2**20


@dataclass(frozen=True, slots=True)
class _Job:
    """Checked options and the work that they mean."""

    options: PrepareOptions
    files: list[InputFile]
    parts: list[Part]
    rule: SplitRule
    identity: dict[str, Any]

    @property
    def num_bytes(self) -> int:
        """Input bytes on disk."""
        return sum(part.num_bytes for part in self.parts)

    @property
    def reader(self) -> Reader:
        """What reads the input."""
        return Reader(_inputs(self.options))


def prepare(options: PrepareOptions, progress: Progress = no_progress) -> DataIndex:
    """Makes `options.output` a complete shard folder and returns its index. Does nothing if it is one already.

    Throughput is that of `tokenizers`: about 3 MB/s of text a core.

    Raises:
        ConfigError: Options that cannot be, or that differ from those the folder was begun with.
        DataError: Inputs that are missing, malformed, empty, or differ from those the folder was begun with; or a
            worker was killed.
        LockedError: Another process prepares the same folder.
        DiskError: The disk refused. What is finished is kept: the same command continues.
    """
    job = _plan_job(options)
    folder = make_dir(options.output)
    with lock_folder(folder):
        output.claim_folder(folder, job.identity, job.files)
        index = _complete_index(folder)
        if index is not None:
            _log.info("%s is complete: nothing to do", folder)
            return index
        try:
            return _build(job, progress)
        except DataError:
            output.discard_output(folder)
            raise
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
                fix="mend that and run the same command again; finished parts are kept",
            ) from error


def _plan_job(options: PrepareOptions) -> _Job:
    """Checks everything that can be checked before anything is written."""
    rule = parse_split(options.split, options.seed)
    if options.processes is not None and options.processes < 1:
        raise ConfigError(f"processes={options.processes} must be at least 1", fix="leave it out for one a core")
    identity = asdict(options)
    for name in ("output", "inputs", "processes"):
        del identity[name]
    if options.tokenizer == "bpe":
        identity["vocab_size"] = options.vocab_size or DEFAULT_VOCAB_SIZE
        check_bpe_size(identity["vocab_size"])
    elif options.vocab_size is not None:
        raise ConfigError(
            f"vocab_size={options.vocab_size} applies to tokenizer=bpe only, not to {options.tokenizer}",
            fix="leave it out",
        )
    elif options.tokenizer != "char":
        path = Path(options.tokenizer)
        eos_id(load_tokenizer(path))
        identity["tokenizer"] = f"sha256:{tokenizer_hash(path)}"
    files = list_inputs(_inputs(options))
    identity["part_bytes"] = options.part_bytes or plan_part_bytes(files)
    identity["format"] = FORMAT
    parts = plan_parts(files, identity["part_bytes"])
    job = _Job(options, files, parts, rule, identity)
    if not job.num_bytes:
        raise DataError(f"the input is empty ({len(files)} files, 0 bytes)", fix="give files with text in them")
    return job


def _inputs(options: PrepareOptions) -> tuple[InputConfig, ...]:
    """The inputs as a config would name them."""
    return (InputConfig(path=list(options.inputs), text_field=options.text_field),) if options.inputs else ()


def _complete_index(folder: Path) -> DataIndex | None:
    """Returns the index of a folder that is complete; where files of it are missing, takes the index away."""
    if not (folder / INDEX_NAME).exists():
        return None
    try:
        index = load_index(folder)
        check_shards(folder, index)
        if tokenizer_hash(folder / output.TOKENIZER_NAME) == index.tokenizer_sha256:
            return index
        (folder / output.TOKENIZER_NAME).unlink()
        damage = f"{output.TOKENIZER_NAME} is not the one that made the shards"
    except (DataError, OSError) as error:
        damage = str(error)
    _log.warning("%s; making what is missing again", damage)
    (folder / INDEX_NAME).unlink()
    return None


def _build(job: _Job, progress: Progress) -> DataIndex:
    folder = job.options.output
    tokenizer_path = folder / output.TOKENIZER_NAME
    if not tokenizer_path.exists():
        write_file(tokenizer_path, _make_tokenizer(job, progress))
    sha256 = tokenizer_hash(tokenizer_path)
    records = output.load_records(folder, job.parts, sha256)
    output.remove_leftovers(folder, job.parts, records)
    _write_parts(job, tokenizer_path, sha256, records, progress)
    records = output.load_records(folder, job.parts, sha256)
    assert len(records) == len(job.parts), "every part that was written has a record"
    progress("tokenizing", job.num_bytes, job.num_bytes, sum(record.num_documents for record in records.values()))
    index = _merge(job, tokenizer_path, [records[part.number] for part in job.parts])
    write_index(folder, index)
    return index


def _make_tokenizer(job: _Job, progress: Progress) -> bytes:
    """Returns the content of tokenizer.json."""
    kind = job.options.tokenizer
    if kind == "bpe":
        texts = train_texts(job.parts, job.reader, job.rule, job.options.sample_bytes, progress)
        return dump_tokenizer(train_bpe(texts, job.identity["vocab_size"]))
    if kind == "char":
        return dump_tokenizer(train_char(train_texts(job.parts, job.reader, job.rule, None, progress)))
    return Path(kind).read_bytes()


def _write_parts(
    job: _Job, tokenizer_path: Path, sha256: str, records: dict[int, PartRecord], progress: Progress
) -> None:
    options = job.options
    settings = PartSettings(
        folder=options.output,
        rule=job.rule,
        reader=job.reader,
        cut_long=options.tokenizer in ("bpe", "char"),
        shard_tokens=options.shard_tokens,
        tokenizer_sha256=sha256,
    )
    todo = [part for part in job.parts if part.number not in records]
    earlier_bytes = job.num_bytes - sum(part.num_bytes for part in todo)
    earlier_documents = sum(record.num_documents for record in records.values())

    def tick(num_bytes: int, num_documents: int) -> None:
        progress("tokenizing", earlier_bytes + num_bytes, job.num_bytes, earlier_documents + num_documents)

    run_parts(settings, tokenizer_path, todo, options.processes or _num_cores(), tick)


def _num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _merge(job: _Job, tokenizer_path: Path, records: Sequence[PartRecord]) -> DataIndex:
    """Builds the index out of the records, in part order."""
    splits: dict[str, SplitIndex] = {}
    for name in SPLITS:
        written = [record.splits[name] for record in records]
        split = build_split([s for w in written for s in w.shards], sum(w.num_bytes_text for w in written))
        if split.num_documents:
            splits[name] = split
    for count, what in (
        (sum(record.num_empty for record in records), "empty documents"),
        (sum(record.num_undecodable for record in records), "files that are not UTF-8"),
    ):
        if count:
            _log.info("skipped %d %s", count, what)
    if TRAIN not in splits:
        raise DataError("there is no text to train on", fix="give more text, or hold out less with --split")
    if VALIDATION not in splits and job.rule.fraction:
        _log.warning("split %s held out nothing: there is no validation split", job.options.split)
    tokenizer = load_tokenizer(tokenizer_path)
    size = vocabulary_size(tokenizer)
    return DataIndex(tokenizer_hash(tokenizer_path), size, token_dtype(size), eos_id(tokenizer), splits)
