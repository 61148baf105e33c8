"""What the ranks of the handshake's test do: meet, with another package on one of them."""

import socket
import sys
import tempfile
from pathlib import Path

import torch.distributed as td

from pretrain.dist import World
from pretrain.errors import LaunchError
from pretrain.train.handshake import agree_on_versions


def agree(world: World, packages: dict[str, str]) -> list[str]:
    """Returns what the last rank's peers and itself say, first as they are, then with `packages` on the last rank."""
    td.init_process_group("gloo", rank=world.rank, world_size=world.size)
    agree_on_versions(world)
    if world.rank == world.size - 1:
        socket.gethostname = lambda: "n2"
        for name, version in packages.items():
            folder = Path(tempfile.mkdtemp()) / f"{name}-{version}.dist-info"
            folder.mkdir()
            (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
            sys.path.insert(0, str(folder.parent))
    try:
        agree_on_versions(world)
    except LaunchError as error:
        return [str(error), str(error.exit_code)]
    return []
