"""Writes token data as other systems do, byte by byte and apart from what reads them; and reads shards with webdataset.

They were compared with the real writers (megatron-core 0.16.1, mosaicml-streaming 0.13.0): the same bytes.
"""

import hashlib
import itertools
import json
import struct
from pathlib import Path

import numpy as np
from backports import zstd
from tokenizers import AddedToken, Tokenizer, decoders, models

from pretrain.shards.index import DataIndex
from pretrain.tokenizer.file import dump_tokenizer
from pretrain.tokenizer.special_tokens import EOS

EOS_ID = 0
VOCAB_SIZE = 300

MEGATRON_CODES = {"uint8": 1, "int32": 4, "int64": 5, "uint16": 8}
MDS_DTYPE_CODES = {"uint16": 16, "int32": 33, "uint32": 32, "int64": 65}


def write_tokenizer(path: Path, vocab_size: int = VOCAB_SIZE) -> Path:
    """A tokenizer of words w1, w2, ...; token 0 ends a document."""
    vocab = {f"w{number}": number for number in range(vocab_size)}
    vocab[EOS] = vocab.pop("w0")
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="w1"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(EOS, special=True)])
    path.write_bytes(dump_tokenizer(tokenizer))
    return path


def write_megatron(prefix: Path, documents: list[list[list[int]]], dtype: str = "uint16") -> None:
    """Documents of sequences."""
    sequences = [sequence for document in documents for sequence in document]
    width = np.dtype(dtype).itemsize
    lengths = [len(sequence) for sequence in sequences]
    pointers = [width * sum(lengths[:number]) for number in range(len(lengths))]
    starts = [sum(len(document) for document in documents[:number]) for number in range(len(documents) + 1)]
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, MEGATRON_CODES[dtype], len(lengths), len(starts))
    index += struct.pack(f"<{len(lengths)}i", *lengths)
    index += struct.pack(f"<{len(pointers)}q", *pointers) + struct.pack(f"<{len(starts)}q", *starts)
    prefix.with_name(prefix.name + ".idx").write_bytes(index)
    content = b"".join(np.array(sequence, f"<{np.dtype(dtype).str[1:]}").tobytes() for sequence in sequences)
    prefix.with_name(prefix.name + ".bin").write_bytes(content)


def write_flat(path: Path, tokens: list[int], dtype: str = "uint16") -> None:
    """nanoGPT's .bin, and OLMo's .npy without a header."""
    path.write_bytes(np.array(tokens, dtype).tobytes())


def write_llmc(path: Path, tokens: list[int], magic: int = 20240520, version: int = 1, dtype: str = "uint16") -> None:
    """A .bin of llm.c or modded-nanogpt."""
    path.write_bytes(struct.pack("<256i", magic, version, len(tokens), *[0] * 253) + np.array(tokens, dtype).tobytes())


def encode_ndarray(tokens: list[int], dtype: str, encoding: str) -> bytes:
    """A value of a column of MDS whose encoding is `ndarray`, `ndarray:DTYPE` or `ndarray:DTYPE:SHAPE`."""
    fixed = encoding.split(":")[1:]
    width = 0 if len(tokens) < 2**8 else 1
    shape = bytes([1 << 2 | width]) + len(tokens).to_bytes(1 << width, "little")
    code = bytes([MDS_DTYPE_CODES[dtype]])
    return code * (not fixed) + shape * (len(fixed) < 2) + np.array(tokens, dtype).tobytes()


def write_mds(
    folder: Path,
    samples: list[list[int]],
    *,
    encoding: str = "bytes",
    dtype: str = "int64",
    samples_a_shard: int = 3,
    compression: str | None = None,
    hashes: tuple[str, ...] = ("sha1",),
    neighbours: tuple[str, str] = ("id", "note"),
) -> None:
    """Shards with the columns `tokens` and its neighbours (fixed size, text), in the order of their names."""
    folder.mkdir(parents=True)
    fixed, text = neighbours
    columns = {fixed: ("int", 8), text: ("str", None), "tokens": (encoding, None)}
    if encoding.count(":") == 2:
        columns["tokens"] = (encoding, len(samples[0]) * np.dtype(dtype).itemsize)
    names = sorted(columns)
    config = {"version": 2, "format": "mds", "compression": compression, "hashes": list(hashes), "size_limit": 1 << 26,
              "column_names": names, "column_encodings": [columns[name][0] for name in names],
              "column_sizes": [columns[name][1] for name in names]}  # fmt: skip
    shards = []
    for first in range(0, len(samples), samples_a_shard):
        rows = []
        for number, tokens in enumerate(samples[first : first + samples_a_shard]):
            value = np.array(tokens, dtype).tobytes()
            value = value if encoding == "bytes" else encode_ndarray(tokens, dtype, encoding)
            values = {fixed: struct.pack("<q", number), text: b"n" * number, "tokens": value}
            heads = [struct.pack("<I", len(values[name])) for name in names if columns[name][1] is None]
            rows.append(b"".join([*heads, *(values[name] for name in names)]))
        described = json.dumps(config, sort_keys=True).encode()
        begin = 4 + 4 * (len(rows) + 1) + len(described)
        offsets = [begin + sum(map(len, rows[:number])) for number in range(len(rows) + 1)]
        raw = struct.pack(f"<{1 + len(offsets)}I", len(rows), *offsets) + described + b"".join(rows)
        name = f"shard.{first // samples_a_shard:05d}.mds"
        entry = {**config, "samples": len(rows), "raw_data": describe(name, raw, hashes), "zip_data": None}
        if compression:
            raw, name = zstd.compress(raw), f"{name}.zstd"
            entry["zip_data"] = describe(name, raw, hashes)
        (folder / name).write_bytes(raw)
        shards.append(entry)
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": shards}, sort_keys=True))


def describe(name: str, content: bytes, hashes: tuple[str, ...] = ()) -> dict:
    """What an index of MDS says of a file."""
    digests = {algorithm: hashlib.new(algorithm, content).hexdigest() for algorithm in hashes}
    return {"basename": name, "bytes": len(content), "hashes": digests}


def read_documents(folder: Path, index: DataIndex, split: str = "train") -> list[list[int]]:
    """The documents of a split, in order, as plain webdataset gives them."""
    import webdataset  # seconds, which a process that is killed at once need not spend

    urls = [str(folder / shard.name) for shard in index.splits[split].shards] if split in index.splits else []
    if not urls:
        return []
    documents = []
    for sample in webdataset.WebDataset(urls, shardshuffle=False).decode():
        documents += [piece.tolist() for piece in np.split(sample["tokens.npy"], sample["docs.npy"][1:])]
    return documents


def join(lists: list[list]) -> list:
    """One list of all."""
    return list(itertools.chain.from_iterable(lists))


def token_hash(tokens: list[int]) -> dict:
    """What conversion.json says of these tokens."""
    return {"num_tokens": len(tokens), "sha256": hashlib.sha256(np.array(tokens, "<u4").tobytes()).hexdigest()}
