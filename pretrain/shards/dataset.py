"""The training data of a run: a shard folder or a mixture, found and checked, not opened.

Imports neither torch nor numpy, so that the launcher refuses bad data on a login node. Deliberately
not here: the order of samples (data/), and anything that opens a shard.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pretrain.config.data import DataConfig
from pretrain.errors import DataError
from pretrain.shards.index import DataIndex, check_shards, data_hash, load_index

ONLY = "data"
"""Name of the source where there is one."""


@dataclass(frozen=True, slots=True)
class DataSource:
    """A shard folder, with its name in the mixture; one that `repeats` starts over at its end."""

    name: str
    folder: Path
    index: DataIndex
    repeats: bool = True


@dataclass(frozen=True, slots=True)
class Dataset:
    """All sources of a run, in the order of the config: of one tokenizer, kind, dtype and labels."""

    sources: tuple[DataSource, ...]

    @property
    def index(self) -> DataIndex:
        """The first index: all have its tokenizer, vocabulary, dtype, end of document, kind, labels."""
        return self.sources[0].index

    @property
    def tokenizer_path(self) -> Path:
        """The tokenizer of all sources; images have none."""
        return self.sources[0].folder / "tokenizer.json"

    @property
    def sha256(self) -> str:
        """Identity of the data, hex: the hash of one folder, or of the hashes of several."""
        first, *rest = (data_hash(source.index) for source in self.sources)
        return hashlib.sha256("\n".join([first, *rest]).encode()).hexdigest() if rest else first


def open_dataset(config: DataConfig, folder_of: Callable[[str], Path] = Path) -> Dataset:
    """Reads the index of every source, and checks that all sources go together.

    `folder_of` returns the folder of a path: of an address, that of its fetched index and
    tokenizer.

    Raises:
        DataError: A folder or an index is missing or damaged, or tokenizers or kinds differ.
    """
    if config.path is not None:
        folder = folder_of(config.path)
        return Dataset((DataSource(ONLY, folder, load_index(folder)),))
    folders = [folder_of(source.path) for source in config.mixture]
    sources = [
        DataSource(source.name, folder, load_index(folder), source.repeat)
        for source, folder in zip(config.mixture, folders, strict=True)
    ]
    first, *rest = sources
    for source in rest:
        where = str(source.folder)
        for field in ("tokenizer_sha256", "kind", "dtype", "eos_id", "begin_id"):
            mine = str(getattr(first.index, field))
            other = str(getattr(source.index, field))
            if mine != other:
                both = f"{field} of {source.name!r} is {other[:12]}, that of {first.name!r} is {mine[:12]}"
                raise DataError(
                    f"data.mixture: {both}",
                    where=where,
                    fix="prepare all sources with one tokenizer and its options",
                )
        if source.index.labels != first.index.labels:
            both = f"the labels of {source.name!r} are not those of {first.name!r}, in their order"
            raise DataError(
                f"data.mixture: {both}",
                where=where,
                fix="prepare all sources with one list of labels",
            )
    return Dataset(tuple(sources))


def check_local(config: DataConfig) -> None:
    """Checks the files of the sources that are folders of this machine. Raises: DataError."""
    for path in config.paths:
        if "://" not in path:
            index = load_index(Path(path))
            check_shards(Path(path), index)
            _check_tokenizer(Path(path), index)


def check_tokenizers(dataset: Dataset) -> None:
    """Checks that the tokenizer in each source's folder made its shards. Raises: DataError."""
    for source in dataset.sources:
        _check_tokenizer(source.folder, source.index)


def _check_tokenizer(folder: Path, index: DataIndex) -> None:
    if not index.has_tokenizer:
        return
    path = folder / "tokenizer.json"
    fix = "copy it again or run `pretrain prepare` again"
    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", where=str(path), fix=fix) from None
    if digest != index.tokenizer_sha256:
        raise DataError(
            f"sha256 is {digest[:12]}, the index says {index.tokenizer_sha256[:12]}",
            where=str(path),
            fix=fix,
        )
