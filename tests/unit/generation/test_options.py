"""What the command line says, what a model's makers say, and what follows."""

import pytest

from pretrain.errors import ConfigError
from pretrain.generation.beam import Beams
from pretrain.generation.constraints import Constraints
from pretrain.generation.generation_options import Options
from pretrain.generation.sampling import GREEDY, Sampling
from pretrain.types import GenerationDefaults
from tests.unit.generation.codecs import byte_codec
from tests.unit.generation.models import tiny_model

CODEC = byte_codec()
DECODER, BOTH = tiny_model("llama-tiny"), tiny_model("t5-tiny")


SAYING_NOTHING = GenerationDefaults()
TRANSLATOR = GenerationDefaults(num_beams=4, length_penalty=0.6, early_stopping=True)
CHATTY = GenerationDefaults(stated={"do_sample": True, "temperature": 0.6, "top_p": 0.9})


@pytest.mark.parametrize(
    ("given", "model", "makers", "expected"),
    [
        ({}, DECODER, SAYING_NOTHING, Sampling(0.8)),
        ({}, DECODER, GenerationDefaults(stated={"do_sample": False}), GREEDY),
        (
            {"top_p": 0.5},
            DECODER,
            GenerationDefaults(stated={"do_sample": False, "temperature": 0.6}),
            Sampling(0.6, 0, 0.5),
        ),
        ({}, DECODER, GenerationDefaults(stated={"temperature": 1.0}), Sampling(1.0)),
        ({}, DECODER, GenerationDefaults(stated={"do_sample": True}), Sampling(1.0, 50)),
        ({}, DECODER, GenerationDefaults(stated={"do_sample": True, "top_k": 0}), Sampling(1.0)),
        ({}, BOTH, SAYING_NOTHING, GREEDY),
        ({}, BOTH, TRANSLATOR, Beams(4, 0.6, True)),
        ({}, DECODER, CHATTY, Sampling(0.6, 50, 0.9)),
        ({}, BOTH, CHATTY, Sampling(0.6, 50, 0.9)),
        ({"temperature": 0.0}, DECODER, CHATTY, Sampling(0.0, 50, 0.9)),
        ({"temperature": 0.0}, BOTH, TRANSLATOR, GREEDY),
        ({"temperature": 1.0}, BOTH, TRANSLATOR, Sampling(1.0)),
        ({"top_p": 0.5}, BOTH, SAYING_NOTHING, Sampling(0.8, top_p=0.5)),
        ({"top_k": 3}, DECODER, CHATTY, Sampling(0.6, 3, 0.9)),
        ({"beams": 1}, BOTH, TRANSLATOR, GREEDY),
        ({"beams": 1}, DECODER, CHATTY, GREEDY),
        ({"beams": 1, "temperature": 0.7}, BOTH, TRANSLATOR, Sampling(0.7)),
        ({"beams": 2}, DECODER, SAYING_NOTHING, Beams(2)),
        ({"beams": 2, "temperature": 0.0}, BOTH, TRANSLATOR, Beams(2, 0.6, True)),
        ({"n_best": 3}, BOTH, TRANSLATOR, Beams(4, 0.6, True, 3)),
        ({"length_penalty": 2.0, "early_stopping": "never"}, BOTH, TRANSLATOR, Beams(4, 2.0, "never")),
        ({"early_stopping": "false"}, BOTH, TRANSLATOR, Beams(4, 0.6, False)),
    ],
)
def test_what_is_given_goes_before_what_the_makers_say(given, model, makers, expected):
    assert Options(**given).method(model, makers) == expected


def test_temperature_zero_is_greedy_whatever_else_the_makers_say():
    assert Options(temperature=0.0).method(DECODER, CHATTY).temperature == 0


@pytest.mark.parametrize(
    ("given", "model", "makers", "expected"),
    [
        ({}, DECODER, SAYING_NOTHING, Constraints(128, eos_ids=CODEC.eos_ids)),
        ({"max_tokens": 7}, DECODER, GenerationDefaults(max_new_tokens=9), Constraints(7, eos_ids=CODEC.eos_ids)),
        ({}, DECODER, GenerationDefaults(max_new_tokens=9, max_length=20), Constraints(9, eos_ids=CODEC.eos_ids)),
        # Theirs counts what a row begins with: the start token of an answer, the prompt of a continuation.
        ({}, BOTH, GenerationDefaults(max_length=20), Constraints(20, eos_ids=CODEC.eos_ids, max_length=20)),
        ({}, DECODER, GenerationDefaults(max_length=20), Constraints(20, eos_ids=CODEC.eos_ids, max_length=20)),
        ({"max_tokens": 30}, DECODER, GenerationDefaults(max_length=20), Constraints(30, eos_ids=CODEC.eos_ids)),
        (
            {},
            BOTH,
            GenerationDefaults(eos=(5, 6), suppressed=(0,), forced_eos=5, renormalize=True),
            Constraints(128, 0, (5, 6), (0,), 5, True),
        ),
        (
            {"no_repeat_ngram_size": 0},
            BOTH,
            GenerationDefaults(repetition_penalty=1.3, no_repeat_ngram_size=3),
            Constraints(128, eos_ids=CODEC.eos_ids, repetition_penalty=1.3),
        ),
    ],
)
def test_constraints_are_those_of_the_makers_and_the_tokenizer(given, model, makers, expected):
    assert Options(**given).constraints(model, CODEC, makers) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"beams": 4, "temperature": 0.5}, "--beams searches, --temperature draws: only one can be; leave one"),
        ({"n_best": 2, "top_p": 0.5}, "--n-best searches, --top-p draws"),
        ({"beams": 4, "top_k": 5}, "--beams searches, --top-k draws"),
        ({"beams": 1, "n_best": 1}, "--n-best is not for --beams 1; give --beams 4 or so"),
        ({"early_stopping": "yes"}, "--early-stopping yes is unknown; use true, false, never"),
        ({"beams": 2, "n_best": 3}, r"num_return=3 \(--n-best\) must be between 1 and num_beams=2"),
        ({"temperature": -1.0}, "temperature=-1.0 must be"),
        ({"top_p": 2.0}, "top_p=2.0 must be"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0 must be above 0; use 1 for none"),
        ({"length_penalty": 99.0}, "length_penalty=99.0 must be"),
    ],
)
def test_options_that_make_no_sense_are_refused_before_a_model_is_loaded(given, message):
    with pytest.raises(ConfigError, match=message):
        Options(**given)


def test_options_of_beams_need_beams():
    with pytest.raises(ConfigError, match="--length-penalty needs several beams; give --beams 4 or so"):
        Options(length_penalty=0.5).method(BOTH, SAYING_NOTHING)


def test_where_masks_are_filled_only_the_number_of_candidates_can_be_given():
    assert Options().candidates() == 5
    assert Options(top_k=2).candidates() == 2
    with pytest.raises(ConfigError, match="--max-tokens is for models that generate, this one fills masks; leave it"):
        Options(top_k=2, max_tokens=5).candidates()
