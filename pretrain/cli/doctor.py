"""`pretrain doctor` and `pretrain drill`."""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast, get_args

import typer
from typer import Argument, Option

from pretrain.cli.completion import complete_config
from pretrain.cli.options import Config, Json, Overrides, console, print_json
from pretrain.errors import EXIT_RESUME_ME, ConfigError

if TYPE_CHECKING:
    from pretrain.config.run import RunConfig
    from pretrain.doctor.check import Report
    from pretrain.doctor.place import JobTopology
    from pretrain.doctor.small import TrialOptions


def doctor_command(
    config: Annotated[
        str | None, Argument(metavar="CONFIG", help="Config of a run, if any.", autocompletion=complete_config)
    ] = None,
    overrides: Overrides = None,
    ranks: Annotated[int | None, Option(min=1, help="Processes. Default: GPUs, or 2.")] = None,
    selftest: Annotated[
        bool, Option("--selftest", help="Instead: check ZeRO stages, and a run that is killed.")
    ] = False,
    calibrate: Annotated[bool, Option("--calibrate", help="Instead: measure for `plan`.")] = False,
    gpu: Annotated[str | None, Option(help="--calibrate: GPU. Default: by its name.")] = None,
    output: Annotated[
        Path | None,
        Option(help="--calibrate: file. --selftest: folder. Default: the cache; next to the run."),
    ] = None,
    quick: Annotated[bool, Option("--quick", help="Skip torch, ranks and servers.")] = False,
    compare: Annotated[
        Path | None, Option(help="Instead: compare the output of --quick --json of several nodes.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check machines before they train: packages, devices, network, disk, data, rendezvous, wandb.

    As a rank of torchrun or srun, it checks all nodes. The exit code is 0 if nothing fails, else
    that of the first failure: 69, or 64 (config), 65 (data), 74 (disk).

    Example: pretrain doctor configs/run/quickstart.yaml --ranks 2
    """
    from pretrain.config.load import Extensions, load_config
    from pretrain.doctor.place import find_place, slurm_environment
    from pretrain.doctor.small import ask

    if compare is not None:
        raise typer.Exit(_tell(_compared(compare), as_json))
    # A job, whose ranks import them in any case, has its nodes examined by this command.
    overrides = overrides or []
    trains = selftest or calibrate or not {"SLURM_PROCID", "WORLD_SIZE"}.isdisjoint(os.environ)
    extensions: Extensions = "import" if trains else "ask"
    loaded = None if config is None else load_config(config, overrides, extensions=extensions)
    place = find_place(os.environ, ranks, is_quick=quick)
    if place.is_started:
        # srun sets none of the variables that torch reads.
        os.environ.update(slurm_environment(os.environ))
    if selftest or calibrate:
        if config is None or loaded is None:
            raise typer.BadParameter(f"--{'selftest' if selftest else 'calibrate'} needs a CONFIG")
        asked = ask(config, overrides, loaded, ranks, None if calibrate else output, place)
        raise typer.Exit(_selftest(asked, as_json) if selftest else _calibrate(asked, gpu, output, as_json))
    raise typer.Exit(_check(loaded, place, as_json, is_quick=quick))


def _check(loaded: "RunConfig | None", place: "JobTopology", as_json: bool, *, is_quick: bool) -> int:
    from pretrain.doctor.check import exit_code
    from pretrain.doctor.quick import examine, look

    if is_quick:
        return _tell(look(loaded, place, is_quick=True), as_json)
    report, is_told = examine(loaded, place)
    return _tell(report, as_json) if is_told else exit_code(report.checks)


def _compared(path: Path) -> "Report":
    from pretrain.doctor.check import Report, read_reports
    from pretrain.doctor.versions import compare_reports

    try:
        reports = read_reports(path.read_text(encoding="utf-8", errors="replace"))
    except OSError as error:
        raise ConfigError(
            f"cannot be read: {error.strerror}",
            where=str(path),
            fix="check the path of --compare",
        ) from None
    if not reports:
        raise ConfigError(
            "contains no report of a node",
            where=str(path),
            fix="collect the output of `pretrain doctor --quick --json` of each node there",
        )
    hosts = ", ".join(dict.fromkeys(report.host for report in reports))
    return Report(hosts, compare_reports(reports), reports[0].versions)


def _selftest(asked: "TrialOptions", as_json: bool) -> int:
    import socket

    from pretrain.doctor.check import Report, exit_code
    from pretrain.doctor.selftest import run_selftest
    from pretrain.doctor.versions import own_versions

    checks = run_selftest(asked, _teller(asked.place.rank))
    if asked.place.rank:
        return exit_code(checks)
    return _tell(Report(socket.gethostname(), checks, own_versions()), as_json)


def _calibrate(asked: "TrialOptions", gpu: str | None, output: Path | None, as_json: bool) -> int:
    from pretrain.doctor.calibrate import calibrate, describe
    from pretrain.plan.cluster import calibration_folder, save_calibration
    from pretrain.utils.io import remove_dir

    try:
        measured = calibrate(asked, gpu, _teller(asked.place.rank))
    finally:
        if asked.place.rank == 0 and asked.folder.exists():
            remove_dir(asked.folder)
    if measured is None:
        return 0  # rank 0 writes it
    calibration, facts = measured
    path = output or calibration_folder() / f"{calibration.gpu}.json"
    save_calibration(calibration, path)
    if as_json:
        print_json({"path": str(path), "calibration": asdict(calibration), "measured": facts})
        return 0
    for name, value, share in describe(calibration, facts):
        print(f"{name:<24}{value:>18}   {share}".rstrip())
    print(f"written to {path}")
    return 0


def _teller(rank: int) -> Callable[[str], None]:
    """Returns a function that prints progress messages on stderr, on rank 0 only."""
    return lambda text: None if rank else print(text, file=sys.stderr, flush=True)


def _tell(report: "Report", as_json: bool) -> int:
    """Prints a report, as JSON on one line: many nodes can share a file. Returns the exit code."""
    from pretrain.doctor.check import exit_code

    if as_json:
        print(json.dumps(report.facts()))
    else:
        from pretrain.doctor.check import show_checks

        show_checks(report.host, report.checks, console())
    return exit_code(report.checks)


def drill_command(
    config: Config,
    overrides: Overrides = None,
    kills: Annotated[int, Option(min=0, help="Total number of SIGKILLs.")] = 20,
    ranks: Annotated[int, Option(min=1, help="Ranks of a run.")] = 1,
    seed: Annotated[int, Option(help="Seed of targets and times of the kills.")] = 0,
    target: Annotated[str, Option(help="Target: rank, launcher, all (ranks) or any.")] = "rank",
    steps: Annotated[int | None, Option(min=1, help="Steps. Default: as the kills need.")] = None,
    every: Annotated[int, Option(min=1, help="Steps between checkpoints.")] = 5,
    at_most: Annotated[int | None, Option(min=0, help="Kills in this call; exits 75 before the last.")] = None,
    output: Annotated[Path | None, Option(help="Folder. Default: the run's, with -drill.")] = None,
    as_json: Json = False,
) -> None:
    """Kill a short run of a config repeatedly, and compare it with an uninterrupted one.

    Both runs have a folder of their own. Ledger, weights and moments must be bit-identical, and no
    process or file may be left over. The exit code is 0 if so, else 1.

    Example: pretrain drill configs/run/quickstart.yaml --kills 20 --ranks 2
    """
    from pretrain.config.load import load_config
    from pretrain.drill.drill import Drill, plan_steps
    from pretrain.drill.watch import Target
    from pretrain.shards.dataset import check_local
    from pretrain.utils.status_line import transient_bar

    if target not in get_args(Target):
        raise typer.BadParameter(f"--target {target}: choose from {', '.join(get_args(Target))}")
    loaded = load_config(config, overrides or [], extensions="ask")
    # Before the first run is started: both errors would end every start.
    loaded.plan_ranks(ranks)
    check_local(loaded.data)
    folder = output or loaded.folder.with_name(f"{loaded.run.name}-drill")
    last_step = min(steps, loaded.train.last_step) if steps else plan_steps(loaded, kills, every)
    drill = Drill(loaded, folder, ranks, seed, cast(Target, target), last_step, every)
    with transient_bar("{task.completed}/{task.total}") as bar:
        verdict = drill.run(kills, at_most, bar)
    if verdict is None:
        text = f"{drill.num_done} of {kills} kills are done; the same command continues"
        print(json.dumps({"kills": drill.num_done, "of": kills}) if as_json else text)
        raise typer.Exit(EXIT_RESUME_ME)
    if as_json:
        print_json(verdict.facts())
    else:
        print("\n".join(verdict.lines()))
    raise typer.Exit(0 if verdict.passed else 1)
