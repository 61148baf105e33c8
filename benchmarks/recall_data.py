"""Associative recall: rows that ask for what was said some way back (as Ba et al. 2016, 4.1; Arora et al. 2023, 3).

    k17 v3  k52 v60  k8 v41 ...  f9 f30 f2 ...  k52  ->  v60

A document is some pairs of key and value, filler, one of the keys again, its value, and the end. Only the value has a
loss. The distance is that from the key to its second time, and the same number of documents has each distance.

    python -m benchmarks.recall_data --output data/recall
"""

import argparse
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers

from pretrain.data.shards import ShardWriter
from pretrain.data.tokenizer import EOS, UNK, dump_tokenizer
from pretrain.index import DataIndex, SplitIndex, build_split, write_index

DISTANCES = (16, 32, 64, 128, 256, 512)
PAIRS = 8
SYMBOLS = 64
"""Keys, values and fillers, of each so many."""
FIRST_KEY, FIRST_VALUE, FIRST_FILLER = 2, 2 + SYMBOLS, 2 + 2 * SYMBOLS
DOCUMENTS_A_SHARD = 20_000


def draw_documents(rng: np.random.Generator, distance: int, count: int) -> np.ndarray:
    """Returns int64 [count, any]: documents of one distance; the last three tokens are the key, its value, the end.

    Rows differ in length with the place of the pair that is asked for, so all ask for one place, drawn.
    """
    place = int(rng.integers(max(0, PAIRS - distance // 2), PAIRS))
    keys = rng.permuted(np.tile(np.arange(SYMBOLS), (count, 1)), axis=1)[:, :PAIRS] + FIRST_KEY
    values = rng.integers(SYMBOLS, size=(count, PAIRS)) + FIRST_VALUE
    pairs = np.stack((keys, values), axis=2).reshape(count, 2 * PAIRS)
    filler = rng.integers(SYMBOLS, size=(count, distance - 2 * (PAIRS - place))) + FIRST_FILLER
    end = np.zeros(count, dtype=np.int64)
    asked = np.stack((keys[:, place], values[:, place], end), axis=1)
    return np.concatenate((pairs, filler, asked), axis=1)


def build_tokenizer() -> Tokenizer:
    """Returns a tokenizer of the symbols, one a word."""
    names = [EOS, UNK, *(f"{kind}{number}" for kind in "kvf" for number in range(SYMBOLS))]
    tokenizer = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([EOS, UNK])
    return tokenizer


def _documents(rng: np.random.Generator, count: int) -> Iterator[np.ndarray]:
    """Yields `count` documents, the distances in turn."""
    for number in range(count):
        yield draw_documents(rng, DISTANCES[number % len(DISTANCES)], 1)[0]


def _write_split(folder: Path, split: str, count: int, seed: int) -> SplitIndex:
    (folder / split).mkdir(parents=True)
    rng, shards = np.random.default_rng(seed), []
    for first in range(0, count, DOCUMENTS_A_SHARD):
        name = f"part-00000-{len(shards):04d}.tar"
        writer = ShardWriter(folder / split / name, "uint16", kind="records")
        for document in _documents(rng, min(DOCUMENTS_A_SHARD, count - first)):
            learned = np.zeros(len(document), dtype=bool)
            learned[-2] = True
            writer.add_document(document, loss=learned)
        shards.append(writer.close())
    return build_split(shards, num_bytes_text=0)


def write_recall(folder: Path, num_documents: int, seed: int = 0) -> DataIndex:
    """Writes a shard folder as `pretrain prepare` does; a hundredth as many documents are for validation."""
    folder.mkdir(parents=True)
    content = dump_tokenizer(build_tokenizer())
    (folder / "tokenizer.json").write_bytes(content)
    held = max(len(DISTANCES), num_documents // 100)
    index = DataIndex(
        tokenizer_sha256=hashlib.sha256(content).hexdigest(),
        vocab_size=2 + 3 * SYMBOLS,
        dtype="uint16",
        eos_id=0,
        splits={
            "train": _write_split(folder, "train", num_documents, seed),
            "validation": _write_split(folder, "validation", held, seed + 1),
        },
        kind="records",
    )
    write_index(folder, index)
    return index


def main() -> None:
    """Writes a folder and prints what is in it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--documents", type=int, default=300_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    index = write_recall(arguments.output, arguments.documents, arguments.seed)
    print(json.dumps({name: [split.num_documents, split.num_tokens] for name, split in index.splits.items()}))


if __name__ == "__main__":
    main()
