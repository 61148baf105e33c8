"""`pretrain generate`, `import`, `export`, `inspect` and `attention`."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from pretrain.cli.options import Device, Json, ModelPath, print_json
from pretrain.errors import ConfigError


def generate_command(
    model: ModelPath,
    prompt: Annotated[list[str] | None, Option(help="Text to continue or translate.")] = None,
    file: Annotated[str | None, Option(help="Prompts, one per line; - for standard input.")] = None,
    max_tokens: Annotated[int | None, Option(min=1, help="Default: the model's, or 128.")] = None,
    temperature: Annotated[float | None, Option(help="0 is greedy. Default: 0.8 to continue a text.")] = None,
    top_k: Annotated[int | None, Option(help="Sample from k tokens; candidates of a mask.")] = None,
    top_p: Annotated[float | None, Option(help="Nucleus sampling: total probability.")] = None,
    seed: Annotated[int, Option(help="Seed of sampling; independent of the batch.")] = 0,
    beams: Annotated[int | None, Option(min=1, help="Default: the model's.")] = None,
    length_penalty: Annotated[float | None, Option(help="Above 0: longer texts.")] = None,
    early_stopping: Annotated[str | None, Option(help="Beam search: true, false, never.")] = None,
    n_best: Annotated[int | None, Option(min=1, help="Texts per prompt, with scores.")] = None,
    batch_size: Annotated[int, Option(min=1, help="Prompts per batch.")] = 16,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Continue texts, translate them, or fill in [MASK], as the model can.

    Without --prompt and --file, prompts are piped in, one a line; without that, a document begins.

    Example: pretrain generate runs/quickstart --prompt "def main(" --temperature 0
    """
    from pretrain.utils.status_line import status_line

    status_line().enter("importing torch")
    from pretrain.artifact import open_artifact
    from pretrain.artifact.model_path import open_source
    from pretrain.artifact.open import find_normalize
    from pretrain.generate.command import run_generate
    from pretrain.generate.generation_options import Options
    from pretrain.generate.text import find_prompts
    from pretrain.prepare.normalize import build_normalizers
    from pretrain.utils.units import plural

    search = (beams, length_penalty, early_stopping, n_best)
    options = Options(max_tokens, temperature, top_k, top_p, *search)
    prompts = find_prompts(prompt or [], file)
    status_line().enter(f"reading {model}")
    artifact = open_artifact(model, device)
    status_line().close()
    normalize = find_normalize(open_source(model))
    # Prompts are normalized like the text of the training.
    if normalize is not None and prompts is not None:
        prompts = map(build_normalizers(normalize)[0], prompts)
    # Not an error: a released model may name settings that only its own library has.
    for setting in artifact.generation.not_honoured():
        print(f"note: the model's own {setting} is not honoured", file=sys.stderr)
    num_blank = run_generate(
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
    if num_blank:
        print(f"note: {plural(num_blank, 'text')} without a visible character", file=sys.stderr)


def import_command(
    source: Annotated[str, Argument(metavar="HF", help="A folder, or a name on the hub.")],
    out: Annotated[Path, Argument(metavar="OUT", help="Model folder to write.")],
    as_json: Json = False,
) -> None:
    """Make a model folder of a released model, to generate with, fine-tune, or export again.

    Example: pretrain import Helsinki-NLP/opus-mt-en-it models/en-it
    """
    from pretrain.artifact.transfer import import_model
    from pretrain.inspect.describe import print_facts

    imported = import_model(source, out)
    print_facts({"kind": "model", "path": str(out), **asdict(imported)}, as_json)


def export_command(
    model: Annotated[Path, Argument(metavar="MODEL", help="A run, checkpoint or model folder.")],
    out: Annotated[Path, Argument(metavar="OUT", help="Hugging Face folder to write.")],
    dtype: Annotated[str, Option(help="fp32 or bf16.")] = "fp32",
    family: Annotated[str | None, Option(help="model_type. Default: the first exact one.")] = None,
    adapter: Annotated[bool, Option("--adapter", help="LoRA run: export the adapters alone, for peft.")] = False,
    check: Annotated[bool, Option(help="Refuse if transformers has other scores.")] = True,
    as_json: Json = False,
) -> None:
    """Write a Hugging Face folder: safetensors, config, tokenizer, model card. Needs no GPU.

    Example: pretrain export runs/quickstart released/quickstart --dtype bf16
    """
    from pretrain.artifact.lora import export_adapter
    from pretrain.artifact.transfer import export_model
    from pretrain.inspect.describe import print_facts

    if adapter:
        exported = export_adapter(model, out, family=family)
        print_facts({"kind": "adapter", "path": str(out), **asdict(exported)}, as_json)
        return
    written = export_model(model, out, dtype=dtype, family=family, check=check)
    print_facts({"kind": "release", "path": str(out), **asdict(written)}, as_json)


def inspect_command(
    path: Annotated[Path, Argument(metavar="PATH", help="Shards, a run, checkpoint or model.")],
    verify: Annotated[bool, Option("--verify", help="Compare bytes with their CRC32.")] = False,
    tensors: Annotated[bool, Option("--tensors", help="List the parameters.")] = False,
    stats: Annotated[bool, Option("--stats", help="List the parameters with their norms.")] = False,
    as_json: Json = False,
) -> None:
    """Describe, verify or list a run, a checkpoint, or a folder of a model, of Hugging Face, or of shards.

    Example: pretrain inspect runs/quickstart --verify
    """
    from pretrain.inspect.describe import inspect

    inspect(path, verify=verify, tensors=tensors, stats=stats, as_json=as_json)


def attention_command(
    model: ModelPath,
    text: Annotated[str, Option(help="Input of the model; with two stacks, the source.")],
    target: Annotated[str | None, Option(help="For the decoder. Default: the answer.")] = None,
    out: Annotated[Path | None, Option(help="Picture to write: .png, .svg or .pdf.")] = None,
    layer: Annotated[str, Option(help="Indices from 0, such as 0,3; or all.")] = "all",
    head: Annotated[str, Option(help="Indices from 0, such as 0,3; or all.")] = "all",
    kind: Annotated[str | None, Option(help="self, cross (default), encoder, decoder.")] = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Draw what the heads of a model attend to, tokens on both axes.

    Example: pretrain attention runs/quickstart --text "def main():" --out heads.png
    """
    from dataclasses import replace

    from pretrain.artifact import open_artifact
    from pretrain.artifact.model_path import open_source
    from pretrain.artifact.open import find_normalize
    from pretrain.attention_maps.terminal import AttentionRequest, see_attention
    from pretrain.prepare.normalize import build_normalizers
    from pretrain.utils.units import plural

    if out is None and not as_json:
        raise ConfigError("nothing to show", fix="give --out x.png, or --json")
    request = AttentionRequest(text, target, kind, layer, head, out)
    normalize = find_normalize(open_source(model))
    if normalize is not None:
        to_source, to_target = build_normalizers(normalize)
        target = None if target is None else to_target(target)
        request = replace(request, text=to_source(text), target=target)
    facts = see_attention(open_artifact(model, device), request)
    if as_json:
        print_json(facts)
    else:
        print(f"{out}: {plural(len(facts['heads']), 'map')}")
