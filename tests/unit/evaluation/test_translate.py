"""Test sets through a translator: in batches of any size each sentence gets what it gets alone, in its place."""

import pytest

from pretrain.errors import ConfigError
from pretrain.evaluation.translation import encode_sources, plan_batches, translate
from pretrain.generation.beam import Beams, beam_search
from pretrain.generation.constraints import Constraints
from pretrain.generation.sampling import GREEDY, generate
from tests.unit.generation.codecs import byte_codec
from tests.unit.generation.models import tiny_model

TEXTS = ["the cat sat on the mat", "a dog", "the dog sat on the cat, and the cat on the mat", "cat", "on the mat"]


@pytest.fixture(scope="module")
def codec():
    return byte_codec()


@pytest.fixture(scope="module")
def model(codec):
    return tiny_model("marian-tiny", vocab_size=codec.vocab_size)


@pytest.mark.parametrize("batch_tokens", [1, 40, 10**6])
@pytest.mark.parametrize("method", [GREEDY, Beams(3)])
def test_every_sentence_gets_what_it_gets_alone(model, codec, method, batch_tokens):
    sources = encode_sources(model, codec, TEXTS, "test.en")
    constraints = Constraints(max_new_tokens=9, eos_ids=codec.eos_ids)
    found = translate(model, codec, sources, constraints, method, batch_tokens=batch_tokens)
    alone = []
    for row in sources:
        if isinstance(method, Beams):
            alone.append(beam_search(model, [row], constraints, method)[0][0])
        else:
            alone.append(generate(model, [row], constraints, method)[0])
    assert found.texts == [codec.decode(one.tokens) for one in alone]
    assert len(set(found.texts)) > 1
    assert found.num_tokens == sum(len(one.tokens) for one in alone)
    assert found.num_cut == sum(not one.ended for one in alone)


@pytest.mark.parametrize("batch_tokens", [1, 7, 12, 100])
def test_batches_hold_every_row_once_and_the_longest_come_first(batch_tokens):
    rows = [[0] * length for length in (3, 9, 1, 4, 4, 2, 9, 5)]
    batches = list(plan_batches(rows, batch_tokens))
    assert sorted(row for batch in batches for row in batch) == list(range(8))
    lengths = [[len(rows[row]) for row in batch] for batch in batches]
    assert [length for batch in lengths for length in batch] == sorted(map(len, rows), reverse=True)
    assert all(len(batch) == 1 or batch[0] * len(batch) <= batch_tokens for batch in lengths)
    assert len(batches) == {1: 8, 7: 7, 12: 5, 100: 1}[batch_tokens]


def test_a_source_ends_as_in_training_once(model, codec):
    (end,) = codec.eos_ids
    plain = encode_sources(model, codec, ["the cat"], "test.en")
    ending = encode_sources(model, byte_codec(appends_end=True), ["the cat"], "test.en")
    assert plain == ending == [[*codec.encode("the cat"), end]]
    assert encode_sources(model, codec, [""], "test.en") == [[end]]


def test_a_source_that_is_too_long_is_named_by_its_line(model, codec):
    with pytest.raises(ConfigError, match=r"test\.en:2: the prompt has \d+ tokens, model\.max_seq_len is 128"):
        encode_sources(model, codec, ["the cat", "0123456789" * 20], "test.en")


def test_a_model_that_does_not_translate_is_refused(codec):
    decoder = tiny_model("llama-tiny", vocab_size=codec.vocab_size)
    with pytest.raises(ConfigError, match="this one has a decoder alone; give --data, for its loss"):
        encode_sources(decoder, codec, TEXTS, "test.en")
