"""The model card says what the model is, how to load it and what made it, and no secret."""

import pytest

from pretrain import __version__
from pretrain.families import FAMILIES
from pretrain.interop.write import About, model_card
from tests.unit.interop.releases import tiny


def card(preset="llama-tiny", about=None, has_tokenizer=True, **model):
    config, family = tiny(preset, **model), FAMILIES[preset.partition("-")[0]]
    return model_card(
        config, family, about or About(), architecture=family.architecture(config), num_parameters=1_234_567,
        dtype="bf16", has_tokenizer=has_tokenizer,
    )  # fmt: skip


def test_facts_metrics_and_config_are_on_the_card():
    about = About(
        "My run", "mine", source="step 1000 of my-run", run_config="seed: 1\n", metrics={"loss": 2.34567891, "n": 3}
    )
    text = card(about=about)
    assert text.startswith("---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags:\n- llama\n---\n")
    for part in (
        "# My run\n",
        "- architecture: LlamaForCausalLM (decoder)\n",
        "- parameters: 1,234,567, bf16\n",
        "- layers, width, heads: 2, 64, 4\n",
        f"Made from step 1000 of my-run, by pretrain {__version__}. No licence is stated: the",
        "| loss | 2.34568 |\n| n | 3 |",
        "differs from the defaults</summary>\n\n```yaml\nseed: 1\n```\n\n</details>",
    ):
        assert part in text


def test_nothing_is_said_of_what_is_not_known():
    text = card(has_tokenizer=False)
    for part in ("Tokenizer", "Metrics", "Config of the run", "Made from"):
        assert part not in text


@pytest.mark.parametrize(
    ("preset", "model", "auto_class"),
    [
        ("gpt2-tiny", {}, "AutoModelForCausalLM"),
        ("bert-tiny", {}, "AutoModelForMaskedLM"),
        ("t5-tiny", {}, "AutoModelForSeq2SeqLM"),
        ("llama-tiny", {"head": {"kind": "none"}}, "AutoModel"),
    ],
)
def test_the_class_that_loads_the_model_is_named(preset, model, auto_class):
    assert f"from transformers import {auto_class}, AutoTokenizer\n" in card(preset, **model)
    text = card(preset, About(folder="mine"), **model)
    loads = f"model = {auto_class}.from_pretrained(name)\ntokenizer = AutoTokenizer.from_pretrained(name)\n"
    assert f'name = "mine"  # this folder, or its name on the hub\n{loads}inputs = tokenizer("A text"' in text
    assert ("model.generate(**inputs" in text) == (auto_class in ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM"))


def test_a_model_that_chats_is_called_by_its_template():
    assert "tokenizer.apply_chat_template(turns, add_generation_prompt=True" in card(about=About(chats=True))
    assert "apply_chat_template" not in card()


def test_secrets_are_blotted_out(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijkl")
    text = card(about=About(source="hf_abcdefghijkl", run_config="token: hf_abcdefghijkl"))
    assert "hf_abcdefghijkl" not in text
    assert "token: ***" in text
