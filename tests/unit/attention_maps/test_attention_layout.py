"""Sizes and places: nothing overlaps, nothing leaves the picture, and what cannot be read is refused."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretrain.attention_maps.figure_layout import MAX_SIDE, MAX_TOKENS, MIN_CELL, SectionSize, font_points, plan_layout
from pretrain.errors import ConfigError

LONGEST = 12

shapes = st.builds(
    SectionSize,
    rows=st.integers(1, 6),
    columns=st.integers(1, 8),
    queries=st.integers(1, 20),
    keys=st.integers(1, 20),
    query_columns=st.integers(1, LONGEST),
    key_columns=st.integers(1, LONGEST),
)


def square(rows, columns, tokens):
    return SectionSize(rows, columns, tokens, tokens, LONGEST, LONGEST)


def panels(layout):
    for section, shape in enumerate(layout.shapes):
        for row in range(shape.rows):
            for column in range(shape.columns):
                yield layout.panel(section, row, column)


def overlap(a, b):
    apart_x = a.left + a.width <= b.left or b.left + b.width <= a.left
    apart_y = a.top + a.height <= b.top or b.top + b.height <= a.top
    return not (apart_x or apart_y)


@given(st.lists(shapes, min_size=1, max_size=2))
def test_panels_and_colour_bar_lie_within_the_picture_and_apart(sizes):
    layout = plan_layout(sizes)
    boxes = [*panels(layout), layout.colour_bar()]
    assert layout.fits
    assert all(not overlap(a, b) for a, b in combinations(boxes, 2))
    for box in boxes:
        assert box.left > 0 and box.top > 0
        assert box.left + box.width < layout.width and box.top + box.height < layout.height


@given(shapes)
def test_labels_have_room_left_of_and_below_their_panel(shape):
    layout = plan_layout([shape])
    character = 0.602 * font_points(layout.cell) / 72
    for row in range(shape.rows):
        for column in range(shape.columns):
            labels, box = layout.labels(0, row, column), layout.panel(0, row, column)
            assert labels.left == (column == 0 or layout.has_large_panels(shape))
            if labels.left:
                before = 0.0 if column == 0 else sum(layout.panel(0, row, column - 1)[::2])
                assert box.left - before > shape.query_columns * character
            if labels.bottom:
                below = layout.height if row == shape.rows - 1 else layout.panel(0, row + 1, column).top
                assert below - box.top - box.height > shape.key_columns * character


@pytest.mark.parametrize("tokens", [1, 12, 60, 100])
def test_every_panel_of_many_tokens_is_labelled_and_few_tokens_are_labelled_at_the_edges(tokens):
    layout = plan_layout([square(2, 2, tokens)])
    assert layout.labels(0, 0, 1).left == (tokens >= 60)


def test_more_tokens_make_a_larger_picture_and_labels_stay_readable():
    layouts = [plan_layout([square(4, 4, tokens)]) for tokens in (12, 24, 48, 80)]
    assert all(fewer.width < more.width and fewer.height < more.height for fewer, more in pairwise(layouts))
    assert all(font_points(layout.cell) >= 5 for layout in layouts)


def test_one_map_is_larger_than_one_of_many():
    assert plan_layout([square(1, 1, 12)]).cell > 2 * plan_layout([square(4, 4, 12)]).cell


def test_one_map_takes_the_most_tokens():
    assert plan_layout([square(1, 1, MAX_TOKENS)]).width <= MAX_SIDE


def test_too_many_tokens_are_refused_with_the_number_that_fits():
    pattern = r"^300 tokens cannot be read in one picture of 12 x 12 maps, at most (\d+) can; shorten the text, or"
    with pytest.raises(ConfigError, match=pattern) as error:
        plan_layout([square(12, 12, 300)])
    most = int(str(error.value).split("at most ")[1].split()[0])
    assert plan_layout([square(12, 12, most)]).cell == pytest.approx(MIN_CELL)
    with pytest.raises(ConfigError, match=f"at most {most} can"):
        plan_layout([square(12, 12, most + 1)])


def test_too_many_maps_are_refused():
    with pytest.raises(ConfigError, match=r"^100 x 96 maps do not fit in one picture; choose fewer with --layer"):
        plan_layout([square(100, 96, 5)])
