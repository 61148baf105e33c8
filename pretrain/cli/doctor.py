"""`pretrain doctor`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pretrain.cli.options import Json, Overrides

if TYPE_CHECKING:
    from pretrain.doctor.check import Report


def doctor_command(
    config: Annotated[
        str | None, typer.Argument(metavar="[CONFIG]", help="A YAML file, or a built-in one. Default: no run in mind.")
    ] = None,
    overrides: Overrides = None,
    ranks: Annotated[int | None, typer.Option(min=1, help="Processes to start here. Default: GPUs, or 2.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Leave out torch, ranks and servers; under a second.")] = False,
    compare: Annotated[
        Path | None, typer.Option(help="Instead: compare what --quick --json has printed on several nodes.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check machines before they train: packages, devices, network, file system, data, rendezvous, wandb.

    Started as a rank of torchrun or srun it looks at all nodes. Ends with 0 where nothing fails, else with the exit
    code of the first failure: 69, or 64, 65, 74 where config, data or disk are to blame.

    Example: pretrain doctor configs/run/quickstart.yaml --ranks 2
    """
    import os

    from pretrain.config.load import load_config
    from pretrain.doctor.place import find_place

    if compare is not None:
        report = _compared(compare)
        raise typer.Exit(_tell(report, as_json))
    loaded = None if config is None else load_config(config, overrides or [])
    place = find_place(os.environ, ranks, is_quick=quick)
    if quick:
        from pretrain.doctor.quick import look

        raise typer.Exit(_tell(look(loaded, place, is_quick=True), as_json))
    from pretrain.doctor.check import exit_code
    from pretrain.doctor.examine import examine

    report, is_told = examine(loaded, place)
    raise typer.Exit(_tell(report, as_json) if is_told else exit_code(report.checks))


def _compared(path: Path) -> "Report":
    from pretrain.doctor.check import Report, read_reports
    from pretrain.doctor.examine import compare_reports
    from pretrain.errors import ConfigError

    try:
        reports = read_reports(path.read_text(encoding="utf-8", errors="replace"))
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", where=str(path), fix="check the path") from None
    if not reports:
        fix = "write there what `pretrain doctor --quick --json` prints on each node"
        raise ConfigError("holds no report of a node", where=str(path), fix=fix)
    hosts = ", ".join(dict.fromkeys(report.host for report in reports))
    return Report(hosts, compare_reports(reports), reports[0].versions)


def _tell(report: "Report", as_json: bool) -> int:
    """Prints a report, as JSON on one line, so that those of many nodes can share a file; returns the exit code."""
    import json

    from pretrain.doctor.check import exit_code

    if as_json:
        print(json.dumps(report.facts()))
    else:
        from rich.console import Console

        from pretrain.doctor.show import show_checks

        show_checks(report.host, report.checks, Console(highlight=False))
    return exit_code(report.checks)
