"""Rows on a terminal: documents in alternating colours with a rule at their left; in a pipe the same words, plain.

    position 0   sample 17 of wiki   causal   512 tokens: 3 documents, 20 padding   489 targets
    1          tokens 0-119, positions 0-119, began in an earlier row
               | text ...
    2          tokens 120-491, positions 0-371
       learned | text ...
               | the {quick -> [MASK]} fox {jumps} over the {lazy -> pear} dog
                 20 tokens of padding

Whatever colour says, words or braces say too. Control characters are escaped: text of the web can hold what a terminal
obeys.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from pretrain.datacheck.rows import ShownDocument, ShownRow
from pretrain.datacheck.show import Shown
from pretrain.datacheck.sides import Part, Stretch

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

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


def print_rows(shown: Shown, console: "Console") -> None:
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


def _headline(shown: Shown, place: int, row: ShownRow) -> str:
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


def _part_lines(part: Part, colour: str, console: "Console") -> Iterator["Text"]:
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
