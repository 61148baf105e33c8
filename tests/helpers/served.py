"""Shard folders that are served, and processes that read them.

python -m tests.helpers.served URL CACHE BYTES     reads all of the train split, prints its digest
"""

import hashlib
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretrain.shards.index import DataIndex, ShardIndex, load_index
from pretrain.shards.remote_store import open_store
from pretrain.shards.store import Patience, ShardStore
from tests.helpers.shards import make_shards
from tests.helpers.waiting import LIMIT_S

if TYPE_CHECKING:
    from pretrain.data.stream import TokenStream
    from tests.helpers.servers import FolderServer

ROOT = Path(__file__).resolve().parents[2]
QUICK = Patience(first_s=0.01, longest_s=0.05, total_s=LIMIT_S, room_s=LIMIT_S, report_s=LIMIT_S)
"""Tries again soon. Nobody gives up: a process or a thread of a busy machine may stand still for long."""
PLENTY = 2**30
ORDER = {"seq_len": 16, "seed": 3, "lanes": 2, "block_samples": 4}
NUM_SAMPLES = 400
"""More than two epochs of `make_served`."""


def make_served(folder: Path, train: tuple[int, ...] = (700, 300, 900, 500, 640), **options: Any) -> DataIndex:
    """Writes a shard folder with a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = b'{"version": "1.0"}'
    (folder / "tokenizer.json").write_bytes(tokenizer)
    return make_shards(folder, train, tokenizer_sha256=hashlib.sha256(tokenizer).hexdigest(), **options)


def open_quick(
    url: str, cache: Path, num_bytes: int = PLENTY, patience: Patience = QUICK, **options: Any
) -> ShardStore:
    """Opens a store that does not wait long."""
    return open_store(url, cache, num_bytes, patience=patience, **options)


def room_for(folder: Path, *shards: ShardIndex) -> int:
    """Returns the limit of a cache that has room for shards of a folder, beside index and tokenizer."""
    return size_of(*shards) + sum((folder / name).stat().st_size for name in ("index.json", "tokenizer.json"))


def size_of(*shards: ShardIndex) -> int:
    """Returns what shards take in a cache."""
    return sum(shard.num_bytes + shard.table_bytes for shard in shards)


def train_shards(data: tuple[Path, DataIndex]) -> tuple[ShardIndex, ...]:
    """Returns the train shards of a folder and its index."""
    return data[1].split("train").shards


def tars(server: "FolderServer") -> list[str]:
    """Returns the shards that a server was asked for, in order."""
    return [path.lstrip("/") for path in server.paths() if path.endswith(".tar")]


def cached(cache: Path, pattern: str = "*.tar") -> set[str]:
    """Returns the hashes of the shards that a cache has files of."""
    return {path.name[:64] for path in (cache / "shards").glob(pattern)}


def cached_bytes(cache: Path) -> int:
    """Returns the bytes in the files of a cache, those that come now included; files may go meanwhile."""
    total = 0
    for path in (cache / "shards").iterdir():
        try:
            total += path.stat().st_size if path.suffix not in (".lock", ".soon") else 0
        except FileNotFoundError:
            continue
    return total


def open_stream(data: Path | ShardStore, split: str = "train") -> "TokenStream":
    """The stream of a folder or of a store."""
    from pretrain.data.stream import TokenStream  # brings torch, which the processes below do without

    folder = data if isinstance(data, Path) else data.folder
    return TokenStream(data, load_index(folder), split, **ORDER)


def digest_stream(stream: "TokenStream", first: int = 0, last: int = NUM_SAMPLES) -> str:
    """Returns a hash of samples: tokens, document starts and ids."""
    hasher = hashlib.sha256()
    for position in range(first, last, 4):
        rows = stream.read(range(position, position + 4))
        for array in (rows.tokens_BT, rows.starts, rows.sample_ids_B):
            hasher.update(array.tobytes())
    return hasher.hexdigest()


def digest_shards(folder: Path, store: ShardStore | None = None) -> str:
    """Returns a hash of all shards of the train split, read twice, in and against their order."""
    hasher = hashlib.sha256()
    names = [shard.name for shard in load_index(folder).split("train").shards]
    names += names[::-1]
    for number, name in enumerate(names):
        if store is not None:
            store.upcoming(names[number : number + 3])
            store.path(name)
        hasher.update((folder / name).read_bytes())
        if store is not None:
            store.release(name)
    return hasher.hexdigest()


def start_reader(url: str, cache: Path, num_bytes: int = PLENTY) -> subprocess.Popen[str]:
    """Starts a process that reads all shards."""
    command = [sys.executable, "-m", "tests.helpers.served", url, str(cache), str(num_bytes)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def main() -> None:
    """The process that `start_reader` starts."""
    store = open_quick(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
    print(digest_shards(store.folder, store))
    store.close()


if __name__ == "__main__":
    main()
