"""Picture of attention maps, with tokens as labels: visible white space, in the fonts at hand."""

import functools
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from pretrain.attention_maps.figure_layout import Box, FigureLayout, Labels, SectionSize, font_points, plan_layout
from pretrain.attention_maps.maps import HeadMap
from pretrain.generation.constraints import Codec
from pretrain.tracking.picture_files import check_format, encode_figure, plain_style
from pretrain.utils.io import make_dir, write_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.figure import Figure
    from matplotlib.path import Path as Outline

SPACE = "\u2423"  # the open box, which makes a space visible
SENTENCEPIECE_SPACE = "\u2581"  # a space in the pieces of sentencepiece
ELLIPSIS = "\u2026"
LONGEST_COLUMNS = 12
FONTS = (
    "DejaVu Sans Mono", "Noto Sans Mono", "Noto Sans Mono CJK SC", "Noto Sans Mono CJK JP",
    "Noto Sans CJK SC", "Noto Sans CJK JP", "WenQuanYi Micro Hei Mono", "WenQuanYi Zen Hei Mono",
    "Droid Sans Fallback", "IPAexGothic", "IPAGothic", "MS Gothic", "Hiragino Sans",
    "Arial Unicode MS", "DejaVu Sans", "Noto Sans", "Noto Sans Arabic", "Noto Sans Hebrew",
    "Noto Sans Devanagari", "Noto Sans Thai", "FreeSans", "Unifont",
)  # fmt: skip
"""Tried in this order for each character; the first and `DejaVu Sans` come with matplotlib."""
REPLACEMENT = "\ufffd"  # the decoded form of bytes that are not whole characters
MOST_PARTS = 8  # tokens of a character: it has at most four bytes, but a token may overlap two


def spell_tokens(codec: Codec, ids: Sequence[int]) -> list[str]:
    """Returns the text of each token; parts of a cut character as it with `[1/3]`, `[2/3]` ...

    Tokenizers of bytes cut the characters of a script that they were not trained on.
    """
    shown = codec.tokens(list(ids))
    start = 0
    while start < len(ids):
        ends = range(start + 1, min(start + MOST_PARTS, len(ids)) + 1)
        # Tokens to be decoded together; one alone where nothing completes them.
        whole = (end for end in ends if REPLACEMENT not in codec.decode(list(ids[start:end])))
        end = next(whole, start + 1)
        if end - start > 1:
            text = codec.decode(list(ids[start:end]))
            text = text if len(text) <= 3 else text[:2] + ELLIPSIS
            num_parts = end - start
            shown[start:end] = [f"{text}[{part}/{num_parts}]" for part in range(1, num_parts + 1)]
        start = end
    return shown


@functools.cache
def label_fonts() -> list[str]:
    """Returns the `FONTS` that this machine has."""
    from matplotlib import font_manager

    installed = {font.name for font in font_manager.fontManager.ttflist}
    return [name for name in FONTS if name in installed]


@functools.cache
def _drawable_code_points() -> frozenset[int]:
    from matplotlib import font_manager

    code_points: set[int] = set()
    for name in label_fonts():
        font = font_manager.FontProperties(family=[name])
        path = font_manager.findfont(font, fallback_to_default=False)
        code_points |= font_manager.get_font(path).get_charmap().keys()
    return frozenset(code_points)


def is_drawable(character: str) -> bool:
    """Returns whether some font of this machine has the character."""
    return ord(character) in _drawable_code_points()


def columns(text: str) -> int:
    """Returns the columns of a text in a monospaced font: two for a wide character of East Asia."""
    bases = [c for c in text if not unicodedata.combining(c)]
    return len(bases) + sum(unicodedata.east_asian_width(c) in "WF" for c in bases)


def label(token: str, drawable: Callable[[str], bool] = is_drawable) -> str:
    r"""Returns the label of a token.

    Spaces, sentencepiece's too, become open boxes; other white space, control characters and those
    of no font become escapes (`\n`, `\u0e01`); more than `LONGEST_COLUMNS` columns are cut.
    """
    if not token:
        return '""'
    shown = [_visible(character, drawable) for character in token]
    if columns("".join(shown)) <= LONGEST_COLUMNS:
        return "".join(shown)
    is_room = (columns(text) < LONGEST_COLUMNS for text in accumulate(shown))
    return "".join(piece for piece, fits in zip(shown, is_room, strict=True) if fits) + ELLIPSIS


def _visible(character: str, drawable: Callable[[str], bool]) -> str:
    if character in (" ", SENTENCEPIECE_SPACE):
        return SPACE
    category = unicodedata.category(character)
    is_blank = character.isspace() or category in ("Cc", "Cf", "Zl", "Zp", "Zs")
    if is_blank or not drawable(character):
        return character.encode("unicode_escape").decode("ascii")
    return character


# A picture of attention maps: small multiples, layers down and heads across, or one large map.
#
# White is a weight of 0 and the darkest blue 1; cells that the mask forbids are grey and hatched,
# unlike a weight that the model has learnt to be 0. Not here: sizes and places (figure_layout.py).

DPI = 150
COLOURS = ("#ffffff", "#c6e6f1", "#93cce5", "#62b0da", "#3693cc", "#0f75b9", "#0458a1", "#1d3b7f", "#242155")
"""White to dark blue in equal steps of CIELAB lightness: equal lengths of the bar look equal."""
FORBIDDEN_FACE = "#e4e4e4"
MAX_NUMBERED_TOKENS = 16  # a side of a single map that has its weights written in its cells


@dataclass(frozen=True, slots=True)
class FigureSection:
    """Rows of maps over the same tokens."""

    heading: str
    legend: str
    rows: list[list[HeadMap]]  # the heads of each layer
    queries: list[str]  # labels of the rows of a map
    keys: list[str]  # labels of its columns

    @property
    def shape(self) -> SectionSize:
        """Size of the section."""
        return SectionSize(
            rows=len(self.rows),
            columns=max(map(len, self.rows)),
            queries=len(self.queries),
            keys=len(self.keys),
            query_columns=max(map(columns, self.queries)),
            key_columns=max(map(columns, self.keys)),
        )


def build_sections(rows: Sequence[list[HeadMap]], tokens: dict[str, list[str]]) -> list[FigureSection]:
    """Groups rows of `choose_heads` by stack and kind; `tokens` has the ones of each stack."""
    sections = []
    for (stack, kind), group in groupby(rows, key=lambda row: (row[0].stack, row[0].kind)):
        queries = keys = list(map(label, tokens[stack]))
        heading = f"{stack} self-attention"
        legend = "a row: what one token attends to"
        if kind == "cross":
            keys = list(map(label, tokens["encoder"]))
            heading = "cross-attention"
            legend = "a row: what one target token attends to in the source"
        sections.append(FigureSection(heading, legend, list(group), queries, keys))
    return sections


def draw_attention(sections: Sequence[FigureSection], path: Path) -> None:
    """Draws maps and writes the picture; the suffix is the format. Raises: ConfigError, DiskError."""
    content = render_attention(sections, check_format(path))
    make_dir(path.parent)
    write_file(path, content)


def render_attention(sections: Sequence[FigureSection], image_format: str) -> bytes:
    """Returns the picture of maps in a format. Raises: ConfigError: More tokens than can be read."""
    layout = plan_layout([section.shape for section in sections])
    with plain_style():
        return encode_figure(draw_figure(sections, layout), image_format)


def draw_figure(sections: Sequence[FigureSection], layout: FigureLayout) -> "Figure":
    """Returns the picture, a figure outside of pyplot: without a display, and kept by nothing."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(layout.width, layout.height), dpi=DPI)
    for number, section in enumerate(sections):
        _draw_section(figure, layout, number, section)
    axes = _add_axes(figure, layout, layout.colour_bar())
    bar = figure.colorbar(_colours(), cax=axes, ticks=[0, 0.01, 0.1, 0.25, 0.5, 1])
    bar.ax.set_title("weight", fontsize=7.5)
    bar.ax.tick_params(labelsize=7, length=2)
    return figure


def _add_axes(figure: "Figure", layout: FigureLayout, box: Box) -> "Axes":
    left = box.left / layout.width
    bottom = 1 - (box.top + box.height) / layout.height
    return figure.add_axes((left, bottom, box.width / layout.width, box.height / layout.height))


def _draw_section(figure: "Figure", layout: FigureLayout, number: int, section: FigureSection) -> None:
    x = layout.left / layout.width
    top = layout.heading(number)
    bold: dict[str, Any] = {"fontsize": 10, "fontweight": "bold", "va": "top"}
    small: dict[str, Any] = {"fontsize": 8, "color": "#606060", "va": "top"}
    figure.text(x, 1 - top / layout.height, section.heading, **bold)
    figure.text(x, 1 - (top + 0.2) / layout.height, section.legend, **small)
    is_single = sum(map(len, section.rows)) == 1
    for row, heads in enumerate(section.rows):
        for column, head in enumerate(heads):
            axes = _add_axes(figure, layout, layout.panel(number, row, column))
            _draw_map(axes, head)
            _label_axes(axes, section, layout.cell, layout.labels(number, row, column))
            if is_single and max(head.weights_TS.shape) <= MAX_NUMBERED_TOKENS:
                _write_weights(axes, head)


def _draw_map(axes: "Axes", head: HeadMap) -> None:
    """Draws the cells of one head, what is forbidden, and thin lines between the cells."""
    from matplotlib.patches import PathPatch

    num_queries, num_keys = head.weights_TS.shape
    colours = _colours()
    scale: dict[str, Any] = {"cmap": colours.cmap, "norm": colours.norm}
    axes.imshow(head.weights_TS.numpy(), interpolation="nearest", aspect="auto", **scale)
    forbidden = _outline(~head.allowed_TS)
    if forbidden is not None:
        hatched: dict[str, Any] = {"linewidth": 0, "hatch": "////", "edgecolor": "#c4c4c4"}
        axes.add_patch(PathPatch(forbidden, facecolor=FORBIDDEN_FACE, **hatched))
    thin: dict[str, Any] = {"color": "#e9e9e9", "linewidth": 0.4}
    axes.vlines([key - 0.5 for key in range(1, num_keys)], -0.5, num_queries - 0.5, **thin)
    axes.hlines([query - 0.5 for query in range(1, num_queries)], -0.5, num_keys - 0.5, **thin)
    for spine in axes.spines.values():
        spine.set(color="#808080", linewidth=0.5)
    axes.set_title(f"layer {head.layer} head {head.head}", fontsize=7.5, pad=3)


def _outline(forbidden_TS: Tensor) -> "Outline | None":
    """Returns the runs of forbidden cells of each row as one path, which is hatched as a whole."""
    from matplotlib.path import Path as Outline
    from matplotlib.transforms import Affine2D

    rectangles = []
    for query, row in enumerate(forbidden_TS.tolist()):
        start = 0
        for is_forbidden, run in groupby(row):
            end = start + len(list(run))
            if is_forbidden:
                place = Affine2D().scale(end - start, 1).translate(start - 0.5, query - 0.5)
                rectangles.append(Outline.unit_rectangle().transformed(place))
            start = end
    return Outline.make_compound_path(*rectangles) if rectangles else None


def _colours() -> "ScalarMappable":
    """Returns the colours of weights from 0 to 1."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, PowerNorm

    colours = LinearSegmentedColormap.from_list("attention", COLOURS)
    # The square root of a weight: of sixty equal ones, each 0.017, all are visible.
    return ScalarMappable(PowerNorm(0.5, vmin=0, vmax=1), colours)


def _write_weights(axes: "Axes", head: HeadMap) -> None:
    """Writes the weights in their cells, those that are not 0.00."""
    for query, row in enumerate(head.weights_TS.tolist()):
        for key, weight in enumerate(row):
            text = f"{weight:.2f}".removeprefix("0")
            if text != ".00":
                colour = "white" if weight > 0.25 else "black"
                axes.text(key, query, text, size=8, color=colour, ha="center", va="center")


def _label_axes(axes: "Axes", section: FigureSection, cell: float, labels: Labels) -> None:
    style: dict[str, Any] = {"fontsize": font_points(cell), "fontfamily": label_fonts()}
    style["parse_math"] = False
    axes.set_yticks(range(len(section.queries)), section.queries, **style)
    axes.set_xticks(range(len(section.keys)), section.keys, rotation=90, **style)
    axes.tick_params(labelleft=labels.left, labeltop=labels.top, labelbottom=labels.bottom)
    axes.tick_params(length=0, pad=2)
