"""The self-check of the stack, on real ranks over gloo: sound stacks pass it, and known defects do not."""

import re

import pytest

from tests.helpers.ranks import run_in_ranks

pytestmark = pytest.mark.long

ADAMW = ("optim.kind=adamw", "optim.muon=null", "optim.lr=1e-3")
GPT2 = ("model.preset=gpt2-124m", *ADAMW)
LLAMA = ("model.preset=llama-5m", *ADAMW)
STAGE_0 = ("engine.kind=deepspeed", "engine.zero_stage=0", "engine.precision=bf16")


def checked(folder, defect: str, *overrides: str, ranks: int = 2):
    """What rank 0 tells of a check."""
    arguments = {"folder": str(folder), "overrides": overrides, "defect": defect}
    return run_in_ranks("tests.integration.self_check_workers:check", ranks, arguments)[0]


@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        (1, ("engine.kind=single", "engine.zero_stage=0")),
        (1, ("engine.kind=single", "engine.zero_stage=0", "engine.precision=bf16")),
        (2, ("engine.kind=ddp", "engine.zero_stage=0", "engine.precision=bf16")),
        (2, STAGE_0),
        (2, ("engine.zero_stage=1",)),
        (2, ("engine.zero_stage=2", "engine.precision=bf16")),
        (2, ("engine.zero_stage=3",)),
        (2, (*GPT2, "parallel.tensor=2")),
        (2, (*GPT2, "parallel.sequence=2")),
        (2, ("model.preset=olmoe-1b-7b", "parallel.experts=2", *ADAMW)),
        (2, ("model.preset=t5-small", "objective.kind=span", *ADAMW)),
        (2, ("model.preset=bert-base", "objective.kind=masked", *ADAMW)),
    ],
)
def test_a_sound_stack_passes_once(tmp_path, ranks, overrides):
    told = checked(tmp_path, "none", *overrides, ranks=ranks)
    assert told["checked"]["self_check"]["torch"] and told["again"] == {}


@pytest.mark.parametrize(
    ("defect", "overrides", "found", "issue"),
    [
        ("180642", (*LLAMA, "engine.compile=true"), r"compiled blocks: the gradient of \S+qkv.weight is", "180642"),
        ("193061", (*LLAMA, "engine.compile=true"), r"compiled blocks: the gradient of \S+norm.weight is", "193061"),
        ("8224", ("engine.precision=bf16",), "the engine: the gradient of embedding.weight is", "8224"),
        ("7839 scale", STAGE_0, "the engine: the gradient of .* is 1.0e\\+00", "7837"),
        ("7839 clear", STAGE_0, "the engine: the gradient's norm of step 2 is", "7837"),
        ("gather before the step", (), "the engine: the loss of step 2 is", "DeepSpeed"),
        ("coalesced gather", (), "the coalesced all-gather of gloo", "gloo"),
        ("biases twice", (*GPT2, "parallel.tensor=2"), r"the engine: the gradient of \S+bias is 1.0e\+00", "DeepSpeed"),
        ("resumed elsewhere", (), "resumed steps: the loss of step 4 is", "DeepSpeed"),
        ("backend", LLAMA, "the attention backend: the gradient of", "engine.attention=eager"),
    ],
)
def test_a_known_defect_is_found_with_its_issue(tmp_path, defect, overrides, found, issue):
    told = checked(tmp_path, defect, *overrides)
    assert re.match(f"self-check: {found}", told["what"]), told
    assert issue in told["fix"] and told["fix"].endswith("run.self_check=off trains all the same")


def test_a_run_checks_its_stack_at_its_first_start(make_run):
    said = make_run.train("checked", "run.self_check=on", "train.stop_after=3")
    parts = "collectives, the attention backend, the engine, resumed steps"
    assert f"self-check: {parts} are right" in said
    assert "self-check" not in make_run.train("checked", "run.self_check=on", "train.stop_after=5")
    first, second = make_run.folder("checked").read_record()["attempts"]
    assert first["self_check"]["torch"] == first["versions"]["torch"] and "self_check" not in second
    make_run.train("plain", "train.stop_after=5")
    ledgers = [make_run.folder(name).audit.read_text() for name in ("checked", "plain")]
    steps = [re.sub(r'"attempt":\d+', "", ledger) for ledger in ledgers]
    assert steps[0] == steps[1], "the check changes no bit of the run"
