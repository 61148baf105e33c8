"""Text of tokens as they come."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain.generation.text import Detokenizer, text_after
from tests.unit.generation.codecs import TEXTS, byte_codec, sentencepiece_codec

CODECS = {"bytes": byte_codec(), "sentencepiece": sentencepiece_codec()}
RARE = "\U00010348"
"""Four bytes in UTF-8, and a token for each."""


def pieces_of(codec, ids, context=()):
    text = Detokenizer(codec, context)
    return [*(text.add(number) for number in ids), text.rest()]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("codec", CODECS)
def test_pieces_are_the_text_and_none_is_broken(codec, text):
    codec = CODECS[codec]
    ids = codec.encode(text)
    befores = [codec.decode(ids[:split]) for split in range(len(ids))]
    whole = [split for split, before in enumerate(befores) if "\ufffd" not in before]
    assert len(whole) > 5
    for split in whole:
        pieces = pieces_of(codec, ids[split:], ids[:split])
        assert befores[split] + "".join(pieces) == text
        assert "\ufffd" not in "".join(pieces)
        # It comes as early as it can: with every token but those that end within a character or add nothing.
        assert sum(bool(piece) for piece in pieces) == len({befores[place] for place in whole if place >= split})


@pytest.mark.parametrize("codec", CODECS)
def test_a_character_of_several_tokens_comes_whole_with_its_last(codec):
    codec = CODECS[codec]
    before, ids = codec.encode("a"), codec.encode(f"a{RARE}b")
    pieces = pieces_of(codec, ids[len(before) :], before)
    assert len(ids) == len(before) + 5
    assert pieces == ["", "", "", RARE, "b", ""]


def test_a_character_that_never_becomes_whole_is_given_out_at_the_end():
    codec = CODECS["bytes"]
    ids = codec.encode(f"a{RARE}")[:-1]
    assert pieces_of(codec, ids) == ["a", "", "", "", "\ufffd"]
    assert pieces_of(codec, []) == [""]


def test_broken_bytes_within_a_text_are_given_out_with_what_follows():
    codec = CODECS["bytes"]
    ids = [*codec.encode(RARE)[:2], *codec.encode("bc")]
    assert pieces_of(codec, ids) == ["", "", "\ufffdb", "c", ""]


@settings(max_examples=200)
@given(st.lists(st.integers(0, CODECS["bytes"].vocab_size - 1), max_size=12), st.integers(0, 4))
def test_pieces_of_any_ids_are_what_they_add_to_the_text(ids, split):
    codec = CODECS["bytes"]
    context = codec.encode("the cat")[:split]
    assert "".join(pieces_of(codec, ids, context)) == text_after(codec, context, ids)


def test_a_word_after_a_prompt_keeps_its_space():
    codec = CODECS["sentencepiece"]
    ids = codec.encode("the cat")
    assert codec.decode(ids[1:]) == "cat"
    assert text_after(codec, ids[:1], ids[1:]) == " cat"
    assert "".join(pieces_of(codec, ids[1:], ids[:1])) == " cat"


def test_special_tokens_among_the_text_give_nothing():
    codec = CODECS["sentencepiece"]
    the, cat = codec.encode("the cat")
    (end,) = codec.eos_ids
    assert pieces_of(codec, [end, the, end, end, cat]) == ["", "the", "", "", " cat", ""]
