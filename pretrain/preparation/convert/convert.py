"""`pretrain prepare --from KIND`: token data of another system -> token shards.

    plan                            headers, sizes and tables are checked before anything is written
    lock, claim the folder          prepare.json: the identity of the folder; another one is refused
    tokenizer.json                  the one that made the tokens, as it was given
    parts, over processes           each its own shards and record (convert_part.py); finished ones are kept
    conversion.json                 the hash of all tokens of the source equals that of the shards
    statistics.json, data_card.md   (preparation/statistics.py)
    index.json                      last: merges the records in part order

The hash is a proof that no token was lost. Before: sha256 over the tokens of the files, uint32
little-endian. After: the same over the shards on disk, in the source's order.

A killed conversion is continued by the same command, and gives the same bytes. An unusable source
ends it with one line and removes its output. Memory of a process: one chunk, one document, one
member.
"""

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.config.prepare import TokenizerConfig
from pretrain.errors import ConfigError, DataError
from pretrain.preparation.convert.convert_part import ConvertJob, ConvertOptions, load_runs, start_converting
from pretrain.preparation.convert.flat import open_nanogpt, open_olmo
from pretrain.preparation.convert.mds import open_mds
from pretrain.preparation.convert.megatron import open_megatron
from pretrain.preparation.convert.token_file import ReadOptions, TokenFile
from pretrain.preparation.input_parts import WHOLE, InputFile, plan_part_bytes, plan_parts
from pretrain.preparation.output import CONVERSION_NAME, fill_folder
from pretrain.preparation.part_record import PartRecord, merge_splits
from pretrain.preparation.pool import WorkerPool
from pretrain.preparation.progress import Progress, no_progress
from pretrain.preparation.split import TRAIN, VALIDATION, SplitRule, is_validation, parse_split
from pretrain.preparation.statistics import write_statistics
from pretrain.shards.index import DataIndex, ShardIndex, write_index
from pretrain.shards.reader import ShardReader
from pretrain.tokenizer.file import load_tokenizer, parse_tokenizer, read_given, tokenizer_hash
from pretrain.tokenizer.roles import eos_id, start_id, vocabulary_size
from pretrain.utils.io import write_file, write_json

FORMATS: dict[str, Callable[[Sequence[str], ReadOptions], Sequence[TokenFile]]] = {
    "megatron": open_megatron,
    "nanogpt": open_nanogpt,
    "olmo": open_olmo,
    "mds": open_mds,
}
DEFAULT_SPLIT = "hash:0.01"
# Goes up when the same options would give other bytes.
FORMAT = 3

_log = logging.getLogger(__name__)


def convert_tokens(
    options: ConvertOptions, progress: Progress = no_progress, *, processes: int | None = None
) -> DataIndex:
    """Makes `options.output` a complete shard folder out of token data, unless it is one.

    Throughput is about 30,000 documents a second and core; the proof reads the source and the
    shards once more.

    The token hash is logged, and written to conversion.json. `processes` are one a core, if None,
    and have no effect on the output.

    Raises:
        ConfigError: Invalid options, or others than those the folder was begun with.
        DataError: A source or a tokenizer that is missing, damaged, empty, or another than that the
            folder was begun with; a token outside the vocabulary; or a worker was killed.
        LaunchError: A tokenizer that cannot be fetched.
        LockedError: Another process writes the folder.
        DiskError: The disk refused. Finished parts are kept: the same command continues.
    """
    job = _plan(options)
    listed = [side for opened in job.files.values() for side in (opened.file, *opened.companions)]
    files = list({file.path: file for file in listed}.values())
    index = fill_folder(job.folder, WHOLE, _identity(job), files, processes, lambda: _build(job, progress, processes))
    assert index is not None, "there are no other shares to wait for"
    return index


def _plan(options: ConvertOptions) -> ConvertJob:
    """Opens the source and checks everything that can be checked before its tokens are read."""
    if options.kind not in FORMATS:
        raise ConfigError(
            f"from={options.kind!r} is not a format of tokens",
            fix=f"use one of {', '.join(FORMATS)}",
        )
    source = read_given(TokenizerConfig(kind="given", path=options.tokenizer))
    content = source.content
    tokenizer = parse_tokenizer(content, options.tokenizer)
    read = ReadOptions(vocabulary_size(tokenizer), eos_id(tokenizer, source.eos), options.dtype)
    opened_files = FORMATS[options.kind](options.source, read)
    files = {opened.file.path: opened for opened in opened_files}
    stored = [opened.file for opened in opened_files]
    if len(files) < len(stored):
        where = ", ".join(options.source)
        raise DataError("names a file twice", where=where, fix="name each once")
    splits, rule = _plan_split(stored, options.split)
    parts = plan_parts(stored, plan_part_bytes(stored))
    return ConvertJob(options.output, parts, options, content, read, start_id(tokenizer), files, splits, rule)


def _identity(job: ConvertJob) -> dict[str, Any]:
    """Returns all that the output depends on, without the source."""
    return {
        "from": job.options.kind,
        "tokenizer": f"sha256:{hashlib.sha256(job.tokenizer).hexdigest()}",
        "split": job.options.split,
        "dtype": job.options.dtype,
        "format": FORMAT,
    }


def _plan_split(files: Sequence[InputFile], split: str | None) -> tuple[dict[str, str], SplitRule]:
    """Returns the split of files whose names decide, and the rule for other documents."""
    held_out = {file.path for file in files if is_validation(file.path)}
    if split is None and 0 < len(held_out) < len(files):
        by_file = {file.path: VALIDATION if file.path in held_out else TRAIN for file in files}
        return by_file, parse_split("hash:0", 0)
    rule = parse_split(split or DEFAULT_SPLIT, 0)
    if rule.kind != "hash":
        raise ConfigError(f"split={split!r} cuts texts, not tokens", fix="use --split hash:F")
    return {}, rule


def _build(job: ConvertJob, progress: Progress, processes: int | None) -> DataIndex:
    write_file(job.tokenizer_path, job.tokenizer)
    sha256 = tokenizer_hash(job.tokenizer_path)
    pool = WorkerPool(job.folder, progress, processes)
    records = pool.write_parts(partial(start_converting, job), job.parts, sha256, "converting")
    ordered = [records[part.number] for part in job.parts]
    splits = merge_splits(ordered)
    index = DataIndex(
        tokenizer_sha256=sha256,
        vocab_size=job.read.vocab_size,
        dtype=job.read.shard_dtype.name,
        eos_id=job.read.eos_id,
        splits=splits,
        begin_id=_find_begin(job, sum(split.num_documents for split in splits.values())),
    )
    _prove(job, index, records, progress)
    formats = [job.options.kind] * len(job.files)
    tokenizer = load_tokenizer(job.tokenizer_path)
    write_statistics(job.folder, formats, job.num_bytes, index, tokenizer, ordered)
    write_index(job.folder, index)
    return index


def _find_begin(job: ConvertJob, num_documents: int) -> int | None:
    """Returns the token that the tokenizer puts in front of a text, if every document begins with it."""
    num_begun = sum(load_runs(job.folder, part).get("num_begun", 0) for part in job.parts)
    if 0 < num_begun < num_documents:
        text = "%d of %d documents begin with token %d: prompts of a run will not, as not all do"
        _log.warning(text, num_begun, num_documents, job.begin_id)
    return job.begin_id if num_begun == num_documents else None


def _prove(job: ConvertJob, index: DataIndex, records: dict[int, PartRecord], progress: Progress) -> None:
    """Compares the tokens of source and shards, and writes their hashes."""
    folder = job.folder
    done_bytes = 0
    num_documents = sum(split.num_documents for split in index.splits.values())

    def tick(num_bytes: int) -> None:
        nonlocal done_bytes
        done_bytes += num_bytes
        progress("comparing", done_bytes, 2 * job.num_bytes, num_documents)

    before = _hash_tokens(_read_source(job.files.values(), tick))
    after = _hash_tokens(_read_output(job, index, records, tick))
    if before != after:
        source = f"{before['num_tokens']} tokens (sha256 {before['sha256']})"
        output = f"{after['num_tokens']} ({after['sha256']})"
        raise DataError(
            f"the source changed while it was read: {source} became {output}",
            fix="run the same command again",
        )
    num_open = sum(load_runs(folder, part)["num_open"] for part in job.parts)
    facts = {
        "from": job.options.kind,
        "num_documents": num_documents,
        "num_documents_without_end": num_open,
        "before": before,
        "after": after,
    }
    write_json(folder / CONVERSION_NAME, facts)
    text = "token hash before and after: sha256 %(sha256)s over %(num_tokens)d tokens"
    _log.info(text, before)
    if num_open:
        text = "%d of %d documents do not end with token %d"
        _log.warning(text, num_open, num_documents, index.eos_id)


def _hash_tokens(chunks: Iterable[np.ndarray]) -> dict[str, int | str]:
    """Returns number and hash of tokens: sha256 over them as uint32, little-endian, in hex."""
    num_tokens = 0
    sha256 = hashlib.sha256()
    for chunk in chunks:
        num_tokens += len(chunk)
        sha256.update(np.ascontiguousarray(chunk, "<u4").data)
    return {"num_tokens": num_tokens, "sha256": sha256.hexdigest()}


def _read_source(files: Iterable[TokenFile], tick: Callable[[int], None]) -> Iterator[np.ndarray]:
    """Yields the tokens of all files. Raises: DataError, OSError."""
    for opened in files:
        yield from opened.tokens()
        tick(opened.file.size)


def _read_output(
    job: ConvertJob, index: DataIndex, records: dict[int, PartRecord], tick: Callable[[int], None]
) -> Iterator[np.ndarray]:
    """Yields the documents of all shards, in the source's order."""
    folder = job.folder
    for part in job.parts:
        splits = records[part.number].splits.items()
        readers = {name: _read_shards(folder, index.dtype, split.shards) for name, split in splits}
        for split, count in load_runs(folder, part)["rows"]:
            yield from islice(readers[split], count)
        tick(part.num_bytes)


def _read_shards(folder: Path, dtype: str, shards: Iterable[ShardIndex]) -> Iterator[np.ndarray]:
    """Yields the documents of shards. Raises: DataError: one is damaged."""
    for shard in shards:
        reader = ShardReader(folder, shard, dtype)
        for number in range(shard.num_members):
            tokens, starts = reader.member(number)
            yield from np.split(tokens, starts[1:])
