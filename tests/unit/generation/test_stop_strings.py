"""Stop strings: what comes out before one, however the text is cut, and which ones are tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretrain.errors import ConfigError
from pretrain.generation.constraints import Constraints
from pretrain.generation.generation_options import Options
from pretrain.generation.sampling import GREEDY
from pretrain.generation.stop_strings import StopFilter, StopStrings
from pretrain.generation.text import generate_text, stream_text
from pretrain.types import GenerationDefaults
from tests.unit.generation.codecs import END, MASK, byte_codec
from tests.unit.generation.models import tiny_model

CODEC = byte_codec()
MODEL = tiny_model(vocab_size=CODEC.vocab_size)


def filtered(pieces, stops):
    """What comes out after each piece, and at the end."""
    one = StopFilter(stops)
    found = []
    for piece in pieces:
        found.append(one.add(piece))
        if one.is_found:
            break
    return [*found, one.rest()]


@given(st.lists(st.text("ab", max_size=3), max_size=8), st.text("ab", min_size=1, max_size=4))
def test_what_comes_out_is_the_text_before_the_stop_string_however_it_is_cut(pieces, stop):
    text = "".join(pieces)
    assert "".join(filtered(pieces, [stop])) == text.partition(stop)[0]
    assert StopStrings(CODEC.decode, [stop]).cut(text) == text.partition(stop)[0]


@pytest.mark.parametrize(
    ("pieces", "stops", "out"),
    [
        (["one", " EN", "D two"], ["END"], ["one", " ", "", ""]),
        (["one", " EN", "vy"], ["END"], ["one", " ", "ENvy", ""]),  # what was held back comes with the next piece
        (["a\n", "\nb"], ["\n\n"], ["a", "", ""]),
        (["a\n"], ["\n\n"], ["a", "\n"]),  # the text ends while one may have begun
        (["xENDy"], ["y", "END"], ["x", ""]),  # of several in one piece the first
        (["abab", "c"], ["ababc"], ["", "", ""]),
        (["aba", "bac"], ["abac"], ["", "ab", ""]),
        (["a", "b"], [], ["a", "b", ""]),
    ],
)
def test_a_piece_is_held_back_while_a_stop_string_may_have_begun(pieces, stops, out):
    assert filtered(pieces, stops) == out


def test_one_that_is_a_special_token_ends_a_row_by_its_id_and_others_by_their_text():
    end, mask = (CODEC.encode_rendered(name)[0] for name in (END, MASK))
    constraints = Options(stop=(MASK, "cat", END)).constraints(MODEL, CODEC, GenerationDefaults())
    assert constraints.eos_ids == (end, mask)
    assert constraints.stop_strings == ("cat",)


def test_those_of_a_release_are_taken_unless_others_are_given():
    released = GenerationDefaults(stop_strings=("\n\n",))
    assert Options().constraints(MODEL, CODEC, released).stop_strings == ("\n\n",)
    assert Options(stop=("x",)).constraints(MODEL, CODEC, released).stop_strings == ("x",)


def test_an_empty_one_is_refused():
    with pytest.raises(ConfigError, match="--stop: a stop string is empty; give a text"):
        Options(stop=("a", ""))


def test_a_row_that_is_stopped_does_not_end_the_others_and_nothing_of_the_stop_string_is_streamed():
    prompts = ["The cat", "the dog sat on"]
    ((first,), (second,)) = generate_text(MODEL, CODEC, prompts, Constraints(30), GREEDY)
    stop = next(first.text[n : n + 3] for n in range(2, 20) if first.text[n : n + 3] not in second.text)
    constraints = Constraints(30, stop_strings=(stop,))
    ((stopped,), (whole,)) = generate_text(MODEL, CODEC, prompts, constraints, GREEDY)
    assert stopped.text == first.text.partition(stop)[0]
    assert stopped.num_tokens < first.num_tokens
    assert (whole.text, whole.num_tokens) == (second.text, second.num_tokens)
    pieces = list(stream_text(MODEL, CODEC, prompts[0], constraints, GREEDY))
    assert "".join(pieces) == stopped.text
