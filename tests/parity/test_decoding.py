"""Greedy decoding and beam search against `generate` of transformers: the same tokens, the same scores.

Prompts of several lengths share a batch: padded on the left for decoders, on the right for encoders, on both sides of
the comparison.
"""

import json
from itertools import product

import pytest
import torch
import transformers

from pretrain.generation.beam import Beams, beam_search
from pretrain.generation.constraints import Constraints
from pretrain.generation.generation_options import Options
from pretrain.generation.sampling import generate
from pretrain.interop.generation import load_generation_defaults
from tests.helpers.lent import lend
from tests.helpers.tables import alternating
from tests.parity.test_decoders import (
    LONGROPE,
    cohere2,
    deepseek_v3,
    gemma2,
    gpt2,
    gpt_neox,
    gpt_oss,
    llama,
    mistral,
    phi3,
    smollm3,
)
from tests.parity.test_encoder_decoders import PAD, marian, t5
from tests.unit.generation.codecs import byte_codec

MAKERS = {
    "gpt2": gpt2,
    "llama": llama,
    "mistral": mistral,
    "gpt_oss": gpt_oss,
    "deepseek_v3": deepseek_v3,
    "gemma2": gemma2,
    "gpt_neox": gpt_neox,
    "smollm3": smollm3,
    "cohere2": cohere2,
    # All rows have the short factors: those of a batch here have a length each, and theirs have one.
    "phi3": lambda: phi3(
        rope_parameters=dict(LONGROPE),
        original_max_position_embeddings=64,
        sliding_window=None,
        max_position_embeddings=64,
    ),
    "t5": t5,
    "marian": lambda: marian(activation_function="swish", scale_embedding=True),
}
LENGTHS = [9, 1, 5, 14, 5, 2]
ENDS = tuple(range(3, 18))
"""A quarter of the vocabulary: random models end early, and at many lengths."""
PENALTIES = [0.0, 1.0, 0.6, 2.0, -1.0]
STOPS = [False, True, "never"]
# Sums of fp32 logits of order 10, taken in another order.
CLOSE = 1e-5
FEW_MODELS = pytest.mark.parametrize(
    "lent",
    [pytest.param(name, marks=[] if name in ("gpt2", "t5") else pytest.mark.long) for name in MAKERS],
    indirect=True,
)
"""For rules that act on scores, which are equal for every model by the other tests: a decoder and two stacks."""


@pytest.fixture(scope="module", params=MAKERS)
def lent(request, tmp_path_factory):
    torch.manual_seed(0)
    lent = lend(MAKERS[request.param](), tmp_path_factory.mktemp("theirs"))
    # Theirs takes from here what a call leaves open.
    lent.theirs.generation_config = transformers.GenerationConfig()
    return lent


def prompts_of(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, PAD, (length,), generator=generator).tolist() for length in LENGTHS]


def their_generate(lent, prompts, count, ends, **settings):
    """Tokens of each row up to its end, and its score: as many rows as were asked for each prompt."""
    longest, is_decoder = max(len(prompt) for prompt in prompts), lent.ours.encoder is None
    rows = [[PAD] * (longest - len(row)) + row if is_decoder else row + [PAD] * (longest - len(row)) for row in prompts]
    output = lent.theirs.generate(
        torch.tensor(rows),
        attention_mask=(torch.tensor(rows) != PAD).long(),
        generation_config=transformers.GenerationConfig(
            max_new_tokens=count, do_sample=False, pad_token_id=PAD, eos_token_id=list(ends) or None,
            decoder_start_token_id=lent.release.config.special_tokens.start, return_dict_in_generate=True,
            output_scores=True, **settings,
        ),
    )  # fmt: skip
    new_tokens = output.sequences[:, longest if is_decoder else 1 :].tolist()
    trimmed = [row[: next((place for place, token in enumerate(row) if token in ends), count)] for row in new_tokens]
    return trimmed, output.get("sequences_scores")


def check_beams(lent, prompts, count, ends, penalty, stop, n_best=4, num_beams=4, **settings):
    """Asserts that ours finds the same beams with the same scores; returns their tokens."""
    their_settings = {
        "suppress_tokens": list(settings.get("suppressed_ids", ())) or None,
        "forced_eos_token_id": settings.get("forced_eos_id"),
        "renormalize_logits": settings.get("renormalize", False),
        "min_new_tokens": settings.get("min_new_tokens"),
        "repetition_penalty": settings.get("repetition_penalty"),
        "no_repeat_ngram_size": settings.get("no_repeat_ngram_size"),
    }
    expected, scores = their_generate(
        lent, prompts, count, ends, num_beams=num_beams, num_return_sequences=n_best, length_penalty=penalty,
        early_stopping=stop, **their_settings,
    )  # fmt: skip
    constraints = Constraints(count, eos_ids=ends, **settings)
    rows = beam_search(lent.ours, prompts, constraints, Beams(num_beams, penalty, stop, n_best))
    found = [beam for row in rows for beam in row]
    assert [beam.tokens for beam in found] == expected
    assert [beam.score for beam in found] == pytest.approx(scores.tolist(), rel=CLOSE, abs=CLOSE)
    return expected


@pytest.mark.parametrize(("seed", "ends"), alternating(range(2), [(), ENDS, (20,)]))
def test_greedy_decoding_of_padded_rows_agrees_token_for_token(lent, seed, ends):
    prompts = prompts_of(seed)
    expected, _ = their_generate(lent, prompts, 25, ends)
    assert [row.tokens for row in generate(lent.ours, prompts, Constraints(25, eos_ids=ends))] == expected


@FEW_MODELS
def test_constraints_agree(lent):
    prompts = prompts_of(3)
    first = [row.tokens[0] for row in generate(lent.ours, prompts, Constraints(1))]
    suppressed = tuple(sorted(set(first) - {20, 21, 22}))  # theirs does not suppress an end
    settings = {"bad_words_ids": [[token] for token in suppressed], "forced_eos_token_id": 20, "min_new_tokens": 4}
    expected, _ = their_generate(lent, prompts, 12, (20, 21, 22), **settings)
    constraints = Constraints(12, eos_ids=(20, 21, 22), suppressed_ids=suppressed, forced_eos_id=20, min_new_tokens=4)
    found = generate(lent.ours, prompts, constraints)
    assert [row.tokens for row in found] == expected
    assert all(row.ended for row in found)


REPEATS = [
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.8},
    {"no_repeat_ngram_size": 1},
    {"no_repeat_ngram_size": 3},
    {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
]
"""Theirs counts the padding before a prompt as tokens of it: prompts are given one by one."""


@FEW_MODELS
@pytest.mark.parametrize("settings", REPEATS, ids=str)
def test_penalties_of_repetitions_agree(lent, settings):
    prompts = [[5, 9, 5, 9, 30, 9, 5], [8], prompts_of(11)[0]]
    expected = [their_generate(lent, [prompt], 15, (20,), **settings)[0][0] for prompt in prompts]
    found = generate(lent.ours, prompts, Constraints(15, eos_ids=(20,), **settings))
    assert [row.tokens for row in found] == expected
    if settings.get("repetition_penalty", 1) >= 1:  # below, a row may repeat one token as it is
        assert expected != [row.tokens for row in generate(lent.ours, prompts, Constraints(15, eos_ids=(20,)))]


@FEW_MODELS
@pytest.mark.parametrize(
    ("settings", "renormalize"),
    [(REPEATS[0], False), (REPEATS[1], True), (REPEATS[3], False), (REPEATS[4], True)],
    ids=str,
)
def test_beams_with_penalties_of_repetitions_agree(lent, settings, renormalize):
    for prompt in ([5, 9, 5, 9, 30, 9, 5], prompts_of(12)[0]):
        check_beams(lent, [prompt], 10, ENDS[:3], 1.0, False, renormalize=renormalize, **settings)


@pytest.mark.long
@pytest.mark.parametrize(("penalty", "stop"), product(PENALTIES, STOPS))
def test_beams_agree_whatever_the_penalty_and_the_stop(lent, penalty, stop):
    found = check_beams(lent, prompts_of(4), 20, ENDS, penalty, stop)
    assert len({len(tokens) for tokens in found}) > 1


@pytest.mark.parametrize(("seed", "num_beams"), alternating([5, 6], [2, 5]))
def test_the_best_beam_agrees(lent, seed, num_beams):
    check_beams(lent, prompts_of(seed), 20, ENDS[:8], 1.0, False, n_best=1, num_beams=num_beams)


def test_beams_that_only_end_by_their_length_agree(lent):
    check_beams(lent, prompts_of(8), 15, (), 1.0, False)


@FEW_MODELS
@pytest.mark.parametrize(("stop", "renormalize"), alternating(STOPS, [False, True]))
def test_beams_with_constraints_agree(lent, stop, renormalize):
    suppressed = tuple(range(30, 45))
    settings = {"suppressed_ids": suppressed, "forced_eos_id": 20, "renormalize": renormalize}
    check_beams(lent, prompts_of(9), 10, (20, *ENDS[:6]), 1.0, stop, min_new_tokens=2, **settings)


STATED = [
    {"do_sample": False, "max_length": 20, "temperature": 1.0, "top_k": 50, "num_beams": 1, "repetition_penalty": 1.0},
    {"do_sample": False, "max_length": 17, "max_new_tokens": 4, "num_return_sequences": 1, "length_penalty": 1.0},
    {"do_sample": False, "max_length": 16, "repetition_penalty": 1.3, "early_stopping": False},
    {"num_beams": 3, "max_length": 18, "no_repeat_ngram_size": 0, "renormalize_logits": False},
    {"do_sample": True, "top_k": 1, "temperature": 0.7, "max_new_tokens": 9},
]


@pytest.mark.parametrize(("stated", "maker"), alternating(STATED, [llama, t5]))
def test_a_release_generates_by_what_it_states_defaults_too(maker, stated, tmp_path):
    torch.manual_seed(0)
    theirs, ours, release = lend(maker(), tmp_path)
    start = release.config.special_tokens.start
    ids = {"pad_token_id": PAD, "eos_token_id": 20, "decoder_start_token_id": start}
    (tmp_path / "generation_config.json").write_text(json.dumps(stated | ids))
    theirs.generation_config = transformers.GenerationConfig.from_pretrained(tmp_path)
    defaults = load_generation_defaults(tmp_path)
    constraints = Options().constraints(ours, byte_codec(), defaults)
    method = Options().method(ours, defaults)
    for prompt in prompts_of(12):
        before = 1 if ours.encoder is not None else len(prompt)
        expected = theirs.generate(torch.tensor([prompt]))[0, before:].tolist()
        if isinstance(method, Beams):
            tokens = beam_search(ours, [prompt], constraints, method)[0][0].tokens
        else:
            tokens = generate(ours, [prompt], constraints, method)[0].tokens
        assert tokens == expected[: expected.index(20) if 20 in expected else None]


@FEW_MODELS
def test_a_translator_generates_by_its_own_settings(lent):
    """As opus-mt models do: padding is no word, a sentence that is too long is cut short, probabilities sum to 1."""
    settings = {"suppressed_ids": (PAD,), "forced_eos_id": 0, "renormalize": True}
    check_beams(lent, prompts_of(10), 12, (0,), 1.0, False, n_best=1, num_beams=6, **settings)
