"""Webdataset tars of images that others made, indexed where they are, without a copy.

    photos-000.tar     a/1.jpg, a/1.cls, ...: names that agree up to the first dot are a sample
      -> read once, forward: SHA-256 of the tar, CRC32, decoding and label of each image
      -> SPLIT/part-00007-0000-photos-000.tar    a link to it; of an address, its URL in the index
      -> .lengths.npy beside it, parts/....npy with labels as the part numbers them
      -> index_labels: SPLIT/....idx.npy, once the labels of all parts are known

The image is .jpg, .jpeg, .png, .webp or another of `SUFFIXES`; the label .cls (a number or a name),
else .json (a field of it), else .txt (a name); a caption .txt, else a field of .json. Other members
are left out. A tar is of one split. Of captioned images the record of a part keeps the texts, and
no labels are numbered.
"""

import hashlib
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np

from pretrain.config.prepare import InputConfig, PrepareConfig
from pretrain.errors import DataError
from pretrain.preparation.captions import decode_caption
from pretrain.preparation.filters import BAD_IMAGE, BadInputError, limit_of
from pretrain.preparation.input_parts import InputFile, InputPart, Report
from pretrain.preparation.inputs.opening import InputStream
from pretrain.preparation.labelling import LabelSet, check_labels, sort_labels
from pretrain.preparation.part_record import PARTS_DIR, PartRecord, SplitRecord, write_record
from pretrain.preparation.readers.records import ReadRule
from pretrain.preparation.readers.webdataset import SKIP_BYTES, TarMember, TarReader, split_name
from pretrain.preparation.split import SPLITS, TRAIN, VALIDATION, SplitRule, is_validation
from pretrain.shards.index import ShardIndex
from pretrain.shards.reader import load_table
from pretrain.shards.writer import write_sidecar
from pretrain.utils.image_file import SUFFIXES, ImageFile
from pretrain.utils.io import disk_error, make_dir
from pretrain.utils.safe_read import parse_json
from pretrain.utils.units import plural

LABEL_KINDS = ("cls", "json", "txt")
MAX_LABEL_CHARS = 200
OF_CAPTIONS = "captions need --vocab-size N, or a --tokenizer of another kind"
OWN_KEY = "give each sample a key of its own, and its members in a row"


class _Hashed:
    """A stream of bytes that are hashed as they are read."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.sha256 = hashlib.sha256()

    def read(self, num_bytes: int) -> bytes:
        """Returns up to `num_bytes`."""
        data = self._stream.read(num_bytes)
        self.sha256.update(data)
        return data


class _Sample(NamedTuple):
    key: str
    offset: int  # of the image's bytes in the tar
    content: bytes
    width: int
    height: int
    label: str  # or caption


def split_tars(config: PrepareConfig, files: Sequence[InputFile], rule: SplitRule) -> dict[str, str]:
    """Returns the split of each tar by path: as given, by names such as `val`, or by a hash."""
    splits = [config.inputs[file.input].split for file in files]
    named = [is_validation(file.path) for file in files]
    if any(splits) or 0 < sum(named) < len(files):
        held_out = {file.path for file, split, is_named in zip(files, splits, named, strict=True)
                    if split == VALIDATION or (split is None and is_named)}  # fmt: skip
    else:
        can_hold_out = rule.fraction > 0 and len(files) > 1
        wanted = max(1, round(rule.fraction * len(files))) if can_hold_out else 0
        names = {file.path: Path(file.path).name.encode() for file in files}
        hashes = {path: hashlib.blake2b(name, salt=rule.salt).digest() for path, name in names.items()}
        held_out = set(sorted(names, key=hashes.__getitem__)[:wanted])
    return {file.path: VALIDATION if file.path in held_out else TRAIN for file in files}


def index_part(config: PrepareConfig, splits: dict[str, str], captioned: bool, part: InputPart, report: Report) -> None:
    """Indexes the tars of a part and commits its record; an exception leaves no file."""
    folder = Path(config.output)
    record = PartRecord("", {name: SplitRecord() for name in SPLITS})
    made: list[Path] = []
    try:
        for number, file in enumerate(piece.file for piece in part.slices):
            stem = re.sub(r"[^A-Za-z0-9_-]", "_", Path(file.path).stem)[:100]
            split = splits[file.path]
            tar = make_dir(folder / split) / f"{part.name}-{number:04d}-{stem}.tar"
            made += [tar, tar.with_suffix(".lengths.npy"), tar.with_suffix(".idx.npy"), _part_table(tar)]
            if captioned:
                record.captions[f"{split}/{tar.name}"] = []
            shard = _index_tar(config, file, tar, record, report)
            record.bad.check(limit_of(config, part.input_bytes))
            if shard is None:
                record.captions.pop(f"{split}/{tar.name}", None)
                continue
            record.splits[split].shards.append(shard)
            if file.is_remote:
                record.tars[shard.name] = file.path
            else:
                _link(tar, Path(file.path))
    except BaseException:
        for path in made:
            path.unlink(missing_ok=True)
        raise
    write_record(folder, part, record)


def _part_table(tar: Path) -> Path:
    return tar.parent.parent / PARTS_DIR / f"{tar.stem}.npy"


def _link(link: Path, target: Path) -> None:
    try:
        link.unlink(missing_ok=True)
        link.symlink_to(target.resolve())
    except OSError as error:
        raise disk_error("link", link, error) from error


def leave_out_image(
    config: PrepareConfig, file: InputFile, record: PartRecord, error: DataError, num_bytes: int
) -> None:
    """Counts an image, or the rest of a tar, with an error. Raises: BadInputError: It stops."""
    reason = error.reason if isinstance(error, BadInputError) else BAD_IMAGE
    bad = BadInputError(error.what, where=error.where, fix=error.fix, reason=reason)
    rule = ReadRule(config.inputs[file.input])
    record.bad.add(rule.leave_out(bad, num_bytes, 1, max(num_bytes, 1)))
    record.num_filtered[reason] = record.num_filtered.get(reason, 0) + 1


def _index_tar(
    config: PrepareConfig, file: InputFile, tar: Path, record: PartRecord, report: Report
) -> ShardIndex | None:
    """Reads a tar, and writes its sidecars; labels are numbered as the record lists them.

    The captions of the tar, which the record has a list of, are appended to that. Returns None for
    a tar whose samples are all left out.
    """
    table, sizes = [], []
    numbers = {label: number for number, label in enumerate(record.labels)}
    captions = record.captions.get(f"{tar.parent.name}/{tar.name}")
    with InputStream(file) as stream:
        hashed = _Hashed(stream.plain)
        tar_reader = TarReader(cast(BinaryIO, hashed), file.shown)
        one = config.inputs[file.input]
        samples = _read_samples(tar_reader, file.shown, one, captions is not None)
        for sample, num_bytes in _until_damage(samples, tar_reader, file.size):
            if isinstance(sample, DataError):
                leave_out_image(config, file, record, sample, num_bytes)
                continue
            record.bad.num_read += 1
            label = 0
            if captions is None:
                record.labels.setdefault(sample.label, f"{file.shown}, sample {sample.key!r}")
                label = numbers.setdefault(sample.label, len(numbers))
                record.splits[tar.parent.name].num_labelled[label] += 1
            else:
                captions.append(sample.label)
            table.append((sample.offset, len(sample.content), zlib.crc32(sample.content), label))
            sizes.append((1, sample.width, sample.height))
            report(num_bytes, 1)
        while hashed.read(SKIP_BYTES):  # behind a damage
            pass
        stream.check_unchanged()
    if not table and record.bad.num_bad:
        return None
    if not table:
        raise DataError("a tar without a sample", where=file.shown, fix="remove it")
    place = _part_table(tar) if captions is None else tar.with_suffix(".idx.npy")
    return ShardIndex(
        name=f"{tar.parent.name}/{tar.name}",
        num_bytes=file.size,
        sha256=hashed.sha256.hexdigest(),
        num_tokens=len(table),
        num_documents=len(table),
        num_members=len(table),
        table=write_sidecar(place, np.array(table, dtype="<i8")),
        lengths=write_sidecar(tar.with_suffix(".lengths.npy"), np.array(sizes, dtype="<u4")),
    )


def _until_damage(
    samples: Iterator[tuple[_Sample | DataError, int]], tar: TarReader, size: int
) -> Iterator[tuple[_Sample | DataError, int]]:
    """Yields the samples of a tar; last the damage behind which nothing can be read."""
    try:
        yield from samples
    except BadInputError as error:
        yield error, size - tar.position


def _read_samples(
    tar: TarReader, name: str, config: InputConfig, captioned: bool
) -> Iterator[tuple[_Sample | DataError, int]]:
    """Yields the samples of a tar, or their errors, each with the bytes since the one before.

    Raises: BadInputError: The tar is damaged.
    """
    keys: set[str] = set()
    before = 0
    named = (member for member in tar if split_name(member.path)[0])
    for key, members in groupby(named, key=lambda member: split_name(member.path)[0]):
        where = f"{name}, sample {key!r}"
        sample: _Sample | DataError
        try:
            if key in keys:
                raise DataError(
                    "the key comes twice, with other samples in between",
                    where=where,
                    fix=OWN_KEY,
                )
            keys.add(key)
            sample = _read_sample(tar, key, members, where, config, captioned)
        except BadInputError:
            raise
        except DataError as error:
            sample = error
        yield sample, tar.position - before
        before = tar.position


def _read_sample(
    tar: TarReader, key: str, members: Iterator[TarMember], where: str, config: InputConfig, captioned: bool
) -> _Sample:
    bodies: dict[str, bytes] = {}
    places: dict[str, int] = {}
    for member in members:
        kind = split_name(member.path)[1]
        if kind in places:
            raise DataError(f"two members .{kind}", where=where, fix=OWN_KEY)
        places[kind] = tar.position
        if f".{kind}" in SUFFIXES or kind in LABEL_KINDS:
            if member.size > config.max_document_bytes:
                limit = f"inputs.max_document_bytes={config.max_document_bytes}"
                raise DataError(
                    f".{kind} of {member.size} bytes, more than {limit}",
                    where=where,
                    fix="raise the limit, or remove the sample",
                )
            bodies[kind] = member.read(member.size)
    images = [kind for kind in bodies if f".{kind}" in SUFFIXES]
    has = ", ".join(f".{kind}" for kind in places)
    if len(images) != 1:
        count = plural(len(images), "image") if images else "no image"
        raise DataError(
            f"{count} in a sample (it has {has})",
            where=where,
            fix=f"give each sample one of {' '.join(SUFFIXES)}",
        )
    (kind,) = images
    label = (_caption_of if captioned else _label_of)(bodies, where, config)
    if label is None and captioned:
        raise DataError(
            f"an image without a caption (the sample has {has})",
            where=where,
            fix=f"give it a .txt, or a .json with {config.text_field!r} (text_field of an input)",
        )
    if label is None:
        field = f"{config.label_field!r} (label_field of an input)"
        raise DataError(
            f"a sample without a label (it has {has})",
            where=where,
            fix=f"give it a .cls, a .json with {field}, or a .txt",
        )
    image = ImageFile(bodies[kind], f"{where}, .{kind}")
    image.decode(channels=3)
    return _Sample(key, places[kind], bodies[kind], image.width, image.height, label)


def _caption_of(bodies: dict[str, bytes], where: str, config: InputConfig) -> str | None:
    """Returns the caption of a sample; None: it has none. Raises: DataError: It is empty."""
    if "txt" in bodies:
        return decode_caption(bodies["txt"], f"{where}, .txt")
    try:
        values = parse_json(bodies.get("json", b"{}"))
    except ValueError as error:
        raise DataError(f".json: {error}", where=where, fix="write it as JSON") from None
    text = values.get(config.text_field) if isinstance(values, dict) else None
    return None if text is None else decode_caption(str(text).encode(), f"{where}, .json")


def _label_of(bodies: dict[str, bytes], where: str, config: InputConfig) -> str | None:
    """Returns the label of a sample; None: it has none. Raises: DataError: It is none."""
    field = config.label_field
    for kind in LABEL_KINDS:
        if kind not in bodies:
            continue
        try:
            label: Any = bodies[kind].decode("utf-8-sig").strip()
            if kind == "json":
                label = parse_json(label)
                label = label.get(field) if isinstance(label, dict) else label
        except ValueError as error:
            raise DataError(
                f".{kind}: {error}",
                where=where,
                fix="write it as JSON, in UTF-8" if kind == "json" else "write it as UTF-8",
            ) from None
        if label is None:
            continue
        if type(label) not in (str, int) or not 0 < len(str(label)) <= MAX_LABEL_CHARS:
            raise DataError(
                f".{kind}: {str(label)[:40]!r} is no label",
                where=where,
                fix=f"give a number or a name of up to {MAX_LABEL_CHARS} characters; {OF_CAPTIONS}",
            )
        return str(label)
    return None


def find_labels(config: PrepareConfig, records: Sequence[PartRecord]) -> LabelSet:
    """Returns the classes: those given, or the sorted labels of all parts. Raises: DataError."""
    counts, places = count_labels(records)
    check_class_sizes(counts, places, "give images with other labels")
    if not config.labels:
        return LabelSet(tuple(sort_labels(counts)), is_given=False)
    check_labels(config.labels)
    labels = LabelSet(tuple(config.labels), is_given=True)
    for label, where in places.items():
        if _find(labels, label) is None:
            raise DataError(
                f"label {label!r} is not one of labels ({', '.join(config.labels[:20])})",
                where=where,
                fix="add it to labels, or correct it",
            )
    return labels


def _find(labels: LabelSet, label: str) -> int | None:
    """Returns the number of a label, which spells a name, or the number of one."""
    number = labels.find(label)
    return labels.find(int(label)) if number is None and label.isdecimal() else number


def count_labels(records: Sequence[PartRecord]) -> tuple[Counter[str], dict[str, str]]:
    """Returns the images of each label, and the place of the first one."""
    counts: Counter[str] = Counter()
    places: dict[str, str] = {}
    for record in records:
        for number, (label, place) in enumerate(record.labels.items()):
            counts[label] += sum(split.num_labelled[number] for split in record.splits.values())
            places.setdefault(label, place)
    return counts, places


def check_class_sizes(counts: Counter[str], places: dict[str, str], fix: str) -> None:
    """Checks that there are two classes or more, of two images or more. Raises: DataError."""
    if alone := sorted(name for name, count in counts.items() if count == 1):
        more = f"add images of it, or remove it; {OF_CAPTIONS}"
        raise DataError(
            f"class {alone[0]!r} has one image: it cannot be both learned and measured",
            where=places[alone[0]],
            fix=more,
        )
    if len(counts) == 1:
        raise DataError(
            f"there is one class, {min(counts)!r}: a model has nothing to distinguish",
            where=places[min(counts)],
            fix=fix,
        )


def index_labels(folder: Path, labels: LabelSet, records: Sequence[PartRecord]) -> list[PartRecord]:
    """Writes the tables of all tars, with the numbers of labels; returns such records."""
    finished = []
    for record in records:
        numbers = [_find(labels, label) or 0 for label in record.labels]
        splits = {}
        for name, split in record.splits.items():
            shards = [_renumber(folder, shard, np.array(numbers)) for shard in split.shards]
            counts: Counter[int] = Counter()
            for number, count in split.num_labelled.items():
                counts[numbers[number]] += count
            splits[name] = replace(split, shards=shards, num_labelled=counts)
        finished.append(replace(record, splits=splits))
    return finished


def remove_part_tables(folder: Path) -> None:
    """Removes the tables of single parts, which a finished folder does not need."""
    for path in (folder / PARTS_DIR).glob("*.npy"):
        path.unlink()


def _renumber(folder: Path, shard: ShardIndex, numbers: np.ndarray) -> ShardIndex:
    table = load_table(folder, shard, 0).copy()
    table[:, 3] = numbers[table[:, 3]]
    return replace(shard, table=write_sidecar((folder / shard.name).with_suffix(".idx.npy"), table))
