"""The output folder of a drill, and the state that lets it be done in parts.

drill.json              settings, the pace of the golden run, one entry a kill
golden.yaml killed.yaml the two configs            golden.log killed.log   output of the runs
golden/ killed/         their run folders          tmp/    temporary files of their processes
"""

import os
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from pretrain.drill.watch import Target
from pretrain.errors import ConfigError
from pretrain.run.folder import RunDir
from pretrain.run.owner import find_owner, highest_number, path_of
from pretrain.utils.io import make_dir, write_json
from pretrain.utils.safe_read import check_fields, read_json

GOLDEN, KILLED = "golden", "killed"
SHARED_MEMORY = Path("/dev/shm")
CACHES = ("torchinductor_", "triton", "torch_extensions")
"""Beginnings of names in TMPDIR that compilers keep for the next start."""


@dataclass(frozen=True, slots=True)
class DrillFolder:
    """The paths of a drill; `name` is `golden` or `killed`."""

    path: Path

    @property
    def state(self) -> Path:
        """Settings and results so far."""
        return self.path / "drill.json"

    def config(self, name: str) -> Path:
        """Config of a run."""
        return self.path / f"{name}.yaml"

    def log(self, name: str) -> Path:
        """Output of a run, all attempts."""
        return self.path / f"{name}.log"

    @property
    def temporary(self) -> Path:
        """TMPDIR of all processes, in which leftovers are found."""
        return self.path / "tmp"

    def run(self, name: str) -> RunDir:
        """Folder of a run."""
        return RunDir(self.path / name)


@dataclass(frozen=True, slots=True)
class DrillSettings:
    """Settings that identify a drill."""

    config: str  # resolved, as YAML, without the changes of the drill
    ranks: int  # of a run
    seed: int  # of the kills
    target: Target  # of the kills
    steps: int  # of a run
    every_steps: int  # between checkpoints


@dataclass(slots=True)
class Pace:
    """Durations of the uninterrupted run in seconds; moments of kills are fractions of these."""

    total_s: float  # start to end
    start_s: float  # start to first step
    step_s: float  # a step, with its share of checkpoints
    save_s: float  # the longest save, from the first file of a checkpoint to its commit


@dataclass(slots=True)
class State:
    """Results so far."""

    settings: DrillSettings
    pace: Pace | None = None  # None until the uninterrupted run is complete
    killed_s: float = 0.0  # seconds of all attempts of the killed run
    kills: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # one line each
    is_stuck: bool = False  # the killed run failed by itself, so that no process is left to kill

    def save(self, folder: DrillFolder) -> None:
        """Writes drill.json atomically. Raises: DiskError."""
        write_json(folder.state, asdict(self))


def open_state(folder: DrillFolder, settings: DrillSettings) -> State:
    """Returns the state of a drill, new or half done.

    Raises:
        ConfigError: The folder holds other files, or a drill of other settings, which it names.
    """
    if not folder.state.is_file():
        if folder.path.is_dir() and any(folder.path.iterdir()):
            raise ConfigError("exists and holds no drill", where=str(folder.path), fix="give another --output")
        make_dir(folder.path)
        return State(settings)
    try:
        raw = check_fields(read_json(folder.state), {})
        earlier = DrillSettings(**raw.pop("settings"))
        pace = raw.pop("pace")
        state = State(earlier, Pace(**pace) if pace else None, **raw)
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise ConfigError(
            f"the state of the drill cannot be read: {error}", where=str(folder.state), fix="give another --output"
        ) from None
    for name, value in asdict(settings).items():
        if getattr(earlier, name) != value:
            shown = "" if name == "config" else f" ({getattr(earlier, name)}, not {value})"
            raise ConfigError(
                f"this drill was begun with another {name}{shown}",
                where=str(folder.path),
                fix="give another --output, or the same settings to continue",
            )
    return state


def find_temporary(folder: DrillFolder, run: RunDir) -> list[str]:
    """Returns the temporary files of a run that has ended, and the contents of its TMPDIR."""
    inside = [path for path in run.path.rglob("*") if ".tmp-" in path.name or path.name.startswith(".trash-")]
    outside = folder.temporary.iterdir() if folder.temporary.is_dir() else []
    return [str(path) for path in (*inside, *outside) if not path.name.startswith(CACHES)]


def find_leases(run: RunDir) -> list[str]:
    """Returns the leases of a run that has ended, except the last one if it was released."""
    if not run.lease.is_dir():
        return []
    last = path_of(run.lease, highest_number(run.lease))
    owner = find_owner(last)
    is_released = owner is not None and owner.owner is not None and owner.owner.released
    return sorted(str(path) for path in run.lease.iterdir() if path != last or not is_released)


def list_shared_memory() -> set[str]:
    """Returns this user's names in /dev/shm."""
    names = set()
    with suppress(OSError):
        for entry in os.scandir(SHARED_MEMORY):
            with suppress(OSError):
                if entry.stat(follow_symlinks=False).st_uid == os.getuid():
                    names.add(entry.name)
    return names


def find_shared_memory(before: set[str]) -> list[str]:
    """Returns new paths in /dev/shm, unless a live process uses them."""
    new = {str(SHARED_MEMORY / name) for name in list_shared_memory() - before}
    unused = new - _in_use(new) if new else set()
    # Names that are gone by now belonged to processes that have ended meanwhile.
    return sorted(unused & {str(SHARED_MEMORY / name) for name in list_shared_memory()})


def _in_use(paths: set[str]) -> set[str]:
    """Returns the paths that a live process has open or mapped."""
    used: set[str] = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            maps = Path(f"/proc/{process.pid}/maps").read_text(errors="replace")
            used |= {path for path in paths if path in maps}
        with suppress(psutil.Error, OSError):
            used |= paths & {one.path for one in process.open_files()}
    return used
