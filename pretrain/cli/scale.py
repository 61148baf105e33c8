"""Commands of `pretrain scale`: plan, run, fit, score, coordinates."""

import math
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from pretrain.cli.launch import chosen_site, submit_runs
from pretrain.cli.nodes import train_local
from pretrain.cli.options import (
    CommandGroup,
    Config,
    Json,
    Overrides,
    RunFolder,
    console,
    print_json,
)
from pretrain.cli.plan import find_stored
from pretrain.errors import EXIT_DIVERGED, EXIT_OK, ConfigError, LockedError

if TYPE_CHECKING:
    from pretrain.scale.ladder import Ladder, LadderRequest
    from pretrain.scale.prediction import LadderFit, PredictedRun
    from pretrain.scale.scaling_rule import LadderRule

LadderFolder = Annotated[Path, Argument(metavar="LADDER", help="A folder of `scale plan`.", show_default=False)]

scale_app = CommandGroup(
    "Predict the loss of a large run by a ladder of small ones; check the rules of size.\n\n"
    "Example: pretrain scale plan quickstart --budget 3e14 --widths 32,64,96 --rule depth_by_width=0"
)


@scale_app.command("plan")
def scale_plan_command(
    config: Config,
    budget: Annotated[float, Option(min=1.0, help="FLOPs of the large run: 1e16.")],
    overrides: Overrides = None,
    output: Annotated[Path, Option(help="The folder to write.")] = Path("runs/ladder"),
    smallest: Annotated[float | None, Option(min=1.0, help="FLOPs. Default: a tenth of --largest.")] = None,
    largest: Annotated[float | None, Option(min=1.0, help="FLOPs. Default: --budget / 30.")] = None,
    rungs: Annotated[int | None, Option(min=1, max=100, help="Sizes, and budgets. Default: 4.")] = None,
    widths: Annotated[str | None, Option(metavar="A,B,..", help="Sizes instead of those three.")] = None,
    seeds: Annotated[int, Option(min=1, help="Runs of each size on the line.")] = 1,
    rule: Annotated[list[str] | None, Option(metavar="KEY=VALUE", help="Part of the rule (docs).")] = None,
    as_json: Json = False,
) -> None:
    """Plan a ladder: small runs and the large one under one rule, from a reference run.

    Example: pretrain scale plan quickstart --budget 3e14 --widths 32,64,96 --rule depth_by_width=0
    """
    from pretrain.config.load import load_config
    from pretrain.scale.ladder import (
        MAX_FLOPS,
        RATIO,
        RUNGS,
        SPREAD,
        LadderPlanner,
        LadderRequest,
        plan_ladder,
        write_ladder,
    )
    from pretrain.scale.law import MIN_RUNS

    loaded = load_config(config, overrides or [], extensions="require")
    stored = find_stored(loaded)
    if stored is None:
        # Before an error that a wrong vocabulary may be the cause of.
        line = "the data are not here: their supply is not checked"
        if not loaded.model.vocab_size:
            line += ", and a vocabulary is assumed: prepare them, or give model.vocab_size"
        typer.echo(line, err=True)
    vocab_size = stored.vocab_size if stored else None
    planner = LadderPlanner(loaded, _parse_rule(rule or []), output, vocab_size)
    if widths is not None and (smallest or largest or rungs):
        raise ConfigError(
            "has its budgets by the rule",
            where="--widths",
            fix="leave out --smallest, --largest and --rungs, or --widths",
        )
    highest = largest or budget / RATIO
    lowest = smallest or highest / SPREAD
    request = LadderRequest(budget, lowest, highest, rungs or RUNGS, _parse_widths(widths), seeds)
    _check_budgets(request, MAX_FLOPS)
    ladder, configs = plan_ladder(planner, request, stored)
    write_ladder(ladder, loaded, configs, output)
    if as_json:
        print_json({"folder": str(output), **ladder.model_dump(mode="json")})
        return
    _show_ladder(ladder)
    if len(ladder.runs) == MIN_RUNS:
        spare = f"a law takes {MIN_RUNS} runs: if one diverges, there is none"
        typer.echo(f"{spare}; add a size, or --seeds 2", err=True)
    place = shlex.quote(str(output))
    typer.echo(f"next: pretrain scale run {place}")
    typer.echo(f"      pretrain scale fit {place}")


def _check_budgets(request: "LadderRequest", most: float) -> None:
    for option, flops in (("--budget", request.budget), ("--largest", request.largest)):
        if not flops <= most:
            raise ConfigError(
                f"{flops:.3g} FLOPs are beyond any run",
                where=option,
                fix=f"use at most {most:g}",
            )
    if request.smallest >= request.largest:
        raise ConfigError(
            f"{request.smallest:.3g} FLOPs are not below the {request.largest:.3g} of --largest",
            where="--smallest",
            fix="lower it, or leave it out",
        )


@scale_app.command("run")
def scale_run_command(
    ladder: LadderFolder,
    ranks: Annotated[int, Option(min=1, help="Processes of a run; with --slurm, of a node.")] = 1,
    slurm: Annotated[bool, Option("--slurm", help="Submit the runs as a job array.")] = False,
    nodes: Annotated[int, Option(min=1, help="Nodes of each job.")] = 1,
    time: Annotated[str, Option(help="Time limit of a job: 2-00:00:00, 3d, 12h.")] = "1d",
    cluster: Annotated[str | None, Option(help="A YAML file, or a name (slurm/README.md).")] = None,
    partition: Annotated[str | None, Option(help="Override of the cluster's setting.")] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="With --slurm: print the job instead.")] = False,
) -> None:
    """Train the runs of a ladder, but the large one, here or by Slurm.

    The same command continues after a stop; finished and queued ones are skipped.

    Example: pretrain scale run runs/ladder --ranks 2
    """
    from pretrain.config.load import load_config
    from pretrain.scale.ladder import config_path, load_ladder, place_items, run_path
    from pretrain.scale.prediction import read_point
    from pretrain.utils.process import discard_refused_stdout

    names = [run.name for run in load_ladder(ladder).runs]
    sources = [(config_path(ladder, name), place_items(ladder, name)) for name in names]
    points = {name: read_point(run_path(ladder, name)) for name in names}
    diverged = {
        name: f"{name} {reason}: left out"
        for name, reason in points.items()
        if isinstance(reason, str) and reason.startswith("diverged")
    }
    if slurm:
        from pretrain_launch.preflight import LaunchRequest

        request = LaunchRequest(nodes, time, ranks_per_node=ranks)
        configs = [load_config(path, items) for path, items in sources]
        site = chosen_site(cluster, partition)
        submit_runs(configs, request, site, dry_run=dry_run, left_out=diverged)
        return
    discard_refused_stdout()
    for name, (path, items) in zip(names, sources, strict=True):
        if name in diverged:
            typer.echo(diverged[name], err=True)
            continue
        code = train_local(str(path), items, ranks)
        if code not in (EXIT_OK, EXIT_DIVERGED):  # the law can do without a run that has diverged
            raise typer.Exit(code)
    typer.echo(f"next: pretrain scale fit {shlex.quote(str(ladder))}")


@scale_app.command("fit")
def scale_fit_command(ladder: LadderFolder, as_json: Json = False) -> None:
    """Fit the law to the finished runs, and write the prediction of the large run before it begins.

    Example: pretrain scale fit runs/ladder
    """
    from pretrain.scale.ladder import load_ladder, run_path
    from pretrain.scale.prediction import (
        PREDICTION,
        fit_ladder,
        prediction_facts,
        read_point,
        write_prediction,
    )
    from pretrain.scale.scale_page import PAGE, write_page

    plan = load_ladder(ladder)
    target = run_path(ladder, plan.target.name)
    if (ladder / PREDICTION).exists() and (target / "run.json").exists():
        raise LockedError(
            f"{target} has begun, and has a prediction already",
            where=str(ladder / PREDICTION),
            fix="compare them: pretrain scale score LADDER RUN",
        )
    outcomes = {run.name: read_point(run_path(ladder, run.name)) for run in plan.runs}
    left_out = {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, str)}
    for name, reason in left_out.items():
        typer.echo(f"{name} is left out: {reason}", err=True)
    points = [outcome for outcome in outcomes.values() if not isinstance(outcome, str)]
    fit = fit_ladder(points, plan.rule.tokens_per_parameter)
    predicted = _predict(ladder, plan, fit)
    facts = prediction_facts(fit, plan.name, plan.budget, predicted, left_out)
    facts = write_prediction(ladder / PREDICTION, facts)
    write_page(ladder / PAGE, facts)
    if as_json:
        print_json(facts)
    else:
        _show_fit(facts, ladder)


@scale_app.command("score")
def scale_score_command(ladder: LadderFolder, run: RunFolder, as_json: Json = False) -> None:
    """Compare the large run, when it is done, with its prediction.

    Example: pretrain scale score runs/ladder runs/ladder/runs/quickstart-target
    """
    from dataclasses import asdict

    from pretrain.scale.prediction import PREDICTION, load_prediction, score
    from pretrain.scale.scale_page import PAGE, write_page

    facts = load_prediction(ladder / PREDICTION)
    scored = score(facts, run)
    write_page(ladder / PAGE, facts, scored)
    if as_json:
        print_json(asdict(scored))
        return
    predicted = scored.predicted
    inside = "inside" if scored.is_inside else "outside"
    typer.echo(f"measured   {scored.measured:.4f}  {scored.run}")
    typer.echo(f"predicted  {predicted.loss:.4f}  off by {100 * scored.error:+.2f}%")
    typer.echo(f"95%        {predicted.low:.4f} to {predicted.high:.4f}: the measured loss is {inside}")
    if not scored.is_before:
        typer.echo(
            f"after the fact: the run began {scored.began}, the prediction is of {scored.written}",
            err=True,
        )
    typer.echo(f"{ladder / PAGE}: open it in a browser")


@scale_app.command("coordinates")
def coordinates_command(
    config: Config,
    overrides: Overrides = None,
    widths: Annotated[str, Option(metavar="W,W,...", help="Widths of the model.")] = "64,128,256,512",
    steps: Annotated[int, Option(min=1, help="Steps at each width.")] = 4,
    output: Annotated[Path | None, Option(help="Picture of it: .svg, .png or .pdf.")] = None,
    as_json: Json = False,
) -> None:
    """Check that activations keep their size as the model gets wider (`optim.transfer`).

    A few steps on random tokens, at each width; no data are read.

    Example: pretrain scale coordinates mine.yaml --widths 64,128,256 --output coordinates.svg
    """
    from pretrain.config.load import load_config
    from pretrain.scale.coordinates import TOLERANCE, check_coordinates, draw_coordinates
    from pretrain.tracking.picture_files import check_format
    from pretrain.utils.io import write_file
    from pretrain.utils.units import plural

    image_format = ""
    if output is not None:
        image_format = check_format(output)
    chosen = _parse_widths(widths)
    if len(set(chosen)) < max(2, len(chosen)):
        raise ConfigError(
            f"a slope needs two widths or more, each once, not {widths}",
            where="--widths",
            fix="for example 64,128",
        )
    report = check_coordinates(load_config(config, overrides or [], extensions="require"), chosen, steps)
    if output is not None:
        write_file(output, draw_coordinates(report, image_format))
    slopes = report.slopes()
    layer, slope = report.worst()
    if as_json:
        # A size of 0, as that of the change at step 0, has no slope.
        shown = [[None if value != value else value for value in row] for row in slopes.tolist()]
        facts: dict[str, Any] = {"widths": report.widths, "layers": report.layers}
        facts |= {"sizes": report.sizes.tolist(), "slopes": shown}
        print_json(facts | {"tolerance": TOLERANCE, "flat": report.is_flat()})
        return
    heads = [f"width {width}" for width in report.widths]
    table = _table("mean |activation|", "layer", "step", *heads, "slope")
    for step, rows in enumerate(slopes.tolist()):
        for number, (name, value) in enumerate(zip(report.layers, rows, strict=True)):
            sizes = [f"{size:.4g}" for size in report.sizes[:, step, number]]
            table.add_row(name, str(step), *sizes, "" if math.isnan(value) else f"{value:+.2f}")
    console().print(table)
    verdict = "flat" if report.is_flat() else "not flat"
    after = plural(steps, "step")
    largest = f"the largest slope after {after} is {slope:+.2f} ({layer})"
    print(f"\n{verdict}: {largest}, the tolerance {TOLERANCE}")


def _parse_rule(items: list[str]) -> "LadderRule":
    """Returns a rule from KEY=VALUE items. Raises: ConfigError."""
    from pretrain.config.load import parse_section
    from pretrain.config.yaml_nodes import LocatedTree, parse_yaml
    from pretrain.scale.scaling_rule import LadderRule

    located = LocatedTree()
    for item in items:
        key, separator, text = item.partition("=")
        if not separator:
            raise ConfigError(
                "not of the form KEY=VALUE",
                where=f"--rule {item[:40]}",
                fix="for example tokens_per_parameter=10",
            )
        located.values[key], _ = parse_yaml(text, f"--rule {key}")
        located.places[key] = f"--rule {key}"
    return parse_section(LadderRule, located, "--rule")


def _parse_widths(text: str | None) -> tuple[int, ...]:
    """Returns widths from `A,B,..`. Raises: ConfigError."""
    words = [] if text is None else text.split(",")
    if not all(word.strip().isdecimal() and int(word) for word in words):
        raise ConfigError(
            f"{(text or '')[:40]!r} is no list of widths",
            where="--widths",
            fix="for example 64,96,128",
        )
    return tuple(map(int, words))


def _predict(folder: Path, ladder: "Ladder", fit: "LadderFit") -> "list[PredictedRun]":
    """Returns the large run as planned, and the best size of its budget, whose config is written."""
    from pretrain.config.load import dump_config, load_config
    from pretrain.scale.ladder import REFERENCE, LadderPlanner, config_path, is_near
    from pretrain.scale.scaling_rule import RunSize, size_of
    from pretrain.utils.io import write_file

    reference = load_config(folder / REFERENCE, extensions="ignore")
    planner = LadderPlanner(reference, ladder.rule, folder, ladder.vocab_size)
    planned = fit.predict(ladder.target.name, RunSize(ladder.target.parameters, ladder.target.tokens))
    optimal = fit.optimal_parameters(ladder.budget)[0]
    if not is_near(optimal, ladder.target.parameters):
        return [planned]
    width = planner.nearest_width(optimal)
    if width == ladder.target.width:
        return [planned]
    try:
        best = planner.run(width, ladder.budget, "optimal")
    except ConfigError as error:
        typer.echo(f"the best size gets no config: {error}", err=True)
        return [planned]
    write_file(config_path(folder, best.run.name), dump_config(best).encode())
    return [planned, fit.predict(best.run.name, size_of(best, ladder.vocab_size))]


def _table(title: str, *heads: str) -> Any:
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for place, head in enumerate(heads):
        table.add_column(head, justify="right" if place else "left", header_style="dim", no_wrap=True)
    return table


def _show_ladder(ladder: "Ladder") -> None:
    """Prints the runs of a ladder as a table."""
    from pretrain.utils.units import count

    title = f"{ladder.name}: {len(ladder.runs)} runs, {ladder.flops:.3g} FLOPs, for one of {ladder.target.flops:.3g}"
    table = _table(title, "run", "width", "layers", "N", "tokens", "steps", "batch", "lr", "FLOPs", "epochs")
    for run in (*ladder.runs, ladder.target):
        sizes = [str(run.width), str(run.layers), count(run.parameters), count(run.tokens)]
        epochs = "" if run.epochs is None else f"{run.epochs:.2f}"
        course = [f"{run.steps:,}", f"{run.global_tokens:,}", f"{run.lr:.3g}", f"{run.flops:.2e}", epochs]
        table.add_row(run.name.removeprefix(f"{ladder.name}-"), *sizes, *course)
    console().print(table)


def _show_fit(facts: dict[str, Any], folder: Path) -> None:
    """Prints runs, law and prediction."""
    from pretrain.scale.ladder import config_path, is_near, place_items, run_path
    from pretrain.scale.law import LineLaw, ScalingLaw
    from pretrain.scale.prediction import PREDICTION
    from pretrain.scale.scale_page import PAGE, law_text, line_text
    from pretrain.utils.units import count

    title = f"Law of {len(facts['runs'])} runs"
    table = _table(title, "run", "N", "tokens", "FLOPs", "loss", "fitted", "off by")
    for run in facts["runs"]:
        sizes = [count(run["parameters"]), count(run["tokens"]), f"{run['flops']:.3g}"]
        off = f"{100 * (run['loss'] / run['fitted'] - 1):+.2f}%"
        table.add_row(run["name"], *sizes, f"{run['loss']:.4f}", f"{run['fitted']:.4f}", off)
    console().print(table)
    typer.echo(f"L(N, D) = {law_text(ScalingLaw(**facts['law']))}")
    typer.echo(f"L(C) = {line_text(LineLaw(**facts['line_law']))}, on the line of the large run")
    best = facts["optimal"]
    text = "the runs do not tell it"
    if is_near(best["parameters"], facts["predicted"][0]["parameters"]):
        text = f"{count(best['parameters'])} (95% {count(best['low'])} to {count(best['high'])})"
    typer.echo(f"best N at {facts['budget']:.3g} FLOPs: {text}")
    for run in facts["predicted"]:
        size = f"N={count(run['parameters'])}, {count(run['tokens'])} tokens"
        typer.echo(f"{run['name']}: {size}: predicted {run['loss']:.4f} (95% {run['low']:.4f} to {run['high']:.4f})")
    typer.echo(f"{folder / PREDICTION}: written {facts['written']}, SHA-256 {facts['sha256'][:16]}...")
    typer.echo(f"{folder / PAGE}: open it in a browser")
    for run in facts["predicted"]:
        if not run_path(folder, run["name"]).exists():
            command = ["pretrain", "launch", "local", str(config_path(folder, run["name"]))]
            typer.echo(f"next: {shlex.join(command + place_items(folder, run['name']))}")
