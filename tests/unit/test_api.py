"""The commands as functions: the same results as the commands, and errors before a process is started."""

import json

import pytest
import torch
import transformers

import pretrain
from pretrain.errors import ConfigError, DataError, LaunchError
from pretrain.shards.index import load_index
from tests.helpers.cli import run_warm
from tests.helpers.lent import quiet_transformers
from tests.unit.artifact.runs import write_each_shape

TEXTS = [f"the cat number {number} sat on the mat of the other cat" for number in range(20)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Texts, and a run with random weights of each shape."""
    return write_each_shape(tmp_path_factory.mktemp("api"), TEXTS)


@pytest.mark.parametrize("name", ["gpt", "bert", "t5"])
def test_texts_are_those_of_the_command(folder, name):
    prompts = [
        prompt.replace("sat", "[MASK]") if name == "bert" else prompt for prompt in ("the cat sat", "the mat sat")
    ]
    options = ["--top-k", "2"] if name == "bert" else ["--max-tokens", "6", "--temperature", "0"]
    command = ["generate", name, "--json", *options, "--prompt", prompts[0], "--prompt", prompts[1]]
    expected = [json.loads(line)["text"] for line in run_warm(*command, cwd=folder).stdout.splitlines()]
    chosen = {"top_k": 2} if name == "bert" else {"max_tokens": 6, "temperature": 0.0}
    artifact = pretrain.open_artifact(folder / name)
    assert pretrain.generate(artifact, prompts, **chosen) == expected
    assert pretrain.generate(folder / name, prompts[1], device="cpu", **chosen) == expected[1]
    assert len(expected) == 2


def test_scores_are_those_of_the_command(folder):
    command = ["evaluate", "gpt", "--json", "--device", "cpu"]
    expected = json.loads(run_warm(*command, cwd=folder).stdout)["sources"]
    assert pretrain.evaluate(folder / "gpt", device="cpu")["sources"] == expected
    few = pretrain.evaluate(folder / "gpt", data=str(folder / "texts"), max_tokens=40, device="cpu")["sources"]
    assert [source["targets"] < expected[name]["targets"] for name, source in few.items()] == [True]


def test_an_export_is_a_folder_of_transformers(folder, tmp_path):
    assert pretrain.export(folder / "gpt", tmp_path / "out") == tmp_path / "out"
    with quiet_transformers():
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ours = pretrain.open_artifact(folder / "gpt").model
    tokens = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        logits = ours(pretrain.Batch(tokens, tokens)).logits_BTV[..., : ours.vocab_size]
        torch.testing.assert_close(theirs(tokens).logits, logits, rtol=1e-4, atol=1e-5)
    with pytest.raises(ConfigError, match="out"):
        pretrain.export(folder / "gpt", tmp_path / "out")


def test_texts_become_shards(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("\n\n".join(TEXTS))
    out = pretrain.prepare(tmp_path / "data", str(tmp_path / "a.txt"), vocab_size=270, split="tail:0.1", processes=1)
    assert out == tmp_path / "data" and load_index(out).vocab_size == 270
    assert "training tokens" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="vocab_size=300 does not go with tokenizer=char"):
        pretrain.prepare(tmp_path / "other", str(tmp_path / "a.txt"), tokenizer="char", vocab_size=300)
    with pytest.raises(DataError, match="none"):
        pretrain.prepare(tmp_path / "other", str(tmp_path / "none"))


def test_a_wrong_config_starts_no_training(tmp_path):
    with pytest.raises(ConfigError, match=r"optim\.lrr"):
        pretrain.train("quickstart", ["optim.lrr=1"])


def test_a_training_that_fails_names_its_run(folder, tmp_path, capfd):
    with pytest.raises(LaunchError, match=rf"{tmp_path}/x: the training ended with exit code 65; see its last lines"):
        pretrain.train("quickstart", [f"run.dir={tmp_path}", "run.name=x", f"data.path={tmp_path / 'none'}"])
    assert "error: " in capfd.readouterr().out
