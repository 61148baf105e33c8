"""The output folder of a drill, and the state that lets it be done in parts.

drill.json              settings, what the golden run took, one entry a kill
golden.yaml killed.yaml the two configs            golden.log killed.log   what the runs printed
golden/ killed/         their run folders      tmp/    where their processes put temporary files
"""

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pretrain.drill.watch import Target
from pretrain.errors import ConfigError
from pretrain.run.folder import RunDir
from pretrain.run.owner import find_owner, highest_number, path_of
from pretrain.utils.io import make_dir, write_json

GOLDEN, KILLED = "golden", "killed"


@dataclass(frozen=True, slots=True)
class DrillFolder:
    """The paths of a drill."""

    path: Path

    @property
    def state(self) -> Path:
        """Settings and results so far."""
        return self.path / "drill.json"

    def config(self, name: str) -> Path:
        """The config of `golden` or `killed`."""
        return self.path / f"{name}.yaml"

    def log(self, name: str) -> Path:
        """Output of that run, all attempts."""
        return self.path / f"{name}.log"

    @property
    def temporary(self) -> Path:
        """The TMPDIR of all processes, so that what they leave there is seen."""
        return self.path / "tmp"

    def run(self, name: str) -> RunDir:
        """Its run folder."""
        return RunDir(self.path / name)


@dataclass(frozen=True, slots=True)
class DrillSettings:
    """Settings that identify a drill.

    Attributes:
        config: Resolved config as YAML, without the changes of the drill.
        ranks: Ranks of a run.
        seed: Seed of the kills.
        target: Target of the kills.
        steps: Steps of the run.
        every_steps: Checkpoint interval in steps.
    """

    config: str
    ranks: int
    seed: int
    target: Target
    steps: int
    every_steps: int


@dataclass(slots=True)
class Pace:
    """Durations of the uninterrupted run in seconds; moments of kills are fractions of these.

    Attributes:
        total_s: Start to end.
        start_s: Start to first step.
        step_s: A step, with its share of checkpoints.
        save_s: The longest save, from the first file of a checkpoint to its commit.
    """

    total_s: float
    start_s: float
    step_s: float
    save_s: float


@dataclass(slots=True)
class State:
    """Results so far.

    Attributes:
        settings: Settings of the drill.
        pace: None until the uninterrupted run is complete.
        killed_s: Seconds of all attempts of the killed run.
        kills: One entry per kill.
        problems: Problems found, one line each.
        is_stuck: Whether the killed run failed by itself, so that nothing is left to kill.
    """

    settings: DrillSettings
    pace: Pace | None = None
    killed_s: float = 0.0
    kills: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    is_stuck: bool = False

    def save(self, folder: DrillFolder) -> None:
        """Writes drill.json atomically. Raises: DiskError."""
        write_json(folder.state, asdict(self))


def open_state(folder: DrillFolder, settings: DrillSettings) -> State:
    """Returns the state of a drill, new or half done.

    Raises:
        ConfigError: The folder holds something else, or the drill of other settings; the first that differs is named.
    """
    if not folder.state.is_file():
        if folder.path.is_dir() and any(folder.path.iterdir()):
            raise ConfigError("exists and holds no drill", where=str(folder.path), fix="give another --output")
        make_dir(folder.path)
        return State(settings)
    try:
        raw = json.loads(folder.state.read_text(encoding="utf-8"))
        known = DrillSettings(**raw.pop("settings"))
        pace = raw.pop("pace")
        state = State(known, Pace(**pace) if pace else None, **raw)
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise ConfigError(
            f"the state of the drill cannot be read: {error}", where=str(folder.state), fix="give another --output"
        ) from None
    for name, value in asdict(settings).items():
        if getattr(known, name) != value:
            shown = "" if name == "config" else f" ({getattr(known, name)}, not {value})"
            raise ConfigError(
                f"this drill was begun with another {name}{shown}",
                where=str(folder.path),
                fix="give another --output, or the same settings to continue",
            )
    return state


# Leftovers of kills: temporary files in the run folder and TMPDIR, shared memory, leases.


SHARED_MEMORY = Path("/dev/shm")

CACHES = ("torchinductor_", "triton", "torch_extensions")

"""Beginnings of names in TMPDIR that compilers keep for the next start."""

_TEMPORARY = (".tmp-", ".trash-")


def find_temporary(folder: DrillFolder, run: RunDir) -> list[str]:
    """Returns the temporary files and folders of a run that has ended, and what is in its TMPDIR."""
    inside = [path for path in run.path.rglob("*") if path.name.startswith(_TEMPORARY) or ".tmp-" in path.name]
    outside = folder.temporary.iterdir() if folder.temporary.is_dir() else []
    return [str(path) for path in (*inside, *(path for path in outside if not path.name.startswith(CACHES)))]


def find_leases(run: RunDir) -> list[str]:
    """Returns what is in the lease folder of a run that has ended, besides the lease that its last owner gave back."""
    if not run.lease.is_dir():
        return []
    last = path_of(run.lease, highest_number(run.lease))
    found = find_owner(last)
    is_given_back = found is not None and found.owner is not None and found.owner.released
    return sorted(str(path) for path in run.lease.iterdir() if path != last or not is_given_back)


def list_shared_memory() -> set[str]:
    """Returns the names in /dev/shm that are this user's."""
    found = set()
    with suppress(OSError):
        for entry in os.scandir(SHARED_MEMORY):
            with suppress(OSError):
                if entry.stat(follow_symlinks=False).st_uid == os.getuid():
                    found.add(entry.name)
    return found


def find_shared_memory(before: set[str]) -> list[str]:
    """Returns what is in /dev/shm and was not `before`, unless a live process uses it.

    Names that are gone by the end of the look belong to processes that ended meanwhile.
    """
    new = {str(SHARED_MEMORY / name) for name in list_shared_memory() - before}
    unused = new - _in_use(new) if new else set()
    return sorted(unused & {str(SHARED_MEMORY / name) for name in list_shared_memory()})


def _in_use(names: set[str]) -> set[str]:
    """Returns those that a live process has open or mapped."""
    used: set[str] = set()
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            with suppress(OSError):
                maps = (process / "maps").read_text(errors="replace")
                used |= {name for name in names if name in maps}
            with suppress(OSError):
                for link in (process / "fd").iterdir():
                    with suppress(OSError):  # closed just now: our own, among others
                        used |= names & {str(link.readlink())}
    return used
