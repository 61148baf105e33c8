"""`pretrain data show`: rows of a shard folder or of a run's data, as the model will see them.

what, options  ->  RunConfig (data_setup.py)  ->  rows of its data  ->  those of its objective, in words (data_rows.py)

train          ->  the samples from a position of the run on, whatever source they come from
validation     ->  the rows of one source from a number on, in their fixed order
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from pretrain.config.data import DataConfig
from pretrain.config.run import RunConfig
from pretrain.data.source_streams import SOURCE_BITS, SourceStreams, open_windows, source_of
from pretrain.datacheck.setup import ReadingOptions, find_config_of, folder_config, open_data
from pretrain.datacheck.shown_rows import ShownDocument, ShownRow, describe_rows
from pretrain.datacheck.sides import SidePart, Stretch
from pretrain.errors import ConfigError, DataError
from pretrain.resolve import context_of_run, fit_config
from pretrain.rows import PairRows, TokenRows
from pretrain.shards.dataset import Dataset
from pretrain.shards.index import INDEX_NAME
from pretrain.shards.store import ShardStore
from pretrain.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text


@dataclass(frozen=True, slots=True)
class RowsReport:
    """Rows, and what is to be known of all of them.

    Attributes:
        name: Of what was opened.
        split: They are of this.
        objectives: Kinds of the run's.
        first: Position of the first.
        sources: Name of the source of each row; empty where there is only one.
        numbers: Number of each sample within its source.
        rows: In words.
        document_mask: Documents do not see each other.
    """

    name: str
    split: str
    objectives: tuple[str, ...]
    first: int
    sources: tuple[str, ...]
    numbers: tuple[int, ...]
    rows: tuple[ShownRow, ...]
    document_mask: bool

    def facts(self) -> dict[str, Any]:
        """Returns all as JSON has it."""
        rows = [
            {"position": self.first + place, "source": self.sources[place] if self.sources else None, **asdict(row)}
            for place, row in enumerate(self.rows)
        ]
        return {"kind": "rows", "path": self.name, "split": self.split, "rows": rows}


def show(what: str, overrides: Sequence[str], choice: ReadingOptions) -> RowsReport:
    """Reads rows, and makes of them what the objective makes.

    Args:
        what: A shard folder, a run's config, or a run.
        overrides: `a.b=c`, laid over a config.
        choice: Which rows, and how they are made.

    Raises:
        ConfigError: Options that do not go together, or the tokenizer lacks a token that the objective needs.
        DataError: A shard is missing or damaged.
    """
    config = find_config_of(what, overrides, choice)
    with open_data(DataConfig(path=what) if config is None else config.data) as (dataset, stores):
        config = fit_config(config or folder_config(what, dataset, choice), dataset)
        context, tokenizer = context_of_run(config, dataset), load_tokenizer(dataset.tokenizer_path)
        rows = _read_rows(dataset, stores, config, choice)
        shown = describe_rows(rows, config.objective, context, tokenizer, dataset.index.labels)
    numbers = (rows.target if isinstance(rows, PairRows) else rows).sample_ids
    names: tuple[str, ...] = ()
    if config.data.mixture and choice.split == "train":
        names = tuple(dataset.sources[number].name for number in source_of(numbers).tolist())
        numbers = numbers & ((1 << (63 - SOURCE_BITS)) - 1)
    return RowsReport(
        name=what,
        split=choice.split,
        objectives=tuple(task.kind for task in config.objective.tasks),
        first=choice.position,
        sources=names,
        numbers=tuple(numbers.tolist()),
        rows=tuple(shown),
        document_mask=config.data.document_mask,
    )


def _read_rows(
    dataset: Dataset, stores: Sequence[ShardStore], config: RunConfig, choice: ReadingOptions
) -> TokenRows | PairRows:
    positions, batch_rows = range(choice.position, choice.position + choice.rows), config.batch.rows
    if choice.split == "train":
        return SourceStreams(dataset, stores, config.data, config.lengths, batch_rows, config.seed).read(positions)
    held = {
        source.name: (source.index, store)
        for source, store in zip(dataset.sources, stores, strict=True)
        if "validation" in source.index.splits
    }
    if not held:
        raise DataError("there is no split 'validation'", where=INDEX_NAME, fix="show --split train")
    name = choice.source or next(iter(held))
    if name not in held:
        raise ConfigError(
            f"{name!r} is no source with a validation split", where="--source", fix=f"use {', '.join(held)}"
        )
    windows = open_windows(*held[name], config.data, config.lengths, batch_rows)
    end = windows.num_windows()
    if choice.position >= end:
        raise ConfigError(f"there is no row {choice.position}, the split has {end}", fix="lower --position")
    return windows.read_windows(range(choice.position, min(positions.stop, end)))


# Rows on a terminal: documents in alternating colours with a rule at their left; in a pipe the same
# words, plain.
#
#     position 0   sample 17 of wiki   causal   512 tokens: 3 documents, 20 padding   489 targets
#     1          tokens 0-119, positions 0-119, began in an earlier row
#                | text ...
#     2          tokens 120-491, positions 0-371
#        learned | text ...
#                | the {quick -> [MASK]} fox {jumps} over the {lazy -> pear} dog
#                  20 tokens of padding
#
# Whatever colour says, words or braces say too. Control characters are escaped: text of the web can
# hold what a terminal obeys.


COLOURS = ("cyan", "magenta")

"""Of documents in turn: legible on black and on white."""

STYLES = {"learned": "bold", "target": "bold", "context": "italic", "prefix": "italic"}

"""Laid over the document's colour, by kind of stretch."""

IN_TEXT = ("text", "masked", "replaced", "kept", "labelled")

"""Kinds that follow each other in a line; others have lines of their own, and their name beside them."""

TRUTH, STANDS = "bold green", "red"

"""Of a hidden or labelled token, and of what the model reads in its place or says of it."""

LEGENDS = {
    "masked": "{truth -> what stands there}: predicted; {truth}: predicted, and left as it is",
    "classify": "{first token: label of the document}",
    "tag": "{first token: label of its word}",
}

"""What braces mean, by objective."""

LABEL_COLUMNS = 13

LEAST_COLUMNS = 20

"""Text is not wrapped into less."""

INDENT = " " * (LABEL_COLUMNS + 3)


def print_rows(shown: RowsReport, console: "Console") -> None:
    """Prints rows; in colour and wrapped where the console is a terminal."""
    from rich.text import Text

    if not shown.document_mask:
        console.print(Text("documents see each other: data.document_mask is off", style="bold"), soft_wrap=True)
    for objective in shown.objectives:
        if objective in LEGENDS:
            console.print(Text(LEGENDS[objective], style="bold"), soft_wrap=True)
    for place, row in enumerate(shown.rows):
        if place:
            console.print()
        console.print(Text(_headline(shown, place, row), style="bold reverse"), soft_wrap=True)
        for words in _facts(row):
            console.print(Text(INDENT + words, style="dim"), soft_wrap=True)
        for number, document in enumerate(row.documents):
            for line in _document_lines(row, number, document, console):
                console.print(line, soft_wrap=True)
        for words in _end(row):
            console.print(Text(INDENT + words, style="dim"), soft_wrap=True)


def _headline(shown: RowsReport, place: int, row: ShownRow) -> str:
    source = f" of {shown.sources[place]}" if shown.sources else ""
    what = "position" if shown.split == "train" else "row"
    tokens = f"{row.num_tokens:,} tokens"
    if row.num_source_tokens is not None:
        tokens = f"source {row.num_source_tokens:,} and target {row.num_tokens:,} tokens"
    padding = row.num_padding + (row.num_source_padding or 0)
    return (
        f"{what} {shown.first + place:,}   sample {shown.numbers[place]:,}{source}   {row.objective}   {tokens}: "
        f"{_count(len(row.documents), 'document')}, {padding:,} padding   {_count(row.num_targets, 'target')}"
    )


def _facts(row: ShownRow) -> Iterator[str]:
    if row.denoiser is not None:
        yield f"denoiser {row.denoiser}"
    if row.starts_with is not None and row.documents:
        yield f"the decoder reads {_printable(row.starts_with)} before each target"


def _end(row: ShownRow) -> Iterator[str]:
    if row.beyond is not None:
        yield f"the last token predicts {_printable(row.beyond)!r}"
    is_pair = row.num_source_padding is not None
    for place, count in (
        (" in the source row", row.num_source_padding),
        (" in the target row" if is_pair else "", row.num_padding),
    ):
        if count:
            yield f"{_count(count, 'token')} of padding{place}"


def _document_lines(row: ShownRow, number: int, document: ShownDocument, console: "Console") -> Iterator["Text"]:
    from rich.text import Text

    colour = COLOURS[number % len(COLOURS)]
    facts = []
    for name, part in (("source ", document.source), ("target ", document.target)):
        if part is not None:
            side = name if row.num_source_tokens is not None else ""
            places = _range("token", part.first, part.num_tokens)
            facts.append(f"{side}{places}, {_range('position', part.position, part.num_tokens)}")
    if number == 0 and row.starts_inside:
        facts.append("began in an earlier row")
    if document.goes_on:
        facts.append("goes on after this row")
    for place, line in enumerate(_fit(Text("; ".join(facts), style="dim"), console)):
        yield Text.assemble((f"{'' if place else number + 1:<{len(INDENT)}}", f"bold {colour}"), line)
    for part in (document.source, document.target):
        if part is not None:
            yield from _part_lines(part, colour, console)


def _part_lines(part: SidePart, colour: str, console: "Console") -> Iterator["Text"]:
    from rich.text import Text

    rule = "\u2502" if console.is_terminal else "|"
    for label, stretches in groupby(part.stretches, lambda stretch: "" if stretch.kind in IN_TEXT else stretch.kind):
        flow = _flow(list(stretches), f"{STYLES.get(label, '')} {colour}".strip())
        for place, line in enumerate(_fit(flow, console)):
            yield Text.assemble((f"{label if not place else '':>{LABEL_COLUMNS}} {rule} ", colour), line)


def _fit(text: "Text", console: "Console") -> list["Text"]:
    """Returns the lines of a text, as wide as there is room on a terminal."""
    lines = list(text.split("\n"))
    if not console.is_terminal:
        return lines
    room = max(console.width - len(INDENT), LEAST_COLUMNS)
    return [part for line in lines for part in line.wrap(console, room)]


def _flow(stretches: Sequence[Stretch], style: str) -> "Text":
    """Returns stretches one after another; what is predicted of a text in braces."""
    from rich.text import Text

    flow = Text()
    for stretch in stretches:
        if stretch.kind not in IN_TEXT or stretch.kind == "text":
            _append(flow, stretch, style)
            continue
        text = _printable(stretch.text)
        word = text.lstrip() or text  # the space before a word is no part of what is said of it
        flow.append(text.removesuffix(word), style=style)
        flow.append("{", style="dim")
        flow.append(word, style=TRUTH if stretch.label is None else style)
        if stretch.stands is not None:
            flow.append(" -> ", style="dim")
            flow.append(_printable(stretch.stands), style=STANDS)
        if stretch.label is not None:
            flow.append(": ", style="dim")
            flow.append(_printable(stretch.label), style=STANDS)
        flow.append("}", style="dim")
    return flow


def _append(flow: "Text", stretch: Stretch, style: str) -> None:
    end = 0
    for low, high in stretch.special:
        flow.append(_printable(stretch.text[end:low]), style=style)
        flow.append(_printable(stretch.text[low:high]), style=f"{style} reverse")
        end = high
    flow.append(_printable(stretch.text[end:]), style=style)


def _range(what: str, first: int, count: int) -> str:
    return f"{what} {first}" if count == 1 else f"{what}s {first}-{first + count - 1}"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s'[: number != 1]}"


def _printable(text: str) -> str:
    """Returns a text without what a terminal would obey; line ends stay."""
    return "".join(c if c == "\n" or c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
