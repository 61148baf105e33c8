"""Captions of images: read with the images, made tokens once the texts of all parts are known.

    photos/cat.jpg, photos/cat.txt     or KEY.jpg, KEY.txt of a webdataset tar
      -> parts/part-00007.json         the texts of each shard, as its part was read (images.py)
      -> tokenizer.json                trained on those of the training split, or the given one
      -> SPLIT/part-00007-0000.captions.npy    bounds and tokens of a shard's captions

Each caption ends with the end-of-document token. All of this is done by the process that writes the
index: a million captions are half a minute.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from pretrain.config.prepare import PrepareConfig
from pretrain.errors import DataError
from pretrain.preparation.part_record import LengthHistogram, PartRecord
from pretrain.preparation.pool import ShardJob
from pretrain.preparation.split import TRAIN
from pretrain.shards.index import ShardIndex
from pretrain.shards.writer import write_sidecar
from pretrain.tokenizer.encoder import Encoder, build_encoder
from pretrain.tokenizer.file import dump_tokenizer, load_tokenizer
from pretrain.tokenizer.roles import eos_id
from pretrain.tokenizer.train import train_tokenizer
from pretrain.utils.io import write_file


def decode_caption(content: bytes, where: str) -> str:
    """Returns the text of a caption, without white space around it. Raises: DataError: None."""
    try:
        text = content.decode("utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise DataError(
            f"a caption that is not UTF-8: {error}",
            where=where,
            fix="write it as UTF-8",
        ) from None
    if not text:
        raise DataError("an empty caption", where=where, fix="write one, or remove the image")
    return text


def encode_captions(
    job: ShardJob, config: PrepareConfig, content: bytes | None, records: Sequence[PartRecord]
) -> tuple[list[PartRecord], Tokenizer]:
    """Writes the tokenizer and the captions of all shards; returns records that list them.

    `content` is a given tokenizer's; None: it is trained. Raises: DataError: There is nothing to
    train on, or nothing of a caption is left.
    """
    path = job.tokenizer_path
    if content is None:
        texts = [text for record in records for shard in record.splits[TRAIN].shards
                 for text in record.captions[shard.name]]  # fmt: skip
        content = dump_tokenizer(train_tokenizer(_sample(config, texts), config.tokenizer))
    write_file(path, content)
    tokenizer = load_tokenizer(path)
    encoder = build_encoder(tokenizer, eos_id(tokenizer, config.tokenizer.eos))
    finished = []
    for record in records:
        splits = {}
        for name, split in record.splits.items():
            texts = [text for shard in split.shards for text in record.captions[shard.name]]
            counted: dict[str, Any] = {"num_bytes_text": sum(len(text.encode()) for text in texts)}
            counted |= {"lengths": LengthHistogram()}
            shards = [_encode(job.folder, encoder, shard, record, counted["lengths"]) for shard in split.shards]
            splits[name] = replace(split, shards=shards, **counted)
        finished.append(replace(record, splits=splits))
    return finished, tokenizer


def _sample(config: PrepareConfig, texts: Sequence[str]) -> Sequence[str]:
    """Returns every n-th text, so many that they have at most `sample_bytes`."""
    # A character that the sample lacks has no token at all.
    if config.tokenizer.kind == "char":
        return texts
    num_bytes = sum(len(text.encode()) for text in texts)
    return texts[:: max(1, -(-num_bytes // config.tokenizer.sample_bytes))]


def _encode(
    folder: Path, encoder: Encoder, shard: ShardIndex, record: PartRecord, lengths: LengthHistogram
) -> ShardIndex:
    texts = record.captions[shard.name]
    tokens = encoder.encode(texts)
    if not tokens.lengths.all():
        text = texts[int(tokens.lengths.argmin())]
        raise DataError(
            f"the tokenizer leaves nothing of the caption {text[:40]!r}",
            where=shard.name,
            fix="use another tokenizer, or correct the caption",
        )
    ends = np.cumsum(tokens.lengths)
    ended = np.insert(tokens.values, ends, encoder.eos[0])
    lengths.add(tokens.lengths + 1)
    bounds = np.concatenate([[0], ends + np.arange(1, len(ends) + 1)])
    values = np.concatenate([bounds, ended]).astype("<u4")[None]
    captions = write_sidecar((folder / shard.name).with_suffix(".captions.npy"), values)
    return replace(shard, captions=captions)


def describe_captions(split: str, records: Sequence[PartRecord]) -> dict[str, object]:
    """Returns the entry of a split's captions in statistics.json."""
    lengths = LengthHistogram()
    for record in records:
        lengths.merge(record.splits[split].lengths)
    num_bytes = sum(record.splits[split].num_bytes_text for record in records)
    return {"num_tokens": lengths.total, "num_bytes_text": num_bytes, "lengths": lengths.facts()}
