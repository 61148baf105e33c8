"""A plan as tables for a terminal."""

from typing import Any

from rich.console import Console, JustifyMethod
from rich.table import Table

from pretrain.utils.units import count, flops, percent, plural, size, span

_MEMORY = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer, master weights",
    "gathered": "gathered whole by stage 3",
    "activations": "activations",
    "loss": "chunk of logits",
    "buckets": "communication buckets",
    "overhead": "context, NCCL, fragmentation",
}

_BAR = 30
_SMALL_BAR = 12


def show_plan(facts: dict[str, Any], console: Console) -> None:
    """Prints a whole plan; problems last, where they are seen."""
    _show_model(facts, console)
    if "layout" in facts:
        _show_memory(facts, console)
        _show_time(facts, console)
        _show_course(facts, console)
        _show_data(facts["data"], console)
    if "search" in facts:
        _show_search(facts["search"], console)
    if "sweep" in facts:
        _show_sweep(facts["sweep"], console)
    for problem in facts["problems"]:
        if not problem["refuses"]:  # the others end the command
            text = f"predicted: {problem['what']}; {problem['fix']}"
            console.print(text, style="bold red", soft_wrap=True)


def _section(title: str | None) -> Table:
    table = _table(title, ())
    table.show_header = False
    table.add_column(style="dim", min_width=28)
    table.add_column(justify="right", min_width=12)
    table.add_column(overflow="fold")
    return table


def _table(title: str | None, columns: tuple[str, ...], gap: int = 2) -> Table:
    """Returns a table of numbers; a column without a name, and the curve, are text."""
    padding = (0, gap, 0, 0)
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=padding)
    for name in columns:
        justify: JustifyMethod = "left" if name in ("", "curve") else "right"
        table.add_column(name, justify=justify, header_style="dim", no_wrap=True)
    return table


def _show_model(facts: dict[str, Any], console: Console) -> None:
    model = facts["model"]
    cluster = facts["cluster"]
    total = model["parameters"]["total"]
    table = _section(f"Model: {count(total)} parameters ({total:,})")
    for name, number in model["parameters"].items():
        if number and name != "total":
            table.add_row(name, count(number), percent(number / total))
    if model["active"] != total:
        share = percent(model["active"] / total)
        table.add_row("active", count(model["active"]), f"{share}: what a token meets")
    weights = total + model["adapters"]
    if model["trained"] != total:
        share = percent(model["trained"] / weights)
        table.add_row("trained", count(model["trained"]), f"{share} of the weights")
    if model["adapters"]:
        table.add_row("adapters", count(model["adapters"]), percent(model["adapters"] / weights))
    each = model["flops_per_token"]
    table.add_row("FLOPs a token, forward", flops(each["forward"]))
    table.add_row("backward", flops(each["backward"]))
    if each["recompute"]:
        table.add_row("recomputed", flops(each["recompute"]), "no useful work: not in MFU")
    run, whole = model["flops"]["run"], model["flops"]["whole"]
    saved = f"{percent(1 - run / whole)} less by short rows and windows" if run < whole else ""
    table.add_row("FLOPs of the run", f"{run:.2e}", saved)
    console.print(table)
    if model["vocab_assumed"]:
        console.print(
            f"The vocabulary is not known, its data are not here: {model['vocab_size']:,} is assumed; "
            "say model.vocab_size=N",
            style="yellow",
            soft_wrap=True,
        )
    layout = facts.get("layout")
    text = ""
    if layout is not None:
        ranks = _groups(cluster["ranks"], layout["sequence"])
        text = (
            f": {layout['engine']} ZeRO-{layout['zero_stage']}, {layout['precision']}; {layout['rows']} rows a step "
            f"= {ranks} x {layout['accumulation']} accumulated x {layout['micro']} at once, "
            f"{count(layout['tokens_per_step'])} tokens"
        )
    where = f"{cluster['nodes']} x {cluster['per_node']} {cluster['name']}"
    if cluster["assumed"]:
        where += " (assumed; for others --gpu and --nodes)"
    console.print(f"\n[bold]On {where}[/bold]{text}", soft_wrap=True, highlight=False)
    if (measured := facts["calibration"]) is not None:
        day = measured["measured"][:10]
        console.print(f"Calibrated on {measured['device']} ({measured['host']}, {day})")
    console.print()


def _groups(ranks: int, sequence: int) -> str:
    groups = plural(ranks // sequence, "group")
    return f"{ranks} ranks" if sequence == 1 else f"{groups} of {sequence} ranks"


def _show_memory(facts: dict[str, Any], console: Console) -> None:
    memory = facts["memory"]
    limit = memory["limit"]
    table = _section(f"Memory of a rank: {size(memory['total'])} of {size(limit)}")
    for key, name in _MEMORY.items():
        if memory[key]:
            table.add_row(name, size(memory[key]), "#" * round(_BAR * min(1.5, memory[key] / limit)))
    layout = facts["layout"]
    offloads = any(layout[f"offload_{part}"] != "none" for part in ("optimizer", "params", "activations"))
    held = "offloaded, and what a save copies" if offloads else "what a save copies"
    table.add_row("in the host's memory", size(memory["host"]), held)
    largest = memory["largest_micro"]
    most = f"{largest:,}" + (" or more" if largest == memory["micro_limit"] else "")
    asked = layout["micro"]
    table.add_row("largest micro-batch", most, f"rows; batch.micro={asked} is asked for")
    console.print(table)
    console.print()


def _show_time(facts: dict[str, Any], console: Console) -> None:
    rates = facts["rates"]
    first = rates["predicted"]
    columns = ("", "MFU", "tokens/s", "a step", "whole run", "GPU-hours")
    num_columns = len(columns) - _on_cpu(facts)
    table = _table(f"Time: bound by {first['bound']}", columns[:num_columns])
    for column in table.columns:
        column.min_width = 9
    for name, rate in rates.items():
        cells = (
            name,
            percent(rate["mfu"]),
            count(rate["tokens_per_s"]),
            span(rate["step_s"]),
            span(rate["days"] * 86_400),
            f"{rate['gpu_hours']:,.{1 if rate['gpu_hours'] < 10 else 0}f}",
        )
        table.add_row(*cells[:num_columns])
    console.print(table)
    parts = _section(None)
    for name, seconds in first["parts_s"].items():
        if seconds:
            share = seconds / first["step_s"]
            parts.add_row(f"  {name}", span(seconds), f"{percent(share):>6}  {'#' * round(_BAR * share)}")
    console.print(parts)
    if facts["fp8"] is not None:
        _show_fp8(facts["fp8"], console)
    if facts["cluster"]["ranks"] > 1:
        _show_network(facts, console)
    console.print()


def _show_fp8(fp8: dict[str, Any], console: Console) -> None:
    key = f"engine.fp8={fp8['recipe']}"
    if fp8["refused"]:
        console.print(f"{key} will be refused: {fp8['refused']}; use engine.fp8=off", style="bold red", soft_wrap=True)
        return
    speeds = f"products of blocks {fp8['speedup']:.2f}x, the step {fp8['step_speedup']:.2f}x as fast as in bf16"
    if not fp8["pays"]:
        fix = "; use engine.fp8=off, a larger micro-batch or a wider model" if fp8["asked"] else ""
        style = "yellow" if fp8["asked"] else "dim"
        console.print(
            f"FP8 does not pay ({key}, predicted): {speeds}{fix}", style=style, soft_wrap=True, highlight=False
        )
    else:
        console.print(f"FP8 pays ({key}, predicted): {speeds}", soft_wrap=True, highlight=False)
    if not fp8["asked"]:
        return
    table = _table(None, ("", "M", "K", "N", "bf16", "FP8", "speed"))
    for one in fp8["products"]:
        times = (span(one["bf16_s"]), span(one["fp8_s"]), f"{one['speedup']:.2f}x")
        table.add_row(f"  {one['name']}", f"{one['m']:,}", f"{one['k']:,}", f"{one['n']:,}", *times)
    console.print(table)


def _show_network(facts: dict[str, Any], console: Console) -> None:
    columns = ("ZeRO", "bytes", "in a node", "between nodes", "")
    table = _table("A rank sends in a step", columns)
    for one in facts["network"]:
        between = span(one["between_s"]) if one["between_s"] else "-"
        asked = "<- asked for" if one["zero_stage"] == facts["layout"]["zero_stage"] else ""
        table.add_row(str(one["zero_stage"]), size(one["bytes"]), span(one["inside_s"]), between, asked)
    console.print(table)
    for key, title, whose in (
        ("exchange", "queries, keys, values and results", "ranks of a row"),
        ("experts", "tokens and results of experts", "ranks that share them"),
        ("tensor", "columns and sums of layers", "ranks that share matrices"),
    ):
        if (exchange := facts[key])["bytes"]:
            sent = f"{size(exchange['bytes'])} in {span(exchange['seconds'])}"
            text = f"and {title} to the {exchange['ranks']} {whose}: {sent}"
            console.print(text, soft_wrap=True, highlight=False)


def _on_cpu(facts: dict[str, Any]) -> bool:
    return bool(facts["cluster"]["generation"] == "cpu")


def _show_course(facts: dict[str, Any], console: Console) -> None:
    course = facts["course"]
    table = _section("Checkpoints, jobs, failures")
    written = f"written in {span(course['save_s'])}, during training"
    table.add_row("a checkpoint", size(course["checkpoint_bytes"]), written)
    table.add_row("disk", size(course["disk_bytes"]), f"{course['checkpoints_kept']} at once")
    if course["interval_s"]:
        table.add_row("every", span(course["interval_s"]), "by checkpoint.every_steps")
    else:
        table.add_row("every", "never", "checkpoint.every_steps=0: only at the end or a stop")
    # The failures that are assumed are those of nodes with GPUs.
    if not (_on_cpu(facts) and course["failures"]["assumed"]):
        _add_failures(table, course)
    jobs = course.get("jobs")
    if jobs and jobs["count"]:
        each = f"of {span(jobs['limit_s'])}, {jobs['steps_each']:,} steps each"
        table.add_row("jobs", str(jobs["count"]), each)
    elif jobs:
        table.add_row("jobs", "none", "the limit is shorter than start and save")
    console.print(table)
    console.print()


def _add_failures(table: Table, course: dict[str, Any]) -> None:
    failures = course["failures"]
    expected = f"{failures['expected']:.1f} expected over the run"
    table.add_row("a failure every", span(failures["mtbf_s"]), expected)
    best = f"checkpoint.every_steps={failures['daly_steps']} (Daly)"
    if failures["daly_s"] > course["total_s"]:
        best = "longer than the run (Daly)"
    table.add_row("best interval", span(failures["daly_s"]), best)
    table.add_row("", span(failures["young_s"]), "by Young")
    lost = percent(failures["lost_share"])
    table.add_row("lost to saves and failures", lost, "at most: saves run during training")


def _show_data(data: dict[str, Any], console: Console) -> None:
    table = _section("Data")
    speed = f"{size(data['bytes_s'])}/s by all ranks"
    table.add_row("tokens read", count(data["needed_tokens"]), speed)
    if data["optimal_tokens"] is not None:
        share = data["needed_tokens"] / data["optimal_tokens"]
        optimal = f"20 a parameter; the run reads {share:.2f} x"
        table.add_row("compute-optimal", count(data["optimal_tokens"]), optimal)
    stored = data["stored"]
    if stored is None:
        table.add_row("there are", "?", "the data are not here")
    else:
        shards = f"in {stored['shards']} shards: {data['epochs']:.2f} epochs"
        table.add_row("there are", count(stored["tokens"]), shards)
        lanes = f"an epoch, data.lanes={data['lanes']}"
        table.add_row("rows a lane", count(data["rows_a_lane"]), lanes)
    if "reference_s" in data:
        note = "a forward pass over all answers, once"
        table.add_row("reference", span(data["reference_s"]), note)
    console.print(table)
    if data["problem"]:
        console.print(data["problem"], style="bold red", soft_wrap=True)


def _show_search(found: list[dict[str, Any]], console: Console) -> None:
    console.print()
    if not found:
        console.print("[bold]Layouts that fit[/bold]: none")
        return
    columns = ("ZeRO", "micro", "x", "recomputed", "on host", "MFU", "tokens/s", "memory", "bound")
    table = _table("Layouts that fit, fastest first", columns, gap=1)
    for one in found:
        host = [name for name in ("optimizer", "params", "activations") if one[f"offload_{name}"] != "none"]
        table.add_row(
            str(one["zero_stage"]),
            str(one["micro"]),
            str(one["accumulation"]),
            one["activation_checkpointing"],
            "+".join(host) or "-",
            percent(one["mfu"]),
            count(one["tokens_per_s"]),
            size(one["memory_bytes"]),
            one["bound"],
        )
    console.print(table)
    console.print("The first: " + " ".join(found[0]["overrides"]), soft_wrap=True, highlight=False)


def _show_sweep(points: list[dict[str, Any]], console: Console) -> None:
    console.print()
    columns = ("nodes", "GPUs", "micro", "x", "tokens/s", "MFU", "of 1st", "run", "bound", "curve")
    # One space between columns: the widest numbers fit a terminal of 80.
    table = _table("Scaling: the same batch on more nodes (x: micro-batches a step)", columns, gap=1)
    most = max((point["tokens_per_s"] or 0 for point in points), default=0)
    for point in points:
        if point["tokens_per_s"] is not None:
            table.add_row(
                str(point["nodes"]),
                f"{point['ranks']:,}",
                str(point["micro"]),
                str(point["accumulation"]),
                count(point["tokens_per_s"]),
                percent(point["mfu"]),
                percent(point["efficiency"]),
                span(point["days"] * 86_400),
                point["bound"],
                "#" * max(1, round(_SMALL_BAR * point["tokens_per_s"] / most)),
            )
    console.print(table)
    for point in points:
        if point["why"]:
            nodes = plural(point["nodes"], "node")
            console.print(f"{nodes}: {point['why']}", style="yellow", soft_wrap=True)
