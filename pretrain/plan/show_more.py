"""Tables of what `--search` and `--sweep` find."""

from typing import Any

from rich.console import Console
from rich.table import Table

from pretrain.utils.units import count, percent, size, span

_BAR = 12


def _table(title: str, columns: tuple[str, ...]) -> Table:
    # One space between columns: the widest numbers fit a terminal of 80.
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in columns:
        table.add_column(name, justify="left" if name == "curve" else "right", header_style="dim", no_wrap=True)
    return table


def show_search(found: list[dict[str, Any]], console: Console) -> None:
    """Prints the layouts that fit, and how to ask for the first."""
    console.print()
    if not found:
        console.print("[bold]Layouts that fit[/bold]: none")
        return
    columns = ("ZeRO", "micro", "x", "recomputed", "on host", "MFU", "tokens/s", "memory", "bound")
    table = _table("Layouts that fit, fastest first", columns)
    for one in found:
        host = [name for name in ("optimizer", "params") if one[f"offload_{name}"] != "none"]
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


def show_sweep(points: list[dict[str, Any]], console: Console) -> None:
    """Prints the scaling curve."""
    console.print()
    columns = ("nodes", "GPUs", "micro", "x", "tokens/s", "MFU", "of 1st", "run", "bound", "curve")
    table = _table("Scaling: the same batch on more nodes (x: micro-batches a step)", columns)
    most = max((point["tokens_per_s"] or 0 for point in points), default=0)
    for point in points:
        if point["tokens_per_s"] is None:
            continue
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
            "#" * max(1, round(_BAR * point["tokens_per_s"] / most)),
        )
    console.print(table)
    for point in points:
        if point["why"]:
            console.print(
                f"{point['nodes']} node{'s' if point['nodes'] > 1 else ''}: {point['why']}",
                style="yellow",
                soft_wrap=True,
            )
