"""Opens the data of a config to look at: folders of this machine, or addresses through its cache."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from pretrain.config.data import DataConfig
from pretrain.data.remote.store import ShardStore
from pretrain.data.source_streams import open_stores
from pretrain.data.tokenizer import tokenizer_hash
from pretrain.errors import DataError
from pretrain.index import DataIndex
from pretrain.index.dataset import Dataset, open_dataset


@contextlib.contextmanager
def open_data(config: DataConfig) -> Iterator[tuple[Dataset, Sequence[ShardStore]]]:
    """Gives the sources of a config and where the shards of each are.

    Raises:
        DataError: A folder, an index or a file is missing, or not of the size that the index says; a tokenizer is not
            the one that made the shards; or the sources do not go together.
        DiskError: The cache cannot be used.
        LaunchError: A package that reads such addresses is missing.
    """
    stores = open_stores(config, lambda: False)
    try:
        folders = {path: store.folder for path, store in zip(config.paths, stores, strict=True)}
        dataset = open_dataset(config, folders.__getitem__)
        for store, source in zip(stores, dataset.sources, strict=True):
            store.check()
            _check_tokenizer(store.folder, source.index)
        yield dataset, stores
    finally:
        for store in stores:
            store.close()


def _check_tokenizer(folder: Path, index: DataIndex) -> None:
    path = folder / "tokenizer.json"
    fix = "copy it again or run `pretrain prepare` again"
    try:
        found = tokenizer_hash(path)
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", where=str(path), fix=fix) from None
    if found != index.tokenizer_sha256:
        raise DataError(
            f"sha256 is {found[:12]}, the index says {index.tokenizer_sha256[:12]}", where=str(path), fix=fix
        )
