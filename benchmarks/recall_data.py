"""Associative recall: rows that ask for what was said some way back (as Ba et al. 2016, 4.1; Arora et al. 2023, 3).

    k17 v3  k52 v60  k8 v41 ...  f9 f30 k52 v60 f2 ...  k8 v41  f7  k52 v60 ...

A document is some pairs of key and value, then filler in which keys come again, each with its value after it, and the
end. Those later values have a loss: they were drawn for this document, so they can only be known from there. Which key
comes is drawn evenly each time, so neither the place nor what was asked before tells it. The distance is that to the
last time that the key came. Documents differ in length, and most are short: what is near is learned first.

    python -m benchmarks.recall_data --output data/recall
"""

import argparse
import hashlib
import json
import math
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers

from pretrain.shards.index import DataIndex, SplitIndex, build_split, write_index
from pretrain.shards.ragged import TokenDocuments, ragged_of
from pretrain.shards.writer import ShardWriter
from pretrain.tokenizer.file import dump_tokenizer
from pretrain.tokenizer.special_tokens import EOS, UNK

DISTANCES = (16, 32, 64, 128, 256, 512)
"""In the middle of each class on a logarithmic scale."""
FILLERS = (16, 32, 64, 128, 256, 512)
"""Of a document, with the questions in it; the share of documents falls with the square of it."""
QUESTIONS = 4
PAIRS = 4
SYMBOLS = 16
"""Keys, values and fillers, of each so many."""
EOS_ID = 0
FIRST_KEY, FIRST_VALUE, FIRST_FILLER = 2, 2 + SYMBOLS, 2 + 2 * SYMBOLS
DOCUMENTS_A_SHARD = 20_000


def draw_document(rng: np.random.Generator, fillers: int | None = None) -> tuple[np.ndarray, dict[int, int]]:
    """Returns int64 tokens [any], and the distance of each value that can be known, by its place.

    Args:
        rng: Draws all of it.
        fillers: How long it is, besides the pairs. None: one of FILLERS, drawn.
    """
    if fillers is None:
        shares = np.array(FILLERS, dtype=float) ** -2
        fillers = int(rng.choice(FILLERS, p=shares / shares.sum()))
    keys = rng.permutation(SYMBOLS)[:PAIRS] + FIRST_KEY
    values = rng.integers(SYMBOLS, size=PAIRS) + FIRST_VALUE
    document = rng.integers(SYMBOLS, size=2 * PAIRS + fillers + 1) + FIRST_FILLER
    document[: 2 * PAIRS] = np.stack((keys, values), axis=1).reshape(-1)
    document[-1] = EOS_ID
    last, questions = {pair: 2 * pair for pair in range(PAIRS)}, {}
    places = 2 * PAIRS + np.sort(rng.choice(fillers - QUESTIONS, size=QUESTIONS, replace=False)) + np.arange(QUESTIONS)
    for place in places.tolist():
        pair = int(rng.integers(PAIRS))
        document[place : place + 2] = keys[pair], values[pair]
        questions[place + 1], last[pair] = place - last[pair], place
    return document, questions


def class_of(distance: int) -> int:
    """Returns the one of DISTANCES that is nearest on a logarithmic scale."""
    return min(DISTANCES, key=lambda middle: abs(math.log(distance / middle)))


def build_tokenizer() -> Tokenizer:
    """Returns a tokenizer of the symbols, one a word."""
    names = [EOS, UNK, *(f"{kind}{number}" for kind in "kvf" for number in range(SYMBOLS))]
    tokenizer = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([EOS, UNK])
    return tokenizer


def _write_split(folder: Path, split: str, count: int, seed: int) -> SplitIndex:
    (folder / split).mkdir(parents=True)
    rng, shards = np.random.default_rng(seed), []
    for first in range(0, count, DOCUMENTS_A_SHARD):
        name = f"part-00000-{len(shards):04d}.tar"
        writer = ShardWriter(folder / split / name, "uint16", kind="records")
        for _ in range(min(DOCUMENTS_A_SHARD, count - first)):
            document, questions = draw_document(rng)
            learned = np.zeros(len(document), dtype=bool)
            learned[list(questions)] = True
            writer.add(TokenDocuments(ragged_of([document]), loss=learned))
        shards.append(writer.close())
    return build_split(shards, num_bytes_text=0)


def write_recall(folder: Path, num_documents: int, seed: int = 0) -> DataIndex:
    """Writes a shard folder as `pretrain prepare` does; a hundredth as many documents are for validation."""
    folder.mkdir(parents=True)
    content = dump_tokenizer(build_tokenizer())
    (folder / "tokenizer.json").write_bytes(content)
    held = max(8, num_documents // 100)
    index = DataIndex(
        tokenizer_sha256=hashlib.sha256(content).hexdigest(),
        vocab_size=2 + 3 * SYMBOLS,
        dtype="uint16",
        eos_id=EOS_ID,
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
