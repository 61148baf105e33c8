"""`pretrain attention`."""

from pathlib import Path
from typing import Annotated

import typer

from pretrain.cli.options import Device, Json, What


def attention_command(
    what: What,
    text: Annotated[str, typer.Option(help="What the model reads; with two stacks, the source.")],
    target: Annotated[str | None, typer.Option(help="What the decoder reads. Default: the model's answer.")] = None,
    out: Annotated[Path | None, typer.Option(help="Picture to write: .png, .svg or .pdf.")] = None,
    layer: Annotated[str, typer.Option(help="Numbers from 0, as in 0,3; or all.")] = "all",
    head: Annotated[str, typer.Option(help="Numbers from 0, as in 0,3; or all.")] = "all",
    kind: Annotated[str | None, typer.Option(help="self, cross, encoder or decoder. Default: cross, if any.")] = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Draw what the heads of a model attend to, tokens on both axes.

    Example: pretrain attention runs/quickstart --text "def main():" --out heads.png
    """
    import json
    from dataclasses import replace

    from pretrain.artifact import open_artifact
    from pretrain.artifact.normalize import find_normalize
    from pretrain.artifact.what import open_what
    from pretrain.attention_maps.text import Request, see_attention
    from pretrain.errors import ConfigError
    from pretrain.prepare.normalize import build_normalizers

    if out is None and not as_json:
        raise ConfigError("nothing to show", fix="give --out x.png, or --json")
    request = Request(text, target, kind, layer, head, out)
    normalize = find_normalize(open_what(what))
    if normalize is not None:
        to_source, to_target = build_normalizers(normalize)
        request = replace(request, text=to_source(text), target=None if target is None else to_target(target))
    facts = see_attention(open_artifact(what, device), request)
    print(
        json.dumps(facts, indent=2) if as_json else f"{out}: {len(facts['heads'])} map{'s'[: len(facts['heads']) != 1]}"
    )
