"""Decoding with a cache, in batches, against reading everything again."""

from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pretrain.errors import CheckpointError, ConfigError
from pretrain.generation.beam import Beams, beam_search
from pretrain.generation.constraints import Constraints
from pretrain.generation.incremental_decoder import IncrementalDecoder
from pretrain.generation.sampling import GREEDY, Sampling, generate, stream
from pretrain.model import KVCache, kv_cache
from pretrain.types import Batch
from tests.helpers.tables import pairwise
from tests.unit.generation.models import LENGTHS, PRESETS, log_prob_of, random_prompts, read_greedily, tiny_model
from tests.unit.model.tiny import build, encoder_config, random_batch, tiny_config


def tokens_of(continuations):
    return [continuation.tokens for continuation in continuations]


def free(count):
    return Constraints(max_new_tokens=count)


@pytest.mark.parametrize("lengths", [[5, 5], LENGTHS], ids=["equal", "padded"])
@pytest.mark.parametrize("preset", PRESETS)
def test_decoding_in_a_batch_equals_reading_each_row_again(preset, lengths):
    model, prompts = tiny_model(preset), random_prompts(lengths)
    expected = [read_greedily(model, prompt, 20) for prompt in prompts]
    assert tokens_of(generate(model, prompts, free(20))) == expected


@pytest.mark.parametrize("lengths", [[5, 5], LENGTHS], ids=["equal", "padded"])
@pytest.mark.parametrize("preset", ["llama-tiny", "mistral-tiny"])
def test_a_prefix_language_model_sees_its_prompt_whole(preset, lengths):
    model, prompts = tiny_model(preset), random_prompts(lengths)
    expected = [read_greedily(model, prompt, 12, sees_prompt_whole=True) for prompt in prompts]
    assert expected != [read_greedily(model, prompt, 12) for prompt in prompts]
    constraints = Constraints(max_new_tokens=12, sees_prompt_whole=True)
    assert tokens_of(generate(model, prompts, constraints)) == expected
    assert tokens_of(found[0] for found in beam_search(model, prompts, constraints, Beams(1))) == expected


def test_the_reference_backend_decodes_the_same():
    for preset in ("llama-tiny", "t5-tiny"):
        found = [generate(tiny_model(preset, attention=name), random_prompts(), free(12)) for name in ("eager", "sdpa")]
        assert tokens_of(found[0]) == tokens_of(found[1])


@pytest.mark.parametrize("sizes", [[12], [5, 1, 1, 5], [1] * 12, [3, 4, 5]])
@pytest.mark.parametrize("preset", ["llama-tiny", "gpt2-tiny"])
def test_logits_do_not_depend_on_how_the_cache_was_filled(preset, sizes):
    model = build(tiny_config(preset))
    tokens = random_batch(2, 12).tokens_BT
    cache = KVCache(model.num_layers, capacity=12)
    with torch.no_grad():
        parts = [model(Batch(part, part), cache=cache).logits_BTV for part in tokens.split(sizes, dim=1)]
        torch.testing.assert_close(
            torch.cat(parts, dim=1), model(Batch(tokens, tokens)).logits_BTV, rtol=1e-5, atol=1e-5
        )
    assert cache.length == 12


@pytest.mark.parametrize("preset", ["llama-tiny", "t5-tiny"])
def test_a_score_is_the_mean_log_probability_of_the_new_tokens(preset):
    model, prompts = tiny_model(preset), random_prompts()
    for prompt, found in zip(prompts, generate(model, prompts, free(9)), strict=True):
        # fp32 sums of nine terms; padding changes the order of summation within attention.
        assert found.score == pytest.approx(log_prob_of(model, prompt, found.tokens) / 9, rel=1e-4)


def test_a_seed_reproduces_and_another_does_not():
    model, sampling = tiny_model(scale=1.0), Sampling(top_k=40)
    first = generate(model, random_prompts(), free(20), sampling, seed=1)
    assert first == generate(model, random_prompts(), free(20), sampling, seed=1)
    second = generate(model, random_prompts(), free(20), sampling, seed=2)
    assert all(a.tokens != b.tokens for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("preset", ["llama-tiny", "t5-tiny"])
def test_a_row_is_drawn_the_same_in_whatever_batch(preset):
    model, sampling, prompts = tiny_model(preset, scale=1.0), Sampling(), random_prompts([5, 1, 9, 7])
    together = tokens_of(generate(model, prompts, free(20), sampling, seed=3))
    alone = [generate(model, [prompt], free(20), sampling, seed=3)[0].tokens for prompt in prompts]
    backwards = tokens_of(generate(model, prompts[::-1], free(20), sampling, seed=3))[::-1]
    assert together == alone == backwards


def test_equal_prompts_are_drawn_differently():
    (prompt,) = random_prompts([4])
    first, second = tokens_of(generate(tiny_model(scale=1.0), [prompt, prompt], free(20), Sampling()))
    assert first != second


def test_rows_may_bring_their_own_seeds():
    model, prompts = tiny_model(scale=1.0), random_prompts([4]) * 3
    found = tokens_of(generate(model, prompts, free(20), Sampling(), seed=[5, 6, 5]))
    assert found[0] == found[2] != found[1]


def test_drawn_tokens_follow_the_distribution_of_the_model():
    model, (prompt,) = tiny_model(scale=1.5), random_prompts([4])
    drawn = tokens_of(generate(model, [prompt] * 4000, free(1), Sampling()))
    frequencies = torch.bincount(torch.tensor(drawn)[:, 0], minlength=128) / 4000
    with torch.no_grad():
        expected = model(Batch(torch.tensor([prompt]), torch.tensor([prompt]))).logits_BTV[0, -1].softmax(dim=-1)
    # Three standard errors of a frequency from 4000 draws are at most 2.4%.
    torch.testing.assert_close(frequencies, expected, rtol=0, atol=0.024)
    assert expected.max() < 0.5


def test_a_tiny_top_p_is_greedy():
    model = tiny_model()
    found = generate(model, random_prompts(), free(15), Sampling(top_p=1e-9))
    assert found == generate(model, random_prompts(), free(15), GREEDY)


@pytest.mark.parametrize("preset", ["llama-tiny", "marian-tiny"])
def test_a_row_stops_at_any_of_its_end_tokens_and_the_others_go_on(preset):
    model, prompts = tiny_model(preset, scale=2.0), random_prompts()
    unbound = tokens_of(generate(model, prompts, free(20), seed=1, sampling=Sampling()))
    ends = (unbound[0][7], unbound[2][3])
    stopped = generate(model, prompts, Constraints(20, eos_ids=ends), Sampling(), seed=1)
    for found, row in zip(stopped, unbound, strict=True):
        first = next((place for place, token in enumerate(row) if token in ends), None)
        assert found.tokens == row[:first]
        assert found.ended == (first is not None)
    assert len({len(found.tokens) for found in stopped}) > 1


def test_rows_that_have_ended_leave_the_batch():
    model, prompts = tiny_model(), random_prompts()
    rows = []
    model.embedding.register_forward_hook(lambda module, inputs, output: rows.append(inputs[0].shape[0]))
    unbound = tokens_of(generate(model, prompts, free(6)))
    assert rows == [4] * 6
    rows.clear()
    ends = tuple({row[3] for row in unbound[:2]})
    lengths = [len(found.tokens) + found.ended for found in generate(model, prompts, Constraints(6, eos_ids=ends))]
    assert rows == [sum(length > step for length in lengths) for step in range(max(lengths))]
    assert rows[-1] < 4


def test_suppressed_tokens_never_come_and_the_next_best_does():
    model, prompts = tiny_model(), random_prompts()
    first = generate(model, prompts, free(1))
    suppressed = tuple({found.tokens[0] for found in first})
    found = generate(model, prompts, Constraints(20, suppressed_ids=suppressed))
    assert not {token for row in found for token in row.tokens} & set(suppressed)
    assert max(row.score for row in generate(model, prompts, Constraints(1, suppressed_ids=suppressed))) < max(
        row.score for row in first
    )


def test_renormalizing_makes_up_for_what_is_suppressed():
    model, prompts = tiny_model(), random_prompts([3])
    best = generate(model, prompts, free(1))[0].tokens[0]
    plain, renormalized = (
        generate(model, prompts, Constraints(1, suppressed_ids=(best,), renormalize=flag))[0] for flag in (False, True)
    )
    log_probs = torch.tensor(read_log_probs(model, prompts[0]))
    left = 1 - log_probs[best].exp()
    assert plain.tokens == renormalized.tokens
    assert renormalized.score == pytest.approx(plain.score - float(left.log()), abs=1e-5)


def read_log_probs(model, prompt):
    tokens = torch.tensor([prompt])
    with torch.no_grad():
        return model(Batch(tokens, tokens)).logits_BTV[0, -1].log_softmax(dim=-1).tolist()


def test_no_end_comes_before_the_least_number_of_tokens():
    model, (prompt,) = tiny_model(), random_prompts([5])
    eos = generate(model, [prompt], free(1))[0].tokens[0]
    assert generate(model, [prompt], Constraints(9, eos_ids=(eos,)))[0].tokens == []
    for least in (1, 4, 9, 20):
        (found,) = generate(model, [prompt], Constraints(9, eos_ids=(eos,), min_new_tokens=least))
        assert len(found.tokens) >= min(least, 9)
        assert eos not in found.tokens


@pytest.mark.parametrize("suppressed", [(), (7,)])
def test_the_last_token_is_the_forced_one(suppressed):
    model, prompts = tiny_model(), random_prompts()
    kept = Constraints(6, suppressed_ids=suppressed, forced_eos_id=7)
    found, unbound = generate(model, prompts, kept), generate(model, prompts, Constraints(6, suppressed_ids=suppressed))
    assert tokens_of(found) == [[*row.tokens[:5], 7] for row in unbound]
    ended = generate(model, prompts, Constraints(6, eos_ids=(7,), forced_eos_id=7, min_new_tokens=5))
    assert [(len(row.tokens), row.ended) for row in ended] == [(5, True)] * 4


def test_padded_ids_are_never_generated():
    model = tiny_model(vocab_size=61)
    assert model.head.weight.shape[0] == 128
    drawn = generate(model, random_prompts(), free(100), Sampling(temperature=100.0))
    assert max(max(row.tokens) for row in drawn) < 61


def test_each_row_goes_on_until_the_model_can_read_no_further():
    model = tiny_model(max_seq_len=8)
    prompts = random_prompts([5, 1, 8, 5])
    # The last token is drawn from all 8 positions, and is not read any more.
    found = generate(model, prompts, free(100))
    assert [len(row.tokens) for row in found] == [4, 8, 1, 4]
    assert tokens_of(found) == [generate(model, [prompt], free(100))[0].tokens for prompt in prompts]
    assert tokens_of(generate(model, prompts, free(0))) == [[]] * 4
    assert generate(model, [], free(5)) == []


def test_an_answer_is_as_long_as_the_decoder_can_read_whatever_its_source():
    model = tiny_model("t5-tiny", max_seq_len=8)
    assert [len(row.tokens) for row in generate(model, random_prompts([5, 1, 8]), free(100))] == [8] * 3


def test_dropout_is_off_while_generating_and_the_mode_is_restored():
    model = build(tiny_config(dropout=0.5))
    first, second = (generate(model, random_prompts(), free(10)) for _ in range(2))
    assert first == second
    assert all(module.training for module in model.modules())


def test_training_works_after_generating():
    model = build(tiny_config())
    generate(model, random_prompts(), free(3))
    model(random_batch(2, 8)).logits_BTV[..., :61].sum().backward()
    assert model.embedding.weight.grad is not None


def test_stream_yields_a_token_of_every_open_row_at_a_time():
    model, prompts = tiny_model(), random_prompts()
    steps = list(stream(model, prompts, free(6)))
    assert [[drawn.row for drawn in step] for step in steps] == [[0, 1, 2, 3]] * 6
    rows = [[step[row].token for step in steps] for row in range(4)]
    assert rows == tokens_of(generate(model, prompts, free(6)))


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "^the prompt has no tokens"),
        ([0] * 129, r"^the prompt has 129 tokens, model\.max_seq_len is 128; shorten"),
        ([3, 61], "^the prompt has token id 61, the model's vocabulary has 61"),
        ([3, -1], "^the prompt has token id -1, the model's vocabulary has 61"),
    ],
)
def test_prompts_that_cannot_be_read_are_refused(prompt, message):
    with pytest.raises(ConfigError, match=message):
        generate(tiny_model(), [prompt], free(5))
    with pytest.raises(ConfigError, match=message.replace("^", "^prompt 2: ")):
        generate(tiny_model(), [[3], prompt], free(5))


def test_a_greatest_length_counts_the_prompt_and_leaves_room_for_a_token():
    limit = Constraints(20, max_length=7)
    found = generate(tiny_model(), [[3], [3, 4, 5, 6]], limit)
    assert [len(row.tokens) for row in found] == [6, 3]
    with pytest.raises(ConfigError, match=r"a prompt of 7 tokens fills max_length=7 of .*; give --max-tokens"):
        generate(tiny_model(), [[3], [3] * 7], limit)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eos_ids": (61,)}, "token id 61 of the generation settings is not among the 61"),
        ({"suppressed_ids": (-1,)}, "token id -1 of the generation settings"),
        ({"forced_eos_id": 99}, "token id 99 of the generation settings"),
        ({"min_new_tokens": -1}, "min_new_tokens=-1 must not be negative"),
    ],
)
def test_constraints_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        generate(tiny_model(), [[3]], Constraints(5, **changes))


def test_a_model_that_has_diverged_is_refused_instead_of_drawn_from():
    model = tiny_model()
    with torch.no_grad():
        model.decoder.norm.weight.fill_(float("nan"))
    drawn = partial(generate, sampling=Sampling(temperature=0.8, top_p=0.9))
    for decode in (generate, drawn, partial(beam_search, beams=Beams(2))):
        with pytest.raises(CheckpointError, match="scores are not numbers; use a checkpoint from before its loss"):
            decode(model, [[3]], free(5))
    assert not model.training


def test_models_that_cannot_generate_are_refused():
    with pytest.raises(ConfigError, match="an encoder cannot generate"):
        generate(build(encoder_config()), [[3]], free(5))
    with pytest.raises(ConfigError, match="the model has no language model's head"):
        generate(tiny_model(head={"kind": "none"}), [[3]], free(5))
    model = tiny_model("t5-tiny")
    model.special_tokens = model.special_tokens.model_copy(update={"start": None})
    with pytest.raises(ConfigError, match=r"first token is not known; set model\.special_tokens\.start"):
        generate(model, [[3]], free(5))


def scores_of(model, prompts, count, *, fixes_steps, keep=None):
    """Scores of greedy steps, [B, V] each, in steps of fixed shapes or not; `keep`: rows after the third token."""
    decoder = IncrementalDecoder(model, prompts, count, fixes_steps=fixes_steps)
    scores = [decoder.start()]
    for number in range(1, count):
        tokens_B = scores[-1].argmax(dim=-1)
        if keep is not None and number == 3:
            decoder.select(keep)
            tokens_B = tokens_B[torch.tensor(keep, device=tokens_B.device)]
        scores.append(decoder.step(tokens_B).clone())
    return scores


class Operations(TorchDispatchMode):
    """Counts what is dispatched."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.count += 1
        return function(*arguments, **(options or {}))


def test_a_greedy_step_dispatches_as_few_operations_at_any_length():
    model, counts = tiny_model(), []
    for new in (40, 2, 3, 40):  # the first builds the rotary table
        with Operations() as operations:
            generate(model, [[3, 4, 5]], free(new))
        counts.append(operations.count)
    _, two, three, forty = counts
    assert forty - two == 38 * (three - two)
    assert three - two <= 142  # two layers, views and all; a mask or a second copy of the tokens would be more


ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


# fp64 up to rounding, scores are returned in fp32: the kernel sums over hidden keys too, in other blocks.
# On a GPU, where steps are captured, fp32 sums of scores up to a hundred.
@pytest.mark.parametrize(
    ("device", "dtype", "tolerance"),
    [("cpu", torch.float64, 1e-6), pytest.param("cuda", torch.float32, 1e-3, marks=ON_GPU)],
)
@pairwise(
    preset=PRESETS,
    lengths={"equal": [5, 5, 5, 5], "padded": LENGTHS},
    keep=[None, [3, 0, 2], [2, 2, 1, 0], [1], [0, 1, 2, 3, 0]],
)
def test_steps_of_fixed_shapes_give_the_same_scores(preset, lengths, keep, device, dtype, tolerance, monkeypatch):
    monkeypatch.setattr(kv_cache, "FEWEST_KEYS", 4)  # so that 20 tokens take several lengths
    model, prompts = tiny_model(preset, attention="auto").to(device, dtype), random_prompts(lengths)
    plain, fixed = (scores_of(model, prompts, 20, fixes_steps=fixed, keep=keep) for fixed in (False, True))
    torch.testing.assert_close(fixed, plain, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
def test_steps_of_a_mixture_are_not_captured_as_the_host_waits_in_them(device):
    model = build(tiny_config(experts={"count": 6, "top_k": 2})).to(device).eval()
    prompts = random_prompts(LENGTHS)
    chosen, plain = (scores_of(model, prompts, 8, fixes_steps=fixed) for fixed in (None, False))
    torch.testing.assert_close(chosen, plain)
