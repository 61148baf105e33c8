"""How many shuffled tokens a CPU-second yields: TrainLoader against plain webdataset, in one run.

    python -m benchmarks.loader [--quick] [--rows 32]

Every arm yields each token of one epoch once as an input, in batches of int64 torch tensors (inputs, targets) of rows
of 1024, from a warm page cache, starting with closed files. The multisets of tokens are compared first. Ours pays
about 0.1 ms a batch to hand it over between threads, whatever its size.

    ours                     document masks off: the same work as the peers; shuffled over the epoch (lanes and blocks)
    ours_documents           the default: also document numbers, positions, no loss across borders
    webdataset               one sample a member, its documented layout; shard shuffle, shuffle buffer of 1000, batched
                             with a collation that stacks and converts once
    webdataset_defaults      the same with its default collation, converted afterwards
    webdataset_our_shards    our shards, members of 2**18 tokens cut into rows by a generator written for this purpose;
                             shuffles within its buffer, that is about four members

The target is 10 times webdataset. Both layouts are judged: the first peer is what its users do, the last one shows how
much of the difference is the layout and not the reader. An A/A interval wider than 3% makes every verdict inconclusive.
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
import torch
import webdataset as wds
from torch import Tensor

from benchmarks.common import is_conclusive, measure, print_row, ratio
from pretrain.config.data import BatchPlan
from pretrain.data.loader import TrainLoader
from pretrain.data.shards import ShardWriter
from pretrain.data.stream import TokenStream
from pretrain.index import DataIndex, build_split

SEQ_LEN = 1024
VOCAB_SIZE = 50_257
NUM_SHARDS = 4
MUST = 10.0

Batches = Iterable[tuple[Tensor, Tensor]]


def write_ours(folder: Path, num_tokens: int) -> DataIndex:
    """Writes shards of random documents of up to 1200 tokens, `num_tokens` in all."""
    rng = np.random.default_rng(0)
    (folder / "train").mkdir()
    shards = []
    for number in range(NUM_SHARDS):
        writer = ShardWriter(folder / f"train/part-00000-{number:04d}.tar", "uint16")
        while left := num_tokens // NUM_SHARDS - writer.num_tokens:
            writer.add_document(rng.integers(0, VOCAB_SIZE, min(left, int(rng.integers(1, 1201)))))
        shards.append(writer.close())
    return DataIndex("0" * 64, VOCAB_SIZE, "uint16", 0, {"train": build_split(shards, 4 * num_tokens)})


def cut_rows(samples: Iterable[dict[str, Any]]) -> Iterator[np.ndarray]:
    """Cuts members into rows of SEQ_LEN + 1 tokens that overlap by one; the very last target is made up."""
    rest = np.empty(0, np.uint16)
    for sample in samples:
        tokens = np.concatenate((rest, sample["tokens.npy"]))
        num_rows = (len(tokens) - 1) // SEQ_LEN
        for row in range(num_rows):
            yield tokens[row * SEQ_LEN : (row + 1) * SEQ_LEN + 1]
        rest = tokens[num_rows * SEQ_LEN :]
    yield np.append(rest, np.uint16(0))


def write_one_sample_a_member(ours: list[str], folder: Path) -> list[str]:
    """Writes the same rows as webdataset's documentation would; returns the shards."""
    rows = list(cut_rows(wds.WebDataset(ours, shardshuffle=False).decode()))
    names = [str(folder / f"rows-{number}.tar") for number in range(NUM_SHARDS)]
    for name, part in zip(names, np.array_split(np.arange(len(rows)), NUM_SHARDS), strict=True):
        with wds.TarWriter(name) as writer:
            for row in part:
                writer.write({"__key__": f"{row:08d}", "npy": rows[row]})
    return names


def split_rows(rows: np.ndarray) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(rows[:, :-1].astype(np.int64)), torch.from_numpy(rows[:, 1:].astype(np.int64))


def stack(samples: list[Any]) -> tuple[Tensor, Tensor]:
    """Collates with one stack and one conversion."""
    return split_rows(np.stack([sample[0] if isinstance(sample, tuple) else sample for sample in samples]))


def read_webdataset(names: list[str], num_rows: int, collate: bool) -> Batches:
    samples = wds.WebDataset(names, shardshuffle=100).shuffle(1000).decode().to_tuple("npy")
    if collate:
        return samples.batched(num_rows, collation_fn=stack)
    return samples.batched(num_rows).map(lambda batch: split_rows(np.asarray(batch[0])))


def read_webdataset_our_shards(names: list[str], num_rows: int) -> Batches:
    rows = wds.WebDataset(names, shardshuffle=100).decode().compose(cut_rows).shuffle(1000)
    return rows.batched(num_rows, collation_fn=stack)


def read_ours(folder: Path, index: DataIndex, num_rows: int, document_mask: bool) -> Batches:
    stream = TokenStream(folder, index, "train", seq_len=SEQ_LEN, seed=1, lanes=16, block_samples=8192)
    plan = BatchPlan(rows=num_rows, rows_per_rank=num_rows, micro=num_rows, accumulation=1)
    loader = TrainLoader(stream, plan, rank=0, world_size=1, document_mask=document_mask)
    for _ in range(stream.order.epoch_start(1) // num_rows):
        for batch in next(loader).micro_batches:
            yield batch.tokens_BT, batch.targets_BT
    loader.close()


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
    num_rows = options.rows
    num_tokens, rounds = (2**23, 7) if options.quick else (2**25, 15)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        index = write_ours(folder, num_tokens)
        ours = [str(folder / shard.name) for shard in index.split("train").shards]
        theirs = write_one_sample_a_member(ours, folder)
        readers: dict[str, Callable[[], Batches]] = {
            "ours": partial(read_ours, folder, index, num_rows, False),
            "ours_again": partial(read_ours, folder, index, num_rows, False),
            "ours_documents": partial(read_ours, folder, index, num_rows, True),
            "webdataset": partial(read_webdataset, theirs, num_rows, True),
            "webdataset_defaults": partial(read_webdataset, theirs, num_rows, False),
            "webdataset_our_shards": partial(read_webdataset_our_shards, ours, num_rows),
        }
        expected = count_tokens(readers["ours"]())
        for arm, read in readers.items():
            assert count_tokens(read()) == expected, f"{arm} does not yield the same tokens"
        timings = measure({arm: partial(drain, read) for arm, read in readers.items()}, rounds)
    report(timings, num_tokens, num_rows)


def report(timings: dict[str, Any], num_tokens: int, num_rows: int) -> None:
    """Prints rates, ratios and the row."""
    rates = {arm: num_tokens / 1e6 / float(np.median([run.cpu_s for run in runs])) for arm, runs in timings.items()}
    wall = {arm: num_tokens / 1e6 / float(np.median([run.wall_s for run in runs])) for arm, runs in timings.items()}
    ratios = {
        f"{arm} over {peer}": ratio(timings[peer], timings[arm])
        for arm in ("ours", "ours_documents")
        for peer in timings
        if peer.startswith("webdataset")
    }
    aa = ratio(timings["ours"], timings["ours_again"])
    for arm, rate in rates.items():
        print(f"{arm:24s} {rate:8.1f} Mtok per CPU-second  {wall[arm]:8.1f} Mtok/s")
    for label, value in ratios.items():
        print(f"{label:48s} {value}")
    verdicts = {}
    for peer in ("webdataset", "webdataset_our_shards"):
        held = "holds" if ratios[f"ours over {peer}"].low >= MUST else "missed"
        verdicts[peer] = held if is_conclusive(aa) else "inconclusive: A/A wider than 3%"
        print(f"{MUST:.0f} times {peer}: {verdicts[peer]}")
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
    print_row("loader", figures, ("numpy", "torch", "webdataset"))


if __name__ == "__main__":
    main()
