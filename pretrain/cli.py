"""The command line: one function a command. Heavy imports live inside the function that needs them.

Errors of `pretrain.errors` end a command with one line and their exit code; `--debug` shows the traceback too.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from pretrain.errors import EXIT_BUG, EXIT_OK, EXIT_USAGE, PretrainError
from pretrain.evaluate.app import average_command, evaluate_command
from pretrain.report.data_app import data_app

# The common base of every complaint about a command line. Typer exports no name for it, and where it comes from
# (click, or a copy inside typer) depends on the version.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]

app = typer.Typer(
    name="pretrain",
    help="Pretrain Transformers, from raw text to a released checkpoint.\n\n"
    "Example: pretrain launch local configs/run/quickstart.yaml --ranks 2",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
launch_app = typer.Typer(
    help="Start the ranks of a run.\n\nExample: pretrain launch local configs/run/quickstart.yaml --ranks 2",
    no_args_is_help=True,
)
app.add_typer(launch_app, name="launch")
app.add_typer(data_app, name="data")
app.command("average")(average_command)
app.command("evaluate")(evaluate_command)

Config = Annotated[str, typer.Argument(metavar="CONFIG", help="A YAML file, or a built-in one: configs/run/....yaml")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[A.B=C]...", help="Values laid over the file.")]
Json = Annotated[bool, typer.Option("--json", help="Print facts as JSON.")]


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    local_rank: Annotated[int | None, typer.Option("--local_rank", "--local-rank", hidden=True)] = None,
) -> None:
    # `deepspeed` passes --local_rank to every program it starts; LOCAL_RANK is what we read.
    if debug:
        os.environ["PRETRAIN_DEBUG"] = "1"


@app.command("prepare")
def prepare_command(
    context: typer.Context,
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[CONFIG [A.B=C]...]", help="A YAML file.")] = None,
    output: Annotated[Path | None, typer.Option(help="Folder to write.")] = None,
    input: Annotated[
        list[str] | None,
        typer.Option(help="Files, folders, globs or URLs of text. None: this Python's standard library."),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="bpe (default), wordpiece, unigram, char, or a tokenizer.json.")
    ] = None,
    vocab_size: Annotated[int | None, typer.Option(help="Entries of a trained tokenizer. Default: 8192.")] = None,
    text_field: Annotated[str | None, typer.Option(help="Field of a record that holds the text.")] = None,
    max_document_bytes: Annotated[int | None, typer.Option(help="A longer text is refused. Default: 64 MiB.")] = None,
    split: Annotated[
        str | None, typer.Option(help="hash:F by document (default hash:0.01), or tail:F of each.")
    ] = None,
    processes: Annotated[int | None, typer.Option(min=1, help="Worker processes. Default: one a core.")] = None,
    part: Annotated[str, typer.Option(metavar="I/N", help="This machine's share of the parts, from 1/N.")] = "1/1",
    system: Annotated[
        str | None, typer.Option("--from", help="Tokens of megatron, nanogpt, olmo or mds, which are not made again.")
    ] = None,
) -> None:
    """Train a tokenizer and write token shards (webdataset tars with an index), by a config or by options.

    Example: pretrain prepare --input 'corpus/*.jsonl.gz' --output data/corpus --vocab-size 32000
    """
    from pretrain.config.load_prepare import load_prepare, short_prepare
    from pretrain.data.prepare_command import run_prepare
    from pretrain.log import setup_logging

    setup_logging(rank=0, world_size=1)
    words = arguments or []
    if system is not None:
        print(_convert(system, output, [*(input or ()), *words], tokenizer, split, processes))
        return
    named = {
        "output": output,
        "tokenizer": tokenizer,
        "vocab_size": vocab_size,
        "text_field": text_field,
        "max_document_bytes": max_document_bytes,
        "split": split,
    }
    given: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
    if words and not input and (output is None or words[0].endswith((".yaml", ".yml"))):
        if given:
            name = next(iter(given))
            raise typer.BadParameter(f"--{name.replace('_', '-')} does not go with CONFIG: write {name} there")
        config = load_prepare(words[0], words[1:])
    elif output is None:
        raise _UsageError("Missing option '--output'", context)
    else:
        # A shell expands an unquoted glob: `--input a.txt b.txt` is meant as it reads.
        config = short_prepare(inputs=[*(input or ()), *words], **given)
    print(run_prepare(config, part, processes))


def _convert(
    system: str, output: Path | None, inputs: list[str], tokenizer: str | None, split: str | None, processes: int | None
) -> str:
    """Re-shards the tokens of another system; returns what to say of it."""
    from pretrain.data.convert.job import ConvertOptions
    from pretrain.data.prepare_command import run_convert

    if output is None or tokenizer is None or not inputs:
        raise typer.BadParameter("--from needs --input, --output and --tokenizer, the one that made the tokens")
    options = ConvertOptions(
        output=output, kind=system, source=tuple(inputs), tokenizer=tokenizer, split=split or "auto"
    )
    return run_convert(options, processes)


@app.command()
def config(config: Config, overrides: Overrides = None) -> None:
    """Print the resolved config: every key, every default.

    Example: pretrain config configs/run/quickstart.yaml optim.lr=3e-4
    """
    from pretrain.config.load import dump_config, load_config

    sys.stdout.write(dump_config(load_config(config, overrides or [])))


@app.command()
def train(config: Config, overrides: Overrides = None) -> None:
    """Train, or continue training, as one rank: alone, or under torchrun, accelerate, deepspeed or `pretrain launch`.

    Example: pretrain train configs/run/quickstart.yaml engine.kind=single engine.zero_stage=0
    """
    from pretrain.config.load import load_config
    from pretrain.dist import read_world

    world = read_world()
    loaded = load_config(config, overrides or [])
    from pretrain.train.run import run_training

    raise typer.Exit(run_training(loaded, world))


@launch_app.command("local")
def launch_local_command(
    config: Config,
    overrides: Overrides = None,
    ranks: Annotated[int, typer.Option(min=1, help="Processes to start; with GPUs, one for each.")] = 1,
    port: Annotated[int | None, typer.Option(help="Rendezvous port. None: a free one.")] = None,
) -> None:
    """Train on this machine with several ranks.

    Example: pretrain launch local configs/run/quickstart.yaml --ranks 2
    """
    from launch.local import launch_local
    from pretrain.config.data import plan_batch
    from pretrain.config.load import load_config
    from pretrain.index.dataset import check_local

    loaded = load_config(config, overrides or [])
    plan_batch(loaded.batch, ranks)
    check_local(loaded.data)
    logs = Path(loaded.run.dir) / loaded.run.name / "logs"
    raise typer.Exit(launch_local(config, overrides or [], ranks, port, logs))


@app.command("import")
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
    from pretrain.report.describe import print_facts

    imported = import_model(source, out)
    print_facts({"kind": "model", "path": str(out), **asdict(imported)}, as_json)


@app.command("export")
def export_command(
    what: Annotated[Path, typer.Argument(metavar="WHAT", help="A run, a checkpoint or a model folder.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Hugging Face folder to write.")],
    dtype: Annotated[str, typer.Option(help="fp32 or bf16.")] = "fp32",
    family: Annotated[str | None, typer.Option(help="model_type to write. Default: the first that is exact.")] = None,
    as_json: Json = False,
) -> None:
    """Write a Hugging Face folder: safetensors, config, tokenizer, model card. Needs no GPU, whatever trained it.

    Example: pretrain export runs/quickstart released/quickstart --dtype bf16
    """
    from dataclasses import asdict

    from pretrain.artifact.transfer import export_model
    from pretrain.report.describe import print_facts

    written = export_model(what, out, dtype=dtype, family=family)
    print_facts({"kind": "release", "path": str(out), **asdict(written)}, as_json)


@app.command()
def inspect(path: Path, as_json: Json = False) -> None:
    """Describe a shard folder, a run, or a checkpoint.

    Example: pretrain inspect runs/quickstart
    """
    from pretrain.report.describe import describe, print_facts

    print_facts(describe(path), as_json)


@app.command()
def generate(
    what: Annotated[Path, typer.Argument(metavar="WHAT", help="A run, a checkpoint, a model or Hugging Face folder.")],
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
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    as_json: Json = False,
) -> None:
    """Continue texts, translate them, or fill in [MASK], as the model can. One prompt is answered as it comes.

    Without --prompt and --file, prompts are what is piped in, one a line; without that, a document begins.

    Example: pretrain generate runs/quickstart --prompt "def main(" --temperature 0
    """
    from pretrain.artifact import open_artifact
    from pretrain.artifact.normalize import find_normalize
    from pretrain.artifact.what import open_what
    from pretrain.data.normalize import build_normalizers
    from pretrain.generate.command import run_generate
    from pretrain.generate.options import Options
    from pretrain.generate.prompts import find_prompts

    options = Options(max_tokens, temperature, top_k, top_p, beams, length_penalty, early_stopping, n_best)
    prompts = find_prompts(prompt or [], file)
    artifact = open_artifact(what, device)
    normalize = find_normalize(open_what(what))
    if normalize is not None and prompts is not None:
        prompts = map(build_normalizers(normalize)[0], prompts)
    for setting in artifact.generation.not_honoured():
        print(f"note: the model's own {setting} is not honoured", file=sys.stderr)
    try:
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
    except BrokenPipeError:  # `| head` has seen enough
        raise typer.Exit(128 + signal.SIGPIPE) from None


@app.command()
def attention(
    what: Annotated[Path, typer.Argument(metavar="WHAT", help="A run, a checkpoint, a model or Hugging Face folder.")],
    text: Annotated[str, typer.Option(help="What the model reads; with two stacks, the source.")],
    target: Annotated[str | None, typer.Option(help="What the decoder reads. Default: the model's answer.")] = None,
    out: Annotated[Path | None, typer.Option(help="Picture to write: .png, .svg or .pdf.")] = None,
    layer: Annotated[str, typer.Option(help="Numbers from 0, as in 0,3; or all.")] = "all",
    head: Annotated[str, typer.Option(help="Numbers from 0, as in 0,3; or all.")] = "all",
    kind: Annotated[str | None, typer.Option(help="self, cross, encoder or decoder. Default: cross, if any.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    as_json: Json = False,
) -> None:
    """Draw what the heads of a model attend to, tokens on both axes.

    Example: pretrain attention runs/quickstart --text "def main():" --out heads.png
    """
    import json

    from pretrain.artifact import open_artifact
    from pretrain.errors import ConfigError
    from pretrain.report.attention_text import Request, see_attention

    if out is None and not as_json:
        raise ConfigError("nothing to show", fix="give --out x.png, or --json")
    request = Request(text, target, kind, layer, head, out)
    facts = see_attention(open_artifact(what, device), request)
    print(
        json.dumps(facts, indent=2) if as_json else f"{out}: {len(facts['heads'])} map{'s'[: len(facts['heads']) != 1]}"
    )


def main() -> None:
    """Runs the command line and exits."""
    exit_code = run(sys.argv[1:])
    if "torch" in sys.modules:
        from pretrain.dist import leave

        leave(exit_code)
    sys.exit(exit_code)


def run(arguments: list[str]) -> int:
    """Runs one command; returns its exit code. Errors are printed here and nowhere else."""
    rank = _own_rank()
    try:
        result = app(arguments, prog_name="pretrain", standalone_mode=False)
        return result if isinstance(result, int) else EXIT_OK
    except _UsageError as error:
        return _show_usage(error)
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except PretrainError as error:
        _show(error, rank)
        return error.exit_code
    except Exception as error:
        return _show_unexpected(error, rank)


def _own_rank() -> int:
    text = os.environ.get("RANK", "")
    return int(text) if text.isdecimal() else 0


def _show_usage(error: Any) -> int:
    """Prints what is wrong with the command line; it is empty where nothing was given, and the help was printed."""
    text = error.format_message()
    if text:
        command = error.ctx.command_path if error.ctx else "pretrain"
        print(f"error: {command}: {text.rstrip('.')}; see `{command} --help`", file=sys.stderr)
    return EXIT_USAGE


def _show(error: PretrainError, rank: int) -> None:
    from pretrain.errors import ConfigError
    from pretrain.log import redact

    if os.environ.get("PRETRAIN_DEBUG"):
        import traceback

        traceback.print_exc()
    # Every rank reads the same config; one line about it is enough.
    if rank == 0 or not isinstance(error, ConfigError):
        place = f"rank {rank}: " if rank else ""
        for line in str(error).splitlines():
            print(redact(f"error: {place}{line}"), file=sys.stderr)


def _show_unexpected(error: Exception, rank: int) -> int:
    """A lost peer is one line, anything else a traceback: it is our bug."""
    import traceback

    from pretrain.errors import EXIT_UNAVAILABLE
    from pretrain.log import redact

    text = str(error)
    if "torch" in sys.modules and _is_lost_peer(error):
        first = text.splitlines()[0] if text else type(error).__name__
        print(redact(f"error: rank {rank} lost its peers: {first}"), file=sys.stderr)
        return EXIT_UNAVAILABLE
    print(redact(traceback.format_exc()), file=sys.stderr)
    print(f"error: rank {rank}: this is a bug in pretrain ({type(error).__name__})", file=sys.stderr)
    return EXIT_BUG


def _is_lost_peer(error: Exception) -> bool:
    import torch.distributed as td

    return isinstance(error, td.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error).lower())
