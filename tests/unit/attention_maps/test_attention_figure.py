"""Pictures of attention maps: what is drawn, in which colours, in which formats."""

import io
from itertools import pairwise

import numpy as np
import pytest
import torch

from pretrain.attention_maps.figure import (
    COLOURS,
    FORBIDDEN_FACE,
    build_sections,
    check_format,
    draw_attention,
    draw_figure,
)
from pretrain.attention_maps.figure_layout import plan_layout
from pretrain.attention_maps.maps import AttentionMap, choose_heads
from pretrain.errors import ConfigError, DiskError

SOURCE = ["\u2581The", "\u2581house", ".", "</s>"]
TARGET = ["<pad>", "\u2581La", "\u2581casa", "\u2581internazionale", "."]


def attention_map(stack="decoder", kind="self", layer=0, *, heads=2, queries=5, keys=5, causal=True):
    generator = torch.Generator().manual_seed(layer)
    allowed_TS = torch.ones(queries, keys, dtype=torch.bool)
    if causal:
        allowed_TS = allowed_TS.tril()
    scores_NTS = 3 * torch.randn(heads, queries, keys, generator=generator)
    weights_NTS = scores_NTS.masked_fill(~allowed_TS, -torch.inf).softmax(dim=-1)
    return AttentionMap(stack, kind, layer, weights_NTS, allowed_TS)


def sections(maps, kind=None, layers=None, heads=None):
    return build_sections(choose_heads(maps, kind, layers, heads), {"encoder": SOURCE, "decoder": TARGET})


def two_stacks():
    encoder = attention_map("encoder", queries=4, keys=4, causal=False)
    return [encoder, attention_map(), attention_map(kind="cross", keys=4, causal=False)]


def figure_of(built):
    return draw_figure(built, plan_layout([section.shape for section in built]))


def titles(figure):
    return [axes.get_title() for axes in figure.axes]


def shown(labels):
    return [text.get_text() for text in labels]


def pixels(figure):
    from matplotlib import image

    content = io.BytesIO()
    figure.savefig(content, format="png")
    content.seek(0)
    return (255 * image.imread(content)[..., :3]).round().astype(int)


def cell_pixels(figure, axes, query, key):
    """The colours of the middle of a cell, where no line runs."""
    picture = pixels(figure)
    (left, top), (right, bottom) = axes.transData.transform([(key - 0.3, query - 0.3), (key + 0.3, query + 0.3)])
    height = len(picture)
    return picture[round(height - top) : round(height - bottom), round(left) : round(right)].reshape(-1, 3)


def lightness(colour):
    """CIELAB L* of a colour like #0458a1."""
    values = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    red, green, blue = (v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values)
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return 116 * luminance ** (1 / 3) - 16


def test_colours_go_from_white_to_dark_in_equal_steps_of_lightness():
    steps = [a - b for a, b in pairwise(map(lightness, COLOURS))]
    assert COLOURS[0] == "#ffffff"
    # 8 bits a channel are worth about 0.3 of lightness.
    assert steps == pytest.approx([84 / 8] * 8, abs=0.4)


def test_a_grid_has_a_panel_a_head_and_one_colour_bar():
    figure = figure_of(sections([attention_map(layer=0), attention_map(layer=1)]))
    assert titles(figure) == ["layer 0 head 0", "layer 0 head 1", "layer 1 head 0", "layer 1 head 1", "weight"]


def test_only_the_outer_panels_of_a_grid_are_labelled():
    figure = figure_of(sections([attention_map(layer=0), attention_map(layer=1)]))
    figure.canvas.draw()
    left = [axes.yaxis.get_major_ticks()[0].label1.get_visible() for axes in figure.axes[:4]]
    below = [axes.xaxis.get_major_ticks()[0].label1.get_visible() for axes in figure.axes[:4]]
    assert left == [True, False, True, False]
    assert below == [False, False, True, True]


def test_tokens_stand_on_both_axes_targets_down_and_sources_across():
    figure = figure_of(sections(two_stacks(), heads=[1]))
    axes = figure.axes[0]
    assert axes.get_title() == "layer 0 head 1"
    assert shown(axes.get_yticklabels()) == ["<pad>", "\u2423La", "\u2423casa", "\u2423internazio\u2026", "."]
    assert shown(axes.get_xticklabels()) == ["\u2423The", "\u2423house", ".", "</s>"]
    assert figure.texts[0].get_text() == "cross-attention"


def test_both_stacks_are_drawn_below_each_other_with_their_own_tokens():
    figure = figure_of(sections(two_stacks(), "self"))
    assert [text.get_text() for text in figure.texts][::2] == ["encoder self-attention", "decoder self-attention"]
    assert [len(axes.get_yticks()) for axes in figure.axes[:4]] == [4, 4, 5, 5]


def test_one_small_map_has_its_weights_written_and_a_grid_has_not():
    maps = [attention_map()]
    (axes, _) = figure_of(sections(maps, heads=[0])).axes
    expected = [f"{weight:.2f}" for weight in maps[0].weights_NTS[0].flatten().tolist() if weight >= 0.005]
    assert [f"{float(text.get_text()):.2f}" for text in axes.texts] == expected
    assert [len(axes.texts) for axes in figure_of(sections(maps)).axes] == [0, 0, 0]


def test_a_weight_of_zero_is_white_and_what_is_forbidden_is_not():
    weights_NTS = torch.tensor([[[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]])
    allowed_TS = torch.ones(3, 3, dtype=torch.bool).tril()
    maps = [AttentionMap("decoder", "self", 0, weights_NTS, allowed_TS)]
    built = build_sections(choose_heads(maps, None, None, None), {"decoder": list("abc")})
    figure = figure_of(built)
    axes = figure.axes[0]
    assert (cell_pixels(figure, axes, 2, 0) == 255).all()
    forbidden = cell_pixels(figure, axes, 0, 2)
    face = [int(FORBIDDEN_FACE[i : i + 2], 16) for i in (1, 3, 5)]
    assert (forbidden.max(axis=0) == face).all()
    assert (forbidden.min(axis=0) < face).all(), "no hatch"


def test_a_mathematical_token_is_not_typeset():
    maps = [attention_map(queries=2, keys=2)]
    figure = figure_of(build_sections(choose_heads(maps, None, None, None), {"decoder": ["$x_1$", "$\\frac$"]}))
    figure.canvas.draw()
    assert shown(figure.axes[0].get_yticklabels()) == ["$x_1$", "$\\frac$"]


@pytest.mark.parametrize(("name", "start"), [("x.png", b"\x89PNG"), ("x.SVG", b"<?xml"), ("x.pdf", b"%PDF")])
def test_the_suffix_is_the_format_and_the_same_maps_give_the_same_bytes(tmp_path, name, start):
    built = sections([attention_map()])
    for folder in ("a", "b"):
        draw_attention(built, tmp_path / folder / name)
    first, second = ((tmp_path / folder / name).read_bytes() for folder in ("a", "b"))
    assert first.startswith(start)
    assert first == second


@pytest.mark.parametrize("name", ["x.jpg", "x", "x.npy"])
def test_another_suffix_is_refused_before_anything_is_drawn(tmp_path, name):
    with pytest.raises(ConfigError, match=r"^--output x.*: no picture format is called '.*'; use \.png, \.svg, \.pdf$"):
        check_format(tmp_path / name)


def test_a_picture_that_cannot_be_written_leaves_nothing(tmp_path):
    (tmp_path / "x.png").mkdir()
    with pytest.raises(DiskError, match="cannot write"):
        draw_attention(sections([attention_map()]), tmp_path / "x.png")
    assert [path.name for path in tmp_path.iterdir()] == ["x.png"]


def test_the_users_settings_of_matplotlib_are_neither_used_nor_changed(tmp_path):
    import matplotlib

    built = sections([attention_map()])
    draw_attention(built, tmp_path / "plain.png")
    with matplotlib.rc_context({"axes.facecolor": "black", "font.size": 30, "figure.facecolor": "red"}):
        draw_attention(built, tmp_path / "styled.png")
        assert matplotlib.rcParams["font.size"] == 30
    assert (tmp_path / "plain.png").read_bytes() == (tmp_path / "styled.png").read_bytes()


def test_what_is_drawn_is_not_empty():
    assert np.ptp(pixels(figure_of(sections(two_stacks())))) == 255
