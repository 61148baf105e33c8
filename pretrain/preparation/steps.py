"""The job of one `prepare`, or of one share of it, and its steps that read the input.

The other shares wait for the files that the first one makes for all: shares may start in any order,
but have to run together, or the first one first. The first waits for the hashes of the others'
documents only.
"""

import hashlib
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from pretrain.config.prepare import NearDuplicatesConfig, PrepareConfig
from pretrain.config.texts.templates import SPECIAL_KEY
from pretrain.errors import ConfigError, DataError, LockedError
from pretrain.kinds.layouts import LAYOUTS
from pretrain.preparation.duplicates import (
    DUPLICATES_DIR,
    Content,
    file_of,
    find_first,
    load_all_first,
    remove_hashes,
    start_hashing,
)
from pretrain.preparation.filters import Document, LeftOut
from pretrain.preparation.input_parts import InputFile, InputPart, plan_part_bytes, plan_parts
from pretrain.preparation.inputs.listing import list_inputs
from pretrain.preparation.inputs.settle import (
    settle_auto,
    settle_revisions,
    settle_templates,
    settle_tokenizer,
)
from pretrain.preparation.labelling import LABELS_NAME, LabelSet, check_labels, sort_labels
from pretrain.preparation.normalize import check_normalize
from pretrain.preparation.part import read_part
from pretrain.preparation.part_record import nothing_to_train_on
from pretrain.preparation.pool import ShardJob, WorkerPool
from pretrain.preparation.selection.judge import EvaluationTexts, Judge, load_tested
from pretrain.preparation.selection.near_duplicates import (
    find_near,
    find_pairs,
    pairs_path,
    start_hashing_candidates,
)
from pretrain.preparation.split import TRAIN, SplitRule, parse_split
from pretrain.preparation.text_pieces import TextPiece
from pretrain.tokenizer.file import GivenTokenizer, dump_tokenizer, tokenizer_hash
from pretrain.tokenizer.train import DEFAULT_VOCAB_SIZE, TRAINED_KINDS, train_tokenizer
from pretrain.utils.io import write_file, write_json
from pretrain.utils.safe_read import parse_json

# Goes up when the same config would give other bytes.
FORMAT = 1
WAIT_S = 600.0
POLL_S = 0.5


_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PrepareJob(ShardJob):
    """A checked config and its plan, of one share."""

    config: PrepareConfig
    pool: WorkerPool
    files: list[InputFile]
    rule: SplitRule
    given: GivenTokenizer | None
    identity: dict[str, Any]  # options, by dotted key: equal for equal bytes
    tested: EvaluationTexts = field(default_factory=EvaluationTexts)  # of evaluation sets

    @cached_property
    def own_parts(self) -> list[InputPart]:
        """Parts of the share."""
        return self.pool.share.own(self.parts)

    @cached_property
    def judge(self) -> Judge:
        """The rules for a document on its own."""
        return Judge(self.config.filter, self.tested)


def plan_job(config: PrepareConfig, pool: WorkerPool) -> PrepareJob:
    """Checks a config and lists its input. Raises: ConfigError, DataError, LaunchError."""
    rule = parse_split(config.split, config.seed)
    if rule.kind == "tail" and not LAYOUTS[config.kind].running_text:
        raise ConfigError(
            f"split={config.split} cuts texts in two, which kind={config.kind} does not allow",
            fix="use hash:F",
        )
    least = config.filter.min_chars
    most = config.filter.max_chars
    if most is not None and most < least:
        raise ConfigError(
            f"filter.max_chars={most} is less than filter.min_chars={least}",
            fix="raise the first or lower the second",
        )
    if Path(config.output).is_file():
        raise ConfigError("a file, not a folder", where=config.output, fix="use another --output")
    for one in config.inputs:
        if one.normalize is not None:
            check_normalize(one.normalize)
    config, revisions = settle_revisions(config)
    config = settle_auto(config)
    config, tokenizer = settle_tokenizer(config)
    config = settle_templates(config, tokenizer)
    tested = load_tested(config)
    files = list_inputs(config.inputs, config.kind)
    part_bytes = config.part_bytes or plan_part_bytes(files)
    parts = plan_parts(files, part_bytes)
    identity = identity_of(config, tokenizer) | {"part_bytes": part_bytes} | revisions
    if config.filter.decontaminate is not None:
        identity["filter.decontaminate.sha256"] = tested.identity()
    job = PrepareJob(pool.folder, parts, config, pool, files, rule, tokenizer, identity, tested)
    if not job.num_bytes:
        raise DataError(
            f"the input is empty ({len(files)} files, 0 bytes)",
            fix="give files with text in them",
        )
    return job


def identity_of(config: PrepareConfig, given: GivenTokenizer | None) -> dict[str, Any]:
    """Returns {dotted key: value} of all that the output depends on, without the files."""
    # A part has counted its bad items: it stays right with another answer to errors.
    exclude: dict[str, Any] = dict.fromkeys(("output", "max_skipped_share"), True)
    exclude["inputs"] = {"__all__": {"path", "paired_path", "on_error"}}
    # Evaluation sets are known by their n-grams.
    exclude["filter"] = {"decontaminate": {"inputs"}}
    values = config.model_dump(mode="json", exclude=exclude)
    if config.tokenizer.kind in TRAINED_KINDS and config.tokenizer.kind != "char":
        values["tokenizer"]["vocab_size"] = config.tokenizer.vocab_size or DEFAULT_VOCAB_SIZE
    for one in values["inputs"]:
        if isinstance(one["template"], dict):
            one["template"].pop(SPECIAL_KEY, None)  # of the tokenizer, whose hash is here
    if given is not None:
        values["tokenizer"]["path"] = f"sha256:{hashlib.sha256(given.content).hexdigest()}"
    return {**dict(_leaves(values)), "format": FORMAT}


def _leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in pairs:
        name = f"{prefix}{key}"
        is_list_of_trees = isinstance(value, list) and value and isinstance(value[0], dict)
        if isinstance(value, dict) or is_list_of_trees:
            yield from _leaves(value, f"{name}.")
        else:
            yield name, value


def find_duplicates(job: PrepareJob) -> None:
    """Finds the first of equal and of similar documents, over all parts.

    Raises: See `WorkerPool.run`, `_wait_for`.
    """
    is_first = job.pool.share.is_first
    rules = job.config.filter
    near = rules.near_duplicates
    parts = job.parts if is_first else job.own_parts
    wanted = _files(job, parts, "first") if rules.deduplicate else []
    wanted += _files(job, parts, "near") if near else []
    _remove_temporaries(job)
    if not all(path.exists() for path in wanted):
        _hash_parts(job)
        if is_first and rules.deduplicate:
            _wait_for(_files(job, job.parts, "hashes"), "the hashes of the other parts")
            if not all(path.exists() for path in _files(job, job.parts, "first")):
                find_first(job.folder, job.parts)
        if near is not None:
            _compare_candidates(job, near)
        _wait_for(wanted, "what --part 1 makes of the hashes of all parts")
    if is_first:
        remove_hashes(job.folder)


def _files(job: PrepareJob, parts: Sequence[InputPart], *contents: Content) -> list[Path]:
    return [file_of(job.folder, part, content) for part in parts for content in contents]


def _remove_temporaries(job: PrepareJob) -> None:
    """Removes what a killed process of this share has left of files that were not complete."""
    patterns = [f"{path.name}.tmp-*" for path in _files(job, job.own_parts, "hashes", "bands", "ngrams")]
    if job.pool.share.is_first:
        patterns += ["*.first.tmp-*", "*.near.tmp-*", "*.wanted.tmp-*", "pairs.tmp-*"]
    for pattern in patterns:
        for temporary in (job.folder / DUPLICATES_DIR).glob(pattern):
            temporary.unlink()


def _hash_parts(job: PrepareJob) -> None:
    """Hashes the parts of this share that have no hashes yet."""
    rules = job.config.filter
    contents: list[Content] = ["hashes"] if rules.deduplicate else []
    contents += ["bands"] if rules.near_duplicates else []
    todo = [part for part in job.own_parts if not all(path.exists() for path in _files(job, [part], *contents))]
    start = partial(start_hashing, job.config, job.tested)
    job.pool.run(start, job.own_parts, todo, "looking for duplicates")


def _compare_candidates(job: PrepareJob, near: NearDuplicatesConfig) -> None:
    """Compares the documents that MinHash found; the first share writes the bits of all parts."""
    is_first = job.pool.share.is_first
    if is_first and not pairs_path(job.folder).exists():
        _wait_for(_files(job, job.parts, "bands"), "the hashes of the other parts")
        firsts = load_all_first(job.folder, job.parts) if job.config.filter.deduplicate else None
        find_pairs(job.folder, job.parts, firsts)
    _wait_for(_files(job, job.own_parts, "wanted"), "what --part 1 makes of the hashes of all parts")
    todo = [part for part in job.own_parts if not file_of(job.folder, part, "ngrams").exists()]
    start = partial(start_hashing_candidates, job.config, job.tested)
    job.pool.run(start, job.own_parts, todo, "comparing near duplicates")
    if is_first:
        _wait_for(_files(job, job.parts, "ngrams"), "the candidates of the other parts")
        find_near(job.folder, job.parts, near)


def make_tokenizer(job: PrepareJob) -> str:
    """Writes tokenizer.json, or waits for it; returns its hash. Raises: DataError."""
    path = job.tokenizer_path
    if job.pool.share.is_first and not path.exists():
        content = None if job.given is None else job.given.content
        if content is None:
            content = dump_tokenizer(train_tokenizer(_train_texts(job), job.config.tokenizer))
        write_file(path, content)
    _wait_for([path], "the tokenizer, which --part 1 makes")
    return tokenizer_hash(path)


def make_labels(job: PrepareJob) -> LabelSet | None:
    """Returns the labels of labelled documents: given, or found by the first share."""
    if not LAYOUTS[job.config.kind].labelled:
        return None
    if job.config.labels:
        check_labels(job.config.labels)
        return LabelSet(tuple(job.config.labels), is_given=True)
    path = job.folder / LABELS_NAME
    if job.pool.share.is_first and not path.exists():
        trained = _train_pieces(job, "reading the labels", LeftOut())
        documents = (document for document, _ in trained)
        names = (str(label.name) for document in documents for label in document.labels)
        write_json(path, sort_labels(names))
    _wait_for([path], "the labels, which --part 1 finds")
    return LabelSet(tuple(parse_json(path.read_bytes())), is_given=False)


def _train_texts(job: PrepareJob) -> Iterator[str]:
    """Yields the training text of a tokenizer, both sides of pairs. Raises: DataError."""
    config = job.config.tokenizer
    # A character that the sample lacks has no token at all.
    sample_bytes = None if config.kind == "char" else config.sample_bytes
    left_out = LeftOut()
    is_empty = True
    for _, pieces in _train_pieces(job, "reading for the tokenizer", left_out, sample_bytes):
        is_empty = False
        yield from (piece.text for piece in pieces if piece.text)
    if is_empty:
        raise nothing_to_train_on(left_out.documents)
    job.pool.progress(f"training the tokenizer, {config.kind}", 0, 0, 0)


def _train_pieces(
    job: PrepareJob, phase: str, left_out: LeftOut, sample_bytes: int | None = None
) -> Iterator[tuple[Document, list[TextPiece]]]:
    """Yields documents of the training split that are kept, with their pieces in it; counts the others."""
    done_bytes = 0
    num_documents = 0
    divide = resolve_name(LAYOUTS[job.config.kind].pieces)
    for part in job.parts:
        room = sys.maxsize
        # A sample is the beginning of each part, in proportion to its size.
        if sample_bytes is not None:
            room = -(-sample_bytes * part.num_bytes // job.num_bytes)
        for document in read_part(job.config, job.judge, part, left_out):
            pieces = [piece for piece in divide(document, job.rule) if piece.split == TRAIN]
            if pieces:
                yield document, [piece._replace(text=piece.text[:room]) for piece in pieces]
                num_documents += 1
                room -= len(document.utf8) + len((document.source or "").encode())
            if room <= 0:
                break
        done_bytes += part.num_bytes
        job.pool.progress(phase, done_bytes, job.num_bytes, num_documents)


def _wait_for(paths: Sequence[Path], what: str) -> None:
    """Waits for files of other shares, WAIT_S seconds for each. Raises: LockedError."""
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
        waiting = [path for path in missing if not path.exists()]
        if len(waiting) < len(missing):
            missing = waiting
            deadline = time.monotonic() + WAIT_S
