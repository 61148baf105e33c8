"""`pretrain data verify`: the proof that a shard folder is whole, and that a stream reads each sample exactly once.

    files    -> every byte is what the index says (shard_files.py)
    courses  -> an epoch of training, and the validation split: each read at several world sizes, and with another world
                size after each restart (replay.py)
    Proof    -> the readings, whose hashes are equal, and whose tokens are those of the index

Imports no torch of its own: it runs on a login node.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Any

from pretrain.config.data import DataConfig
from pretrain.datacheck.hash import TokenSums
from pretrain.datacheck.progress_bar import StartPhase, no_progress
from pretrain.datacheck.reading import Order, ReadingPlan, open_data, train_course, validation_course
from pretrain.datacheck.replay import Reading, read_course
from pretrain.datacheck.shard_files import CheckedFiles, check_files
from pretrain.datacheck.stats_text import print_whole
from pretrain.errors import ConfigError, DataError
from pretrain.shards.index import DataIndex, data_hash

WORLD_SIZES = (1, 2, 3, 4)
RESTARTS = 3
MAX_ROWS = 1 << 16
"""Of a global batch, which all world sizes divide."""


@dataclass(frozen=True, slots=True)
class Proof:
    """What was found.

    Attributes:
        path: The shard folder, or its address.
        index: Index of the folder.
        files: What was read of it.
        order: In which it was read.
        courses: Each with its readings.
    """

    path: str
    index: DataIndex
    files: CheckedFiles
    order: Order
    courses: list[tuple[ReadingPlan, list[Reading]]]

    @property
    def is_whole(self) -> bool:
        """Every sample was read."""
        return all(readings[0].num_rows == course.num_rows for course, readings in self.courses)


def parse_world_sizes(text: str) -> tuple[int, ...]:
    """Returns the numbers of `1,2,4`. Raises: ConfigError: It is none, or they have no common multiple."""
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise ConfigError(f"--world-sizes {text}: not numbers of ranks", fix="write for example 1,2,3,4")
    if lcm(*sizes) > MAX_ROWS:
        raise ConfigError(f"--world-sizes {text}: no batch of {MAX_ROWS} rows can be cut by all", fix="give fewer")
    return sizes


def verify(
    path: str,
    order: Order,
    *,
    world_sizes: Sequence[int] = WORLD_SIZES,
    restarts: int = RESTARTS,
    max_samples: int | None = None,
    start_phase: StartPhase = no_progress,
) -> Proof:
    """Reads a shard folder, all of it, and proves its stream.

    Costs a CRC32 and a SHA-256 of every byte, and the reading of an epoch for each world size and once more. Where
    documents are packed into bins, these are made and kept in the folder, as a run would.

    Args:
        path: What `pretrain prepare` wrote, or its address.
        order: How samples are made and ordered.
        world_sizes: Numbers of ranks to read with.
        restarts: Kills in each reading.
        max_samples: Read only the first samples of each course. None: all.
        start_phase: For a progress bar.

    Raises:
        ConfigError: A packing that the kind of data does not have.
        DataError: Something is damaged; names shard and member. Or a reading was not exactly once.
    """
    with open_data(DataConfig(path=path)) as (dataset, (store,)):
        index, sizes = dataset.index, tuple(world_sizes)
        files = check_files(store, index, start_phase)
        courses = [train_course(dataset, store, path, order, sizes, files.token_sums["train"])]
        if "validation" in files.token_sums:
            courses.append(validation_course(dataset, store, path, order, sizes, files.token_sums["validation"]))
        sums = TokenSums(index.vocab_size)
        found = []
        for course in courses:
            limit = min(course.num_rows, max_samples or course.num_rows)
            found.append((course, _read_all(course, limit, sizes, restarts, sums, start_phase)))
    return Proof(path, index, files, order, found)


def _read_all(
    course: ReadingPlan,
    limit: int,
    world_sizes: tuple[int, ...],
    restarts: int,
    sums: TokenSums,
    start_phase: StartPhase,
) -> list[Reading]:
    """Reads a course with each number of ranks, and once with another at each start."""
    teams: list[tuple[int, ...]] = [(size,) for size in dict.fromkeys(world_sizes)]
    teams += [world_sizes] if len(teams) > 1 else []
    tick = start_phase(course.name, limit * len(teams))
    readings = [read_course(course, team, limit=limit, restarts=restarts, sums=sums, tick=tick) for team in teams]
    _compare(course, readings)
    return readings


def _compare(course: ReadingPlan, readings: Sequence[Reading]) -> None:
    """Raises: DataError: Readings differ, or tokens are not those of the files."""
    first = readings[0]
    for other in readings[1:]:
        if other.hashes != first.hashes:
            raise _error(course, other, f"rows are not those of world size {_ranks(first)}")
    if first.num_rows == course.num_rows:
        if first.num_tokens != course.num_tokens:
            raise _error(course, first, f"its rows own {first.num_tokens} tokens, the index has {course.num_tokens}")
        if first.token_sum != course.token_sum:
            raise _error(course, first, "the tokens of its rows are not those of the shards")


def _error(course: ReadingPlan, reading: Reading, what: str) -> DataError:
    return DataError(
        f"not exactly once: {what}",
        where=f"{course.name}, world size {_ranks(reading)}",
        fix="verify again; if nothing changes the folder meanwhile, report this as a bug",
    )


def _ranks(reading: Reading) -> str:
    return ", ".join(map(str, reading.world_sizes))


def proof_facts(proof: Proof) -> dict[str, Any]:
    """Returns the proof as JSON has it; hashes are hex."""
    files = proof.files
    return {
        "kind": "proof",
        "path": proof.path,
        "data_sha256": data_hash(proof.index),
        "shards": files.num_shards,
        "members": files.num_members,
        "bytes": files.num_bytes,
        "order": {name: getattr(proof.order, name) for name in proof.order.__slots__},
        "courses": [_course_facts(course, readings) for course, readings in proof.courses],
        "exactly_once": True,
        "whole": proof.is_whole,
    }


def _course_facts(course: ReadingPlan, readings: Sequence[Reading]) -> dict[str, Any]:
    return {
        "name": course.name,
        "samples": course.num_samples,
        "tokens": course.num_tokens,
        "left_out": course.num_left_out,
        "readings": [
            {
                "world_sizes": list(reading.world_sizes),
                "restarts": reading.restarts,
                "rows": reading.num_rows,
                "samples": reading.num_samples,
                "tokens": reading.num_tokens,
                "sample_hash": f"{reading.hashes.samples:016x}",
                "content_hash": f"{reading.hashes.content:016x}",
                "seconds": round(reading.seconds, 3),
            }
            for reading in readings
        ],
    }


def print_proof(proof: Proof) -> None:
    """Prints the proof, a table for each course; the last line is the verdict."""
    from rich import box
    from rich.table import Table

    files, index = proof.files, proof.index
    print(
        f"{proof.path}: {files.num_shards:,} shards, {files.num_members:,} members, {files.num_bytes:,} bytes: "
        "sizes, CRC32 and sha256 are those of the index"
    )
    for course, readings in proof.courses:
        print(f"\n{course.name}: {course.num_samples:,} samples of {proof.order.seq_len:,} tokens")
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for name in ("ranks", "restarts", "samples", "tokens", "hash of samples", "hash of content", "time"):
            table.add_column(name, justify="left" if name == "ranks" else "right", no_wrap=True)
        for reading in readings:
            table.add_row(
                _ranks(reading),
                str(reading.restarts),
                f"{reading.num_samples:,}",
                f"{reading.num_tokens:,}",
                f"{reading.hashes.samples:016x}",
                f"{reading.hashes.content:016x}",
                f"{reading.seconds:.1f} s",
            )
        print_whole(table)
        for line in _remarks(course, readings, index.kind):
            print(line)
    print(f"exactly once: yes{'' if proof.is_whole else ', of the samples that were read'}")


def _remarks(course: ReadingPlan, readings: Sequence[Reading], kind: str) -> Iterator[str]:
    what = "tokens of the targets that fit" if kind == "pairs" else "tokens of the split"
    if readings[0].num_rows == course.num_rows:
        yield f"{readings[0].num_tokens:,} tokens are owned by rows; the index has {course.num_tokens:,} {what}"
    else:
        yield f"only the first {readings[0].num_rows:,} rows: tokens were not compared with the index"
    if readings[0].num_rows > readings[0].num_samples:
        yield f"{readings[0].num_rows:,} rows: the last batches hold samples of the next epoch too"
    if course.num_left_out:
        yield f"{course.num_left_out:,} pairs are longer than a row, and in none"
