"""`pretrain prepare`: text, or the tokens of another system, to token shards."""

from pathlib import Path
from typing import Annotated, Any

import typer

from pretrain.cli.options import UsageError


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
    from pretrain.prepare.prepare_command import run_prepare
    from pretrain.utils.log import setup_logging
    from pretrain.utils.streams import discard_refused_stdout

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
    from pretrain.prepare.convert.job import ConvertOptions
    from pretrain.prepare.prepare_command import run_convert

    if output is None or tokenizer is None or not inputs:
        raise typer.BadParameter("--from needs --input, --output and --tokenizer, the one that made the tokens")
    options = ConvertOptions(
        output=output, kind=system, source=tuple(inputs), tokenizer=tokenizer, split=split or "auto"
    )
    return run_convert(options, processes)
