"""How long the stream takes to its first batch, by how many samples of the run lie behind it, beside skipping.

    python -m benchmarks.resume [--quick]

    ours          a new stream and loader at position p: index, one round of the order, one batch. p from 10^3 to 10^9
    webdataset    its documented way: read and drop p samples. One sample a member, p up to 10^4 (10^5 without --quick);
                  beyond that it is a line through what was measured

The target is that 10^9 samples cost at most 1.2 times 10^3; the aim is 5 ms flat. Files are closed between runs, the
page cache is warm. Times are wall time, the median of interleaved rounds.
"""

import argparse
import os
import statistics
import tempfile
from functools import partial
from itertools import islice
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import webdataset as wds

from benchmarks.common import measure, print_row
from benchmarks.loader import NUM_SHARDS, SEQ_LEN, write_one_sample_a_member, write_ours
from pretrain.config.data import BatchPlan
from pretrain.data.loader import TrainLoader
from pretrain.data.stream import TokenStream
from pretrain.index import DataIndex

ROWS = 16
POSITIONS = (10**3, 10**6, 10**9)
MUST = 1.2
AIM_S = 0.005


def resume_ours(folder: Path, index: DataIndex, position: int) -> None:
    """Opens the stream at a position and takes one step's batch."""
    stream = TokenStream(folder, index, "train", seq_len=SEQ_LEN, lanes=16, block_samples=8192)
    loader = TrainLoader(
        stream, BatchPlan(ROWS, ROWS, ROWS, 1), rank=0, world_size=1, start_position=position, prefetch=1
    )
    next(loader)
    loader.close()


def resume_webdataset(shards: list[str], position: int) -> None:
    """Reads and drops samples, as its users do."""
    samples = wds.WebDataset(shards, shardshuffle=False, empty_check=False).repeat()
    next(islice(iter(samples), position, None))


def main() -> None:
    """Measures, prints a table and the row."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    rounds, skips = (7, (10**3, 10**4)) if quick else (15, (10**3, 10**4, 10**5))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        index = write_ours(folder, NUM_SHARDS * (2**21 if quick else 2**23))
        ours = [str(folder / shard.name) for shard in index.splits["train"].shards]
        members = write_one_sample_a_member(ours, folder)
        arms = {f"ours at {position:.0e}": partial(resume_ours, folder, index, position) for position in POSITIONS}
        arms |= {f"webdataset at {skip:.0e}": partial(resume_webdataset, members, skip) for skip in skips}
        for work in arms.values():
            work()
        timings = measure(arms, rounds)
    medians = {name: statistics.median(timing.wall_s for timing in found) for name, found in timings.items()}
    for name, seconds in medians.items():
        print(f"{name:24} {seconds * 1e3:10.1f} ms")
    flat = medians[f"ours at {POSITIONS[-1]:.0e}"] / medians[f"ours at {POSITIONS[0]:.0e}"]
    slope_s = (medians[f"webdataset at {skips[-1]:.0e}"] - medians[f"webdataset at {skips[0]:.0e}"]) / (
        skips[-1] - skips[0]
    )
    print(f"t(1e9) / t(1e3) = {flat:.2f} (must {MUST}): {'held' if flat <= MUST else 'missed'}")
    print(f"webdataset skips at {slope_s * 1e6:.0f} us a sample: {slope_s * 1e9 / 3600:.0f} hours to 1e9")
    figures = {"ms": {name: round(s * 1e3, 2) for name, s in medians.items()}, "flat": round(flat, 3)}
    print_row(
        "resume of the stream", figures | {"webdataset_us_a_sample": slope_s * 1e6}, ("torch", "webdataset", "numpy")
    )


if __name__ == "__main__":
    main()
