"""Time of the stream to its first batch, by the number of samples already read, against other loaders.

    python -m benchmarks.resume [--quick]
    pip install -e '.[bench]'      first, for litdata and mosaicml-streaming; those that are missing are left out

    ours                  a new stream and loader at position p: index, one round of the order, one batch
    webdataset            its documented way: read and drop p samples. One sample a member, p up to 10^4 (10^5 without
                          --quick); beyond that it is a line through what was measured
    litdata               `load_state_dict` of its loader, at place p of a run over the same few thousand rows
    mosaicml              `load_state_dict` of its dataset, likewise
    mosaicml, epoch 2p    the same, halfway through an epoch of 2p samples (`epoch_size`): it makes the order of a whole
                          epoch at every start, so that its cost is that of the epoch, not of the place

Ours makes the order of 16 lanes of at most 8192 samples, in a corpus of any size. The target is that 10^9 samples cost
at most 1.2 times 10^3; the aim is 5 ms flat. Files are closed between runs, the page cache is warm. Times are the
median of interleaved rounds, wall and CPU; the verdict is by the interval of the paired ratio of CPU time, which other
work on the machine disturbs less.
"""

import argparse
import os
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import webdataset as wds

from benchmarks import peers
from benchmarks.common import is_conclusive, measure, print_row, ratio
from benchmarks.loader import NUM_SHARDS, SEQ_LEN, cut_rows, write_ours, write_webdataset
from pretrain.config.data import BatchPlan
from pretrain.data.loader import TrainLoader
from pretrain.data.stream import TokenStream
from pretrain.objective.causal import causal_rows
from pretrain.shards.index import DataIndex

ROWS = 8
POSITIONS = (10**3, 10**6, 10**9)
MUST = 1.2
AIM_S = 0.005


def resume_ours(folder: Path, index: DataIndex, position: int) -> None:
    """Opens the stream at a position and takes one step's batch."""
    stream = TokenStream(folder, index, "train", seq_len=SEQ_LEN, lanes=16, block_samples=8192)
    rows, plan = partial(causal_rows, document_mask=True), BatchPlan(ROWS, ROWS, ROWS, 1)
    loader = TrainLoader(stream, rows, plan, rank=0, world_size=1, start_position=position, prefetch=1)
    next(loader)
    loader.close()


def resume_webdataset(shards: list[str], position: int) -> None:
    """Reads and drops samples, as its users do."""
    samples = wds.WebDataset(shards, shardshuffle=False, empty_check=False).repeat()
    next(islice(iter(samples), position, None))


def build_arms(folder: Path, num_tokens: int, skips: tuple[int, ...], epochs: tuple[int, ...]) -> dict[str, Any]:
    """Writes the corpus in every format, and returns what resumes at each position."""
    index = write_ours(folder, num_tokens)
    ours = [str(folder / shard.name) for shard in index.split("train").shards]
    rows = list(cut_rows(wds.WebDataset(ours, shardshuffle=False).decode()))
    members = write_webdataset(folder, rows)
    arms: dict[str, Callable[[], Any]] = {}
    for position in POSITIONS:
        arms[f"ours at {position:.0e}"] = partial(resume_ours, folder, index, position)
    arms["ours at 1e+03, again"] = arms["ours at 1e+03"]
    for skip in skips:
        arms[f"webdataset at {skip:.0e}"] = partial(resume_webdataset, members, skip)
    found = peers.installed_peers()
    if "litdata" in found:
        (home := folder / "litdata").mkdir()
        peers.write_litdata(home, rows)
        for position in POSITIONS:
            arms[f"litdata at {position:.0e}"] = partial(peers.resume_litdata, home, ROWS, SEQ_LEN + 1, position)
    if "mosaicml" in found:
        (home := folder / "mosaicml").mkdir()
        peers.write_mosaicml(home, rows)
        for position in POSITIONS:
            arms[f"mosaicml at {position:.0e}"] = partial(peers.resume_mosaicml, home, ROWS, position, len(rows))
        for place in epochs:
            arms[f"mosaicml, epoch 2p, at {place:.0e}"] = partial(peers.resume_mosaicml, home, ROWS, place, 2 * place)
    return arms


def main() -> None:
    """Measures, prints a table and the row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="under a minute")
    quick = parser.parse_args().quick
    rounds = 7 if quick else 15
    skips, epochs = (10**3, 10**4), (10**3, 10**6)
    if not quick:
        skips, epochs = (*skips, 10**5), (*epochs, 10**7)
    peers.quiet()
    with tempfile.TemporaryDirectory() as name:
        arms = build_arms(Path(name), NUM_SHARDS * (2**21 if quick else 2**23), skips, epochs)
        for work in arms.values():
            work()
        timings = measure(arms, rounds)
        # Again without the peers, who leave threads behind and cost a hundred times as much.
        timings |= measure({name: work for name, work in arms.items() if name.startswith("ours")}, 20 * rounds)
    medians = {name: statistics.median(timing.wall_s for timing in found) for name, found in timings.items()}
    cpu = {name: statistics.median(timing.cpu_s for timing in found) for name, found in timings.items()}
    for name, seconds in medians.items():
        print(f"{name:28} {seconds * 1e3:10.1f} ms   CPU {cpu[name] * 1e3:10.1f} ms")
    flat = ratio(timings["ours at 1e+09"], timings["ours at 1e+03"])
    aa = ratio(timings["ours at 1e+03, again"], timings["ours at 1e+03"])
    held = "held" if flat.high <= MUST else "missed" if flat.low > MUST else "inconclusive"
    print(f"t(1e9) / t(1e3) = {flat} (must {MUST}): {held}; A/A {aa}{'' if is_conclusive(aa) else ', wider than 3%'}")
    print(f"ours at 1e9: {medians['ours at 1e+09'] * 1e3:.1f} ms (aim {AIM_S * 1e3:.0f})")
    first, last = (medians[f"webdataset at {skips[place]:.0e}"] for place in (0, -1))
    slope_s = (last - first) / (skips[-1] - skips[0])
    print(f"webdataset skips at {slope_s * 1e6:.0f} us a sample: {slope_s * 1e9 / 3600:.0f} hours to 1e9")
    figures = {
        "ms": {name: round(s * 1e3, 2) for name, s in medians.items()},
        "cpu_ms": {name: round(s * 1e3, 2) for name, s in cpu.items()},
        "flat": str(flat),
        "aa": str(aa),
        "webdataset_us_a_sample": round(slope_s * 1e6, 1),
    }
    packages = [peers.PACKAGES[name] for name in ("litdata", "mosaicml") if f"{name} at 1e+03" in medians]
    print_row("resume of the stream", figures, ("torch", "webdataset", "numpy", *packages))


if __name__ == "__main__":
    main()
