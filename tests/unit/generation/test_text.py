"""Prompts to texts, at once and in pieces."""

import pytest

from pretrain.errors import ConfigError
from pretrain.generation.beam import Beams, beam_search
from pretrain.generation.constraints import Constraints
from pretrain.generation.sampling import GREEDY, Sampling, generate
from pretrain.generation.text import GeneratedText, encode_prompt, generate_text, stream_text
from tests.unit.generation.codecs import TEXTS, byte_codec, sentencepiece_codec
from tests.unit.generation.models import random_prompts, tiny_model

CODEC = byte_codec()
PROMPTS = ["the", "cat sat on the mat", "Na", "the"]
FREE = Constraints(12)


def model_of(preset="llama-tiny", codec=CODEC, **model):
    return tiny_model(preset, vocab_size=codec.vocab_size, scale=2.0, **model)


def texts(answers):
    return [[answer.text for answer in row] for row in answers]


@pytest.mark.parametrize("method", [GREEDY, Sampling(), Beams(3, num_return=2)], ids=["greedy", "drawn", "beams"])
@pytest.mark.parametrize("preset", ["llama-tiny", "t5-tiny"])
def test_batches_change_no_text_and_keep_the_order(preset, method):
    model = model_of(preset)
    expected = list(generate_text(model, CODEC, PROMPTS, FREE, method, seed=1, batch_size=100))
    assert [[answer.prompt for answer in row] for row in expected] == [
        [prompt] * (2 if isinstance(method, Beams) else 1) for prompt in PROMPTS
    ]
    for size in (1, 3):
        found = list(generate_text(model, CODEC, iter(PROMPTS), FREE, method, seed=1, batch_size=size))
        assert texts(found) == texts(expected)
    # Equal prompts are drawn differently, in one batch or in two.
    assert (texts(expected)[0] == texts(expected)[3]) == (method != Sampling())


def test_prompts_are_read_a_batch_at_a_time():
    taken = []
    prompts = (taken.append(prompt) or prompt for prompt in PROMPTS)
    answers = generate_text(model_of(), CODEC, prompts, FREE, GREEDY, batch_size=2)
    next(answers)
    assert len(taken) == 2


def test_an_answer_says_how_long_it_is_and_what_it_scores():
    model, constraints = model_of(), Constraints(12, eos_ids=tuple(range(200, 300)))
    ids = [CODEC.encode(prompt) for prompt in PROMPTS]
    continuations = generate(model, ids, constraints)
    found = [row[0] for row in generate_text(model, CODEC, PROMPTS, constraints, GREEDY)]
    assert [answer.num_tokens for answer in found] == [len(one.tokens) for one in continuations]
    assert [answer.score for answer in found] == [one.score for one in continuations]
    assert found[1] == GeneratedText(PROMPTS[1], found[1].text, found[1].num_tokens, found[1].score)
    assert min(answer.num_tokens for answer in found) < 12


def test_a_continuation_follows_its_prompt_and_an_answer_stands_alone():
    codec = sentencepiece_codec()
    constraints = Constraints(3, suppressed_ids=tuple(range(256)))
    for preset in ("llama-tiny", "t5-tiny"):
        model = model_of(preset, codec)
        ((found,),) = generate_text(model, codec, ["the"], constraints, GREEDY)
        (expected,) = generate(model, [codec.encode("the")], constraints)
        whole = codec.decode([*codec.encode("the"), *expected.tokens])
        assert found.text == (whole[3:] if preset == "llama-tiny" else codec.decode(expected.tokens))


@pytest.mark.parametrize("sampling", [GREEDY, Sampling()], ids=["greedy", "drawn"])
@pytest.mark.parametrize("preset", ["llama-tiny", "t5-tiny"])
def test_pieces_are_the_text(preset, sampling):
    model, constraints = model_of(preset), Constraints(40, eos_ids=CODEC.eos_ids)
    for prompt in TEXTS:
        ((answer,),) = generate_text(model, CODEC, [prompt], constraints, sampling, seed=4)
        pieces = list(stream_text(model, CODEC, prompt, constraints, sampling, seed=4))
        assert "".join(pieces) == answer.text
        assert "" not in pieces


def test_the_end_is_no_part_of_the_text():
    model = model_of()
    end = generate(model, [CODEC.encode("the")], Constraints(5))[0].tokens[4]
    constraints = Constraints(30, eos_ids=(end,))
    ((answer,),) = generate_text(model, CODEC, ["the"], constraints, GREEDY)
    assert answer.num_tokens <= 4
    assert "".join(stream_text(model, CODEC, "the", constraints, GREEDY)) == answer.text


def test_nothing_begins_a_document_with_the_token_that_does():
    model = model_of()
    assert encode_prompt(model, CODEC, "") == list(CODEC.eos_ids)
    model.special_tokens = model.special_tokens.model_copy(update={"bos": 7})
    assert encode_prompt(model, CODEC, "") == [7]
    assert encode_prompt(model, CODEC, "the") == CODEC.encode("the")


def test_an_encoder_reads_the_special_tokens_of_its_codec():
    codec = byte_codec(appends_end=True)
    assert encode_prompt(model_of("t5-tiny"), codec, "the") == [*CODEC.encode("the"), *codec.eos_ids]


def test_prompts_that_cannot_be_read_are_refused_by_their_number():
    model = model_of(max_seq_len=8)
    answers = generate_text(model, CODEC, ["a", "b", "cat " * 30], FREE, GREEDY, batch_size=2)
    assert next(answers)[0].prompt == "a"
    next(answers)
    with pytest.raises(ConfigError, match=r"prompt 3: the prompt has \d+ tokens, model\.max_seq_len is 8"):
        next(answers)
    with pytest.raises(ConfigError, match=r"^the prompt has \d+ tokens"):
        next(stream_text(model, CODEC, "cat " * 30, FREE, GREEDY))
    codec = byte_codec()
    codec.eos_ids = ()
    with pytest.raises(ConfigError, match="the prompt is empty, and the tokenizer has no end-of-text token"):
        encode_prompt(model, codec, "")
    with pytest.raises(ConfigError, match="the prompt has no tokens"):
        encode_prompt(model_of("t5-tiny"), CODEC, "")


def test_beams_of_text_are_those_of_ids():
    model, prompts = model_of(), random_prompts([4, 7], vocab_size=CODEC.vocab_size)
    asked = [CODEC.decode(prompt) for prompt in prompts]
    rows = [CODEC.encode(prompt) for prompt in asked]
    beams = Beams(4, 0.5, num_return=4)
    expected = beam_search(model, rows, FREE, beams)
    found = list(generate_text(model, CODEC, asked, FREE, beams))
    assert [[answer.score for answer in row] for row in found] == [[one.score for one in row] for row in expected]
