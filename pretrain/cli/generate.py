"""`pretrain generate`."""

import sys
from typing import Annotated

import typer

from pretrain.cli.options import Device, Json, What


def generate_command(
    what: What,
    prompt: Annotated[list[str] | None, typer.Option(help="Text to continue, to translate, or with [MASK].")] = None,
    file: Annotated[str | None, typer.Option(help="Prompts, one a line; - for standard input.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens to add. Default: the model's, or 128.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy. Default: 0.8 to continue a text.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Draw among the k likeliest only; candidates of a mask.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Draw among the likeliest of this total probability.")] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives a prompt the same text, in any batch.")] = 0,
    beams: Annotated[int | None, typer.Option(min=1, help="Search with so many. Default: the model's.")] = None,
    length_penalty: Annotated[float | None, typer.Option(help="Above 0 favours long texts.")] = None,
    early_stopping: Annotated[str | None, typer.Option(help="With enough texts: true, false or never.")] = None,
    n_best: Annotated[int | None, typer.Option(min=1, help="Texts for each prompt, with their scores.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts that are read together.")] = 16,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Continue texts, translate them, or fill in [MASK], as the model can. One prompt is answered as it comes.

    Without --prompt and --file, prompts are what is piped in, one a line; without that, a document begins.

    Example: pretrain generate runs/quickstart --prompt "def main(" --temperature 0
    """
    from pretrain.artifact import open_artifact
    from pretrain.artifact.normalize import find_normalize
    from pretrain.artifact.what import open_what
    from pretrain.generate.command import run_generate
    from pretrain.generate.options import Options
    from pretrain.generate.prompts import find_prompts
    from pretrain.prepare.normalize import build_normalizers

    options = Options(max_tokens, temperature, top_k, top_p, beams, length_penalty, early_stopping, n_best)
    prompts = find_prompts(prompt or [], file)
    artifact = open_artifact(what, device)
    normalize = find_normalize(open_what(what))
    if normalize is not None and prompts is not None:
        prompts = map(build_normalizers(normalize)[0], prompts)
    for setting in artifact.generation.not_honoured():
        print(f"note: the model's own {setting} is not honoured", file=sys.stderr)
    run_generate(
        artifact.model,
        artifact.codec,
        artifact.generation,
        options,
        prompts,
        sys.stdout,
        seed=seed,
        batch_size=batch_size,
        as_json=as_json,
    )
