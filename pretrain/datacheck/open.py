"""Opens the data of a config to look at: folders of this machine, or addresses through its cache."""

import contextlib
from collections.abc import Iterator, Sequence

from pretrain.config.data import DataConfig
from pretrain.data.source_streams import open_stores
from pretrain.shards.dataset import Dataset, check_tokenizers, open_dataset
from pretrain.shards.store import ShardStore


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
        for store in stores:
            store.check()
        check_tokenizers(dataset)
        yield dataset, stores
    finally:
        for store in stores:
            store.close()
