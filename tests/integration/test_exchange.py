"""A run leaves by `pretrain export` and comes back by `pretrain import`, through the command line."""

import json
import sys

import pytest
import torch
import transformers

from tests.helpers.cli import run_warm
from tests.helpers.lent import quiet_transformers
from tests.helpers.runs import tensors_of

ZERO3 = ["engine.zero_stage=3", "train.stop_after=4", "checkpoint.every_steps=4"]


def ok(*arguments, cwd):
    result = run_warm(*arguments, cwd=cwd)
    assert result.code == 0, result.stderr
    return result.stdout


@pytest.mark.long
def test_a_run_of_two_zero3_ranks_becomes_a_release_and_a_new_run_starts_from_it(make_run, tmp_path):
    make_run.complete("first", *ZERO3, ranks=2)
    run = make_run.folder("first").path
    facts = json.loads(ok("export", str(run), "released", "--json", cwd=tmp_path))
    assert facts["architecture"] == "LlamaForCausalLM"
    with quiet_transformers():
        model, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "released", output_loading_info=True)
        tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "released")
    assert {key: value for key, value in info.items() if value} == {}
    saved = tensors_of(run / "checkpoints" / "step-00000004")
    rows = model.get_input_embeddings().weight.shape[0]
    expected = torch.from_numpy(saved["embedding.weight/weight"]).view(-1, 32)[:rows]
    assert torch.equal(model.get_input_embeddings().weight, expected)

    prompt = "alpha beta"
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    theirs = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    text = tokenizer.decode(theirs[0], skip_special_tokens=True)
    options = ["--prompt", prompt, "--max-tokens", "12", "--temperature", "0"]
    ok("import", "released", "model", cwd=tmp_path)
    for what in (str(run), "released", "model"):
        assert ok("generate", what, *options, cwd=tmp_path) == text + "\n", what

    alone = ["engine.kind=single", "engine.zero_stage=0", "train.stop_after=1", "optim.lr=1e-30"]
    launcher = [sys.executable, "-m", "pretrain", "train"]
    make_run.complete("second", *alone, f"init.from={tmp_path / 'model'}", launcher=launcher)
    second = tensors_of(make_run.folder("second").path / "checkpoints" / "step-00000001")
    # A learning rate that changes nothing: the weights are still those that the run started from.
    for name in (name for name in second if name.endswith("/weight")):
        width = 32 if name.startswith(("embedding", "head")) else None
        mine, given = second[name], saved[name]
        if width:  # padding of the vocabulary is not exchanged
            mine, given = mine.reshape(-1, width)[:rows], given.reshape(-1, width)[:rows]
        assert (mine == given).all(), name


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["export", "nowhere", "out"], 66, "nowhere: neither a checkpoint nor a run with one; check the path"),
        (["import", "no where", "out"], 64, "'no where' is neither a folder nor a name on the Hugging Face hub"),
        (["import", ".", "out"], 66, "config.json"),
    ],
)
def test_what_cannot_be_exchanged_is_one_line(tmp_path, arguments, code, message):
    result = run_warm(*arguments, cwd=tmp_path)
    assert result.code == code
    assert len(result.errors) == 1 and message in result.errors[0]
    assert list(tmp_path.iterdir()) == []
