"""What a WHAT is, and which of its checkpoints is good."""

from pathlib import Path

from pretrain.checkpoint.best import read_best
from pretrain.checkpoint.layout import MANIFEST, list_checkpoints, load_manifest, step_name
from pretrain.errors import CheckpointError
from pretrain.run.folder import RunDir
from pretrain.utils.checksum import check_file


def is_release(what: Path) -> bool:
    """Whether `what` is a Hugging Face folder."""
    return (what / "config.json").is_file() and not (what / MANIFEST).is_file()


def find_checkpoint(what: Path) -> Path:
    """Returns the checkpoint that `what` names: itself, or the newest good one of a run. A model folder is one.

    RUN/best is the one that best.json of the run names (`checkpoint.best`), verified as any.

    Raises:
        CheckpointError: There is none, or none that verifies.
    """
    if (what / MANIFEST).is_file():
        problem = _problem(what)
        if problem:
            raise CheckpointError(f"damaged: {problem}", where=str(what), fix="use another checkpoint")
        return what
    if is_release(what):
        fix = f"make a model folder of it first: pretrain import {what} OUT"
        raise CheckpointError("a Hugging Face folder has no checkpoint of ours", where=str(what), fix=fix)
    if what.name == "best" and not what.exists():
        checkpoints = RunDir(what.parent).checkpoints
        best = read_best(checkpoints)
        if best is not None:
            return find_checkpoint(checkpoints / step_name(best.step))
    found = list_checkpoints(RunDir(what).checkpoints)
    if not found:
        raise CheckpointError("neither a checkpoint nor a run with one", where=str(what), fix="check the path")
    for path in reversed(found):
        if _problem(path) is None:
            return path
    raise CheckpointError(f"none of its {len(found)} checkpoints is intact", where=str(what), fix="restore one")


def _problem(path: Path) -> str | None:
    try:
        files = load_manifest(path).files
    except CheckpointError as error:
        return error.what
    return next((text for record in files if (text := check_file(path / record.name, record))), None)
