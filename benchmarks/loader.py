"""Shuffled tokens per CPU second: TrainLoader against other loaders, in one run.

    python -m benchmarks.loader [--quick] [--rows 32]
    pip install -e '.[bench]'      first, for litdata, mosaicml-streaming and megatron-core (peers.py); those that are
                                   missing are left out

Every arm yields each token of one epoch once as an input, in batches of int64 torch tensors (inputs, targets) of rows
of 1024, from a warm page cache, starting with closed files. The multisets of tokens are compared first.

    ours                     no document masks and no thread (`workers=0`): the work of the peers, done as they do it;
                             shuffled over the epoch (lanes and blocks), each member's CRC32 checked
    ours_prefetched          the same, made ahead by one thread, as training does it
    ours_documents           the default: also document numbers, positions, no loss across borders; one thread
    webdataset               one sample a member, its documented layout; shard shuffle, shuffle buffer of 1000, batched
                             with a collation that stacks and converts once
    webdataset_defaults      the same with its default collation, converted afterwards
    webdataset_our_shards    our shards, members of 2**18 tokens cut into rows by a generator written for this purpose;
                             shuffles within its buffer, that is about four members
    litdata, mosaicml, megatron, memmap      see peers.py

The first peer is what webdataset's users do; `webdataset_our_shards` and `memmap` show how much is layout and not the
reader. An A/A interval wider than 3% makes every verdict inconclusive.
"""

import argparse
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import webdataset as wds

from benchmarks import peers
from benchmarks.common import Ratio, Timing, is_conclusive, measure, print_row, ratio
from benchmarks.peers import Batches, split_rows, stack
from pretrain.config.data import BatchPlan
from pretrain.data.loader import TrainLoader
from pretrain.data.stream import TokenStream
from pretrain.objective.causal import causal_rows
from pretrain.shards.index import DataIndex, build_split
from pretrain.shards.ragged import TokenDocuments, ragged_of
from pretrain.shards.writer import ShardWriter

SEQ_LEN = 1024
VOCAB_SIZE = 50_257
EOS_ID = 0
NUM_SHARDS = 4
MUST = {"webdataset": 10.0, "litdata": 1.5, "megatron": 0.8}
SLOW = ("webdataset", "webdataset_defaults", "mosaicml", "megatron")
AIM = {"webdataset": 40.0, "litdata": 3.0, "megatron": 1.2}


def make_documents(shard: int, num_tokens: int) -> Iterator[np.ndarray]:
    """Yields random documents of up to 1200 tokens, `num_tokens` in all, each ended by EOS_ID."""
    rng = np.random.default_rng(shard)
    while num_tokens:
        document = rng.integers(0, VOCAB_SIZE, min(num_tokens, int(rng.integers(1, 1201))))
        document[-1] = EOS_ID
        num_tokens -= len(document)
        yield document


def write_ours(folder: Path, num_tokens: int) -> DataIndex:
    """Writes NUM_SHARDS shards of random documents, `num_tokens` in all."""
    (folder / "train").mkdir()
    shards = []
    for number in range(NUM_SHARDS):
        writer = ShardWriter(folder / f"train/part-00000-{number:04d}.tar", "uint16")
        for document in make_documents(number, num_tokens // NUM_SHARDS):
            writer.add(TokenDocuments(ragged_of([document])))
        shards.append(writer.close())
    return DataIndex("0" * 64, VOCAB_SIZE, "uint16", EOS_ID, {"train": build_split(shards, 4 * num_tokens)})


def cut_rows(samples: Iterable[dict[str, Any]]) -> Iterator[np.ndarray]:
    """Cuts members into rows of SEQ_LEN + 1 tokens that overlap by one; the very last target is made up."""
    rest = np.empty(0, np.uint16)
    for sample in samples:
        tokens = np.concatenate((rest, sample["tokens.npy"]))
        num_rows = (len(tokens) - 1) // SEQ_LEN
        for row in range(num_rows):
            yield tokens[row * SEQ_LEN : (row + 1) * SEQ_LEN + 1]
        rest = tokens[num_rows * SEQ_LEN :]
    yield np.append(rest, np.uint16(EOS_ID))


def write_webdataset(folder: Path, rows: list[np.ndarray]) -> list[str]:
    """Writes one sample a member, as its documentation would; returns the shards."""
    names = [str(folder / f"rows-{number}.tar") for number in range(NUM_SHARDS)]
    for name, part in zip(names, np.array_split(np.arange(len(rows)), NUM_SHARDS), strict=True):
        with wds.TarWriter(name) as writer:
            for row in part:
                writer.write({"__key__": f"{row:08d}", "npy": rows[row]})
    return names


def read_webdataset(names: list[str], num_rows: int, collate: bool) -> Batches:
    samples = wds.WebDataset(names, shardshuffle=100).shuffle(1000).decode().to_tuple("npy")
    if collate:
        return samples.batched(num_rows, collation_fn=stack)
    return samples.batched(num_rows).map(lambda batch: split_rows(np.asarray(batch[0])))


def read_webdataset_our_shards(names: list[str], num_rows: int) -> Batches:
    rows = wds.WebDataset(names, shardshuffle=100).decode().compose(cut_rows).shuffle(1000)
    return rows.batched(num_rows, collation_fn=stack)


def read_ours(folder: Path, index: DataIndex, num_rows: int, workers: int, document_mask: bool) -> Batches:
    stream = TokenStream(folder, index, "train", seq_len=SEQ_LEN, seed=1, lanes=16, block_samples=8192)
    plan = BatchPlan(rows=num_rows, rows_per_rank=num_rows, micro=num_rows, accumulation=1)
    rows = partial(causal_rows, document_mask=document_mask)
    loader = TrainLoader(stream, rows, plan, rank=0, world_size=1, workers=workers)
    for _ in range(stream.order.epoch_start(1) // num_rows):
        for batch in next(loader).micro_batches:
            yield batch.tokens_BT, batch.targets_BT
    loader.close()


def build_arms(folder: Path, num_tokens: int, num_rows: int) -> dict[str, Callable[[], Batches]]:
    """Writes the corpus in every format, and returns what reads an epoch of each."""
    index = write_ours(folder, num_tokens)
    ours = [str(folder / shard.name) for shard in index.split("train").shards]
    rows = list(cut_rows(wds.WebDataset(ours, shardshuffle=False).decode()))
    theirs = write_webdataset(folder, rows)
    arms: dict[str, Callable[[], Batches]] = {
        "ours": partial(read_ours, folder, index, num_rows, 0, False),
        "ours_again": partial(read_ours, folder, index, num_rows, 0, False),
        "ours_prefetched": partial(read_ours, folder, index, num_rows, 1, False),
        "ours_documents": partial(read_ours, folder, index, num_rows, 1, True),
        "webdataset": partial(read_webdataset, theirs, num_rows, True),
        "webdataset_defaults": partial(read_webdataset, theirs, num_rows, False),
        "webdataset_our_shards": partial(read_webdataset_our_shards, ours, num_rows),
    }
    homes = {name: folder / name for name in ("memmap", *peers.installed_peers())}
    for home in homes.values():
        home.mkdir()
    peers.write_memmap(homes["memmap"], rows)
    arms["memmap"] = partial(peers.read_memmap, homes["memmap"], num_rows, SEQ_LEN)
    if "litdata" in homes:
        peers.write_litdata(homes["litdata"], rows)
        arms["litdata"] = partial(peers.read_litdata, homes["litdata"], num_rows, SEQ_LEN + 1)
    if "mosaicml" in homes:
        peers.write_mosaicml(homes["mosaicml"], rows)
        arms["mosaicml"] = partial(peers.read_mosaicml, homes["mosaicml"], num_rows)
    if "megatron" in homes:
        parts = (make_documents(number, num_tokens // NUM_SHARDS) for number in range(NUM_SHARDS))
        peers.write_megatron(homes["megatron"], (document for part in parts for document in part))
        arms["megatron"] = partial(peers.read_megatron, homes["megatron"], num_rows, SEQ_LEN, VOCAB_SIZE)
    return arms


def count_tokens(batches: Batches) -> list[int]:
    """Returns how often each id is an input."""
    return sum(np.bincount(inputs.flatten(), minlength=VOCAB_SIZE) for inputs, _ in batches).tolist()


def drain(read: Callable[[], Batches]) -> None:
    for inputs, targets in read():
        assert inputs.shape == targets.shape and inputs.shape[1] == SEQ_LEN


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="under a minute")
    parser.add_argument("--rows", type=int, default=32, help="rows a batch, a divisor of 8192")
    options = parser.parse_args()
    num_tokens, rounds = (2**23, 5) if options.quick else (2**25, 15)
    peers.quiet()
    with tempfile.TemporaryDirectory() as name:
        readers = build_arms(Path(name), num_tokens, options.rows)
        expected = count_tokens(readers["ours"]())
        for arm, read in readers.items():
            assert count_tokens(read()) == expected, f"{arm} does not yield the same tokens"
        arms = {arm: partial(drain, read) for arm, read in readers.items()}
        timings = measure(arms, rounds)
        # Those that take a tenth of the others' time can be measured more often.
        fast = {arm: work for arm, work in arms.items() if arm not in SLOW}
        for arm, more in measure(fast, 5 * rounds, seed=1).items():
            timings[arm] += more
    report(timings, num_tokens, options.rows)


def compare(peer: list[Timing], ours: list[Timing]) -> Ratio:
    """Returns the ratio over the rounds that both were in."""
    rounds = min(len(peer), len(ours))
    return ratio(peer[:rounds], ours[:rounds])


def report(timings: dict[str, Any], num_tokens: int, num_rows: int) -> None:
    """Prints rates, ratios, verdicts and the row."""
    rates = {arm: num_tokens / 1e6 / float(np.median([run.cpu_s for run in runs])) for arm, runs in timings.items()}
    wall = {arm: num_tokens / 1e6 / float(np.median([run.wall_s for run in runs])) for arm, runs in timings.items()}
    others = [arm for arm in timings if not arm.startswith("ours")]
    ratios = {
        f"{arm} over {peer}": compare(timings[peer], timings[arm])
        for arm in ("ours", "ours_prefetched", "ours_documents")
        for peer in others
    }
    aa = ratio(timings["ours"], timings["ours_again"])
    for arm, rate in rates.items():
        print(f"{arm:24s} {rate:8.1f} Mtok per CPU-second  {wall[arm]:8.1f} Mtok/s")
    for label, value in ratios.items():
        print(f"{label:48s} {value}")
    verdicts = {}
    for peer in (peer for peer in MUST if peer in timings):
        low = ratios[f"ours over {peer}"].low
        held = "aim holds" if low >= AIM[peer] else "must holds" if low >= MUST[peer] else "missed"
        verdicts[peer] = held if is_conclusive(aa) else f"inconclusive: A/A wider than 3%; {held}"
        print(f"{peer}: must {MUST[peer]:g}, aim {AIM[peer]:g}: {verdicts[peer]}")
    print(f"A/A {aa}")
    figures = {
        "unit": "Mtok per CPU-second",
        "rows": num_rows,
        "rates": {arm: round(rate, 2) for arm, rate in rates.items()},
        "rates_wall": {arm: round(rate, 2) for arm, rate in wall.items()},
        "ratios": {label: str(value) for label, value in ratios.items()},
        "aa": str(aa),
        "verdicts": verdicts,
    }
    packages = [package for name, package in peers.PACKAGES.items() if name in timings]
    print_row("loader", figures, ("numpy", "torch", "webdataset", *packages))


if __name__ == "__main__":
    main()
