"""Beam search against every continuation that there is, and against greedy decoding."""

from itertools import pairwise

import pytest

from pretrain.errors import ConfigError
from pretrain.generation.beam import Beams, beam_search
from pretrain.generation.constraints import Constraints
from pretrain.generation.sampling import generate
from tests.helpers.tables import alternating
from tests.unit.generation.models import PRESETS, log_prob_of, random_prompts, read_again, tiny_model

VOCAB = 5
STEPS = 4
EOS = 1
MANY_ENDS = tuple(range(3, 18))
"""A quarter of the usual vocabulary: beams of random models end early and at different lengths."""


def every_continuation(model, prompt, constraints):
    """(log-probability, number of new tokens, tokens without the end) of all that can be generated."""
    going, found = [((), 0.0)], []
    for step in range(constraints.max_new_tokens):
        longer = []
        for tokens, log_prob in going:
            log_probs = read_again(model, prompt, list(tokens))[-1].tolist()
            for token in range(VOCAB):
                if token in constraints.suppressed_ids:
                    continue
                total = log_prob + log_probs[token]
                if token in constraints.eos_ids:
                    found.append((total, step + 1, list(tokens)))
                elif step + 1 == constraints.max_new_tokens:
                    found.append((total, step + 1, [*tokens, token]))
                else:
                    longer.append(((*tokens, token), total))
        going = longer
    return found


def best_first(found, length_penalty):
    scored = [(log_prob / count**length_penalty, tokens) for log_prob, count, tokens in found]
    return sorted(scored, key=lambda pair: -pair[0])


@pytest.mark.parametrize(("length_penalty", "preset"), alternating([0.0, 1.0, 2.0, -1.0], ["t5-tiny", "llama-tiny"]))
def test_enough_beams_find_the_best_of_all_continuations(preset, length_penalty):
    model, (prompt,) = tiny_model(preset, vocab_size=VOCAB, scale=1.5), random_prompts([6], vocab_size=VOCAB)
    constraints = Constraints(STEPS, eos_ids=(EOS,))
    expected = best_first(every_continuation(model, prompt, constraints), length_penalty)
    beams = Beams(VOCAB**STEPS, length_penalty=length_penalty, num_return=len(expected))
    (found,) = beam_search(model, [prompt], constraints, beams)
    assert len(found) == len(expected) == 1 + 4 + 16 + 64 * VOCAB
    # fp32 sums of a few terms, in another order; two beams that are closer than that may change places.
    assert [beam.score for beam in found] == pytest.approx([score for score, _ in expected], rel=1e-5)
    assert [beam.tokens for beam in found[:10]] == [tokens for _, tokens in expected[:10]]
    assert {(*beam.tokens, beam.ended) for beam in found} == {(*tokens, len(tokens) < STEPS) for _, tokens in expected}


def test_constraints_hold_for_every_beam():
    model, (prompt,) = tiny_model(vocab_size=VOCAB, scale=1.5), random_prompts([6], vocab_size=VOCAB)
    constraints = Constraints(3, eos_ids=(0, EOS), suppressed_ids=(4,))
    expected = best_first(every_continuation(model, prompt, constraints), 1.0)
    (found,) = beam_search(model, [prompt], constraints, Beams(100, num_return=100))
    assert [beam.tokens for beam in found] == [tokens for _, tokens in expected]
    (found,) = beam_search(
        model, [prompt], Constraints(3, eos_ids=(0, 1), min_new_tokens=2), Beams(100, num_return=100)
    )
    assert {len(beam.tokens) for beam in found} == {2, 3}
    forced = Constraints(3, eos_ids=(EOS,), forced_eos_id=EOS)
    (found,) = beam_search(model, [prompt], forced, Beams(100, num_return=100))
    assert all(beam.ended for beam in found)
    longest = next(beam for beam in found if len(beam.tokens) == 2)
    # The forced end is a token of the length, and costs nothing.
    assert longest.score == pytest.approx(log_prob_of(model, prompt, longest.tokens) / 3, rel=1e-4)


@pytest.mark.parametrize("early_stopping", [True, False])
@pytest.mark.parametrize("preset", PRESETS)
def test_one_beam_is_greedy_decoding(preset, early_stopping):
    model, prompts = tiny_model(preset, scale=2.0), random_prompts()
    free = generate(model, prompts, Constraints(15))
    constraints = Constraints(15, eos_ids=(free[0].tokens[4], free[3].tokens[7]))
    expected = generate(model, prompts, constraints)
    found = beam_search(model, prompts, constraints, Beams(1, early_stopping=early_stopping))
    assert [row[0].tokens for row in found] == [row.tokens for row in expected]
    assert [row[0].ended for row in found] == [row.ended for row in expected]
    assert [row[0].score for row in found] == pytest.approx([row.score for row in expected], rel=1e-5)
    assert {row.ended for row in expected} == {True, False}


@pytest.mark.parametrize("preset", PRESETS)
def test_a_search_does_not_depend_on_the_other_rows(preset):
    model, prompts = tiny_model(preset, scale=1.5), random_prompts()
    constraints, beams = Constraints(25, eos_ids=MANY_ENDS), Beams(4, early_stopping=True, num_return=4)
    together = beam_search(model, prompts, constraints, beams)
    alone = [beam_search(model, [prompt], constraints, beams)[0] for prompt in prompts]
    assert [[beam.tokens for beam in row] for row in together] == [[beam.tokens for beam in row] for row in alone]
    assert len({len(beam.tokens) for row in together for beam in row}) > 3


@pytest.mark.parametrize("preset", ["llama-tiny", "t5-tiny"])
def test_a_score_is_the_log_probability_over_the_power_of_the_length(preset):
    model, prompts = tiny_model(preset, scale=2.0), random_prompts()
    constraints = Constraints(10, eos_ids=(5, 6, 7))
    for prompt, row in zip(prompts, beam_search(model, prompts, constraints, Beams(3, 0.6, num_return=3)), strict=True):
        assert [beam.score for beam in row] == sorted((beam.score for beam in row), reverse=True)
        for beam in row:
            ends = [[*beam.tokens, end] for end in constraints.eos_ids] if beam.ended else [beam.tokens]
            scores = [log_prob_of(model, prompt, tokens) / len(tokens) ** 0.6 for tokens in ends]
            assert min(abs(score - beam.score) for score in scores) < 1e-4


def test_rows_that_are_done_leave_the_batch_and_a_stricter_stop_comes_later():
    model, prompts, rows = tiny_model(scale=1.0), random_prompts(), []
    model.embedding.register_forward_hook(lambda module, inputs, output: rows.append(inputs[0].shape[0]))
    constraints, num_steps, scores = Constraints(25, eos_ids=MANY_ENDS), [], []
    for stop in (True, False, "never"):
        rows.clear()
        found = beam_search(model, prompts, constraints, Beams(4, 1.0, early_stopping=stop))
        assert rows[0] == 4
        assert all(number in (4, 8, 12, 16) for number in rows[1:])
        assert rows[1:] == sorted(rows[1:], reverse=True)
        num_steps.append(sum(rows))
        scores.append([row[0].score for row in found])
    assert num_steps[0] < num_steps[1] < num_steps[2]
    for earlier, later in pairwise(scores):
        assert all(b >= a for a, b in zip(earlier, later, strict=True))
    assert scores[0] != scores[2]


@pytest.mark.parametrize("length_penalty", [0.0, -0.1])
def test_never_stops_like_false_where_long_texts_gain_nothing(length_penalty):
    model, prompts, rows = tiny_model(scale=1.0), random_prompts(), []
    model.embedding.register_forward_hook(lambda module, inputs, output: rows.append(inputs[0].shape[0]))
    constraints, steps = Constraints(25, eos_ids=MANY_ENDS), []
    for stop in (False, "never"):
        rows.clear()
        found = beam_search(model, prompts, constraints, Beams(4, length_penalty, early_stopping=stop))
        steps.append((list(rows), found))
    assert steps[0] == steps[1]
    assert len(steps[0][0]) < 25


def test_fewer_come_where_there_are_no_more():
    model = tiny_model(vocab_size=VOCAB)
    (found,) = beam_search(model, [[3]], Constraints(1), Beams(8, num_return=8))
    assert sorted(beam.tokens[0] for beam in found) == list(range(VOCAB))
    assert beam_search(model, [[3], [4]], Constraints(0), Beams(2)) == [[], []]
    assert beam_search(model, [], Constraints(3), Beams(2)) == []


@pytest.mark.parametrize("preset", ["llama-tiny", "t5-tiny"])
def test_each_row_goes_on_until_the_model_can_read_no_further(preset):
    model, prompts = tiny_model(preset, max_seq_len=8), random_prompts([5, 1, 8, 5])
    found = beam_search(model, prompts, Constraints(100), Beams(3))
    limits = [4, 8, 1, 4] if preset == "llama-tiny" else [8] * 4
    assert [len(row[0].tokens) for row in found] == limits
    assert [row[0].tokens for row in found] == [
        beam_search(model, [prompt], Constraints(100), Beams(3))[0][0].tokens for prompt in prompts
    ]


def test_the_mode_of_the_model_is_restored():
    model = tiny_model()
    model.train()
    beam_search(model, [[3]], Constraints(3), Beams(2))
    assert model.training
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_beams": 0}, "num_beams=0 must be at least 1"),
        (
            {"num_beams": 2, "num_return": 3},
            r"num_return=3 \(--n-best\) must be between 1 and num_beams=2; use more beams",
        ),
        ({"num_beams": 2, "num_return": 0}, r"num_return=0 \(--n-best\) must be between 1"),
        ({"num_beams": 2, "length_penalty": float("nan")}, "length_penalty=nan must be between -10 and 10"),
        ({"num_beams": 2, "length_penalty": 11.0}, "length_penalty=11.0 must be between"),
        (
            {"num_beams": 2, "early_stopping": "always"},
            "early_stopping='always' is unknown; use true, false or \"never\"",
        ),
    ],
)
def test_values_out_of_range_are_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        Beams(**values)


def test_a_prompt_that_cannot_be_read_is_refused():
    with pytest.raises(ConfigError, match="prompt 2: the prompt has no tokens"):
        beam_search(tiny_model(), [[3], []], Constraints(3), Beams(2))
