"""The training data of a run: a shard folder or a mixture, found and checked, not opened.

Needs neither torch nor numpy, so that the launcher refuses bad data on a login node. Deliberately
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
    """A shard folder.

    Attributes:
        name: Name in the mixture of the config.
        folder: The shard folder.
        index: Index of the folder.
        repeats: Starts over after it has been read once.
    """

    name: str
    folder: Path
    index: DataIndex
    repeats: bool = True


@dataclass(frozen=True, slots=True)
class Dataset:
    """All sources of a run, in the order of the config.

    Attributes:
        sources: At least one; of one tokenizer, kind, dtype and list of labels.
    """

    sources: tuple[DataSource, ...]

    @property
    def index(self) -> DataIndex:
        """Tells what is the same for all sources: tokenizer, vocabulary, dtype, end of document, kind, labels."""
        return self.sources[0].index

    @property
    def tokenizer_path(self) -> Path:
        """The tokenizer of all sources."""
        return self.sources[0].folder / "tokenizer.json"

    @property
    def sha256(self) -> str:
        """Identity of the data, hex; that of the folder where there is one."""
        hashes = [data_hash(source.index) for source in self.sources]
        return hashes[0] if len(hashes) == 1 else hashlib.sha256("\n".join(hashes).encode()).hexdigest()


def open_dataset(config: DataConfig, folder_of: Callable[[str], Path] = Path) -> Dataset:
    """Reads the index of every source, and checks that all sources go together.

    Args:
        config: Names the sources.
        folder_of: Returns the folder of a path: of an address, where its index and tokenizer have been fetched to.

    Raises:
        DataError: A folder or an index is missing or damaged; or sources of different tokenizers or kinds.
    """
    if config.path is not None:
        return Dataset((_open(ONLY, folder_of(config.path), True),))
    sources = tuple(_open(source.name, folder_of(source.path), source.repeat) for source in config.mixture)
    first = sources[0]
    for source in sources[1:]:
        for what in ("tokenizer_sha256", "kind", "dtype"):
            mine, other = getattr(first.index, what), getattr(source.index, what)
            if mine != other:
                raise DataError(
                    f"data.mixture: {what} of {source.name!r} is {other[:12]}, that of {first.name!r} is {mine[:12]}",
                    where=str(source.folder),
                    fix="prepare all sources with one tokenizer",
                )
        if source.index.labels != first.index.labels:
            raise DataError(
                f"data.mixture: the labels of {source.name!r} are not those of {first.name!r}, in their order",
                where=str(source.folder),
                fix="prepare all sources with one list of labels",
            )
    return Dataset(sources)


def check_local(config: DataConfig) -> None:
    """Checks the sources that are folders of this machine, and that their files are there: what a launcher can know.

    Raises:
        DataError: A folder, an index or a file is missing or damaged.
    """
    for path in config.paths:
        if "://" not in path:
            index = load_index(Path(path))
            check_shards(Path(path), index)
            _check_tokenizer(Path(path) / "tokenizer.json", index)


def check_tokenizers(dataset: Dataset) -> None:
    """Checks that the tokenizer of each source is the one that made its shards: what a run keeps, and decodes with.

    Raises:
        DataError: One is missing, or another.
    """
    for source in dataset.sources:
        _check_tokenizer(source.folder / "tokenizer.json", source.index)


def _check_tokenizer(path: Path, index: DataIndex) -> None:
    wanted = index.tokenizer_sha256
    fix = "copy it again or run `pretrain prepare` again"
    try:
        found = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", where=str(path), fix=fix) from None
    if found != wanted:
        raise DataError(f"sha256 is {found[:12]}, the index says {wanted[:12]}", where=str(path), fix=fix)


def _open(name: str, folder: Path, repeats: bool) -> DataSource:
    return DataSource(name, folder, load_index(folder), repeats)
