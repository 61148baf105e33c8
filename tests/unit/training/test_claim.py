"""What an attempt finds of those that were killed before it, and what is refused before it begins."""

from pathlib import Path

import pytest

from pretrain.config.load import load_config
from pretrain.dist import World
from pretrain.errors import ConfigError
from pretrain.run.folder import RunDir
from pretrain.run.stop import StopFlag
from pretrain.training import claim
from pretrain.training.claim import claim_run, sweep
from pretrain.training.resolution import course_changes
from pretrain.utils.io import set_fault_hook, write_file
from tests.unit.artifact.runs import TEXTS, write_texts


class Death(BaseException):
    """The end of the process: nothing catches it."""


def die(operation, path):
    """Ends the process before it gives a file its name."""
    if operation == "rename":
        raise Death


def test_whatever_a_killed_attempt_was_writing_is_removed_and_nothing_else(tmp_path):
    run = RunDir(tmp_path)
    kept = [run.record, run.checkpoints / "best.json", run.path / "attention" / "step-00000010.png"]
    for path in kept:
        path.parent.mkdir(exist_ok=True)
        write_file(path, b"old")
    set_fault_hook(die)
    for path in (*kept, run.checkpoints / ".trial"):
        try:
            write_file(path, b"new")
        except Death:
            continue
    set_fault_hook(None)
    (run.checkpoints / ".tmp-step-00000020-0a1b2c3d").mkdir()
    sweep(run)
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == sorted(kept)
    assert not list(run.checkpoints.glob(".tmp-*"))


def test_a_pattern_without_a_match_is_refused_before_the_start_is_read_and_the_folder_is_taken(tmp_path):
    data = write_texts(tmp_path / "data", TEXTS)
    tied = "model={preset: llama-tiny, tied_embeddings: true, max_seq_len: 64}"
    also = "finetune={kind: lora, also: [embedding.weight, head.weight]}"
    places = (f"run.dir={tmp_path}", f"data.path={data}", f"init.from={tmp_path / 'gone'}")
    (tmp_path / "mine.yaml").write_text(
        "{run: {name: run}, data: {path: x}, optim: {lr: 1e-3, schedule: {warmup_steps: 1}}, train: {steps: 2},"
        " batch: {global_tokens: 64, seq_len: 64, micro: 1}, model: {preset: llama-tiny}}"
    )
    config = load_config(tmp_path / "mine.yaml", [*places, tied, also])
    with pytest.raises(ConfigError, match=r"the head is the embedding here .tied.: finetune.also=.embedding.weight"):
        claim_run(config, World(0, 1, 0), StopFlag())
    assert not (tmp_path / "run").exists()


COSINE = ("train.steps=10", "optim.lr=1e-3", "optim.muon=null", "optim.kind=adamw", "optim.schedule.warmup_steps=2")


@pytest.mark.parametrize(
    ("before", "changes", "step", "told"),
    [
        (
            [],
            ["train.steps=16", "optim.weight_decay=0.2"],
            10,
            ["learning rate at step 11: 1.34e-04 -> 4.50e-04", "weight decay at step 11: 0.1 -> 0.2"],
        ),
        ([], ["train.steps=16"], 1, []),  # both in their warm-up
        ([], ["optim.schedule.min_ratio=0.5"], 9, ["learning rate at step 10: 1.34e-04 -> 5.19e-04"]),
        (["optim.schedule.warmup_steps=0"], ["optim.schedule.warmup_tokens=16384"], 2,
         ["learning rate at step 3: 9.14e-04 -> 7.50e-04"]),
        (
            ["optim.kind=muon", "optim.muon.lr=0.02"],
            ["optim.muon.lr=0.01", "optim.weight_decay=0"],
            1,
            [
                "weight decay at step 2: 0.1 -> 0",
                "learning rate of hidden matrices at step 2: 2.00e-02 -> 1.00e-02",
                "weight decay of hidden matrices at step 2: 0.1 -> 0",
            ],
        ),
        (
            ["optim.ema.horizon_steps=10", "train.steps=100"],
            ["optim.ema.horizon_steps=2", "batch.global_tokens=8192"],
            90,
            [
                "decay of the average of the weights at step 91: 0.904837 -> 0.606531",
                "tokens of the batch at step 91: 4,096 -> 8,192",
            ],
        ),
        ([], ["optim.beta1=0.8", "train.stop_after=3", "batch.micro=1"], 2, []),
    ],
)  # fmt: skip
def test_a_changed_config_tells_what_the_next_step_has(before, changes, step, told):
    stored = [*COSINE, "batch.global_tokens=4096", *before]
    old, new = (load_config("configs/run/quickstart.yaml", items) for items in (stored, [*stored, *changes]))
    assert course_changes(old, new, step) == told


def test_no_other_module_of_training_changes_a_config():
    changing = [path.name for path in Path(claim.__file__).parent.glob("*.py") if "model_copy(" in path.read_text()]
    assert changing == ["resolution.py"]
