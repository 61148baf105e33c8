"""Pieces of HTML: cells, tables, folds. Every text of a run is escaped here: it may hold anything."""

from collections.abc import Collection, Sequence
from html import escape
from typing import Any

MAX_ROWS = 200
"""Rows of a table; of more, an even choice, and the table says so."""
MAX_OPEN_ROWS = 12
LONG_CHARACTERS = 48
"""Cells of more break into lines."""


class Html(str):
    """Text that is HTML already."""


def cell(value: Any) -> str:
    """Returns a cell with an escaped value; None is an empty one."""
    numeric = isinstance(value, int | float) and not isinstance(value, bool)
    text = "" if value is None else figure(value) if numeric else str(value)
    kind = " class=number" if numeric else " class=long" if len(text) > LONG_CHARACTERS else ""
    return f"<td{kind}>{escape(text)}</td>"


def figure(value: float) -> str:
    """Returns a number with five significant digits."""
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if 1e5 <= abs(value) < 1e15 else f"{value:.5g}"


def table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Returns a table that scrolls where it is too wide. A value of type Html is a cell already."""
    cells = [[_as_cell(value) for value in row] for row in rows]
    numeric = [any(row[place].startswith("<td class=number") for row in cells) for place in range(len(heads))]
    head = "".join(
        f"<th{' class=number' if is_numeric else ''}>{escape(text)}</th>"
        for text, is_numeric in zip(heads, numeric, strict=True)
    )
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in cells)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _as_cell(value: Any) -> str:
    return value if isinstance(value, Html) else cell(value)


def swatch(color: str, dash: str = "solid") -> str:
    """Returns a short piece of line in a colour and a line style of CSS."""
    return f'<i class="swatch" style="border-top-style: {dash}; border-color: {escape(color)}"></i>'


def without_empty(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> tuple[list[str], list[list[Any]]]:
    """Returns heads and rows without the columns that hold None only."""
    shown = [place for place in range(len(heads)) if any(row[place] is not None for row in rows)]
    return [heads[place] for place in shown], [[row[place] for place in shown] for row in rows]


def pick(total: int, most: int, keep: Collection[int] = ()) -> list[int]:
    """Returns up to `most` places, evenly from first to last, and those of `keep` beside them."""
    if total <= most:
        return list(range(total))
    return sorted({round(number * (total - 1) / (most - 1)) for number in range(most)} | set(keep))


def folded(heads: Sequence[str], rows: Sequence[Sequence[Any]], keep: Collection[int] = ()) -> str:
    """Returns a table of a few rows, among them those at `keep`, and all of them behind a fold where there are more."""
    if len(rows) <= MAX_OPEN_ROWS:
        return table(heads, rows)
    few = table(heads, [rows[place] for place in pick(len(rows), MAX_OPEN_ROWS, keep)])
    all_places = pick(len(rows), MAX_ROWS, keep)
    words = f"all {len(rows):,} rows" if len(all_places) == len(rows) else f"{len(all_places)} of {len(rows):,} rows"
    return few + fold(words, table(heads, [rows[place] for place in all_places]))


def fold(title: str, content: str, is_open: bool = False) -> str:
    """Returns HTML behind a title that opens it."""
    return f"<details{' open' if is_open else ''}><summary>{escape(title)}</summary>{content}</details>"


def section(title: str, *content: str) -> str:
    """Returns a section with a heading; nothing where all content, which is HTML, is empty."""
    return f"<section><h2>{escape(title)}</h2>{''.join(content)}</section>" if any(content) else ""
