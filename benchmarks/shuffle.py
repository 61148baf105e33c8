"""Quality of the shuffle, against a full permutation: counts only, so there is no noise but the seed's.

    python -m benchmarks.shuffle [--quick]
    pip install -e '.[bench]'      first, for mosaicml-streaming's orders; they are left out without it

A made-up corpus is sorted in the worst way: shards of 30,000 samples (about 64 MB at 1024 tokens), documents of 4
samples one after another, topics of 100,000 samples one after another. Every arm orders the same samples, one epoch,
for one reader. Of each order:

    moved          mean distance of a sample from its place in the corpus, over the number of samples: 1/3 at random
    p10, p90       10th and 90th percentile of that distance: 0.051 and 0.684 at random
    neighbours     share of consecutive samples that are from the same shard
    siblings       share of samples with another sample of their document in the batch of 256
    variance       of topics a batch, over that of a random batch: 1 at random, about 256 when a batch has one topic,
                   below 1 when lanes spread a batch more evenly than chance; 256 / variance is how many independent
                   samples a batch is worth
    open shards    distinct shards in 2**16 consecutive samples: what the mixing costs a reader that fetches shards

Orders: ours (64 lanes and blocks of 2048 are the defaults); webdataset's shard shuffle and buffer of 1000;
mosaicml-streaming's py1s (64 canonical nodes), py1e and py1br (1), its defaults, blocks of 4,000,000 samples; all of
them by one process on one node, as each would train.
"""

import argparse
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import webdataset as wds

from benchmarks import peers
from benchmarks.common import print_row
from pretrain.data.order import SampleOrder, shard_order

SHARD, DOCUMENT, TOPIC, BATCH, WINDOW = 30_000, 4, 100_000, 256, 2**16
CANONICAL_NODES = {"py1s": 64, "py1e": 1, "py1br": 1}


def order_ours(num_samples: int, lanes: int, block_samples: int) -> np.ndarray:
    """Returns ours: X is the shards in a permuted order, samples of it by SampleOrder."""
    order = SampleOrder(num_samples, 1, seed=1, lanes=lanes, block_samples=block_samples)
    places = order.samples(range(num_samples))
    return shard_order(num_samples // SHARD, 1, 0)[places // SHARD] * SHARD + places % SHARD


def order_webdataset(num_samples: int) -> np.ndarray:
    """Returns the order of `WebDataset(shards, shardshuffle=True).shuffle(1000)`."""
    rng = random.Random(1)
    shards = list(range(num_samples // SHARD))
    rng.shuffle(shards)
    samples = (sample for shard in shards for sample in range(shard * SHARD, (shard + 1) * SHARD))
    return np.fromiter(wds.filters.shuffle(1000, rng=rng)(samples), np.int64, num_samples)


def order_mosaicml(num_samples: int, algorithm: str) -> np.ndarray:
    """Returns the order of StreamingDataset(shuffle=True, shuffle_algo=algorithm) on one node, rank and worker."""
    from streaming.base.partition import get_partitions
    from streaming.base.shuffle import get_shuffle

    nodes = CANONICAL_NODES[algorithm]
    sizes = np.full(num_samples // SHARD, SHARD)
    shuffled = get_shuffle(algorithm, sizes, nodes, 1, 0, max(4_000_000 // nodes, 2**18))
    order = shuffled[get_partitions("relaxed", num_samples, nodes, 1, 1, 1, BATCH).reshape(-1)]
    first = np.unique(order, return_index=True)[1]  # it repeats a few, so that all nodes have as many
    return order[np.sort(first)]


def order_fully(num_samples: int) -> np.ndarray:
    """Returns a full permutation."""
    return np.random.default_rng(1).permutation(num_samples)


def measure_order(order: np.ndarray) -> dict[str, float]:
    """Returns the measures of an order, a permutation of range(len(order))."""
    num_samples = len(order)
    assert (np.bincount(order, minlength=num_samples) == 1).all(), "every sample exactly once"
    moved = np.abs(order - np.arange(num_samples)) / num_samples
    p10, p90 = np.percentile(moved, (10, 90))
    shards = order // SHARD
    windows = shards[: num_samples // WINDOW * WINDOW].reshape(-1, WINDOW)
    return {
        "moved": float(moved.mean()),
        "p10": float(p10),
        "p90": float(p90),
        "neighbours": float((shards[1:] == shards[:-1]).mean()),
        "siblings": share_of_siblings(order),
        "variance": topic_variance(order),
        "open shards": float(np.mean([len(np.unique(window)) for window in windows[:: max(1, len(windows) // 32)]])),
    }


def share_of_siblings(order: np.ndarray) -> float:
    """Returns the share of samples that meet another one of their document in their batch."""
    documents = np.sort(order[: len(order) // BATCH * BATCH].reshape(-1, BATCH) // DOCUMENT, axis=1)
    same = documents[:, 1:] == documents[:, :-1]
    met = np.zeros(documents.shape, dtype=bool)
    met[:, 1:] |= same
    met[:, :-1] |= same
    return float(met.mean())


def topic_variance(order: np.ndarray) -> float:
    """Returns the mean squared deviation of a batch's topic counts from what is expected, over that of random batches.

    A batch drawn at random, without replacement, from n samples of which a share p has a topic: the variance of its
    count is BATCH p (1 - p) (n - BATCH) / (n - 1), the hypergeometric one.
    """
    num_samples = len(order)
    topics = order[: num_samples // BATCH * BATCH].reshape(-1, BATCH) // TOPIC
    share = np.bincount(order // TOPIC) / num_samples
    flat = np.arange(len(topics))[:, None] * len(share) + topics
    counts = np.bincount(flat.reshape(-1), minlength=len(topics) * len(share)).reshape(-1, len(share))
    random_variance = BATCH * share * (1 - share) * (num_samples - BATCH) / (num_samples - 1)
    return float(np.square(counts - BATCH * share).mean() / random_variance.mean())


def build_arms(num_samples: int) -> dict[str, Callable[[], np.ndarray]]:
    """Returns the orders that are compared."""
    arms: dict[str, Callable[[], np.ndarray]] = {"full permutation": partial(order_fully, num_samples)}
    for lanes, block in ((16, 1), (16, 2048), (16, 8192), (64, 1024), (64, 2048), (64, 8192), (256, 8192)):
        arms[f"ours, {lanes} lanes, blocks of {block}"] = partial(order_ours, num_samples, lanes, block)
    arms["ours, 16 lanes, one block"] = partial(order_ours, num_samples, 16, num_samples // 16)
    arms["webdataset, buffer of 1000"] = partial(order_webdataset, num_samples)
    if "mosaicml" in peers.installed_peers():
        arms |= {f"mosaicml, {name}": partial(order_mosaicml, num_samples, name) for name in CANONICAL_NODES}
    return arms


def main() -> None:
    """Measures every order, prints a table and the row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="2.1 million samples instead of 8.4")
    num_samples = SHARD * (70 if parser.parse_args().quick else 280)
    peers.quiet()
    found: dict[str, dict[str, Any]] = {}
    for name, order in build_arms(num_samples).items():
        found[name] = {measure: round(value, 4) for measure, value in measure_order(order()).items()}
        if name == "full permutation":
            print(f"{'':32s}" + "".join(f"{measure:>12s}" for measure in found[name]))
        print(f"{name:32s}" + "".join(f"{value:12.4g}" for value in found[name].values()))
    packages = ("numpy", "webdataset", *(["mosaicml-streaming"] if "mosaicml, py1e" in found else []))
    print_row("shuffle quality", {"samples": num_samples, "measures": found}, packages)


if __name__ == "__main__":
    main()
