"""Layout of a picture of attention maps, in inches; pure arithmetic.

    section   heading
              title  title  title        a panel a head, a row a layer; cells: a row a query
              labels panel  panel  panel
                     labels labels labels
    section   ...                        the colour bar is right of the first row

Labels are left of and below a row of panels, or beside every panel if these are large.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from pretrain.errors import ConfigError

MAX_SIDE = 36.0  # of a picture
MIN_CELL = 0.085  # labels of 5 points can just be read
MAX_CELL = 0.4
MAX_TOKENS = 400  # of a picture of one map
# Sides that are aimed at; many tokens make them larger.
OVERVIEW_PANEL = 1.8  # a panel among others
SINGLE_PANEL = 6.0
OVERVIEW = 14.0  # all panels together
MIN_COLUMN = 1.0  # room of a title over a narrow panel
MIN_WIDTH = 3.8  # room of a heading over few panels
HEADING = 0.5
TITLE = 0.22
GAP = 0.12
EDGE = 0.12
BAR = 0.9
LARGE_PANEL = 4  # times as wide and as high as its labels
TOP_LABELS_ROWS = 3  # from which on keys are labelled above the first row too


@dataclass(frozen=True, slots=True)
class SectionSize:
    """The size of a section, in panels, cells and characters."""

    rows: int  # layers
    columns: int  # heads
    queries: int  # T
    keys: int  # S
    query_columns: int  # width of the longest label of a query, in columns of a monospaced font
    key_columns: int  # width of the longest label of a key


class Box(NamedTuple):
    """A rectangle, its origin the upper left corner of the picture."""

    left: float
    top: float
    width: float
    height: float


class Labels(NamedTuple):
    """Sides of a panel that have tokens."""

    left: bool
    top: bool
    bottom: bool


def font_points(cell: float) -> float:
    """Returns the font size of labels beside cells of this side."""
    return min(9.0, 59 * cell)


@dataclass(frozen=True, slots=True)
class FigureLayout:
    """A picture of sections below each other, with cells of one size."""

    shapes: tuple[SectionSize, ...]
    cell: float

    def has_large_panels(self, shape: SectionSize) -> bool:
        """Returns whether every panel of a section has labels of its own."""
        wide = shape.keys * self.cell >= LARGE_PANEL * self._label_width(shape.query_columns)
        return wide and shape.queries * self.cell >= LARGE_PANEL * self._label_width(shape.key_columns)

    def _label_width(self, columns: int) -> float:
        # A character of DejaVu Sans Mono is 0.602 em wide; an em of p points is p / 72 inches.
        # One more for the gap.
        return (columns + 1) * 0.602 * font_points(self.cell) / 72

    @property
    def left(self) -> float:
        """Left edge of the panels."""
        return EDGE + max(self._label_width(shape.query_columns) for shape in self.shapes)

    def _column_width(self, shape: SectionSize) -> float:
        return max(shape.keys * self.cell, MIN_COLUMN)

    def _column_pitch(self, shape: SectionSize) -> float:
        own_labels = self._label_width(shape.query_columns) if self.has_large_panels(shape) else 0.0
        return self._column_width(shape) + GAP + own_labels

    def _right(self, shape: SectionSize) -> float:
        before = (shape.columns - 1) * self._column_pitch(shape)
        return self.left + before + self._column_width(shape)

    def _row_pitch(self, shape: SectionSize) -> float:
        own_labels = self._label_width(shape.key_columns) if self.has_large_panels(shape) else 0.0
        return TITLE + shape.queries * self.cell + GAP + own_labels

    def labels(self, section: int, row: int, column: int) -> Labels:
        """Returns the labelled sides of a panel."""
        shape = self.shapes[section]
        if self.has_large_panels(shape):
            return Labels(left=True, top=False, bottom=True)
        top = row == 0 and shape.rows >= TOP_LABELS_ROWS
        return Labels(left=column == 0, top=top, bottom=row == shape.rows - 1)

    def _section_height(self, shape: SectionSize) -> float:
        height = HEADING + shape.rows * self._row_pitch(shape)
        if self.has_large_panels(shape):  # their labels are in the pitch
            return height
        num_labels = 2 if shape.rows >= TOP_LABELS_ROWS else 1
        return height + num_labels * self._label_width(shape.key_columns)

    @property
    def width(self) -> float:
        """Width of the picture."""
        return max(*map(self._right, self.shapes), MIN_WIDTH - BAR) + BAR

    @property
    def height(self) -> float:
        """Height of the picture."""
        bar = self.colour_bar()
        return EDGE + max(EDGE + sum(map(self._section_height, self.shapes)), bar.top + bar.height + EDGE)

    @property
    def fits(self) -> bool:
        """Returns whether the picture is within the bounds."""
        return max(self.width, self.height) <= MAX_SIDE

    def heading(self, section: int) -> float:
        """Returns the upper edge of a section and of its heading."""
        return EDGE + sum(map(self._section_height, self.shapes[:section]))

    def panel(self, section: int, row: int, column: int) -> Box:
        """Returns the place of a map."""
        shape = self.shapes[section]
        top = self.heading(section) + HEADING + row * self._row_pitch(shape) + TITLE
        if self.labels(section, 0, 0).top:
            top += self._label_width(shape.key_columns)
        left = self.left + column * self._column_pitch(shape)
        return Box(left, top, shape.keys * self.cell, shape.queries * self.cell)

    def colour_bar(self) -> Box:
        """Returns the place of the colour bar."""
        first = self.panel(0, 0, 0)
        return Box(self._right(self.shapes[0]) + 0.25, first.top, 0.14, max(1.0, min(3.0, first.height)))


def plan_layout(shapes: Sequence[SectionSize]) -> FigureLayout:
    """Returns a layout with cells as large as the bounds allow. Raises: ConfigError: None is readable."""
    is_single = len(shapes) == 1 and shapes[0].rows == shapes[0].columns == 1
    num_tokens = max(max(shape.queries, shape.keys) for shape in shapes)
    most_panels = max(max(shape.rows, shape.columns) for shape in shapes)
    panel = SINGLE_PANEL if is_single else max(MIN_COLUMN, min(OVERVIEW_PANEL, OVERVIEW / most_panels))
    wanted = min(MAX_CELL, panel / num_tokens)
    step = 0.005
    for number in range(max(0, int((wanted - MIN_CELL) / step)), -1, -1):
        layout = FigureLayout(tuple(shapes), MIN_CELL + step * number)
        if layout.fits:
            return layout
    maps = " and ".join(f"{shape.rows} x {shape.columns}" for shape in shapes)
    for most in range(num_tokens - 1, 0, -1):
        cut = (replace(s, queries=min(s.queries, most), keys=min(s.keys, most)) for s in shapes)
        if FigureLayout(tuple(cut), MIN_CELL).fits:
            raise ConfigError(
                f"{num_tokens} tokens cannot be read in one picture of {maps} maps, at most {most} can",
                fix="shorten the text, or choose fewer maps with --layer and --head",
            )
    raise ConfigError(f"{maps} maps do not fit in one picture", fix="choose fewer with --layer and --head")
