"""`pretrain prepare --from KIND`: token data of another system -> token shards, without tokenising again.

    plan_job                        headers, sizes and tables are checked before anything is written (convert_job.py)
    lock, claim the folder          prepare.json: the identity of the folder; another one is refused
    tokenizer.json                  the one that made the tokens, as it was given
    parts, over processes           each its own shards and record (convert_part.py); finished ones are kept
    conversion.json                 the hash of all tokens of the source equals that of the shards
    statistics.json, data_card.md   (prepare/statistics.py)
    index.json                      last: merges the records in part order

The hash is a proof that no token was lost. Before: sha256 over the tokens of the files, uint32 little-endian. After:
the same over the shards on disk, in the source's order, without appended tokens.

A killed conversion is continued by the same command, and gives the same bytes. An unusable source ends it with one line
and removes its output. Memory of a process: one chunk, one document, one member.
"""

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from pretrain.errors import ConfigError, DataError
from pretrain.prepare import output
from pretrain.prepare.convert.convert_job import ConvertJob, ConvertOptions, plan_job
from pretrain.prepare.convert.convert_part import ConversionSettings, load_runs
from pretrain.prepare.convert.token_file import TokenFile
from pretrain.prepare.input_parts import InputPart
from pretrain.prepare.output import lock_folder
from pretrain.prepare.part import PartRecord
from pretrain.prepare.pool import name_failures, num_cores, run_task
from pretrain.prepare.progress import Progress, no_progress
from pretrain.prepare.split import SPLITS, TRAIN
from pretrain.prepare.statistics import collect_statistics, write_statistics
from pretrain.shards.index import INDEX_NAME, DataIndex, ShardIndex, SplitIndex, build_split, write_index
from pretrain.shards.reader import ShardReader
from pretrain.tokenizer import load_tokenizer, tokenizer_hash
from pretrain.utils.io import make_dir, write_file, write_json

Tick = Callable[[int], None]

"""Called with the bytes done since the last call."""


@dataclass(frozen=True, slots=True)
class TokenHash:
    """Number and hash of tokens: sha256 over them in order, uint32 little-endian, in hex."""

    num_tokens: int
    sha256: str


def hash_tokens(chunks: Iterable[np.ndarray]) -> TokenHash:
    """Returns the hash of chunks of non-negative integers, however they are cut, whatever their dtype."""
    num_tokens, sha256 = 0, hashlib.sha256()
    for chunk in chunks:
        num_tokens += len(chunk)
        sha256.update(np.ascontiguousarray(chunk, "<u4").data)
    return TokenHash(num_tokens, sha256.hexdigest())


def hash_source(files: Iterable[TokenFile], tick: Tick) -> TokenHash:
    """Reads all files. Raises: DataError, OSError."""

    def read() -> Iterator[np.ndarray]:
        for opened in files:
            yield from opened.tokens()
            tick(opened.file.size)

    return hash_tokens(read())


def hash_shards(
    folder: Path, dtype: str, eos_id: int, parts: Sequence[InputPart], records: dict[int, PartRecord], tick: Tick
) -> TokenHash:
    """Reads all shards of the parts. Raises: DataError, where one is damaged."""

    def read() -> Iterator[np.ndarray]:
        for part in parts:
            splits = records[part.number].splits
            cursors = {name: _Cursor(folder, dtype, eos_id, split.shards) for name, split in splits.items()}
            for split, is_appended, count in load_runs(folder, part).rows:
                yield from cursors[split].take(count, is_appended)
            tick(part.num_bytes)

    return hash_tokens(read())


class _Cursor:
    """The documents of shards, in order."""

    def __init__(self, folder: Path, dtype: str, eos_id: int, shards: Sequence[ShardIndex]) -> None:
        self._eos_id = eos_id
        self._members = self._read(folder, dtype, shards)
        self._tokens, self._bounds = np.empty(0, dtype), np.zeros(1, np.int64)

    @staticmethod
    def _read(folder: Path, dtype: str, shards: Sequence[ShardIndex]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for shard in shards:
            reader = ShardReader(folder, shard, dtype)
            yield from (reader.member(number) for number in range(shard.num_members))

    def take(self, count: int, is_appended: bool) -> Iterator[np.ndarray]:
        """Yields the tokens of the next `count` documents, without an end-of-document token that was appended."""
        while count:
            if len(self._bounds) == 1:
                self._tokens, starts = next(self._members)
                self._bounds = np.append(starts.astype(np.int64), len(self._tokens))
            taken = min(count, len(self._bounds) - 1)
            bounds = self._bounds[: taken + 1]
            tokens = self._tokens[bounds[0] : bounds[-1]]
            if is_appended:
                ends = bounds[1:] - bounds[0] - 1
                assert (tokens[ends] == self._eos_id).all(), "what was appended is the end of a document"
                tokens = np.delete(tokens, ends)
            yield tokens
            self._bounds, count = self._bounds[taken:], count - taken


CONVERSION_NAME = "conversion.json"

_log = logging.getLogger(__name__)


def convert_tokens(
    options: ConvertOptions, progress: Progress = no_progress, *, processes: int | None = None
) -> DataIndex:
    """Makes `options.output` a complete shard folder out of token data. Does nothing if it is one already.

    Throughput is about 30,000 documents a second and core; the proof reads the source and the shards once more.

    Args:
        options: Source, tokenizer and output.
        progress: Progress callback.
        processes: Worker processes; None: one a core. No effect on the output.

    Returns:
        The index. The token hash is logged, and written to conversion.json.

    Raises:
        ConfigError: Invalid options, or others than those the folder was begun with.
        DataError: A source or a tokenizer that is missing, damaged, empty, or another than that the folder was begun
            with; a token outside the vocabulary; or a worker was killed.
        LaunchError: A tokenizer that cannot be fetched.
        LockedError: Another process writes the folder.
        DiskError: The disk refused. Finished parts are kept: the same command continues.
    """
    if processes is not None and processes < 1:
        raise ConfigError(f"processes={processes} must be at least 1", fix="leave it out for one a core")
    job = plan_job(options)
    folder = make_dir(options.output)
    with lock_folder(folder):
        output.claim_folder(folder, job.identity, job.listing)
        index = _complete_index(folder)
        if index is not None:
            _log.info("%s is complete: nothing to do", folder)
            return index
        with name_failures(folder):
            try:
                return _build(job, progress, processes or num_cores())
            except DataError:
                (folder / CONVERSION_NAME).unlink(missing_ok=True)
                output.discard_output(folder)
                raise


def _complete_index(folder: Path) -> DataIndex | None:
    """Returns the index of a folder that is complete; where files of it are missing, takes the index away."""
    for temporary in folder.glob(f"{CONVERSION_NAME}.tmp-*"):
        temporary.unlink()
    if not (folder / INDEX_NAME).exists():
        return None
    index, damage = output.check_complete(folder)
    if index is not None:
        return index
    _log.warning("%s; making what is missing again", damage)
    (folder / INDEX_NAME).unlink()
    return None


def _build(job: ConvertJob, progress: Progress, processes: int) -> DataIndex:
    folder = job.options.output
    write_file(folder / output.TOKENIZER_NAME, job.tokenizer)
    sha256 = tokenizer_hash(folder / output.TOKENIZER_NAME)
    records = output.load_records(folder, job.parts, sha256)
    output.remove_leftovers(folder, job.parts, records)
    _write_parts(job, records, progress, processes)
    records = output.load_records(folder, job.parts, sha256)
    assert len(records) == len(job.parts), "every part that was written has a record"
    ordered = [records[part.number] for part in job.parts]
    index = _merge(job, sha256, ordered)
    _prove(job, index, records, progress)
    formats, tokenizer = [job.options.kind] * len(job.files), load_tokenizer(folder / output.TOKENIZER_NAME)
    write_statistics(folder, collect_statistics(formats, job.num_bytes, index, tokenizer, ordered))
    write_index(folder, index)
    return index


def _write_parts(job: ConvertJob, records: dict[int, PartRecord], progress: Progress, processes: int) -> None:
    settings = ConversionSettings(
        folder=job.options.output,
        tokenizer_path=job.options.output / output.TOKENIZER_NAME,
        files={opened.file.path: opened for opened in job.files},
        splits=job.splits,
        rule=job.rule,
        eos=np.array([job.read.eos_id], job.read.shard_dtype),
        append_eos=job.options.append_eos,
        shard_tokens=job.options.shard_tokens,
    )
    todo = [part for part in job.parts if part.number not in records]
    earlier_bytes = job.num_bytes - sum(part.num_bytes for part in todo)
    earlier_documents = sum(record.num_documents for record in records.values())

    def tick(num_bytes: int, num_documents: int) -> None:
        progress("converting", earlier_bytes + num_bytes, job.num_bytes, earlier_documents + num_documents)

    run_task(settings, todo, processes, tick)


def _merge(job: ConvertJob, sha256: str, records: Sequence[PartRecord]) -> DataIndex:
    """Builds the index out of the records, in part order."""
    splits: dict[str, SplitIndex] = {}
    for name in SPLITS:
        written = [record.splits[name] for record in records]
        built = build_split([s for w in written for s in w.shards], sum(w.num_bytes_text for w in written))
        if built.num_documents:
            splits[name] = built
    if TRAIN not in splits:
        raise DataError("there are no tokens to train on", fix="give more, or hold out less with --split")
    num_empty = sum(record.num_empty for record in records)
    if num_empty:
        _log.info("left out %d empty documents", num_empty)
    return DataIndex(sha256, job.read.vocab_size, job.read.shard_dtype.name, job.read.eos_id, splits)


def _prove(job: ConvertJob, index: DataIndex, records: dict[int, PartRecord], progress: Progress) -> None:
    """Compares the tokens of the source with those of the shards, and writes what they come to."""
    folder, done_bytes = job.options.output, 0
    num_documents = sum(split.num_documents for split in index.splits.values())

    def tick(num_bytes: int) -> None:
        nonlocal done_bytes
        done_bytes += num_bytes
        progress("comparing", done_bytes, 2 * job.num_bytes, num_documents)

    before = hash_source(job.files, tick)
    after = hash_shards(folder, index.dtype, index.eos_id, job.parts, records, tick)
    if before != after:
        what = f"{before.num_tokens} tokens (sha256 {before.sha256}) became {after.num_tokens} ({after.sha256})"
        raise DataError(f"the source changed while it was read: {what}", fix="run the same command again")
    runs = [load_runs(folder, part) for part in job.parts]
    num_open = sum(part.num_open for part in runs)
    facts = {
        "from": job.options.kind,
        "num_documents": num_documents,
        "num_appended_tokens": sum(part.num_appended for part in runs),
        "num_documents_without_end": num_open,
        "before": asdict(before),
        "after": asdict(after),
    }
    write_json(folder / CONVERSION_NAME, facts)
    _log.info("token hash before and after: sha256 %s over %d tokens", before.sha256, before.num_tokens)
    if num_open:
        _log.warning("%d of %d documents do not end with token %d", num_open, num_documents, index.eos_id)
