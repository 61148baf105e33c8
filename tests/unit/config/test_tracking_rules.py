"""Texts and pictures that a run could not show are refused when its config loads."""

import pytest

from pretrain.config.base import refuse
from pretrain.config.load import load_config
from pretrain.config.model import HeadConfig, parse_model
from pretrain.config.presets import expand_preset
from pretrain.config.tracking import AttentionConfig, SamplesConfig, TrackingConfig, tracking_conflicts
from pretrain.config.train import EvalConfig
from pretrain.errors import ConfigError

DECODER, ENCODER, TWO_STACKS = (
    parse_model(expand_preset({"preset": preset, "vocab_size": 100}))
    for preset in ("llama-tiny", "bert-tiny", "t5-v1.1-tiny")
)
OF_SPANS = DECODER.model_copy(update={"head": HeadConfig(kind="spans")})
RECURRENT = parse_model({"kind": "recurrent", "decoder": {"layers": 1, "width": 8}})
NONE, PROMPTS = SamplesConfig(), SamplesConfig(prompts=["a"])


def check(model=DECODER, every=10, samples=NONE, **attention):
    tracking = TrackingConfig(samples=samples, attention=AttentionConfig(**attention))
    refuse(tracking_conflicts(tracking, EvalConfig(every_steps=every), model))


@pytest.mark.parametrize(
    ("address", "text"),
    [
        ("nowhere", "use auto, or an address such as http://HOST:5000"),
        ("http://me:pw@host:5000", "has no credentials; use auto, and set MLFLOW_TRACKING_URI"),
        ("http://host:5000?token=pw", "has no credentials"),
    ],
)
def test_an_address_of_mlflow_is_one_without_credentials(address, text):
    with pytest.raises(ValueError, match=text) as refused:
        TrackingConfig(mlflow=address)
    assert "pw" not in str(refused.value).replace(f"input_value='{address}'", "").split("[type")[0]
    assert TrackingConfig(mlflow="sqlite:////data/mlflow.db").mlflow


@pytest.mark.parametrize("bad", [{"project": "a/b"}, {"project": "a" * 129}, {"tags": ["a" * 65]}, {"tags": [""]}])
def test_names_that_wandb_refuses_are_refused_before_the_run(bad):
    with pytest.raises(ValueError, match="characters"):
        TrackingConfig(**bad)
    TrackingConfig(project="a b.c", tags=["a" * 64])


def test_what_can_be_shown_is_taken():
    check(every=0)
    check(RECURRENT, samples=PROMPTS)
    for kind in (None, "self", "decoder"):
        check(samples=PROMPTS, text="a", kind=kind)
    check(ENCODER, text="a", kind="encoder")
    for kind in (None, "self", "encoder", "decoder", "cross"):
        check(TWO_STACKS, samples=PROMPTS, text="a", target="b", kind=kind)
    last = {"layers": [DECODER.decoder.layers - 1], "heads": [DECODER.decoder.heads - 1]}
    check(text="a", **last)


@pytest.mark.parametrize(
    ("model", "values", "message"),
    [
        (
            DECODER,
            {"samples": PROMPTS, "every": 0},
            r"tracking\.samples\.prompts needs evaluations; set eval\.every_steps, which is 0",
        ),
        (DECODER, {"text": "a", "every": 0}, r"tracking\.attention\.text needs evaluations"),
        (ENCODER, {"samples": PROMPTS}, "a model without a decoder generates no text; remove tracking.samples.prompts"),
        (
            OF_SPANS,
            {"samples": PROMPTS},
            "a model of head.kind=spans generates no text; remove tracking.samples.prompts",
        ),
        (RECURRENT, {"text": "a"}, "model.attention=none has no weights to draw; remove tracking.attention"),
        (TWO_STACKS, {"text": "a"}, r"is the input of the encoder; set tracking\.attention\.target, too"),
        (DECODER, {"text": "a", "target": "b"}, r"tracking\.attention\.target is for models of two stacks; leave it"),
        (DECODER, {"text": "a", "kind": "cross"}, "kind=cross: the model has none; use self or decoder"),
        (ENCODER, {"text": "a", "kind": "decoder"}, "kind=decoder: the model has none; use self or encoder"),
        (DECODER, {"text": "a", "layers": [0, 99]}, r"layers=\[0, 99\]: there are \d+; use 0 to \d+"),
        (DECODER, {"text": "a", "heads": [99]}, r"tracking\.attention\.heads=\[99\]: there are \d+; use 0 to \d+"),
    ],
)
def test_what_cannot_be_shown_is_refused(model, values, message):
    with pytest.raises(ValueError, match=message):
        check(model, **values)


def test_a_recipe_meets_the_rules_when_it_is_loaded():
    overrides = ["eval.every_steps=10", 'tracking.attention={text: "a", target: "b"}']
    with pytest.raises(ConfigError, match="target is for models of two stacks; leave it out"):
        load_config("configs/run/quickstart.yaml", overrides)
    with pytest.raises(ConfigError, match=r"tracking\.attention\.layers\.0.*-1"):
        load_config("configs/run/quickstart.yaml", ["tracking.attention={text: a, layers: [-1]}"])
