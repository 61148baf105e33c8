"""Texts from a model that is being trained: by one rank, or by all of them in step."""

import logging

import pytest
import torch

from pretrain.artifact.plain_codec import PlainCodec
from pretrain.config.presets import expand_preset
from pretrain.config.run import RunConfig
from pretrain.errors import ConfigError
from pretrain.generation.constraints import Constraints
from pretrain.generation.sampling import Sampling
from pretrain.generation.text import generate_text
from pretrain.training.samples import Samples, TextReader
from tests.helpers.tokenizers import train_char
from tests.unit.model.tiny import build, tiny_config, two_stacks_config

TOKENIZER = train_char(["abcdefghij klmnopqrstuvwxyz.\n"])
DECODER = build(tiny_config(vocab_size=TOKENIZER.get_vocab_size(), dropout=0.5), scale=1.0)
TWO_STACKS = build(
    two_stacks_config(model={"special_tokens": {"start": 0}}, vocab_size=TOKENIZER.get_vocab_size(), dropout=0.5),
    scale=1.0,
)
PROMPTS = [letter * length for length, letter in enumerate("abcdefghijklmnopqrst", start=1)]
MAX_TOKENS = 24


def codec_of(model) -> PlainCodec:
    return PlainCodec(TOKENIZER, ends_sources=model.encoder is not None)


def samples(model, *, in_step=False, normalize=str, prompts=PROMPTS) -> Samples:
    """Texts at temperature 1, which a model whose scores are flat ends soon or late."""
    preset = "llama-tiny" if model.encoder is None else "t5-v1.1-tiny"
    config = RunConfig.model_validate({
        "run": {"dir": "runs", "name": "run"},
        "data": {"path": "data"},
        "batch": {"global_tokens": 64, "seq_len": 32, "micro": 1},
        "model": {**expand_preset({"preset": preset, "vocab_size": 61})},
        "objective": {"kind": "causal" if model.encoder is None else "span"},
        "optim": {"lr": 1e-3},
        "train": {"steps": 20},
        "eval": {"every_steps": 5},
        "tracking": {"samples": {"prompts": prompts, "every_evals": 2, "max_tokens": MAX_TOKENS, "temperature": 1.0}},
    })  # fmt: skip
    return Samples(config, TextReader(normalize, str, codec_of(model)), model, in_step=in_step)


def forwards_of(made: Samples, model) -> tuple[list[tuple[str, str]], int]:
    """What is generated, and how many times the model was run for it."""
    runs = []
    hook = model.register_forward_hook(lambda *_: runs.append(1))
    try:
        return made.generate(), len(runs)
    finally:
        hook.remove()


@pytest.mark.parametrize("model", [DECODER, TWO_STACKS], ids=["decoder", "two stacks"])
def test_texts_are_those_of_the_command_and_leave_the_model_in_training(model):
    model.train()
    state = torch.get_rng_state()
    found = samples(model).generate()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(part.training for part in model.modules())
    codec = codec_of(model)
    constraints = Constraints(MAX_TOKENS, eos_ids=codec.eos_ids)
    answers = [one for (one,) in generate_text(model, codec, PROMPTS, constraints, Sampling(1.0), seed=1234)]
    assert found == [(answer.prompt, answer.text) for answer in answers]
    assert min(answer.num_tokens for answer in answers) < MAX_TOKENS / 2, "some must end early"


@pytest.mark.parametrize("model", [DECODER, TWO_STACKS], ids=["decoder", "two stacks"])
def test_in_step_the_model_runs_as_often_whatever_it_says_and_says_the_same(model):
    """One forward too many on one rank is a hang: the number depends on the lengths of the prompts
    alone."""
    alone, _ = forwards_of(samples(model), model)
    together, num_forwards = forwards_of(samples(model, in_step=True), model)
    assert together == alone
    assert num_forwards == 2 * MAX_TOKENS, "two batches of sixteen, one forward a token"
    for prompt in ("ab", "cd"):
        assert forwards_of(samples(model, in_step=True, prompts=[prompt]), model)[1] == MAX_TOKENS


def test_prompts_are_normalised_as_the_data_were_and_shown_as_they_came():
    ((prompt, text),) = samples(DECODER, normalize=str.lower, prompts=["ABC"]).generate()
    ((_, expected),) = samples(DECODER, prompts=["abc"]).generate()
    assert (prompt, text) == ("ABC", expected)


def test_texts_follow_every_so_many_evaluations():
    made = samples(DECODER)
    assert [step for step in range(1, 31) if made.is_due(step)] == [10, 20, 30]


def test_a_prompt_that_does_not_fit_is_named():
    with pytest.raises(ConfigError, match=r"^tracking\.samples\.prompts\[1\]: the prompt has 129 tokens, model\.max"):
        samples(DECODER, prompts=["a", "a" * 129])


@pytest.mark.parametrize("in_step", [False, True])
def test_a_model_that_gives_no_numbers_is_a_warning(caplog, in_step):
    model = build(tiny_config())
    with torch.no_grad():
        model.embedding.weight.fill_(torch.nan)
    with caplog.at_level(logging.WARNING, logger="pretrain"):
        assert samples(model, in_step=in_step).generate() == []
    assert "no samples: the model's scores are not numbers" in caplog.text
