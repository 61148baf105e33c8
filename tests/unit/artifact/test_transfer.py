"""Models in and out through folders: a release of transformers, a model folder, a release again."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from pretrain.artifact.model_path import open_source
from pretrain.artifact.open import open_artifact
from pretrain.artifact.transfer import export_model, import_model
from pretrain.checkpoint.format import MODEL_FILE
from pretrain.config.model import SpecialTokens
from pretrain.errors import CheckpointError, ConfigError, DataError, DiskError
from pretrain.inspect.describe import describe
from pretrain.interop.tokenizer import wrap_tokenizer_json
from pretrain.tokenizer.file import dump_tokenizer
from pretrain.types import Batch
from pretrain.utils.io import set_fault_hook
from tests.helpers.lent import quiet_transformers
from tests.helpers.tokenizers import train_bpe
from tests.unit.artifact.runs import TEXTS, write_text_run, write_texts


@pytest.fixture(scope="module")
def release(tmp_path_factory) -> Path:
    """A GPT-2 of transformers with random weights, without a tokenizer."""
    folder = tmp_path_factory.mktemp("release") / "gpt2"
    torch.manual_seed(3)
    config = transformers.GPT2Config(
        vocab_size=67, n_embd=32, n_layer=2, n_head=4, n_positions=48, bos_token_id=1, eos_token_id=2
    )
    with quiet_transformers():
        model = transformers.GPT2LMHeadModel(config)
        model.generation_config.update(num_beams=3, length_penalty=0.8)
        model.save_pretrained(folder)
    return folder


@pytest.fixture
def imported(release, tmp_path) -> Path:
    """The same as a model folder."""
    import_model(str(release), tmp_path / "model")
    return tmp_path / "model"


def logits(folder: Path) -> torch.Tensor:
    with quiet_transformers(), torch.no_grad():
        model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        return model(torch.arange(20)[None]).logits


def test_an_import_is_exported_as_what_it_came_from(release, imported, tmp_path):
    export_model(imported, tmp_path / "out")
    assert torch.equal(logits(tmp_path / "out"), logits(release))
    import_model(str(tmp_path / "out"), tmp_path / "again")
    first, again = open_source(imported), open_source(tmp_path / "again")
    assert again.config == first.config
    assert again.generation == first.generation
    assert first.generation.num_beams == 3
    assert all(torch.equal(first.read(name), again.read(name)) for name in first.shapes)


def change_model(folder: Path, **values) -> None:
    described = json.loads((folder / MODEL_FILE).read_text())
    described["model"] |= values
    (folder / MODEL_FILE).write_text(json.dumps(described))


def test_the_family_of_an_older_import_is_that_of_its_origin(imported):
    assert json.loads((imported / MODEL_FILE).read_text())["model"]["family"] == "gpt2"
    change_model(imported, family=None)
    assert open_source(imported).config.family == "gpt2"


def test_a_family_that_does_not_represent_a_model_any_more_gives_way_and_that_is_said(imported, tmp_path, caplog):
    change_model(imported, family="starcoder2")
    assert export_model(imported, tmp_path / "out").model_type == "gpt2"
    said = "out: exported as gpt2, since a starcoder2 does not represent this model any more: it has "
    assert said in caplog.text and "decoder.position=rotary, not learned" in caplog.text


def test_only_a_decoder_of_an_encoder_has_a_start_token_in_its_export(imported, tmp_path):
    described = json.loads((imported / MODEL_FILE).read_text())
    described["model"]["special_tokens"]["start"] = 1
    (imported / MODEL_FILE).write_text(json.dumps(described))
    export_model(imported, tmp_path / "out", check=False)
    found = json.loads((tmp_path / "out/generation_config.json").read_text())
    assert found["bos_token_id"] == 1 and "decoder_start_token_id" not in found


def test_a_release_is_exported_in_bf16(release, tmp_path):
    export_model(release, tmp_path / "half", dtype="bf16")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "half")
    assert theirs.dtype == torch.bfloat16
    weight = open_source(release).read("embedding.weight")[:67]
    assert torch.equal(theirs.get_input_embeddings().weight, weight.to(torch.bfloat16))


def test_every_kind_of_folder_opens_as_the_same_model(release, imported, monkeypatch):
    monkeypatch.setattr("pretrain.artifact.model_path.load_hub_tokenizer", lambda folder: None)
    (imported / "tokenizer").mkdir()
    found = [open_artifact(folder).model for folder in (release, imported)]
    ids = torch.arange(20)[None]
    outputs = [model(Batch(ids, ids)).logits_BTV[..., :67] for model in found]
    assert torch.equal(*outputs)
    torch.testing.assert_close(outputs[0], logits(release), rtol=1e-5, atol=1e-5)
    assert not any(model.training for model in found)


def test_inspect_tells_what_a_folder_is(release, imported):
    model, theirs = describe(imported), describe(release)
    assert (model["kind"], theirs["kind"]) == ("model", "Hugging Face model")
    assert "vocabulary 67 in 128 rows, " in model["model"]
    assert theirs["model"] == model["model"].replace(" in 128 rows", "")
    assert theirs["parameters"] == sum(one.numel() for one in load_file(release / "model.safetensors").values())
    assert model["parameters"] - theirs["parameters"] == (128 - 67) * 32, "padding that only our folder has"
    assert theirs["model_type"] == "gpt2"


def test_an_import_says_what_it_left_out(release, tmp_path):
    facts = import_model(str(release), tmp_path / "model")
    assert (facts.model_type, facts.shape, facts.tokenizer) == ("gpt2", "decoder", False)
    assert facts.ignored == []
    with quiet_transformers():
        theirs = transformers.AutoModelForCausalLM.from_pretrained(release)
    assert facts.num_parameters == theirs.num_parameters()  # without padding of the vocabulary
    changed = tmp_path / "changed"
    changed.mkdir()
    for file in release.iterdir():
        (changed / file.name).write_bytes(file.read_bytes())
    (changed / "generation_config.json").write_text(json.dumps({"diversity_penalty": 1.3, "no_repeat_ngram_size": 3}))
    assert import_model(str(changed), tmp_path / "second").not_honoured == ["diversity_penalty=1.3"]


def test_an_import_warns_of_a_tokenizer_that_is_larger_than_its_model(release, tmp_path, caplog):
    shutil.copytree(release, tmp_path / "release")
    tokenizer = train_bpe(TEXTS, 300)
    for name, content in wrap_tokenizer_json(dump_tokenizer(tokenizer), SpecialTokens(eos=0)):
        (tmp_path / "release" / name).write_bytes(content)
    import_model(str(tmp_path / "release"), tmp_path / "model")
    assert f"tokenizer has ids up to {tokenizer.get_vocab_size() - 1}, and its model 67 tokens" in caplog.text


def test_a_vocabulary_of_another_program_is_named_by_an_import(release, tmp_path, caplog):
    shutil.copytree(release, tmp_path / "release")
    (tmp_path / "release/qwen.tiktoken").write_bytes(b"IQ== 0\n")
    import_model(str(tmp_path / "release"), tmp_path / "model")
    assert "qwen.tiktoken: a tiktoken file, which has neither" in caplog.text
    assert "imported without its tokenizer" in caplog.text
    (tmp_path / "release/tokenizer.model").write_bytes(b"IQ== 0\n")
    with pytest.raises(DataError, match=r"tokenizer.model: a tiktoken file, .*; give the folder of a release with a"):
        import_model(str(tmp_path / "release"), tmp_path / "second")


def test_a_folder_that_holds_something_is_not_written_over(release, imported, tmp_path):
    for write in (lambda: import_model(str(release), imported), lambda: export_model(imported, release)):
        with pytest.raises(ConfigError, match="exists and is not an empty folder"):
            write()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_a_model_without_a_tokenizer_says_so_when_text_is_wanted(imported):
    with pytest.raises(DataError, match="the model was imported without a tokenizer"):
        open_artifact(imported)


def test_what_is_no_model_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="neither a checkpoint nor a run with one"):
        open_source(tmp_path)
    with pytest.raises(ConfigError, match="is neither a folder nor a name"):
        import_model(str(tmp_path / "nothing/here/at all"), tmp_path / "out")


@pytest.mark.parametrize("content", ["{", "[]", '{"format": 1}', '{"format": 1, "model": {}, "generation": {}}'])
def test_a_damaged_description_is_refused(imported, content):
    (imported / MODEL_FILE).write_text(content)
    with pytest.raises(CheckpointError, match=r"model\.json: damaged"):
        open_source(imported)


def test_a_newer_format_is_refused_by_its_number(imported):
    facts = json.loads((imported / MODEL_FILE).read_text())
    (imported / MODEL_FILE).write_text(json.dumps(facts | {"format": 9}))
    with pytest.raises(CheckpointError, match="written in format 9, this version reads 1; update pretrain"):
        open_source(imported)


def test_a_damaged_weight_is_found(imported):
    file = imported / "weights-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="CRC32 of chunk 0"):
        open_source(imported)


def test_a_disk_that_refuses_any_one_write_leaves_nothing_behind(release, tmp_path):
    operations = []
    set_fault_hook(lambda operation, path: operations.append(operation))
    try:
        import_model(str(release), tmp_path / "whole")
        for number in range(len(operations)):
            left = iter(range(number, -1, -1))

            def fail(operation: str, path: Path, left=left) -> None:
                if next(left, None) == 0:
                    raise OSError(28, "No space left on device")

            set_fault_hook(fail)
            with pytest.raises(DiskError, match="No space left on device"):
                import_model(str(release), tmp_path / "full")
            assert not (tmp_path / "full").exists() or number == len(operations) - 1
            set_fault_hook(None)
            assert [path.name for path in tmp_path.iterdir() if path.name not in ("whole", "full")] == []
    finally:
        set_fault_hook(None)


@pytest.mark.parametrize("device", ["gpu", "cpu:x", "cuda:99999"])
def test_a_device_that_is_not_there_is_refused(imported, device, monkeypatch):
    monkeypatch.setattr("pretrain.artifact.model_path.load_hub_tokenizer", lambda folder: None)
    (imported / "tokenizer").mkdir()
    with pytest.raises(ConfigError, match=f"--device {device}"):
        open_artifact(imported, device)


def test_the_call_on_the_card_of_an_export_works_and_no_path_of_the_machine_is_there(tmp_path, monkeypatch, capsys):
    (tmp_path / "secret-place").mkdir()
    texts = write_texts(tmp_path / "secret-place" / "texts", TEXTS)
    run = write_text_run(tmp_path / "run", texts, "llama-tiny", "causal")
    export_model(run, tmp_path / "released")
    card = (tmp_path / "released" / "README.md").read_text()
    assert str(tmp_path) not in card and "secret-place" not in card and "path: texts" in card
    monkeypatch.chdir(tmp_path)
    (call,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    exec(call, {})
    assert capsys.readouterr().out.startswith("A text")
    tokenizer = transformers.AutoTokenizer.from_pretrained("released")
    assert tokenizer(["A longer text", "A"], padding=True)["attention_mask"][1][-1] == 0


def test_the_card_of_an_export_has_the_metrics_of_its_weights_alone(tmp_path):
    texts = write_texts(tmp_path / "texts", TEXTS)
    run = write_text_run(tmp_path / "run", texts, "llama-tiny", "causal", steps=(20, 25, 27), averaged=True)
    rows = [
        {"step": step, **more}
        for step, counted in ((20, "tokens"), (25, "pairs"))
        for more in ({counted: step, "loss": step / 10}, {"val_loss": step + 0.5, "val_ema_loss": step + 0.25})
    ]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (run / "checkpoints" / "best.json").write_text('{"step": 20, "metric": "val_ema_loss", "value": 20.25}')

    def shown(place: str) -> dict[str, float]:
        out = tmp_path / "out" / place.replace("/", "-").replace(".", "newest")
        export_model(run / place, out, check=False)
        return {name: float(value) for name, value in re.findall(r"^\| (\w+) \| ([0-9.]+) \|", card_of(out), re.M)}

    raw = {"step": 20, "tokens": 20, "loss": 2, "val_loss": 20.5}
    assert shown("checkpoints/step-00000020") == raw
    assert shown("checkpoints/step-00000025") == {"step": 25, "pairs": 25, "loss": 2.5, "val_loss": 25.5}
    assert shown("checkpoints/step-00000025/ema") == {"step": 25, "pairs": 25, "val_ema_loss": 25.25}
    assert shown(".") == {"step": 27}  # its newest checkpoint, at which nothing was logged
    assert shown("best") == raw


def card_of(folder: Path) -> str:
    """The model card of an export."""
    return (folder / "README.md").read_text()
