"""`pretrain generate`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from pretrain.cli.options import Device, Json, ModelPath


def generate_command(
    model: ModelPath,
    prompt: Annotated[list[str] | None, typer.Option(help="Text to continue, to translate, or with [MASK].")] = None,
    file: Annotated[str | None, typer.Option(help="Prompts, one per line; - for standard input.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Maximum new tokens. Default: the model's, or 128.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="Sampling temperature; 0 is greedy. Default: 0.8 to continue a text.")
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample from the k likeliest tokens; candidates of a mask.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Nucleus sampling: smallest set of this total probability.")
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives a prompt the same text, in any batch.")] = 0,
    beams: Annotated[int | None, typer.Option(min=1, help="Beams of beam search. Default: the model's.")] = None,
    length_penalty: Annotated[float | None, typer.Option(help="Length penalty; above 0 favours long texts.")] = None,
    early_stopping: Annotated[
        str | None, typer.Option(help="Early stopping of beam search: true, false or never.")
    ] = None,
    n_best: Annotated[int | None, typer.Option(min=1, help="Texts per prompt, with their scores.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts per batch.")] = 16,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Continue texts, translate them, or fill in [MASK], as the model can. One prompt is answered as it comes.

    Without --prompt and --file, prompts are what is piped in, one a line; without that, a document begins.

    Example: pretrain generate runs/quickstart --prompt "def main(" --temperature 0
    """
    from pretrain.artifact import open_artifact
    from pretrain.artifact.model_path import open_source
    from pretrain.artifact.open import find_normalize
    from pretrain.generate.command import run_generate
    from pretrain.generate.generation_options import Options
    from pretrain.generate.text import find_prompts
    from pretrain.prepare.normalize import build_normalizers

    options = Options(max_tokens, temperature, top_k, top_p, beams, length_penalty, early_stopping, n_best)
    prompts = find_prompts(prompt or [], file)
    artifact = open_artifact(model, device)
    normalize = find_normalize(open_source(model))
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


# `pretrain import` and `pretrain export`: released models in and out.


def import_command(
    source: Annotated[str, typer.Argument(metavar="HF", help="A Hugging Face folder, or a name on its hub.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Model folder to write.")],
    as_json: Json = False,
) -> None:
    """Make a model folder of a released model, to generate with, fine-tune, or export again.

    Example: pretrain import Helsinki-NLP/opus-mt-en-it models/en-it
    """
    from dataclasses import asdict

    from pretrain.artifact.transfer import import_model
    from pretrain.inspect.describe import print_facts

    imported = import_model(source, out)
    print_facts({"kind": "model", "path": str(out), **asdict(imported)}, as_json)


def export_command(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A run, a checkpoint or a model folder.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Hugging Face folder to write.")],
    dtype: Annotated[str, typer.Option(help="fp32 or bf16.")] = "fp32",
    family: Annotated[str | None, typer.Option(help="model_type to write. Default: the first that is exact.")] = None,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="LoRA run: export the adapters alone, in the format of peft.")
    ] = False,
    check: Annotated[
        bool, typer.Option(help="Refuse the export if transformers computes other scores from it.")
    ] = True,
    as_json: Json = False,
) -> None:
    """Write a Hugging Face folder: safetensors, config, tokenizer, model card. Needs no GPU, whatever trained it.

    Example: pretrain export runs/quickstart released/quickstart --dtype bf16
    """
    from dataclasses import asdict

    from pretrain.artifact.lora import export_adapter
    from pretrain.artifact.transfer import export_model
    from pretrain.inspect.describe import print_facts

    if adapter:
        exported = export_adapter(model, out, family=family)
        print_facts({"kind": "adapter", "path": str(out), **asdict(exported)}, as_json)
        return
    written = export_model(model, out, dtype=dtype, family=family, check=check)
    print_facts({"kind": "release", "path": str(out), **asdict(written)}, as_json)


# `pretrain inspect`.


def inspect_command(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A shard folder, a run, a checkpoint or a model.")],
    verify: Annotated[bool, typer.Option("--verify", help="Read every byte and compare it with its CRC32.")] = False,
    tensors: Annotated[bool, typer.Option("--tensors", help="List the parameters.")] = False,
    stats: Annotated[bool, typer.Option("--stats", help="List the parameters with their norms.")] = False,
    as_json: Json = False,
) -> None:
    """Describe, verify or list a run, a checkpoint, a model folder, a Hugging Face folder, or a shard folder.

    Example: pretrain inspect runs/quickstart --verify
    """
    from pretrain.inspect.inspect import InspectOptions, inspect

    inspect(path, InspectOptions(verify, tensors, stats, as_json))


# `pretrain attention`.


def attention_command(
    model: ModelPath,
    text: Annotated[str, typer.Option(help="Input of the model; with two stacks, the source.")],
    target: Annotated[str | None, typer.Option(help="Input of the decoder. Default: the model's answer.")] = None,
    out: Annotated[Path | None, typer.Option(help="Picture to write: .png, .svg or .pdf.")] = None,
    layer: Annotated[str, typer.Option(help="Indices from 0, such as 0,3; or all.")] = "all",
    head: Annotated[str, typer.Option(help="Indices from 0, such as 0,3; or all.")] = "all",
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
    from pretrain.artifact.model_path import open_source
    from pretrain.artifact.open import find_normalize
    from pretrain.attention_maps.terminal import AttentionRequest, see_attention
    from pretrain.errors import ConfigError
    from pretrain.prepare.normalize import build_normalizers

    if out is None and not as_json:
        raise ConfigError("nothing to show", fix="give --out x.png, or --json")
    request = AttentionRequest(text, target, kind, layer, head, out)
    normalize = find_normalize(open_source(model))
    if normalize is not None:
        to_source, to_target = build_normalizers(normalize)
        request = replace(request, text=to_source(text), target=None if target is None else to_target(target))
    facts = see_attention(open_artifact(model, device), request)
    print(
        json.dumps(facts, indent=2) if as_json else f"{out}: {len(facts['heads'])} map{'s'[: len(facts['heads']) != 1]}"
    )
