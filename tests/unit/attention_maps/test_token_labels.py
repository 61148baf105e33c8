"""Tokens as labels."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretrain.artifact.plain_codec import PlainCodec
from pretrain.attention_maps.figure import LONGEST_COLUMNS, columns, is_drawable, label, label_fonts, spell_tokens
from tests.helpers.tokenizers import train_bpe

BYTES = PlainCodec(train_bpe(["the cat the cat " * 3], 270))


@pytest.mark.parametrize(
    ("token", "shown"),
    [
        ("the", "the"),
        (" the", "\u2423the"),
        ("\u2581the", "\u2423the"),
        ("  ", "\u2423\u2423"),
        ("\n", "\\n"),
        ("\t\r", "\\t\\r"),
        ("", '""'),
        ("a\u00a0b", "a\\xa0b"),
        ("\u200b", "\\u200b"),
        ("\x00", "\\x00"),
        ("</s>", "</s>"),
        ("$x_1$", "$x_1$"),
        ("\u043f\u0440\u0438\u0432\u0435\u0442", "\u043f\u0440\u0438\u0432\u0435\u0442"),
        ("internationalization", "internation\u2026"),
        ("exactly12cha", "exactly12cha"),
        ("\u65e5\u672c\u8a9e\u65e5\u672c\u8a9e", "\u65e5\u672c\u8a9e\u65e5\u672c\u8a9e"),
        ("\u65e5\u672c\u8a9e\u65e5\u672c\u8a9e\u65e5", "\u65e5\u672c\u8a9e\u65e5\u672c\u2026"),
    ],
)
def test_label_of_a_token(token, shown):
    assert label(token, lambda character: True) == shown


def test_what_no_font_has_is_written_by_its_code_point():
    assert label("a\u65e5b", lambda character: character.isascii()) == "a\\u65e5b"
    assert label("\U0001f600", lambda character: character.isascii()) == "\\U0001f600"


@given(st.text(max_size=30))
def test_labels_are_short_and_visible(token):
    shown = label(token, str.isascii)
    assert 1 <= columns(shown) <= LONGEST_COLUMNS
    assert not any(character.isspace() for character in shown)


def test_the_fonts_that_come_with_matplotlib_cover_much():
    assert {"DejaVu Sans Mono", "DejaVu Sans"} <= set(label_fonts())
    samples = "a\u2423\u2026\u00e9\u0416\u03a9\u05d0\u0628\u0561\u10d0\u2211"
    assert all(map(is_drawable, samples))
    assert not is_drawable("\U0010fffd")


def test_parts_of_a_character_are_spelt_as_it():
    ids = BYTES.encode("the \u0436\u65e5cat")
    assert spell_tokens(BYTES, ids) == [
        *("the", " ", "\u0436[1/2]", "\u0436[2/2]"),
        *("\u65e5[1/3]", "\u65e5[2/3]", "\u65e5[3/3]", "cat"),
    ]


def test_a_part_without_its_rest_and_a_real_replacement_character_stay_as_they_are():
    ids = BYTES.encode("\u0436")[:1]
    assert spell_tokens(BYTES, [*ids, *BYTES.encode("a")]) == ["\ufffd", "a"]
    assert "".join(spell_tokens(BYTES, BYTES.encode("a\ufffdb"))).startswith("a")


def test_whole_tokens_are_what_the_codec_says():
    ids = BYTES.encode("the cat\n")
    assert spell_tokens(BYTES, ids) == BYTES.tokens(ids)
    assert spell_tokens(BYTES, []) == []
