"""`pretrain data verify`: the proof that a folder is whole, and a stream reads each sample once.

    files    -> every byte is as in the index, and webdataset reads the shards alike (shard_files.py)
    courses  -> an epoch of training, and the validation split: each read at several world sizes,
                and with another world size after each restart (replay.py)
    proof    -> the readings, with equal hashes and the tokens of the index

Needs no torch: it runs on a login node.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from math import lcm
from typing import Any

from rich.progress import Progress

from pretrain.config.data import DataConfig
from pretrain.datacheck.hash import TokenSums
from pretrain.datacheck.image_data import print_image_proof, verify_images
from pretrain.datacheck.reading import Order, ReadingPlan, open_data, plan_reading
from pretrain.datacheck.replay import Reading, not_exactly_once, read_course
from pretrain.datacheck.shard_files import check_files, check_with_webdataset, shard_totals
from pretrain.datacheck.stats_text import print_table
from pretrain.errors import ConfigError
from pretrain.kinds.layouts import LAYOUTS
from pretrain.shards.index import data_hash
from pretrain.utils.status_line import transient_bar
from pretrain.utils.units import plural

WORLD_SIZES = (1, 2, 3, 4)
RESTARTS = 3
MAX_ROWS = 1 << 16
"""Most rows of a global batch, which all world sizes divide."""


def parse_world_sizes(text: str) -> tuple[int, ...]:
    """Returns the numbers of `1,2,4`. Raises: ConfigError: No numbers, or no common multiple."""
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        sizes = ()
    where = f"--world-sizes {text}"
    if not sizes or min(sizes) < 1:
        raise ConfigError("not numbers of ranks", where=where, fix="write for example 1,2,3,4")
    if lcm(*sizes) > MAX_ROWS:
        raise ConfigError(
            f"no batch of {MAX_ROWS} rows can be cut by all",
            where=where,
            fix="give fewer",
        )
    return sizes


def verify(
    path: str,
    order: Order,
    *,
    world_sizes: Sequence[int] = WORLD_SIZES,
    restarts: int = RESTARTS,
    max_samples: int | None = None,
    decode: bool = False,
) -> dict[str, Any]:
    """Returns the proof of a shard folder and its stream, as JSON. Draws a progress bar on a terminal.

    Of images, every file is checked, and decoded where asked for; the rest is of tokens.

    Costs a CRC32 and a SHA-256 of every byte, and the reading of an epoch for each world size and
    once more. Bins of documents are made and kept in the folder, as by a run.

    Raises:
        ConfigError: A packing that the kind of data does not have.
        DataError: A file is damaged; names shard and member. Or a reading was not exactly once.
    """
    sizes = tuple(world_sizes)
    with open_data(DataConfig(path=path)) as (dataset, (store,)), transient_bar() as bar:
        index = dataset.index
        files = bar.add_task("files", total=2 * shard_totals(*index.splits.values())["bytes"])
        facts = {
            "kind": "proof",
            "path": path,
            "data_sha256": data_hash(index),
            "data_kind": index.kind,
            **shard_totals(*index.splits.values()),
        }
        if index.has_images:
            return facts | verify_images(store, index, order, partial(bar.advance, files), decode=decode)
        token_sums = check_files(store, index, partial(bar.advance, files))
        num_samples = check_with_webdataset(store, index)
        sums = TokenSums(index.vocab_size)
        courses = []
        is_whole = True
        for split in sorted(token_sums):
            course = plan_reading(dataset, store, split, order, sizes, token_sums[split])
            limit = min(course.num_rows, max_samples or course.num_rows)
            is_whole &= limit == course.num_rows
            readings = _read_all(course, limit, sizes, restarts, sums, bar)
            courses.append(_describe_course(course, readings))
    return facts | {
        "webdataset_samples": num_samples,
        "order": asdict(order),
        "courses": courses,
        "exactly_once": True,
        "whole": is_whole,
    }


def _read_all(
    course: ReadingPlan,
    limit: int,
    world_sizes: tuple[int, ...],
    restarts: int,
    sums: TokenSums,
    bar: Progress,
) -> list[Reading]:
    """Compares the readings of a course by each number of ranks, and by another at each start."""
    teams: list[tuple[int, ...]] = [(size,) for size in dict.fromkeys(world_sizes)]
    teams += [world_sizes] if len(teams) > 1 else []
    tick = partial(bar.advance, bar.add_task(course.name, total=limit * len(teams)))
    readings = [read_course(course, team, limit=limit, restarts=restarts, sums=sums, tick=tick) for team in teams]
    first = readings[0]
    for other in readings[1:]:
        if other.hashes != first.hashes:
            raise not_exactly_once(
                course,
                other.world_sizes,
                f"rows are not those of world size {first.world_sizes[0]}",
            )
    if first.num_rows == course.num_rows:
        if first.num_tokens != course.num_tokens:
            raise not_exactly_once(
                course,
                first.world_sizes,
                f"its rows own {first.num_tokens} tokens, the index has {course.num_tokens}",
            )
        if first.token_sum != course.token_sum:
            raise not_exactly_once(
                course,
                first.world_sizes,
                "the tokens of its rows are not those of the shards",
            )
    return readings


def _describe_course(course: ReadingPlan, readings: Sequence[Reading]) -> dict[str, Any]:
    """Returns a course with its readings; hashes are hex."""
    return {
        "name": course.name,
        "samples": course.num_samples,
        "rows": course.num_rows,
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


def print_proof(proof: dict[str, Any]) -> None:
    """Prints the proof, a table for each course; the last line is the verdict."""
    if LAYOUTS[proof["data_kind"]].images:
        print_image_proof(proof)
        return
    totals = ", ".join(plural(proof[f"{noun}s"], noun) for noun in ("shard", "member", "byte"))
    print(f"{proof['path']}: {totals}: sizes, CRC32 and sha256 are those of the index")
    print(f"webdataset reads the {proof['webdataset_samples']:,} members of the first shard of each split alike")
    hashes = ("hash of samples", "hash of content")
    heads = ("ranks", "restarts", "samples", "tokens", *hashes, "time")
    for course in proof["courses"]:
        seq_len = proof["order"]["seq_len"]
        print(f"\n{course['name']}: {course['samples']:,} samples of {seq_len:,} tokens")
        rows = [
            (
                ", ".join(map(str, reading["world_sizes"])),
                str(reading["restarts"]),
                f"{reading['samples']:,}",
                f"{reading['tokens']:,}",
                reading["sample_hash"],
                reading["content_hash"],
                f"{reading['seconds']:.1f} s",
            )
            for reading in course["readings"]
        ]
        print_table(heads, rows, left=0)
        for line in _remarks(course, proof["data_kind"]):
            print(line)
    print(f"exactly once: yes{'' if proof['whole'] else ', of the samples that were read'}")


def _remarks(course: dict[str, Any], kind: str) -> Iterator[str]:
    layout = LAYOUTS[kind]
    part = "tokens of the split"
    if layout.leaves_out or layout.beginning:
        part = f"tokens of the {'targets' if layout.has_source else kind if layout.whole else 'beginnings'} that fit"
    first = course["readings"][0]
    if first["rows"] == course["rows"]:
        owned = f"{first['tokens']:,} tokens are owned by rows"
        yield f"{owned}; the index has {course['tokens']:,} {part}"
    else:
        yield f"only the first {first['rows']:,} rows: tokens were not compared with the index"
    if first["rows"] > first["samples"]:
        yield f"{first['rows']:,} rows: the last batches hold samples of the next epoch too"
    if course["left_out"]:
        rest = "without their rest" if layout.beginning else "in none"
        yield f"{course['left_out']:,} documents are longer than a row, and {rest}"
