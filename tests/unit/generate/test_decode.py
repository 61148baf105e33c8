"""Decoding with a cache against reading everything again."""

import pytest
import torch

from pretrain.errors import ConfigError
from pretrain.generate import GREEDY, Sampling, generate, stream
from pretrain.model import KVCache
from pretrain.types import Batch
from tests.unit.model.tiny import build, encoder_config, random_batch, tiny_config

PRESETS = ["llama-tiny", "gpt2-tiny"]


def prompts(rows=2, length=5):
    return random_batch(rows, length).tokens_BT


def uncached_greedy(model, prompt, count):
    tokens = prompt
    with torch.no_grad():
        for _ in range(count):
            best = model(Batch(tokens, tokens)).logits_BTV[:, -1].argmax(dim=-1)
            tokens = torch.cat((tokens, best[:, None]), dim=1)
    return tokens[:, prompt.shape[1] :].tolist()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("preset", PRESETS)
def test_cached_decoding_equals_reading_everything_again(preset, attention):
    model = build(tiny_config(preset), attention=attention)
    prompt = prompts()
    assert generate(model, prompt, 20, GREEDY) == uncached_greedy(model, prompt, 20)


@pytest.mark.parametrize("sizes", [[12], [5, 1, 1, 5], [1] * 12, [3, 4, 5]])
@pytest.mark.parametrize("preset", PRESETS)
def test_logits_do_not_depend_on_how_the_cache_was_filled(preset, sizes):
    model = build(tiny_config(preset))
    tokens = prompts(length=12)
    cache = KVCache(model.num_layers, capacity=12)
    with torch.no_grad():
        parts = [model(Batch(part, part), cache=cache).logits_BTV for part in tokens.split(sizes, dim=1)]
        torch.testing.assert_close(
            torch.cat(parts, dim=1), model(Batch(tokens, tokens)).logits_BTV, rtol=1e-5, atol=1e-5
        )
    assert cache.length == 12


def test_a_seed_reproduces_and_another_does_not():
    model, sampling = build(tiny_config(), scale=1.0), Sampling(top_k=40)
    first = generate(model, prompts(), 20, sampling, seed=1)
    assert first == generate(model, prompts(), 20, sampling, seed=1)
    assert first != generate(model, prompts(), 20, sampling, seed=2)


def test_a_tiny_top_p_is_greedy():
    model = build(tiny_config())
    assert generate(model, prompts(), 15, Sampling(top_p=1e-9)) == generate(model, prompts(), 15, GREEDY)


def test_a_row_stops_at_its_end_token_and_the_others_go_on():
    model = build(tiny_config())
    free = generate(model, prompts(), 20, GREEDY)
    eos = next(token for token in free[0][3:] if token not in free[1])
    stopped = generate(model, prompts(), 20, GREEDY, eos_id=eos)
    assert stopped == [free[0][: free[0].index(eos)], free[1]]
    assert generate(model, prompts()[:1], 20, GREEDY, eos_id=eos) == stopped[:1]


def test_padded_ids_are_never_generated():
    model = build(tiny_config(vocab_size=61))
    assert model.head.weight.shape[0] == 128
    drawn = generate(model, prompts(), 100, Sampling(temperature=100.0))
    assert max(max(row) for row in drawn) < 61


def test_generation_stops_where_the_model_can_read_no_further():
    model = build(tiny_config(model={"max_seq_len": 8}))
    # The last token is drawn from all 8 positions, and is not read any more.
    assert [len(row) for row in generate(model, prompts(), 100, GREEDY)] == [4, 4]
    assert [len(row) for row in generate(model, prompts(length=8), 100, GREEDY)] == [1, 1]
    assert generate(model, prompts(), 0, GREEDY) == [[], []]


def test_dropout_is_off_while_generating_and_the_mode_is_restored():
    model = build(tiny_config(dropout=0.5))
    assert generate(model, prompts(), 10, GREEDY) == generate(model, prompts(), 10, GREEDY)
    assert model.training
    assert all(module.training for module in model.modules())


def test_training_works_after_generating():
    model = build(tiny_config())
    generate(model, prompts(), 3, GREEDY)
    model(random_batch(2, 8)).logits_BTV[..., :61].sum().backward()
    assert model.embedding.weight.grad is not None


def test_stream_yields_a_token_a_row_at_a_time():
    model = build(tiny_config())
    steps = [ids.tolist() for ids in stream(model, prompts(), 6, GREEDY)]
    assert [list(row) for row in zip(*steps, strict=True)] == generate(model, prompts(), 6, GREEDY)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (torch.zeros(1, 0, dtype=torch.int64), "the prompt has no tokens"),
        (torch.zeros(1, 129, dtype=torch.int64), r"the prompt has 129 tokens, model\.max_seq_len is 128; shorten"),
        (torch.tensor([[3, 61]]), "token id 61, the model's vocabulary has 61"),
    ],
)
def test_prompts_that_cannot_be_read_are_refused(tokens, message):
    with pytest.raises(ConfigError, match=message):
        generate(build(tiny_config()), tokens, 5, GREEDY)


def test_an_encoder_is_refused():
    with pytest.raises(ConfigError, match="an encoder cannot generate"):
        generate(build(encoder_config()), prompts(), 5, GREEDY)
