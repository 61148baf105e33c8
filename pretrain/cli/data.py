"""`pretrain prepare`: text, or the tokens of another system, to token shards."""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from pretrain.cli.completion import complete_config, complete_prepare
from pretrain.cli.options import CommandGroup, Json, Overrides, UsageError, console, count_from, print_json


def prepare_command(
    context: typer.Context,
    arguments: Annotated[
        list[str] | None,
        Argument(
            metavar="[CONFIG [A.B=C]...]",
            help="A YAML file, or a name of `pretrain recipes`, and overrides of it.",
            autocompletion=complete_prepare,
        ),
    ] = None,
    output: Annotated[Path | None, Option(help="Folder to write.")] = None,
    input: Annotated[list[str] | None, Option(help="Files, folders, globs, URLs. None: Python's library.")] = None,
    kind: Annotated[str | None, Option(help="text (default) or images; others by CONFIG.")] = None,
    tokenizer: Annotated[str | None, Option(help="bpe, wordpiece, unigram, char, or a file.")] = None,
    vocab_size: Annotated[int | None, Option(parser=count_from(0), help="Its size. Default: 8192.")] = None,
    text_field: Annotated[str | None, Option(help="Field of a record that holds the text.")] = None,
    max_document_bytes: Annotated[int | None, Option(parser=count_from(0), help="Limit of a text: 64 MiB.")] = None,
    on_error: Annotated[str | None, Option(help="Bad records and files: stop (default), skip.")] = None,
    max_skipped_share: Annotated[float | None, Option(help="Limit of these. Default: 0.01.")] = None,
    undecodable: Annotated[str | None, Option(hidden=True)] = None,
    split: Annotated[str | None, Option(help="hash:F (default hash:0.01), or tail:F of each.")] = None,
    processes: Annotated[int | None, Option(min=1, help="Workers. Default: one a core.")] = None,
    part: Annotated[str, Option(metavar="I/N", help="Share of this machine, from 1/N.")] = "1/1",
    system: Annotated[str | None, Option("--from", help="Tokens of megatron, nanogpt, olmo, mds; webdataset.")] = None,
    dtype: Annotated[str | None, Option(help="With --from: type of tokens, where files lack it.")] = None,
) -> None:
    """Train a tokenizer and write token shards, webdataset tars with an index, by a config or options.

    Example: pretrain prepare --input 'corpus/*.jsonl.gz' --output data/corpus --vocab-size 32000
    """
    from pretrain.config.load import load_section, short_prepare
    from pretrain.config.prepare import PrepareConfig
    from pretrain.preparation.prepare import run_prepare
    from pretrain.utils.log import setup_logging
    from pretrain.utils.process import discard_refused_stdout

    discard_refused_stdout()  # the result is on the disk
    setup_logging(rank=0, world_size=1)
    words = arguments or []
    inputs = [*(input or ()), *words]
    named = {
        "output": output,
        "kind": kind,
        "tokenizer": tokenizer,
        "vocab_size": vocab_size,
        "text_field": text_field,
        "max_document_bytes": max_document_bytes,
        "on_error": on_error,
        "max_skipped_share": max_skipped_share,
        "split": split,
    }
    options: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
    if system == "webdataset":  # tars are read as they are, not converted
        options = {"kind": "images", "format": system} | options
        if output is None or not inputs:
            raise typer.BadParameter("--from webdataset needs --input and --output")
    elif system is not None:
        _refuse_with_from(options, part)
        _convert(system, output, inputs, tokenizer, split, dtype, processes)
        return
    else:
        _refuse_without_from(undecodable, dtype)
    if words and (output is None or words[0].endswith((".yaml", ".yml"))):
        _refuse_with_config(words[0], named | {"input": next(iter(input or ()), None)})
        config = load_section(PrepareConfig, words[0], words[1:])
    elif output is None:
        raise UsageError("Missing option '--output'", context)
    else:
        # A shell expands an unquoted glob: `--input a.txt b.txt` is meant as it reads.
        config = short_prepare(inputs=inputs, **options)
    print(run_prepare(config, part, processes))


def _convert(
    system: str,
    output: Path | None,
    inputs: list[str],
    tokenizer: str | None,
    split: str | None,
    dtype: str | None,
    processes: int | None,
) -> None:
    from pretrain.preparation.convert.convert_part import ConvertOptions
    from pretrain.preparation.prepare import run_convert

    if output is None or tokenizer is None or not inputs:
        raise typer.BadParameter("--from needs --input, --output and --tokenizer, the one that made the tokens")
    print(run_convert(ConvertOptions(output, system, tuple(inputs), tokenizer, split, dtype), processes))


def _refuse_without_from(undecodable: str | None, dtype: str | None) -> None:
    if undecodable is not None:
        raise typer.BadParameter(f"--undecodable is now --on-error: write --on-error {undecodable}")
    if dtype is not None:
        raise typer.BadParameter("--dtype goes with --from: leave it out")


def _refuse_with_config(config: str, given: dict[str, Any]) -> None:
    """Refuses options that a config has keys for."""
    from pretrain.config.load import PREPARE_OPTIONS

    for key, option in PREPARE_OPTIONS.items():
        name = option.removeprefix("--").replace("-", "_")
        if given[name] is not None:
            raise typer.BadParameter(f"{option} does not go with CONFIG {config}: write {key}={given[name]}")


def _refuse_with_from(given: dict[str, Any], part: str) -> None:
    """Refuses options that a conversion of tokens does not have."""
    unused = given.keys() - {"output", "tokenizer", "split"}
    if part != "1/1":
        unused.add("part")
    if unused:
        option = min(unused).replace("_", "-")
        raise typer.BadParameter(f"--{option} does not go with --from: leave it out")


data_app = CommandGroup("Inspect and verify shard folders.\n\nExample: pretrain data verify data/quickstart")

Folder = Annotated[str, Argument(metavar="DIR", help="Folder or address of prepared data.")]
# Options of the order of samples, which several commands have.
SeqLen = Annotated[int, Option(min=1, help="Tokens per row.")]
SourceLen = Annotated[int | None, Option(min=1, help="Tokens per source row. Default: --seq-len.")]
Packing = Annotated[str | None, Option(help="concat (default for text), bins (else) or padded.")]
Lanes = Annotated[int, Option(min=1, help="Lanes of the order, like data.lanes.")]
BlockSamples = Annotated[int, Option(min=1, help="Samples of a block, like data.block_samples.")]
Seed = Annotated[int, Option(min=0, help="Seed of the sample order.")]


@data_app.command("verify")
def verify_command(
    folder: Folder,
    seq_len: SeqLen = 1024,
    source_len: SourceLen = None,
    packing: Packing = None,
    lanes: Lanes = 64,
    block_samples: BlockSamples = 2048,
    seed: Seed = 1234,
    world_sizes: Annotated[str, Option(help="Numbers of ranks to read with.")] = "1,2,3,4",
    restarts: Annotated[int, Option(min=0, help="Kills in each reading.")] = 3,
    max_samples: Annotated[int | None, Option(parser=count_from(1), help="Samples to read. Default: all.")] = None,
    decode: Annotated[bool, Option("--decode", help="Decode every image too.")] = False,
    as_json: Json = False,
) -> None:
    """Check every byte of shards, and that any number of ranks reads each sample exactly once.

    Example: pretrain data verify data/quickstart --seq-len 256
    """
    from pretrain.datacheck.reading import Order
    from pretrain.datacheck.verify import parse_world_sizes, print_proof, verify

    order = Order(seq_len, source_len, packing, lanes, block_samples, seed)
    sizes = parse_world_sizes(world_sizes)
    proof = verify(folder, order, world_sizes=sizes, restarts=restarts, max_samples=max_samples, decode=decode)
    if as_json:
        print_json(proof)
    else:
        print_proof(proof)


@data_app.command("show")
def show_command(
    what: Annotated[
        str, Argument(metavar="DIR|CONFIG|RUN", help="Shards, a config, or a run.", autocompletion=complete_config)
    ],
    overrides: Overrides = None,
    position: Annotated[int, Option(min=0, help="Index of the first sample to show.")] = 0,
    rows: Annotated[int | None, Option(min=1, help="Rows to show. Default: 2, of images 32.")] = None,
    split: Annotated[str, Option(help="Split: train or validation.")] = "train",
    objective: Annotated[
        str | None,
        Option(help="For a folder: masked, span, prefix, ul2, fim, ... Default: by its kind."),
    ] = None,
    source: Annotated[str | None, Option(help="Source of a mixture. Default: the first.")] = None,
    seq_len: Annotated[int | None, Option(min=1, help="Default: the config's, or 512.")] = None,
    source_len: SourceLen = None,
    packing: Packing = None,
    seed: Annotated[int | None, Option(min=0, help="Seed of the rows. Default: the config's, or 1234.")] = None,
    out: Annotated[Path | None, Option("--output", help="Contact sheet to write, a .png: of images only.")] = None,
    as_json: Json = False,
) -> None:
    """Print rows as the model sees them: documents, padding, hidden tokens, loss; of images, draw them.

    Example: pretrain data show configs/run/quickstart.yaml --position 100 --rows 1
    """
    from pretrain.datacheck.image_data import ImagesReport
    from pretrain.datacheck.show import ReadingOptions, print_rows, show

    place = (position, rows, split, source)
    choice = ReadingOptions(*place, objective, seq_len, source_len, packing, seed)
    shown = show(what, overrides or [], choice)
    if isinstance(shown, ImagesReport):
        if out is None and not as_json:
            raise typer.BadParameter("images are shown as a picture: give --output SHEET.png")
        line = "" if out is None else shown.write(out)
        if as_json:
            print_json(shown.facts())
        else:
            print(line)
        return
    if out is not None:
        raise typer.BadParameter("--output is a picture of images, and the data are text: leave it out")
    if as_json:
        print_json(shown.facts())
        return
    print_rows(shown, console())


@data_app.command("stats")
def stats_command(
    folder: Folder,
    out: Annotated[Path | None, Option("--output", help="Picture to write: .png, .svg or .pdf.")] = None,
    as_json: Json = False,
) -> None:
    """Count a shard folder: documents and their lengths, tokens, shards, and the filling of rows.

    Example: pretrain data stats data/quickstart --output lengths.png
    """
    from pretrain.datacheck.image_data import print_image_stats
    from pretrain.datacheck.stats import count_data
    from pretrain.datacheck.stats_text import draw_stats, print_stats
    from pretrain.kinds.layouts import LAYOUTS
    from pretrain.tracking.picture_files import check_format

    if out is not None:
        check_format(out)
    stats = count_data(folder)
    of_images = LAYOUTS[stats["data_kind"]].images
    if out is not None and of_images:
        raise typer.BadParameter("--output is of texts; images are drawn by pretrain data show")
    if out is not None:
        draw_stats(stats, out)
    if as_json:
        print_json(stats)
    elif of_images:
        print_image_stats(stats)
    else:
        print_stats(stats)


@data_app.command("dialogue")
def dialogue_command(
    folder: Annotated[Path, Argument(metavar="FOLDER", help="Folder to write.")],
    conversations: Annotated[int, Option(parser=count_from(1), help="Number of conversations.")] = 100_000,
    seed: Annotated[int, Option(min=0, help="Seed of all that is drawn.")] = 0,
) -> None:
    """Write texts, conversations, and held-out questions, from documentation that this machine has.

    Example: pretrain data dialogue data/chat --conversations 10000
    """
    from pretrain.preparation.dialogue.dialogue_files import write_dialogue

    print("\n".join(write_dialogue(folder, conversations, seed)))
