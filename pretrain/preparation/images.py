"""`kind: images`: folders of classes, or captions, to shards; restartable, the same bytes.

Tars of images that others made are indexed where they are, in image_tars.py.

    photos/cat/1.jpg, photos/dog/a/2.png    the first folder below the input is the class
      -> listed, mixed by a hash of their names, cut into parts by size
      -> each decoded once, on all cores: a damaged file ends the command with its name
      -> SPLIT/part-00007-0000.tar ...       the files as they are, with their labels
      -> statistics.json, index.json

    photos/1.jpg, photos/1.txt              captions, where a tokenizer is asked for, or where no
                                            image lies in a folder: the same, and captions.py

The split is by the bytes of each file, as for texts: copies of an image are all on one side.
Folder, parts, locks and restarts are those of `prepare.py`.
"""

import hashlib
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from pretrain.config.prepare import PrepareConfig
from pretrain.errors import ConfigError, DataError
from pretrain.preparation.captions import decode_caption, describe_captions, encode_captions
from pretrain.preparation.filters import limit_of
from pretrain.preparation.image_tars import (
    check_class_sizes,
    find_labels,
    index_labels,
    index_part,
    leave_out_image,
    remove_part_tables,
    split_tars,
)
from pretrain.preparation.input_parts import (
    WHOLE,
    InputFile,
    InputPart,
    Report,
    Share,
    Work,
    plan_part_bytes,
    plan_parts,
)
from pretrain.preparation.inputs.local_files import find_local, stat_local
from pretrain.preparation.inputs.remote_files import find_remote
from pretrain.preparation.inputs.settle import settle_tokenizer
from pretrain.preparation.labelling import LabelSet, check_labels, sort_labels
from pretrain.preparation.output import claim_lock, fill_folder
from pretrain.preparation.part_record import (
    PartRecord,
    SplitRecord,
    count_left_out,
    load_records,
    merge_bad,
    merge_splits,
    write_record,
)
from pretrain.preparation.pool import ShardJob, Start, WorkerPool
from pretrain.preparation.progress import Progress, no_progress
from pretrain.preparation.split import SPLITS, TRAIN, VALIDATION, parse_split
from pretrain.preparation.statistics import STATISTICS_NAME
from pretrain.preparation.steps import identity_of
from pretrain.shards.image_writer import EncodedImage, ImageShardWriter
from pretrain.shards.index import CAPTIONS, IMAGES, INDEX_NAME, DataIndex, SplitIndex, load_index, write_index
from pretrain.shards.reader import load_lengths
from pretrain.tokenizer.file import tokenizer_hash
from pretrain.tokenizer.roles import eos_id, token_dtype, vocabulary_size
from pretrain.utils.image_file import SUFFIXES, ImageFile
from pretrain.utils.io import make_dir, write_json
from pretrain.utils.remote import check_no_secrets, is_remote, without_secrets
from pretrain.utils.units import plural

WEBDATASET = "webdataset"
"""Format of an input of tars."""
COMPRESSED = (".tar.gz", ".tgz", ".tar.zst")

Facts = dict[str, object]
"""Plain values of statistics.json."""

_log = logging.getLogger(__name__)


def prepare_images(
    config: PrepareConfig, progress: Progress = no_progress, *, share: Share = WHOLE, processes: int | None = None
) -> DataIndex | None:
    """Prepares one share of a folder of images; arguments, result and errors as of `prepare`."""
    rule = parse_split(config.split, config.seed)
    if rule.kind == "tail":
        raise ConfigError(
            f"split={config.split} cuts texts in two, and kind=images has none",
            fix="use hash:F",
        )
    files = list_images(config)
    is_tars = files[0].format == WEBDATASET
    captioned = files[0].pair is not None or (is_tars and config.differs("tokenizer"))
    source = None
    if captioned:
        config, source = settle_tokenizer(config)
    labels = None if is_tars or captioned else _labels_of(config, files)
    part_bytes = config.part_bytes or plan_part_bytes(files)
    folder = Path(config.output)
    job = ShardJob(folder, plan_parts(files, part_bytes))
    pool = WorkerPool(folder, progress, processes, share)
    identity = identity_of(config, source) | {"part_bytes": part_bytes}

    def build() -> DataIndex | None:
        start: Start
        if is_tars:
            start = partial(_start_indexing, config, split_tars(config, files, rule), captioned)
        else:
            start = partial(_start_writing, config, labels)
        pool.write_parts(start, share.own(job.parts), "", "reading images")
        with claim_lock(folder):
            if (folder / INDEX_NAME).exists():
                return load_index(folder)
            records = load_records(folder, job.parts, "")
            if len(records) < len(job.parts):
                return None
            ordered = [records[part.number] for part in job.parts]
            merge_bad(ordered, limit_of(config, job.num_bytes))
            if captioned:
                return _write_captions_index(job, config, source.content if source else None, ordered)
            return _write_index(job, config, labels, ordered)

    return fill_folder(folder, share, identity, files, processes, build)


def list_images(config: PrepareConfig) -> list[InputFile]:
    """Lists the images of all inputs, mixed by a hash of their names: a shard has all classes; or the tars.

    Captions are the `pair` of each image. Raises: ConfigError, DataError: No images, both images
    and tars, or an image without a caption beside others.
    """
    images, tars, rest = _sort_files(config)
    captions = _find_captions(config, images, rest)
    rest = [path for path in rest if path not in captions]
    if rest:
        count = plural(len(rest), "other file")
        _log.warning("%s left out, such as %s", count, without_secrets(rest[0]))
    salt = config.seed.to_bytes(8, "big")

    def place(path: str) -> tuple[bytes, str]:
        name = class_path(config, path).encode()
        return hashlib.blake2b(name, digest_size=8, salt=salt).digest(), path

    described = (replace(stat_local(path), input=images[path], format="image") for path in sorted(images, key=place))
    if captions:
        return [replace(file, pair=stat_local(_caption_path(file.path))) for file in described]
    return list(tars.values()) or list(described)


def _sort_files(config: PrepareConfig) -> tuple[dict[str, int], dict[str, InputFile], list[str]]:
    """Returns the images with the numbers of their inputs, the tars, and other files; images or tars, not both."""
    images: dict[str, int] = {}
    tars: dict[str, InputFile] = {}
    rest: list[str] = []
    for number, one in enumerate(config.inputs):
        if one.format not in ("auto", WEBDATASET):
            raise ConfigError(f"format={one.format} holds no images", where=f"inputs.{number}", fix="leave it out")
        for path, file in _find_files(one.paths):
            if path.endswith(COMPRESSED):
                raise DataError(
                    "a compressed tar: images are read by their place in it",
                    where=without_secrets(path),
                    fix="decompress it",
                )
            if path.endswith(".tar"):
                tars.setdefault(path, replace(file or stat_local(path), input=number, format=WEBDATASET))
            elif file is None and one.format == "auto" and path.lower().endswith(SUFFIXES):
                images.setdefault(path, number)
            else:
                rest.append(path)
    if images and tars:
        both = f"{plural(len(images), 'image')} beside {plural(len(tars), 'tar')}"
        raise DataError(
            f"{both}, which are read in other ways",
            where=min(images),
            fix="give folders of classes or tars, not both",
        )
    if not images and not tars:
        raise _no_images(config)
    return images, tars, rest


def _no_images(config: PrepareConfig) -> DataError:
    roots = [without_secrets(root) for one in config.inputs for root in one.paths]
    return DataError(
        f"there are no images ({' '.join(SUFFIXES)}) and no webdataset tars (.tar)",
        where=", ".join(roots) or "--input",
        fix="give a folder with one folder of images for each class, or tars",
    )


def _caption_path(path: str) -> str:
    return str(Path(path).with_suffix(".txt"))


def _find_captions(config: PrepareConfig, images: Iterable[str], others: Iterable[str]) -> set[str]:
    """Returns the captions beside images; none of classes. Raises: DataError: An image has none."""
    wanted = {_caption_path(path): path for path in images}
    names = wanted.keys() & set(others)
    in_folders = any(len(Path(class_path(config, path)).parts) > 1 for path in images)
    if not wanted or not (config.differs("tokenizer") or (names and not in_folders)):
        return set()
    if without := sorted(wanted.keys() - names):
        raise DataError(
            "an image without a caption",
            where=wanted[without[0]],
            fix=f"write it to {Path(without[0]).name} beside it, or remove the image",
        )
    return names


def _find_files(roots: Sequence[str]) -> Iterator[tuple[str, InputFile | None]]:
    """Yields the files that paths, globs and addresses name; behind an address, described."""
    from webdataset.shardlists import expand_urls

    for root in (name for pattern in roots for name in (expand_urls(pattern) if "{" in pattern else [pattern])):
        if is_remote(root):
            check_no_secrets(root)
            yield from find_remote(root).items()
        elif Path(root).is_file() and not root.endswith((".tar", *COMPRESSED)):
            raise DataError("a file, not a folder of classes", where=root, fix="give the folder above the classes")
        else:
            yield from ((path, None) for path in find_local(root))


def class_path(config: PrepareConfig, path: str) -> str:
    """Returns the path of an image below its input: `cat/1.jpg`."""
    roots = [root for one in config.inputs for root in one.paths if Path(path).is_relative_to(root)]
    return str(Path(path).relative_to(max(roots, key=len)))


def _class_of(config: PrepareConfig, path: str) -> str:
    """Returns the first folder below the input. Raises: DataError: There is none."""
    below = Path(class_path(config, path)).parts
    if len(below) < 2:
        raise DataError(
            "an image without a class: it lies in no folder below the input",
            where=path,
            fix="put it into a folder named after its class, or its caption beside it, as .txt",
        )
    return below[0]


def _labels_of(config: PrepareConfig, files: Sequence[InputFile]) -> LabelSet:
    """Returns the classes: those given, or the sorted names of the folders. Raises: DataError."""
    counts = Counter(_class_of(config, file.path) for file in files)
    places = {_class_of(config, file.path): file.path for file in files}
    check_class_sizes(counts, places, "give the folder above the folders of the classes")
    if not config.labels:
        return LabelSet(tuple(sort_labels(counts)), is_given=False)
    check_labels(config.labels)
    if unknown := sorted(counts.keys() - set(config.labels)):
        raise DataError(
            f"class {unknown[0]!r} is not one of labels ({', '.join(config.labels[:20])})",
            fix="add it to labels, or remove its folder",
        )
    return LabelSet(tuple(config.labels), is_given=True)


def _start_indexing(config: PrepareConfig, splits: dict[str, str], captioned: bool) -> Work:
    return partial(index_part, config, splits, captioned)


def _start_writing(config: PrepareConfig, labels: LabelSet | None) -> Work:
    names = () if labels is None else labels.names
    return partial(_write_part, config, {name: number for number, name in enumerate(names)})


def _write_part(config: PrepareConfig, numbers: dict[str, int], part: InputPart, report: Report) -> None:
    """Writes the shards of a part and commits its record; an exception leaves no file."""
    folder = Path(config.output)
    rule = parse_split(config.split, config.seed)
    record = PartRecord("", {name: SplitRecord() for name in SPLITS})
    writers: dict[str, ImageShardWriter] = {}
    try:
        for file in (piece.file for piece in part.slices):
            content = Path(file.path).read_bytes()
            caption = ""
            try:
                image = ImageFile(content, file.path)
                image.decode(channels=3)
                if file.pair is not None:
                    caption = decode_caption(Path(file.pair.path).read_bytes(), file.pair.path)
            except DataError as error:
                leave_out_image(config, file, record, error, file.num_bytes)
                record.bad.check(limit_of(config, part.input_bytes))
                continue
            record.bad.num_read += 1
            split = config.inputs[file.input].split or rule.split_of(content)
            if split not in writers:
                make_dir(folder / split)
                writers[split] = ImageShardWriter(folder / split / f"{part.name}-0000.tar")
            size = (image.width, image.height)
            label: int | str
            if file.pair is not None:
                label = caption
                record.captions.setdefault(f"{split}/{writers[split].path.name}", []).append(label)
            else:
                label = numbers[_class_of(config, file.path)]
                record.splits[split].num_labelled[label] += 1
            writers[split].add(EncodedImage(content, image.suffix, *size, label))
            report(file.num_bytes, 1)
        for split, writer in writers.items():
            record.splits[split].shards.append(writer.close())
    except BaseException:
        for writer in writers.values():
            writer.discard()
        raise
    write_record(folder, part, record)


def _write_index(
    job: ShardJob, config: PrepareConfig, labels: LabelSet | None, records: Sequence[PartRecord]
) -> DataIndex:
    if labels is None:
        labels = find_labels(config, records)
        records = index_labels(job.folder, labels, records)
    splits = merge_splits(records, "images")
    _warn_of_split(config, splits)
    counts = {name: Counter[int]() for name in splits}
    for part in records:
        for name in splits:
            counts[name].update(part.splits[name].num_labelled)
    untrained = [name for number, name in enumerate(labels.names) if not counts[TRAIN][number]]
    if untrained and not labels.is_given:
        raise DataError(
            f"no image of class {untrained[0]!r} is in the training split",
            fix="add images of it, hold out less with --split, or remove its folder",
        )
    # One id, of the token that stands for each vector of an image: they have no tokenizer.
    index = DataIndex("", 1, "uint16", eos_id=0, splits=splits, kind=IMAGES, labels=labels.names)
    facts: dict[str, Facts] = {}
    for name in splits:
        facts[name] = {"labels": {label: counts[name][number] for number, label in enumerate(labels.names)}}
    _complete(job.folder, index, records, facts)
    remove_part_tables(job.folder)
    return index


def _write_captions_index(
    job: ShardJob, config: PrepareConfig, given: bytes | None, records: Sequence[PartRecord]
) -> DataIndex:
    records, tokenizer = encode_captions(job, config, given, records)
    splits = merge_splits(records, "images")
    _warn_of_split(config, splits)
    size = vocabulary_size(tokenizer)
    end = eos_id(tokenizer, config.tokenizer.eos)
    sha256 = tokenizer_hash(job.tokenizer_path)
    index = DataIndex(sha256, size, token_dtype(size), end, splits, kind=CAPTIONS)
    _complete(job.folder, index, records, {name: {"captions": describe_captions(name, records)} for name in splits})
    return index


def _complete(folder: Path, index: DataIndex, records: Sequence[PartRecord], facts: dict[str, Facts]) -> None:
    """Writes statistics and index; `facts` has what a split has beside its sizes."""
    for record in records:
        index.tars.update(record.tars)
    described = {name: _describe_split(folder, split) | facts[name] for name, split in index.splits.items()}
    write_json(folder / STATISTICS_NAME, {"kind": index.kind, **_describe_bad(records), "splits": described})
    write_index(folder, index)


def _warn_of_split(config: PrepareConfig, splits: dict[str, SplitIndex]) -> None:
    if VALIDATION not in splits:
        larger = parse_split(config.split, config.seed).larger
        _log.warning("no image is held out; to hold out more, prepare another --output with --split %s", larger)


def _describe_bad(records: Sequence[PartRecord]) -> Facts:
    """Returns the entries of images that were left out."""
    bad = merge_bad(records)
    counts = {reason: count for reason, count in count_left_out(records).items() if count}
    skipped = {"num_read": bad.num_read, "num_bad": bad.num_bad, "lost_bytes": bad.lost_bytes}
    return {"left_out": counts, "skipped": skipped}


def _describe_split(folder: Path, split: SplitIndex) -> Facts:
    sizes = np.concatenate([load_lengths(folder, shard)[:, 1:] for shard in split.shards])
    smallest, median, largest = np.quantile(sizes, (0.0, 0.5, 1.0), axis=0, method="lower").tolist()
    return {
        "num_images": split.num_documents,
        "num_bytes": sum(shard.num_bytes for shard in split.shards),
        "num_shards": len(split.shards),
        "width": {"least": smallest[0], "median": median[0], "most": largest[0]},
        "height": {"least": smallest[1], "median": median[1], "most": largest[1]},
    }


def summarize(output: str, index: DataIndex) -> str:
    """Returns the line of a finished folder."""
    held_out = index.splits.get(VALIDATION)
    validation = f" {held_out.num_documents:,} validation images," if held_out else ""
    images = f"{index.splits[TRAIN].num_documents:,} training images"
    if index.layout.captions:
        words = f"captions of {plural(index.vocab_size, 'token')} in the vocabulary"
        return f"{output}: {images},{validation} {words}"
    return f"{output}: {images},{validation} {plural(len(index.labels), 'class')}"
