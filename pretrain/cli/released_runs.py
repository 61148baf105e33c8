"""`pretrain release`, `continue` and `verify-release`: a run for others, and one of others."""

import secrets
import shlex
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from pretrain.cli.options import Overrides, RunFolder, count_from
from pretrain.cli.wish_commands.command_steps import CommandSteps
from pretrain.errors import EXIT_RESUME_ME, CheckpointError, ConfigError

if TYPE_CHECKING:
    from pretrain.release.continuation import ContinuedRun
    from pretrain.release.released_run import ReleasedRun

Released = Annotated[Path, Argument(metavar="RELEASE", help="A folder of `pretrain release`.")]
Ranks = Annotated[int | None, Option(min=1, help="Processes. Default: those of the release.")]

_QUIET = (
    *("eval.every_steps=0", "tracking.samples.prompts=[]", "tracking.attention.text=null"),
    "checkpoint.best=null",
)
"""Overrides of a few steps that are trained for their ledger alone."""


def release_command(
    run: RunFolder,
    out: Annotated[Path, Argument(metavar="OUT", help="Folder to write; must not exist, or be empty.")],
    every: Annotated[
        int | None,
        Option(parser=count_from(1), help="Checkpoints of its multiples, and the newest. Default: all."),
    ] = None,
    shards: Annotated[bool, Option("--shards", help="Take the shards of the data too.")] = False,
    prediction: Annotated[Path | None, Option(help="prediction.json of `pretrain scale fit`.")] = None,
) -> None:
    """Write all that others need to continue and to check a run, with hashes.

    Config, ledger, metrics, versions, data recipe, checkpoints and a card, in a new folder.

    Example: pretrain release runs/quickstart released/quickstart
    """
    from pretrain.release.write_released import plan_release, write_released
    from pretrain.utils.io import check_new_folder
    from pretrain.utils.status_line import transient_bar
    from pretrain.utils.units import listed, size

    check_new_folder(out)
    plan = plan_release(run, every=every, with_shards=shards, prediction=prediction)
    with transient_bar() as bar:
        task = bar.add_task("copying", total=plan.num_bytes)
        released = write_released(plan, out, lambda count: bar.advance(task, count))
    num_bytes = sum(file["num_bytes"] for file in released.files.values())
    steps = listed(list(map(str, released.steps)), 8)
    print(f"{out}: {len(released.files)} files, {size(num_bytes)}; checkpoints of steps {steps}")
    for source in plan.sources:
        if not source.has_shards and source.options is None:
            print(f"    {source.path}: its hash alone, as no folder of `pretrain prepare` is there")
    print(f"next: pretrain verify-release {shlex.quote(str(out))}")


def continue_command(
    release: Released,
    overrides: Overrides = None,
    from_step: Annotated[int | None, Option(min=0, help="A released one, or 0. Default: the newest.")] = None,
    ranks: Ranks = None,
    output: Annotated[Path | None, Option(help="New run folder. Default: runs/NAME-from-STEP.")] = None,
) -> None:
    """Continue a released run in a folder of its own, and compare its rows with the released ones.

    Overrides are as for a resumption: data.path=FOLDER is the place of the data. The same command
    continues what was interrupted. The exit code is 1 where a row is not the released one.

    Example: pretrain continue released/quickstart --from-step 600 --ranks 2
    """
    from pretrain.release.continuation import plan_continuation
    from pretrain.release.released_run import open_released

    released = open_released(release)
    step = released.steps[-1] if from_step is None else from_step
    folder = output or Path("runs") / f"{released.name}-from-{step}"
    plan = plan_continuation(released, step, folder, overrides or [], ranks)
    raise typer.Exit(0 if _train(CommandSteps(), plan, overrides or []) else 1)


def _train(steps: CommandSteps, plan: "ContinuedRun", overrides: list[str]) -> bool:
    """Trains a continuation and prints its comparison; returns whether no row differs. Raises: Exit."""
    from pretrain.release.continuation import compare_continuation, write_continuation

    path = plan.folder.path
    if write_continuation(plan):
        released = plan.released
        print(f"{path}: step {plan.step} of run {released.run}, released {released.written}", flush=True)
    command = ["launch", "local", str(path / "config.yaml"), "--ranks", str(plan.ranks), *overrides]
    code = steps.run(command)
    if code == EXIT_RESUME_ME:
        raise typer.Exit(code)
    steps.refuse(code, command)
    if changed := plan.changed_course():
        print(f"\nnot compared with the released rows: {', '.join(changed)} changed")
        return True
    comparison = compare_continuation(plan)
    if comparison is None:
        print(f"\nnot compared: no released row follows step {plan.step}")
        return True
    print("\n" + "\n".join(comparison.lines()), flush=True)
    return not comparison.difference


def verify_release_command(
    release: Annotated[Path, Argument(metavar="RELEASE", help="A folder of `pretrain release`; its ledger.json.")],
    overrides: Overrides = None,
    steps: Annotated[int, Option(min=0, help="Random steps to train again.")] = 3,
    within: Annotated[int, Option(min=1, help="Most steps from a checkpoint to one of them.")] = 20,
    seed: Annotated[int | None, Option(help="Seed of the choice. Default: a random one.")] = None,
    ranks: Ranks = None,
    run: Annotated[
        Path | None, Option(metavar="RUN", help="Instead: compare the ledger of a run that began anew.")
    ] = None,
) -> None:
    """Check the hashes of a release, and train random steps again from the checkpoints before them.

    On the same versions, processor and layout their rows must be equal in every bit; else samples
    must be equal and losses within a stated tolerance. The exit code is 0 if so, else 1.

    Example: pretrain verify-release released/quickstart --steps 2
    """
    from pretrain.release.released_run import open_released

    if run is not None:
        raise typer.Exit(_compare(release, run))
    released = open_released(release)
    from pretrain.utils.units import plural, size

    problems = list(released.damage(released.files))
    if problems:
        num_bad = f"{plural(len(problems), 'file')} of {len(released.files)}"
        text = f"{num_bad}: {'; '.join(problems[:4])}"
        raise CheckpointError(text, where=str(release), fix="fetch them again")
    num_bytes = sum(file["num_bytes"] for file in released.files.values())
    print(f"{release}: {len(released.files)} files, {size(num_bytes)}: SHA-256 as released")
    seed = secrets.randbelow(2**32) if seed is None else seed
    raise typer.Exit(0 if _replay(released, overrides or [], seed, steps, within, ranks) else 1)


def _replay(
    released: "ReleasedRun",
    overrides: list[str],
    seed: int,
    num_steps: int,
    within: int,
    ranks: int | None,
) -> bool:
    """Trains random steps again; returns whether all are the released ones."""
    from pretrain.release.continuation import plan_continuation
    from pretrain.release.verification import plan_replays
    from pretrain.utils.units import plural

    if not num_steps:
        return True
    replays = plan_replays(released, seed, num_steps, within)
    drawn = [step for replay in replays for step in replay.drawn]
    print(f"drawn by --seed {seed}: steps {', '.join(map(str, drawn))}", flush=True)
    runner = CommandSteps()
    num_bad = 0
    with TemporaryDirectory(prefix="pretrain-verify-") as folder:
        for replay in replays:
            items = [*_QUIET, f"train.stop_after={replay.last}", *overrides]
            place = Path(folder) / f"from-{replay.start}"
            plan = plan_continuation(released, replay.start, place, items, ranks)
            if changed := plan.changed_course():
                text = "another course than the released one cannot be verified"
                raise ConfigError(text, where=", ".join(changed), fix="leave it out")
            num_bad += not _train(runner, plan, items)
    verdict = "verified"
    if num_bad:
        verdict = f"NOT VERIFIED: {num_bad} of {plural(len(replays), 'replay')}"
    print(f"{verdict}: {plural(len(drawn), 'drawn step')} and those before")
    return not num_bad


def _compare(release: Path, run: Path) -> int:
    """Compares the ledger of a run with a ledger.json; returns the exit code."""
    from pretrain.checkpoint.format import list_checkpoints, load_manifest
    from pretrain.release.released_course import LEDGER, compare_hashes, load_ledger_hashes, read_course
    from pretrain.run.folder import RunDir

    hashes = load_ledger_hashes(release / LEDGER if release.is_dir() else release)
    folder = RunDir(run)
    course = read_course(folder)
    checkpoints = list_checkpoints(folder.checkpoints)
    if not checkpoints:
        text = "there is no checkpoint, which names the data"
        raise CheckpointError(text, where=str(run), fix="train the run first")
    data = str(load_manifest(checkpoints[-1]).state.get("data_hash"))
    difference, reasons = compare_hashes(hashes, course, data)
    num_steps = min(len(course.rows), hashes.num_steps)
    for reason in reasons:
        print(f"{run}: NOT COMPARED with {release}: {reason}")
    if not reasons:
        equal = f"steps 1 to {num_steps} are equal to the released ones in every bit"
        print(f"{run}: {difference or equal}")
    return 1 if difference else 0
