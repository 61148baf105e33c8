"""Rows on a terminal: documents in alternating colours with a rule at their left; in a pipe the same words, plain.

    position 0   sample 17 of wiki   512 tokens: 3 documents, 20 padding   489 targets
    1          tokens 0-119, positions 0-119, began in an earlier row
               | text ...
    2          tokens 120-491, positions 0-371
       learned | text ...
                 20 tokens of padding

Control characters are escaped: text of the web can hold what a terminal obeys.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pretrain.report.data_rows import ShownDocument, ShownRow, Stretch
from pretrain.report.data_show import Shown

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

COLOURS = ("cyan", "magenta")
"""Of documents in turn: legible on black and on white."""

STYLES = {"learned": "bold", "context": "dim", "source": "italic", "target": "", "text": ""}
"""Laid over the document's colour, by kind of stretch."""

LABEL_COLUMNS = 8
LEAST_COLUMNS = 20
"""Text is not wrapped into less."""


def print_rows(shown: Shown, console: "Console") -> None:
    """Prints rows; in colour and wrapped where the console is a terminal."""
    from rich.text import Text

    if not shown.document_mask:
        console.print(Text("documents see each other: data.document_mask is off", style="bold yellow"), soft_wrap=True)
    for place, row in enumerate(shown.rows):
        if place:
            console.print()
        console.print(Text(_headline(shown, place, row), style="bold reverse"), soft_wrap=True)
        for number, document in enumerate(row.documents):
            for line in _document_lines(row, number, document, shown.special_tokens, console):
                console.print(line, soft_wrap=True)
        for words in _padding_lines(row):
            console.print(Text(words, style="dim"), soft_wrap=True)


def _headline(shown: Shown, place: int, row: ShownRow) -> str:
    source = f" of {shown.sources[place]}" if shown.sources else ""
    what = "position" if shown.split == "train" else "row"
    documents = len(row.documents)
    return (
        f"{what} {shown.first + place:,}   sample {shown.numbers[place]:,}{source}   {row.num_tokens:,} tokens: "
        f"{documents} document{'s'[: documents != 1]}, {row.num_padding:,} padding   {row.num_targets:,} targets"
    )


def _padding_lines(row: ShownRow) -> Iterator[str]:
    is_pair = row.source_padding is not None
    for place, count in (
        (" in the target row" if is_pair else "", row.num_padding),
        (" in the source row", row.source_padding),
    ):
        if count:
            yield f"{'':{LABEL_COLUMNS + 3}}{count:,} token{'s'[: count != 1]} of padding{place}"


def _document_lines(
    row: ShownRow, number: int, document: ShownDocument, special_tokens: Sequence[str], console: "Console"
) -> Iterator["Text"]:
    from rich.text import Text

    colour = COLOURS[number % len(COLOURS)]
    last = document.first + document.num_tokens - 1
    facts = [
        f"tokens {document.first}-{last}",
        f"positions {document.position}-{document.position + document.num_tokens - 1}",
    ]
    if number == 0 and row.starts_inside:
        facts.append("began in an earlier row")
    if document.goes_on:
        facts.append("goes on after this row")
    yield Text.assemble((f"{number + 1:<{LABEL_COLUMNS + 3}}", f"bold {colour}"), (", ".join(facts), "dim"))
    for stretch in document.stretches:
        yield from _stretch_lines(stretch, colour, special_tokens, console)


def _stretch_lines(
    stretch: Stretch, colour: str, special_tokens: Sequence[str], console: "Console"
) -> Iterator["Text"]:
    from rich.text import Text

    style = f"{STYLES[stretch.kind]} {colour}".strip()
    text = Text(_printable(stretch.text), style=style)
    if special_tokens:
        text.highlight_words(special_tokens, "reverse")
    lines = text.split("\n")
    if console.is_terminal:
        room = max(console.width - LABEL_COLUMNS - 3, LEAST_COLUMNS)
        lines = type(lines)(part for line in lines for part in line.wrap(console, room))
    label = "" if stretch.kind == "text" else stretch.kind
    rule = "\u2502" if console.is_terminal else "|"
    for place, line in enumerate(lines):
        gutter = f"{label if not place else '':>{LABEL_COLUMNS}} {rule} "
        yield Text.assemble((gutter, colour), line)


def _printable(text: str) -> str:
    """Returns a text without what a terminal would obey; line ends stay."""
    return "".join(c if c == "\n" or c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
