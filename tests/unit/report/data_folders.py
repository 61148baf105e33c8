"""Shard folders of every kind with a tokenizer of characters, for tests that look at data."""

from pathlib import Path

import numpy as np

from pretrain.shards.index import DataIndex, build_split, write_index
from pretrain.shards.writer import ShardWriter
from pretrain.tokenizer.file import dump_tokenizer, tokenizer_hash
from pretrain.tokenizer.roles import eos_id
from tests.helpers.shards import add_document
from tests.helpers.tokenizers import train_char

ALPHABET = "abcdefghijklmnopqrstuvwxyz ABC\n\x1b\u00e9"


def make_folder(
    folder: Path,
    documents: list,
    *,
    kind: str = "text",
    validation: list | None = None,
    per_shard: int = 10,
    member_tokens: int = 64,
) -> DataIndex:
    """Writes documents as shards of `per_shard` documents, with the end of a document after each side.

    Args:
        folder: Where.
        documents: text: strings; pairs: (source, target); records: lists of (text, learned).
        kind: What they are.
        validation: The same of the validation split. None: there is none.
        per_shard: Documents a shard.
        member_tokens: As ShardWriter.
    """
    tokenizer = train_char([ALPHABET])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_bytes(dump_tokenizer(tokenizer))
    eos = eos_id(tokenizer)

    def ids(text: str) -> np.ndarray:
        return np.array([*tokenizer.encode(text).ids, eos])

    splits = {}
    for split, given in (("train", documents), ("validation", validation)):
        if given is None:
            continue
        (folder / split).mkdir()
        shards = []
        for first in range(0, len(given), per_shard):
            name = f"part-{first // per_shard:05d}-0000.tar"
            writer = ShardWriter(folder / split / name, "uint16", member_tokens, kind)
            for document in given[first : first + per_shard]:
                if kind == "text":
                    add_document(writer, ids(document))
                elif kind == "pairs":
                    add_document(writer, ids(document[1]), source=ids(document[0]))
                else:
                    flags = [learned for text, learned in document for _ in text]
                    tokens = ids("".join(text for text, _ in document))
                    add_document(writer, tokens, loss=np.array([*flags, flags[-1]]))
            shards.append(writer.close())
        splits[split] = build_split(shards, num_bytes_text=sum(map(len, map(str, given))))
    vocab_size = eos + 1
    index = DataIndex(tokenizer_hash(folder / "tokenizer.json"), vocab_size, "uint16", eos, splits, kind)
    write_index(folder, index)
    return index


def make_texts(count: int, seed: int = 0, longest: int = 60) -> list[str]:
    """Random texts of 1 to `longest` characters."""
    rng = np.random.default_rng(seed)
    letters = list("abcdefghijklmnopqrstuvwxyz ")
    return ["".join(rng.choice(letters, rng.integers(1, longest + 1))) for _ in range(count)]
