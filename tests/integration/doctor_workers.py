"""What the ranks of the doctor's tests do: look around together, and meet with another package on one of them."""

import socket
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as td

from pretrain.config.engine import PLAIN_ENGINE
from pretrain.dist import World
from pretrain.doctor import rank_checks
from pretrain.doctor.check import Check
from pretrain.doctor.rank_checks import meet
from pretrain.errors import LaunchError
from pretrain.training.claim import agree_on_versions
from tests.helpers.clock import FakeClock


def look(world: World, folders: list[str], waits: bool = True) -> list[dict[str, Any]]:
    """Returns what the ranks find together, each with the run folder that it has been told.

    Args:
        world: Ranks.
        folders: Of each rank.
        waits: Whether a rank waits for a file that it does not see; else the time for it passes at once.
    """
    check_seen = rank_checks._check_seen

    def check_at_once(*arguments: Any) -> Check:
        with mock.patch.object(rank_checks, "time", FakeClock()):
            return check_seen(*arguments)

    if not waits:
        rank_checks._check_seen = check_at_once
    engine = PLAIN_ENGINE.model_copy(update={"device": "cpu"})
    checks, _ = meet(world, engine, Path(folders[world.rank]))
    return [asdict(check) for check in checks]


def agree(world: World, packages: dict[str, str]) -> list[str]:
    """Returns the refusal, with `packages` on the last rank; before that all are as they are, and must agree."""
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


def selftest(world: World, config: str) -> list[dict[str, Any]]:
    """Returns the verdicts of a selftest over the ranks of a job, each of which counts as a node."""
    from pretrain.config.load import load_config
    from pretrain.doctor.place import JobTopology
    from pretrain.doctor.selftest import run_selftest
    from pretrain.doctor.small import ask

    place = JobTopology(world.rank, world.size, 1, is_one_host=False, is_started=True)
    asked = ask(config, [], load_config(config), None, None, place)
    return [asdict(check) for check in run_selftest(asked, lambda text: None)]
