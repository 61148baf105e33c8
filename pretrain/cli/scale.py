"""`pretrain scale`: rules of size, checked and fitted."""

from pathlib import Path
from typing import Annotated

from typer import BadParameter, Option

from pretrain.cli.options import CommandGroup, Config, Json, Overrides, console, print_json

scale_app = CommandGroup(
    "Check and fit how training depends on the size of the model.\n\n"
    "Example: pretrain scale coordinates configs/optim/completep.yaml"
)


def _parse_widths(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if len(parts) < 2 or not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise BadParameter(f"{text} is no list of two widths or more, such as 64,128,256")
    return tuple(int(part) for part in parts)


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

    image_format = None if output is None else check_format(output)
    chosen = _parse_widths(widths)
    found = check_coordinates(load_config(config, overrides or [], extensions="require"), chosen, steps)
    if output is not None and image_format is not None:
        write_file(output, draw_coordinates(found, image_format))
    slopes = found.slopes()
    layer, slope = found.worst()
    if as_json:
        # A size of 0, as that of the change at step 0, has no slope.
        shown = [[None if value != value else value for value in row] for row in slopes.tolist()]
        facts = {"widths": found.widths, "layers": found.layers, "sizes": found.sizes.tolist(), "slopes": shown}
        print_json(facts | {"tolerance": TOLERANCE, "flat": found.is_flat()})
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False, title="mean |activation|", title_justify="left", title_style="bold")
    table.add_column("step", justify="right")
    table.add_column("layer")
    for width in found.widths:
        table.add_column(f"width {width}", justify="right")
    table.add_column("slope", justify="right")
    for step in range(steps + 1):
        for number, name in enumerate(found.layers):
            sizes = [f"{size:.4g}" for size in found.sizes[:, step, number]]
            value = slopes[step, number]
            table.add_row(str(step), name, *sizes, "" if value != value else f"{value:+.2f}")
    console().print(table)
    verdict = "flat" if found.is_flat() else "not flat"
    print(f"\n{verdict}: the largest slope after {steps} steps is {slope:+.2f} ({layer}), the tolerance {TOLERANCE}")
