"""What `pretrain generate` writes."""

import io
import json

import pytest

from pretrain.config.model import ModelConfig
from pretrain.config.presets import expand_preset
from pretrain.errors import ConfigError
from pretrain.generation.beam import Beams
from pretrain.generation.command import fill_masks, run_generate
from pretrain.generation.constraints import Constraints
from pretrain.generation.generation_options import Options
from pretrain.generation.sampling import GREEDY
from pretrain.generation.text import generate_text
from pretrain.types import GenerationDefaults
from tests.helpers.tokenizers import train_char
from tests.unit.generation.codecs import TinyCodec, byte_codec
from tests.unit.generation.models import tiny_model
from tests.unit.model.tiny import build

CODEC = byte_codec()
PROMPTS = ["the cat", "", "on the"]
GREEDILY = Options(temperature=0.0, max_tokens=9)
ENDING = Constraints(9, eos_ids=CODEC.eos_ids)


class Flushed(io.StringIO):
    """Remembers what had been written at each flush."""

    def __init__(self):
        super().__init__()
        self.flushes = []

    def flush(self):
        self.flushes.append(self.getvalue())


def model_of(preset):
    return tiny_model(preset, vocab_size=CODEC.vocab_size, scale=2.0)


def run(model, prompts, options=GREEDILY, out=None, codec=CODEC, **rest):
    out = Flushed() if out is None else out
    prompts = None if prompts is None else iter(prompts)
    run_generate(model, codec, GenerationDefaults(), options, prompts, out, **rest)
    return out.getvalue()


def expected_texts(model, prompts, method=GREEDY):
    return [[answer.text for answer in row] for row in generate_text(model, CODEC, prompts, ENDING, method)]


def test_one_prompt_is_continued_as_the_tokens_come():
    model, out = model_of("llama-tiny"), Flushed()
    ((text,),) = expected_texts(model, ["the cat"])
    assert run(model, ["the cat"], out=out) == f"the cat{text}\n"
    assert len(out.flushes) > 4
    assert out.flushes[0].startswith("the cat")
    assert all(later.startswith(earlier) for earlier, later in zip(out.flushes, out.flushes[1:], strict=False))


def test_one_source_is_resulted_without_repeating_it():
    model = model_of("t5-tiny")
    ((text,),) = expected_texts(model, ["the cat"])
    assert run(model, ["the cat"]) == f"{text}\n"


def test_without_a_prompt_a_decoder_begins_a_document():
    model = model_of("llama-tiny")
    ((text,),) = expected_texts(model, [""])
    assert run(model, None) == f"{text}\n"


def test_several_prompts_get_a_line_each_as_soon_as_their_batch_is_done():
    model, out = model_of("llama-tiny"), Flushed()
    lines = run(model, [*PROMPTS, "a\nb"], out=out, batch_size=2).split("\n")
    found = expected_texts(model, [*PROMPTS, "a\nb"])
    expected = [prompt + text for prompt, (text,) in zip([*PROMPTS, "a\nb"], found, strict=True)]
    assert lines == [*(line.replace("\r", "\\r").replace("\n", "\\n") for line in expected), ""]
    assert lines[3].startswith("a\\nb")
    assert [text.count("\n") for text in out.flushes] == [1, 2, 3, 4]


def test_the_best_of_several_beams_come_with_their_scores():
    model = model_of("t5-tiny")
    options = Options(beams=3, n_best=2, max_tokens=9)
    answers = [*generate_text(model, CODEC, ["the", "cat"], ENDING, Beams(3, num_return=2))]
    expected = [(f"{one.score:.4f}", one.text.replace("\n", "\\n")) for row in answers for one in row]
    assert [tuple(line.split("\t", 1)) for line in run(model, ["the", "cat"], options).splitlines()] == expected
    (best,) = run(model, ["the"], Options(beams=3, max_tokens=9)).splitlines()
    assert best == expected[0][1]


@pytest.mark.parametrize("preset", ["llama-tiny", "t5-tiny"])
def test_json_is_an_object_a_line(preset):
    model = model_of(preset)
    for prompts in (["the cat"], PROMPTS[::2]):
        found = [json.loads(line) for line in run(model, prompts, as_json=True).splitlines()]
        answers = [row[0] for row in generate_text(model, CODEC, prompts, ENDING, GREEDY)]
        assert found == [
            {"prompt": one.prompt, "text": one.text, "tokens": one.num_tokens, "score": one.score} for one in answers
        ]
    found = run(model, ["the"], Options(beams=3, n_best=3, max_tokens=4), as_json=True).splitlines()
    scores = [json.loads(line)["score"] for line in found]
    assert len(scores) == 3
    assert scores == sorted(scores, reverse=True)


def test_the_seed_is_that_of_the_draws():
    model, drawn = model_of("llama-tiny"), Options(temperature=1.0, max_tokens=9)
    assert run(model, ["the"], drawn, seed=1) == run(model, ["the"], drawn, seed=1)
    assert run(model, ["the"], drawn, seed=1) != run(model, ["the"], drawn, seed=2)
    # A prompt is continued alike alone, where it is streamed, and among others.
    alone = run(model, ["the"], drawn, seed=1).removesuffix("\n").replace("\r", "\\r").replace("\n", "\\n")
    assert run(model, ["cat", "the"], drawn, seed=1).split("\n")[1] == alone


def encoder():
    values = expand_preset({"preset": "bert-tiny", "vocab_size": CODEC.vocab_size})
    return build(ModelConfig.model_validate(values), scale=2.0)


def test_an_encoder_fills_masks():
    model, prompts = encoder(), ["the [MASK] sat", "[MASK] and [MASK]"]
    filled = [fill_masks(model, CODEC, prompt, 3) for prompt in prompts]
    lines = run(model, prompts, Options(top_k=3)).split("\n")
    assert lines[0] == filled[0].text
    best = filled[0].masks[0][0]
    assert lines[1].startswith(f"  mask 1: {best.token} {best.probability:.3f}  ")
    assert [line[:9] for line in lines[3:5]] == ["  mask 1:", "  mask 2:"]
    (found,) = [json.loads(line) for line in run(model, prompts[1:], Options(top_k=3), as_json=True).splitlines()]
    assert (found["prompt"], found["text"]) == (prompts[1], filled[1].text)
    assert [[one["id"] for one in row] for row in found["masks"]] == [
        [one.id for one in row] for row in filled[1].masks
    ]


@pytest.mark.parametrize(
    ("model", "prompts", "options", "message"),
    [
        (encoder(), None, Options(), r"there is no prompt; give --prompt, with \[MASK\] in it"),
        (encoder(), ["[MASK]", "no"], Options(), "prompt 2: the text has no mask"),
        (encoder(), ["[MASK]"], Options(beams=2), "--beams is for models that generate"),
        (model_of("t5-tiny"), None, Options(), "there is no prompt; give --prompt, --file, or pipe a text in"),
        (model_of("t5-tiny"), ["a"], Options(n_best=2), "--n-best needs several beams"),
    ],
)
def test_what_cannot_be_is_refused(model, prompts, options, message):
    with pytest.raises(ConfigError, match=message):
        run(model, prompts, options)


def test_a_prompt_that_is_refused_leaves_no_output():
    out = Flushed()
    with pytest.raises(ConfigError, match="the prompt has"):
        run(model_of("llama-tiny"), ["cat " * 200], out=out)
    assert out.getvalue() == ""


@pytest.mark.parametrize(("prompts", "num_blank"), [([" "], 1), ([" ", "\n\t"], 2)])
def test_texts_without_a_visible_character_are_counted(prompts, num_blank):
    codec = TinyCodec(train_char([" \n\t"]))
    model = tiny_model("llama-tiny", vocab_size=codec.vocab_size)
    assert run_generate(model, codec, GenerationDefaults(), GREEDILY, iter(prompts), io.StringIO()) == num_blank
    assert (
        run_generate(model_of("llama-tiny"), CODEC, GenerationDefaults(), GREEDILY, iter(["the cat"]), io.StringIO())
        == 0
    )


def test_characters_that_an_output_cannot_show_are_spelt_out():
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    run_generate(model_of("llama-tiny"), CODEC, GenerationDefaults(), GREEDILY, iter(["\u20ac"]), out)
    out.seek(0)
    assert out.read().startswith("\\u20ac")


def test_an_interrupted_text_ends_its_line():
    class Interrupted(Flushed):
        def flush(self):
            super().flush()
            if len(self.flushes) == 3:
                raise KeyboardInterrupt

    out = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        run(model_of("llama-tiny"), ["the cat"], Options(temperature=1.0), out=out)
    assert out.getvalue().endswith("\n")
