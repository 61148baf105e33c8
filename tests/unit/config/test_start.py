"""The model of a config that starts from another one, and the rules of fine-tuning."""

import json

import pytest
from transformers import GPT2Config, GPT2LMHeadModel

from pretrain.config.finetune import FinetuneConfig
from pretrain.config.load import dump_config, load_config
from pretrain.config.presets import expand_preset
from pretrain.errors import ConfigError

RECIPE = "configs/finetune/instruction.yaml"


@pytest.fixture
def start(tmp_path):
    """A model folder of 300 tokens."""
    model = expand_preset({"preset": "bert-tiny", "vocab_size": 300, "special_tokens": {"eos": 2, "mask": 3}})
    (tmp_path / "model.json").write_text(json.dumps({"model": model}))
    return tmp_path


def test_without_a_model_that_of_the_start_is_taken_under_the_keys_that_are_given(start):
    config = load_config("configs/finetune/classify.yaml", [f"init.from={start}", "model.encoder.dropout=0.3"])
    assert (config.model.vocab_size, config.model.encoder.dropout) == (300, 0.3)
    assert (config.model.head.kind, config.model.pooler, config.model.head.transform) == ("labels", True, False)
    assert not config.model.tied_embeddings
    assert (config.model.special_tokens.eos, config.model.special_tokens.mask) == (None, 3)


def test_the_labels_of_a_start_give_way_to_those_of_the_data(start):
    model = json.loads((start / "model.json").read_text())["model"]
    model |= {"head": {"kind": "labels", "labels": ["a", "b"]}, "tied_embeddings": False}
    (start / "model.json").write_text(json.dumps({"model": model}))
    recipe, given = "configs/finetune/classify.yaml", ["model.head.labels=[c, d]"]
    assert load_config(recipe, [f"init.from={start}"]).model.head.labels == []
    assert load_config(recipe, [f"init.from={start}", *given]).model.head.labels == ["c", "d"]


def test_images_of_another_size_than_the_start_have_another_number_of_positions(start):
    model = expand_preset({"preset": "vit-tiny"}) | {"max_seq_len": 17}
    (start / "model.json").write_text(json.dumps({"model": model}))
    given = [f"init.from={start}", "model={input: {image: 28, channels: 1}}", "model.input.size=4"]
    given += ["batch.seq_len=50", "batch.global_tokens=6400"]
    config = load_config("configs/run/vit_fashion.yaml", ["model=null", *given])
    assert config.model.max_seq_len == 50


def test_a_preset_is_not_overruled_by_the_start(start):
    config = load_config(RECIPE, [f"init.from={start}", "model={preset: llama-tiny}", "batch.seq_len=128"])
    assert config.model.preset == "llama-tiny"


def test_a_resolved_config_needs_no_start_and_a_run_gives_its_model(start, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    config = load_config("configs/run/quickstart.yaml", ["model.decoder.layers=5"])
    (run / "config.yaml").write_text(dump_config(config))
    (run / "checkpoints/step-00000001").mkdir(parents=True)
    (run / "checkpoints/step-00000001/manifest.json").write_text("{}")
    checkpoint = run / "checkpoints/step-00000001"
    for folder in (run, checkpoint, run / "best", run / "ema", run / "best/ema", checkpoint / "ema"):
        tuned = load_config(RECIPE, [f"init.from={folder}"])
        assert tuned.model.decoder == config.model.decoder
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(dump_config(load_config(RECIPE, [f"init.from={run}"])))
    (run / "config.yaml").unlink()
    assert load_config(resolved).model.decoder == config.model.decoder


def test_a_start_may_be_a_hugging_face_folder(tmp_path):
    GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=8, n_head=2, n_positions=1024, vocab_size=40)).save_pretrained(
        tmp_path
    )
    decoder = load_config(RECIPE, [f"init.from={tmp_path}", "model.decoder.dropout=0.3"]).model.decoder
    assert (decoder.layers, decoder.width, decoder.position, decoder.dropout) == (2, 8, "learned", 0.3)


def test_a_start_that_is_not_there_or_damaged_is_said_with_its_place(tmp_path):
    (tmp_path / "peft").mkdir()
    (tmp_path / "peft" / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"peft: adapters, not a model; merge them into their model by peft"):
        load_config(RECIPE, [f"init.from={tmp_path / 'peft'}"])
    for nowhere in (tmp_path / "nowhere", tmp_path / "nowhere/ema", tmp_path / "ema"):
        what = f"init.from={nowhere}: no run, checkpoint, model folder or Hugging Face folder is there; check"
        with pytest.raises(ConfigError, match=what):
            load_config(RECIPE, [f"init.from={nowhere}"])
    told = "pretrain import openai/gpt2 models/gpt2, then init.from=models/gpt2"
    with pytest.raises(ConfigError, match=f"is there; check the path; a model of the hub comes first: {told}"):
        load_config(RECIPE, ["init.from=openai/gpt2"])
    (tmp_path / "base").mkdir()
    with pytest.raises(ConfigError, match=rf"did you mean {tmp_path}/base\?"):
        load_config(RECIPE, [f"init.from={tmp_path / 'bas'}"])
    (tmp_path / "model.json").write_text("{")
    with pytest.raises(ConfigError, match=r"model\.json: init.from: "):
        load_config(RECIPE, [f"init.from={tmp_path}"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["finetune.rank=4"], "rank goes with kind=lora, not full"),
        (["finetune.kind=lora"], "finetune.kind=lora needs a base model; set init.from"),
        (
            ["finetune.kind=lora", "init={from: x, freeze: [a]}"],
            "init.freeze does not go with finetune.kind=lora, which freezes the whole model",
        ),
        (["finetune.dora=true"], "dora goes with kind=lora, not full"),
        (
            ["finetune={kind: lora, dora: true}", "init.from=x", "engine={kind: deepspeed, zero_stage: 3}"],
            "finetune.dora takes norms of whole matrices, which engine.zero_stage=3 divides; use engine.zero_stage=2",
        ),
    ],
)
def test_fine_tuning_that_cannot_be_is_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_config("configs/run/quickstart.yaml", overrides)


@pytest.mark.parametrize("recipe", ["chat", "instruction_lora"])
def test_a_recipe_of_adapters_trains_all_weights_by_an_override(tmp_path, recipe):
    overrides = [f"init.from={tmp_path}", "model={preset: llama-tiny, max_seq_len: 1024}", "finetune=null"]
    assert load_config(f"configs/finetune/{recipe}.yaml", overrides).finetune == FinetuneConfig()


def test_adapters_beside_a_recurrent_model_are_refused():
    with pytest.raises(
        ConfigError, match=r"finetune\.kind=lora adapts Transformer blocks, which model\.kind=recurrent"
    ):
        load_config("configs/run/multi30k_recurrent.yaml", ["finetune.kind=lora", "init.from=x"])
