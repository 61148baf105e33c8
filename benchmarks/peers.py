"""Other loaders of shuffled token rows, as their documentation sets them up; those that are not installed are left out.

    pip install -e '.[bench]'       in an environment of its own: mosaicml-streaming wants an older transformers

    write_NAME(folder, ...)  ->  the same tokens in the peer's own format
    read_NAME(folder, rows)  ->  an epoch of batches (inputs, targets), int64, from closed files

All run in this process, without workers, so that CPU time is all of theirs. Where a peer's default collation is slower
than one np.stack and one conversion, it gets these.

    litdata      TokensLoader over blocks of 1025 tokens; shuffle=True (chunks, and samples within each)
    mosaicml     MDS of one row a sample, `ndarray:uint16`; shuffle=True, py1e, its default block
    megatron     megatron-core's IndexedDataset and GPTDataset: its own samples, over documents in its own order, with
                 its loss mask and position ids; its index cache is warm
    memmap       no peer but a floor: rows of a flat file by a permutation, and nothing else (as nanoGPT reads)
"""

import os
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

PACKAGES = {"litdata": "litdata", "mosaicml": "mosaicml-streaming", "megatron": "megatron-core"}
_MODULES = {"litdata": "litdata", "mosaicml": "streaming", "megatron": "megatron.core"}

Batches = Iterable[tuple[Tensor, Tensor]]


def installed_peers() -> list[str]:
    """Returns the peers that can be imported, and says which cannot."""
    found = []
    for name, module in _MODULES.items():
        if find_spec(module.split(".")[0]) is None:
            print(f"{name}: {PACKAGES[name]} is not installed, left out (pip install -e '.[bench]')")
        else:
            found.append(name)
    return found


def split_rows(rows: np.ndarray) -> tuple[Tensor, Tensor]:
    """Returns inputs and targets, int64 [B, T] both, of rows [B, T+1]."""
    return torch.from_numpy(rows[:, :-1].astype(np.int64)), torch.from_numpy(rows[:, 1:].astype(np.int64))


def stack(samples: list[Any]) -> tuple[Tensor, Tensor]:
    """Collates with one stack and one conversion."""
    return split_rows(np.stack([sample[0] if isinstance(sample, tuple) else sample for sample in samples]))


def batches_of(rows: Iterable[np.ndarray], num_rows: int) -> Batches:
    """Collates `num_rows` rows at a time."""
    kept = []
    for row in rows:
        kept.append(row)
        if len(kept) == num_rows:
            yield stack(kept)
            kept = []
    if kept:
        yield stack(kept)


def write_litdata(folder: Path, rows: list[np.ndarray]) -> None:
    """Writes chunks of 8,192 rows, about as litgpt does."""
    from litdata.streaming.item_loader import TokensLoader
    from litdata.streaming.writer import BinaryWriter

    writer = BinaryWriter(str(folder), chunk_size=8192 * len(rows[0]), item_loader=TokensLoader(len(rows[0])))
    for number, row in enumerate(rows):
        writer[number] = row
    writer.done()
    writer.merge()


def open_litdata(folder: Path, width: int) -> Any:
    """Returns its dataset."""
    from litdata import StreamingDataset, TokensLoader

    return StreamingDataset(str(folder), item_loader=TokensLoader(width), shuffle=True)


def read_litdata(folder: Path, num_rows: int, width: int) -> Batches:
    """Yields an epoch."""
    from litdata import StreamingDataLoader

    return StreamingDataLoader(open_litdata(folder, width), batch_size=num_rows, num_workers=0, collate_fn=stack)


def resume_litdata(folder: Path, num_rows: int, width: int, position: int) -> tuple[Tensor, Tensor]:
    """Opens it at a position of the run, a multiple of `num_rows`, and returns the next batch."""
    loader = read_litdata(folder, num_rows, width)
    epoch, done = divmod(position, len(loader.dataset))
    state = loader.dataset.state_dict(done, 0, num_rows) | {"current_epoch": epoch + 1}
    loader.load_state_dict(
        {"dataset": state, "current_epoch": epoch + 1, "num_samples_yielded": done, "latest_worker_idx": -1}
    )
    return next(iter(loader))


def write_mosaicml(folder: Path, rows: list[np.ndarray]) -> None:
    """Writes MDS shards of 64 MiB, its default."""
    from streaming import MDSWriter

    with MDSWriter(out=str(folder), columns={"tokens": f"ndarray:uint16:{len(rows[0])}"}) as writer:
        for row in rows:
            writer.write({"tokens": row})


def open_mosaicml(folder: Path, num_rows: int, epoch_size: int | None = None) -> Any:
    """Returns its dataset; an epoch is as long as the data, or `epoch_size` samples."""
    from streaming import StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    clean_stale_shared_memory()
    return StreamingDataset(local=str(folder), shuffle=True, batch_size=num_rows, epoch_size=epoch_size)


def read_mosaicml(folder: Path, num_rows: int) -> Batches:
    """Yields an epoch."""
    return batches_of((sample["tokens"] for sample in open_mosaicml(folder, num_rows)), num_rows)


def resume_mosaicml(folder: Path, num_rows: int, position: int, epoch_size: int) -> tuple[Tensor, Tensor]:
    """Opens it at a position of the run and returns the next batch."""
    dataset = open_mosaicml(folder, num_rows, epoch_size)
    epoch, done = divmod(position, epoch_size)
    dataset.load_state_dict(dataset.state_dict(done, from_beginning=True) | {"epoch": epoch, "sample_in_epoch": done})
    samples = iter(dataset)
    batch = stack([next(samples)["tokens"] for _ in range(num_rows)])
    dataset._iterator.exit()  # or its thread reads on, from a folder that is gone
    return batch


def write_megatron(folder: Path, documents: Iterable[np.ndarray]) -> None:
    """Writes the documents, and one that is an end-of-document token and no more: GPTDataset leaves the last token of
    its stream out, whichever that is, and every document ends with this one."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(folder / "text.bin"), dtype=np.uint16)
    for document in documents:
        builder.add_document(torch.from_numpy(document.astype(np.int32)), [len(document)])
    builder.add_document(torch.zeros(1, dtype=torch.int32), [1])
    builder.finalize(str(folder / "text.idx"))


def open_megatron(folder: Path, seq_len: int, vocab_size: int) -> Any:
    """Returns its dataset; builds its index the first time."""
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.utils import Split

    tokenizer = SimpleNamespace(vocab_size=vocab_size, eod=0, unique_identifiers={"class": "none"})
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=seq_len,
        blend=([str(folder / "text")], None),
        split="1,0,0",
        path_to_cache=str(folder / "cache"),
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    tokens = IndexedDataset(str(folder / "text"), mmap=True)
    documents = np.arange(len(tokens.document_indices) - 1, dtype=np.int32)
    return GPTDataset(tokens, str(folder / "text"), documents, None, Split.train, config)


def read_megatron(folder: Path, num_rows: int, seq_len: int, vocab_size: int) -> Batches:
    """Yields an epoch."""
    dataset = open_megatron(folder, seq_len, vocab_size)
    for first in range(0, len(dataset), num_rows):
        samples = [dataset[number] for number in range(first, min(first + num_rows, len(dataset)))]
        inputs, targets = (torch.stack([sample[key] for sample in samples]) for key in ("tokens", "labels"))
        yield inputs, targets


def write_memmap(folder: Path, rows: list[np.ndarray]) -> None:
    """Writes the rows into one flat file, each overlapping the next by one token."""
    flat = np.concatenate([row[:-1] for row in rows] + [rows[-1][-1:]])
    flat.tofile(folder / "tokens.bin")


def read_memmap(folder: Path, num_rows: int, seq_len: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields an epoch."""
    flat = np.memmap(folder / "tokens.bin", dtype=np.uint16, mode="r").view(np.ndarray)
    starts = np.random.default_rng(1).permutation(len(flat) // seq_len) * seq_len
    for first in range(0, len(starts), num_rows):
        yield split_rows(np.stack([flat[start : start + seq_len + 1] for start in starts[first : first + num_rows]]))


def quiet() -> None:
    """Keeps the peers' own messages out of the report."""
    import logging
    import warnings

    os.environ.setdefault("TQDM_DISABLE", "1")
    warnings.filterwarnings("ignore")
    logging.getLogger("streaming").setLevel(logging.ERROR)
