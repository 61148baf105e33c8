"""`pretrain prepare`: text, or the tokens of another system, to token shards."""

from pathlib import Path
from typing import Annotated, Any

import typer

from pretrain.cli.options import Json, UsageError


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
    max_document_bytes: Annotated[int | None, typer.Option(help="Maximum size of a text. Default: 64 MiB.")] = None,
    split: Annotated[
        str | None, typer.Option(help="hash:F by document (default hash:0.01), or tail:F of each.")
    ] = None,
    processes: Annotated[int | None, typer.Option(min=1, help="Worker processes. Default: one a core.")] = None,
    part: Annotated[str, typer.Option(metavar="I/N", help="This machine's share of the parts, from 1/N.")] = "1/1",
    system: Annotated[
        str | None, typer.Option("--from", help="Convert tokens of megatron, nanogpt, olmo or mds.")
    ] = None,
) -> None:
    """Train a tokenizer and write token shards (webdataset tars with an index), by a config or by options.

    Example: pretrain prepare --input 'corpus/*.jsonl.gz' --output data/corpus --vocab-size 32000
    """
    from pretrain.config.load import load_prepare, short_prepare
    from pretrain.prepare.prepare import run_prepare
    from pretrain.utils.log import setup_logging
    from pretrain.utils.process import discard_refused_stdout

    discard_refused_stdout()  # the result is on the disk
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
        raise UsageError("Missing option '--output'", context)
    else:
        # A shell expands an unquoted glob: `--input a.txt b.txt` is meant as it reads.
        config = short_prepare(inputs=[*(input or ()), *words], **given)
    print(run_prepare(config, part, processes))


def _convert(
    system: str, output: Path | None, inputs: list[str], tokenizer: str | None, split: str | None, processes: int | None
) -> str:
    """Re-shards the tokens of another system; returns what to say of it."""
    from pretrain.prepare.convert.convert_job import ConvertOptions
    from pretrain.prepare.prepare import run_convert

    if output is None or tokenizer is None or not inputs:
        raise typer.BadParameter("--from needs --input, --output and --tokenizer, the one that made the tokens")
    options = ConvertOptions(
        output=output, kind=system, source=tuple(inputs), tokenizer=tokenizer, split=split or "auto"
    )
    return run_convert(options, processes)


# The commands of `pretrain data`: verify, show, stats.


data_app = typer.Typer(
    help="Inspect and verify shard folders.\n\nExample: pretrain data verify data/quickstart",
    no_args_is_help=True,
)

Folder = Annotated[str, typer.Argument(metavar="DIR", help="Folder that `pretrain prepare` wrote, or its address.")]

SeqLen = Annotated[int, typer.Option(min=1, help="Tokens per row.")]

SourceLen = Annotated[int | None, typer.Option(min=1, help="Pairs: tokens per source row. Default: --seq-len.")]

Packing = Annotated[str | None, typer.Option(help="concat, bins or padded. Default: concat for text, else bins.")]

Lanes = Annotated[int, typer.Option(min=1, help="Lanes of the order, like data.lanes.")]

BlockSamples = Annotated[int, typer.Option(min=1, help="Samples of a block, like data.block_samples.")]

Seed = Annotated[int, typer.Option(min=0, help="Seed of the sample order.")]


@data_app.command("verify")
def verify_command(
    folder: Folder,
    seq_len: SeqLen = 1024,
    source_len: SourceLen = None,
    packing: Packing = None,
    lanes: Lanes = 64,
    block_samples: BlockSamples = 2048,
    seed: Seed = 1234,
    world_sizes: Annotated[str, typer.Option(help="Numbers of ranks to read with.")] = "1,2,3,4",
    restarts: Annotated[int, typer.Option(min=0, help="Kills in each reading.")] = 3,
    max_samples: Annotated[int | None, typer.Option(min=1, help="Read the first N samples only. Default: all.")] = None,
    as_json: Json = False,
) -> None:
    """Check every byte of a shard folder, and that a stream reads each sample exactly once, whatever the ranks.

    Example: pretrain data verify data/quickstart --seq-len 256
    """
    import json

    from pretrain.datacheck.progress_bar import show_progress
    from pretrain.datacheck.reading import Order
    from pretrain.datacheck.verify import parse_world_sizes, print_proof, proof_facts, verify

    order = Order(seq_len, source_len, packing, lanes, block_samples, seed)
    sizes = parse_world_sizes(world_sizes)
    with show_progress() as start_phase:
        proof = verify(
            folder, order, world_sizes=sizes, restarts=restarts, max_samples=max_samples, start_phase=start_phase
        )
    if as_json:
        print(json.dumps(proof_facts(proof), indent=2))
    else:
        print_proof(proof)


@data_app.command("show")
def show_command(
    what: Annotated[str, typer.Argument(metavar="DIR|CONFIG|RUN", help="A shard folder, a run's config, or a run.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[A.B=C]...", help="Overrides of a config.")] = None,
    position: Annotated[int, typer.Option(min=0, help="Index of the first sample to show.")] = 0,
    rows: Annotated[int, typer.Option(min=1, help="Rows to show.")] = 2,
    split: Annotated[str, typer.Option(help="Split: train or validation.")] = "train",
    objective: Annotated[
        str | None,
        typer.Option(help="Objective for a folder: masked, span, prefix, ul2, fim, ... Default: by its kind."),
    ] = None,
    source: Annotated[str | None, typer.Option(help="Source of a mixture for validation. Default: the first.")] = None,
    seq_len: Annotated[int | None, typer.Option(min=1, help="Tokens per row. Default: the config's, or 512.")] = None,
    source_len: SourceLen = None,
    packing: Packing = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Seed of order and corruption. Default: the config's, or 1234.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Print rows as the model will see them: documents and padding, what is hidden, source and target, what is learned.

    Example: pretrain data show configs/run/quickstart.yaml --position 100 --rows 1
    """
    import json

    from pretrain.datacheck.show import ReadingOptions, print_rows, show

    choice = ReadingOptions(position, rows, split, source, objective, seq_len, source_len, packing, seed)
    shown = show(what, overrides or [], choice)
    if as_json:
        print(json.dumps(shown.facts(), indent=2))
        return
    from rich.console import Console

    print_rows(shown, Console(highlight=False))


@data_app.command("stats")
def stats_command(
    folder: Folder,
    out: Annotated[Path | None, typer.Option(help="Picture to write: .png, .svg or .pdf.")] = None,
    as_json: Json = False,
) -> None:
    """Count a shard folder: documents and their lengths, tokens, shards, and how full rows would be.

    Example: pretrain data stats data/quickstart --out lengths.png
    """
    import json

    from pretrain.datacheck.progress_bar import show_progress
    from pretrain.datacheck.stats import count_data
    from pretrain.datacheck.stats_text import draw_stats, print_stats, stats_facts
    from pretrain.tracking.picture_files import check_format

    if out is not None:
        check_format(out)
    with show_progress() as start_phase:
        stats = count_data(folder, start_phase)
    if out is not None:
        draw_stats(stats, out)
    if as_json:
        print(json.dumps(stats_facts(stats), indent=2))
    else:
        print_stats(stats)
