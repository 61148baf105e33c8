"""A new run that continues a released one at a step, on any ranks.

    release.json, config  ->  step released?  ->  data: an override, in the release, or as the config says
    ->  their hash is the released one  ->  new folder: config, records up to the step, checkpoint
    ->  `launch local`, as for any run  ->  its rows beside the released ones

Step 0 is the start of a run without pretrained weights: a folder with a config, and nothing else.
"""

import json
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.checkpoint.format import load_manifest, step_name
from pretrain.config.base import OnResume
from pretrain.config.load import dump_config
from pretrain.config.resumption import changed_keys, class_of
from pretrain.config.run import RunConfig
from pretrain.errors import CheckpointError, ConfigError, DataError, DiskError
from pretrain.release.released_course import TOLERANCES, CourseComparison, compare_course, read_course
from pretrain.release.released_run import DATA, ReleasedRun, copy_file, cut_rows, portable, with_data_paths
from pretrain.run.folder import RunDir
from pretrain.shards.dataset import check_local, open_dataset
from pretrain.shards.index import INDEX_NAME
from pretrain.utils.io import check_file, make_dir, new_folder, write_file, write_json
from pretrain.utils.remote import is_remote
from pretrain.utils.safe_read import check_fields, read_json

ORIGIN = "origin.json"
"""In the new folder: the release and the step that it continues."""
_RECORDS = ("tokenizer.json", "normalize.json", "reference.safetensors")
_ROWS = ("audit.jsonl", "metrics.jsonl")
NOISE = ("dropout", "attention_dropout", "drop_path")
LAYOUT = ("engine.", "parallel.", "batch.micro.")
"""Sections and keys whose change is another layout, which the samples do not depend on."""


@dataclass(frozen=True, slots=True)
class ContinuedRun:
    """A run to be made of a released one."""

    released: ReleasedRun
    step: int
    folder: RunDir
    stored: RunConfig  # of the release, at its new place
    config: RunConfig  # the same with the overrides
    ranks: int

    @property
    def origin(self) -> dict[str, Any]:
        """Identity of what is continued."""
        return {"run": self.released.run, "written": self.released.written, "step": self.step}

    def changed_course(self) -> list[str]:
        """Returns the overridden keys by which later rows are others than the released ones."""
        changed = changed_keys(self.stored, self.config)
        keys = [key for key in changed if class_of(key) != OnResume.FREE]
        return [key for key in keys if not f"{key}.".startswith(LAYOUT)]


def plan_continuation(
    released: ReleasedRun,
    step: int | None,
    folder: Path,
    overrides: Sequence[str] = (),
    ranks: int | None = None,
) -> ContinuedRun:
    """Plans a run that continues a released one.

    Args:
        released: The release.
        step: Step of a checkpoint, or 0. None: the newest.
        folder: The new run folder.
        overrides: Changes of the config, as for a resumption; `data.path` is the place of the data.
        ranks: Processes. None: as many as did the next step of the release.

    Raises:
        ConfigError: The config cannot be read, names modules that are not imported, or does not
            divide over the ranks.
        CheckpointError: The step was not released.
        DataError: The data are missing, or others than those of the run.
    """
    released.check(["config.yaml", "run.json", "audit.jsonl"])
    place = [f"run.dir={json.dumps(str(folder.parent))}", f"run.name={json.dumps(folder.name)}"]
    stored = released.load_config(place)
    if len(released.data) != len(stored.data.paths):
        text = "release.json and config.yaml have different sources of data"
        raise CheckpointError(text, where=str(released.folder.path), fix="fetch it again")
    chosen = released.steps[-1] if step is None else step
    starts = [*([0] if stored.init.from_ is None else []), *released.steps]
    if chosen not in starts:
        raise CheckpointError(
            f"step {chosen} was not released; there is {', '.join(map(str, starts))}",
            where=str(released.folder.path),
            fix="give one of these as --from-step",
        )
    named = stored.run
    is_moved = any(one.startswith(("data.path=", "data.mixture")) for one in overrides)
    config = released.load_config([*place, *overrides])
    paths = config.data.paths if is_moved else _find_data(released, stored)
    stored = with_data_paths(portable(stored), paths).model_copy(update={"run": named})
    config = with_data_paths(config, paths)
    if ranks is None:
        ranks = _ranks_of(released, chosen)
    config.plan_ranks(ranks)
    _check_data(released, config)
    return ContinuedRun(released, chosen, RunDir(folder), stored, config, ranks)


def _find_data(released: ReleasedRun, config: RunConfig) -> list[str]:
    """Returns the place of each source: in the release, or as the config says."""
    paths = []
    for source, path in zip(released.data, config.data.paths, strict=True):
        inside = released.folder.path / DATA / str(source["name"])
        paths.append(str(inside) if (inside / INDEX_NAME).is_file() else path)
    return paths


def _check_data(released: ReleasedRun, config: RunConfig) -> None:
    """Compares the data here with the released ones, unless at an address. Raises: DataError."""
    paths = config.data.paths
    if any(map(is_remote, paths)):
        return  # compared when the run is resumed
    for source, path in zip(released.data, paths, strict=True):
        if not Path(path).is_dir():
            recipe = released.folder.path / DATA / str(source["name"])
            raise DataError(
                f"the data of the run are not there (sha256 {released.data_sha256[:12]})",
                where=path,
                fix=f"prepare them as {recipe} says, or give their place: data.path=FOLDER",
            )
    check_local(config.data)
    dataset = open_dataset(config.data)
    index = dataset.index
    pairs = [
        ("the tokenizer is another", index.tokenizer_sha256, released.tokenizer_sha256),
        ("the token shards are others", dataset.sha256, released.data_sha256),
    ]
    for problem, actual, expected in pairs:
        if actual != expected:
            raise DataError(
                f"{problem} than the run's: sha256 {actual[:12]}, released {expected[:12]}",
                where=", ".join(paths),
                fix="give the data of the run: data.path=FOLDER",
            )


def _ranks_of(released: ReleasedRun, step: int) -> int:
    """Returns the ranks that did the next step, or the last one."""
    course = read_course(released.folder)
    row = course.rows[min(step, len(course.rows) - 1)]
    return int(course.attempts[row.attempt - 1].get("world_size") or 1)


def write_continuation(plan: ContinuedRun) -> bool:
    """Writes the new run folder; returns False where there is one, of the same release and step.

    Raises:
        ConfigError: The folder holds something else.
        CheckpointError: A released file is damaged or missing.
        DiskError: No room, or the disk refused; nothing is left.
    """
    path = plan.folder.path
    if (path / ORIGIN).is_file():
        _check_origin(plan)
        return False
    released = plan.released
    checkpoint = f"checkpoints/{step_name(plan.step)}"
    names = [name for name in _RECORDS if name in released.files]
    if plan.step:
        names += [name for name in _ROWS if name in released.files]
        names += released.names_below(checkpoint)
    size = sum(released.files[name]["num_bytes"] for name in names)
    with new_folder(path) as folder:
        free = shutil.disk_usage(folder).free
        if size > free:
            text = f"{size:,} bytes are to be copied, and {free:,} are free"
            raise DiskError(text, where=str(path), fix="free space, or give another --output")
        for name in names:
            make_dir((folder / name).parent)
            _, digest = copy_file(released.folder.path / name, folder / name)
            if digest != released.files[name]["sha256"]:
                text = f"{name} is not the released one (SHA-256 {digest[:12]})"
                raise CheckpointError(text, where=str(released.folder.path), fix="fetch it again")
        if plan.step:
            _cut(plan, folder, checkpoint)
        write_file(folder / "config.yaml", dump_config(plan.stored).encode())
        write_json(folder / ORIGIN, plan.origin)
    return True


def _cut(plan: ContinuedRun, folder: Path, checkpoint: str) -> None:
    """Cuts the records at the step, and checks the checkpoint by its manifest. Raises: CheckpointError."""
    for file in load_manifest(folder / checkpoint).files:
        if problem := check_file(folder / checkpoint / file.name, file):
            where = str(plan.released.folder.path / checkpoint)
            raise CheckpointError(problem, where=where, fix="fetch it again")
    for name in _ROWS:
        if (folder / name).is_file():
            cut_rows(folder / name, plan.step)
    course = read_course(plan.released.folder, plan.step)
    attempts = course.attempts[: course.rows[-1].attempt]
    attempts[-1] = attempts[-1] | {"committed_step": plan.step}
    # An id of its own: trackers and buckets tell runs apart by it.
    identity = {"id": secrets.token_hex(4), "name": plan.folder.path.name}
    record = plan.released.folder.read_record() | identity | {"attempts": attempts}
    write_json(folder / "run.json", record)


def _check_origin(plan: ContinuedRun) -> None:
    path = plan.folder.path / ORIGIN
    try:
        origin = check_fields(read_json(path), {})
    except (OSError, ValueError) as error:
        text = f"cannot be read: {error}"
        raise ConfigError(text, where=str(path), fix="give another --output") from None
    if origin != plan.origin:
        text = f"continues step {origin.get('step')} of run {origin.get('run')}"
        raise ConfigError(text, where=str(plan.folder.path), fix="give another --output")


def compare_continuation(plan: ContinuedRun) -> CourseComparison | None:
    """Compares the rows of a continuation with the released ones; None: they have none in common.

    Raises: ConfigError, DataError: Records are damaged.
    """
    released, here = read_course(plan.released.folder), read_course(plan.folder)
    stored = plan.stored
    tolerance = None if _has_noise(stored.model_dump()) else TOLERANCES[stored.engine.precision]
    return compare_course(released, here, plan.step, tolerance)


def _has_noise(values: Any) -> bool:
    """Returns whether a config has dropout anywhere: its masks are drawn by rank and micro-batch."""
    if isinstance(values, dict):
        return any(values.get(key) for key in NOISE) or any(map(_has_noise, values.values()))
    return isinstance(values, list) and any(map(_has_noise, values))
