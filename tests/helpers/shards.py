"""Makes small synthetic shard folders for tests."""

from pathlib import Path

import numpy as np

from pretrain.shards.index import DataIndex, ShardIndex, Sidecar, build_split, write_index
from pretrain.shards.ragged import TokenDocuments, ragged_of
from pretrain.shards.writer import ShardWriter

EOS = 0
VOCAB_SIZE = 1000


def make_documents(num_tokens: int, seed: int = 0, longest: int = 50, vocab_size: int = VOCAB_SIZE) -> list[np.ndarray]:
    """Random documents of 1 to `longest` tokens, the last of each EOS, `num_tokens` in all."""
    rng = np.random.default_rng(seed)
    documents = []
    while num_tokens:
        size = min(num_tokens, int(rng.integers(1, longest + 1)))
        document = rng.integers(1, vocab_size, size)
        document[-1] = EOS
        documents.append(document)
        num_tokens -= size
    return documents


def add_document(
    writer: ShardWriter, tokens: np.ndarray, source: np.ndarray | None = None, loss: np.ndarray | None = None
) -> None:
    """Appends one document to a shard."""
    writer.add(TokenDocuments(ragged_of([tokens]), None if source is None else ragged_of([source]), loss))


def write_shard(path: Path, documents: list[np.ndarray], dtype: str = "uint16", member_tokens: int = 64) -> ShardIndex:
    """Writes documents as one shard."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = ShardWriter(path, dtype, member_tokens)
    for document in documents:
        add_document(writer, document)
    return writer.close()


def describe_shard(name: str, num_tokens: int, *, sha256: str = "ab", num_documents: int = 2) -> ShardIndex:
    """Returns the index of a shard of texts that is nowhere."""
    sidecars = (Sidecar(name.replace(".tar", suffix), 7, n) for suffix, n in ((".idx.npy", 6), (".lengths.npy", 1)))
    return ShardIndex(name, 1024, sha256, num_tokens, num_documents, 1, *sidecars)


def make_shards(
    folder: Path,
    train: tuple[int, ...] = (700, 300, 500),
    validation: tuple[int, ...] = (250,),
    *,
    dtype: str = "uint16",
    longest: int = 50,
    member_tokens: int = 64,
    vocab_size: int = VOCAB_SIZE,
    tokenizer_sha256: str = "0" * 64,
) -> DataIndex:
    """Writes a whole shard folder, without a tokenizer; returns its index.

    Args:
        folder: Where.
        train: Tokens of each train shard.
        validation: Tokens of each validation shard.
        dtype: `uint16` or `uint32`.
        longest: Longest document, tokens.
        member_tokens: As ShardWriter.
        vocab_size: Ids are below it; 0 ends a document.
        tokenizer_sha256: What the index says of the tokenizer.
    """
    splits = {}
    for split, sizes in (("train", train), ("validation", validation)):
        shards = []
        for number, size in enumerate(sizes):
            seed = 1000 * len(splits) + number
            documents = make_documents(size, seed, longest, vocab_size)
            shards.append(write_shard(folder / split / f"part-00000-{number:04d}.tar", documents, dtype, member_tokens))
        splits[split] = build_split(shards, num_bytes_text=4 * sum(sizes))
    index = DataIndex(tokenizer_sha256, vocab_size, dtype, EOS, splits)
    write_index(folder, index)
    return index


def read_split(folder: Path, index: DataIndex, split: str = "train") -> tuple[np.ndarray, np.ndarray]:
    """Reads a split with numpy only: its tokens in shard order, and the positions where documents start."""
    import io
    import tarfile

    tokens, starts, size = [], [], 0
    for shard in index.split(split).shards:
        with tarfile.open(folder / shard.name) as tar:
            arrays = {name: np.load(io.BytesIO(tar.extractfile(name).read())) for name in tar.getnames()}
        for key in sorted({name.split(".")[0] for name in arrays}):
            starts.append(arrays[f"{key}.docs.npy"].astype(np.int64) + size)
            tokens.append(arrays[f"{key}.tokens.npy"].astype(np.int64))
            size += len(tokens[-1])
    return np.concatenate(tokens), np.concatenate(starts)
