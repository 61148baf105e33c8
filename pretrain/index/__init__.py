"""What shards there are: the index of a folder (`folder.py`), the sources of a run (`dataset.py`). Imports no torch."""

from pretrain.index.folder import (
    INDEX_NAME,
    INDEX_VERSION,
    LENGTH_BYTES,
    LENGTH_COLUMNS,
    NPY_HEADER_BYTES,
    TABLE_COLUMNS,
    TOKEN_BYTES,
    DataIndex,
    ShardIndex,
    Sidecar,
    SplitIndex,
    build_split,
    check_shards,
    data_hash,
    load_index,
    write_index,
)

__all__ = [
    "INDEX_NAME",
    "INDEX_VERSION",
    "LENGTH_BYTES",
    "LENGTH_COLUMNS",
    "NPY_HEADER_BYTES",
    "TABLE_COLUMNS",
    "TOKEN_BYTES",
    "DataIndex",
    "ShardIndex",
    "Sidecar",
    "SplitIndex",
    "build_split",
    "check_shards",
    "data_hash",
    "load_index",
    "write_index",
]
