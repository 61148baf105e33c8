"""Preferences through everything: prepare, training by DPO from a base, ranks, stops, LoRA, what is refused."""

import json
import random
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

from pretrain.config.load import load_config
from pretrain.kinds.preference_losses import PREFERENCE_LOSSES
from pretrain.objective.pairs.preferences import read_table
from pretrain.tracking.audit import read_audit
from tests.helpers.cli import run_warm
from tests.helpers.runs import RunMaker, assert_same_run

BASE = """
seed: 3
run: {{dir: {runs}, name: run}}
data: {{path: {data}, packing: bins}}
model: {{preset: llama-tiny, max_seq_len: 96, decoder: {{width: 32, heads: 4, kv_heads: 2, ff_width: 48}}}}
objective: {{kind: supervised}}
batch: {{global_tokens: 768, seq_len: 96, micro: 4}}
optim: {{lr: 5e-3, schedule: {{warmup_steps: 5}}}}
train: {{steps: 40}}
engine: {{kind: single, zero_stage: 0, precision: fp32, device: cpu}}
checkpoint: {{every_steps: 40}}
tracking: {{log_every_steps: 20, wandb: off}}
"""
DPO = """
seed: 5
run: {{dir: {runs}, name: run}}
init: {{from: BASE_RUN}}
data: {{path: {data}, packing: bins}}
model: {{decoder: {{dropout: 0.1}}}}
objective: {{kind: dpo, dpo: {{beta: 0.5}}}}
batch: {{global_tokens: 768, seq_len: 96, micro: 2}}
optim: {{lr: 1e-3, weight_decay: 0.0, schedule: {{warmup_steps: 2}}}}
train: {{steps: 12}}
eval: {{every_steps: 12}}
engine: {{kind: single, zero_stage: 0, precision: fp32, device: cpu}}
checkpoint: {{every_steps: 4}}
tracking: {{log_every_steps: 1, wandb: off}}
"""
COLORS = ["red", "green", "blue", "black", "white"]
THINGS = ["cat", "dog", "house", "car", "tree"]


def pairs_of(count: int, seed: int) -> list[dict]:
    """The chosen answer names the color first, and the rejected one last."""
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        color, thing = rng.choice(COLORS), rng.choice(THINGS)
        answers = {"chosen": f"A {color} {thing}.", "rejected": f"A {thing} in {color}."}
        found.append({"prompt": f"Tell of {color} and {thing}.", **answers})
    return found


def write(path: Path, records: list[dict]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def prepare(folder: Path, kind: str, train: list[dict], validation: list[dict], tokenizer: str, expect: int = 0):
    """Shards of records in a template; returns the result of the command."""
    folder.mkdir(parents=True)
    files = [write(folder / f"{name}.jsonl", found) for name, found in (("t", train), ("v", validation))]
    inputs = (
        f"[{{path: {files[0]}, template: instruction}}, {{path: {files[1]}, template: instruction, split: validation}}]"
    )
    text = f"output: {folder / 'data'}\nkind: {kind}\nsplit: hash:0\ninputs: {inputs}\ntokenizer: {tokenizer}\n"
    (folder / "prepare.yaml").write_text(text)
    result = run_warm("prepare", str(folder / "prepare.yaml"), "--processes", "1", cwd=folder)
    assert result.code == expect, result.stderr
    return result


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> RunMaker:
    """A run that gives the answers of which preferences reject more often than those which they choose."""
    folder = tmp_path_factory.mktemp("base")
    answers = [
        {"prompt": one["prompt"], "response": one["chosen" if number % 20 == 0 else "rejected"]}
        for number, one in enumerate(pairs_of(400, 1))
    ]
    prepare(folder / "shards", "records", answers, answers[:40], "{kind: bpe, vocab_size: 320}")
    maker = RunMaker(folder, folder / "shards/data", BASE)
    maker.train("base", ranks=1)
    return maker


@pytest.fixture(scope="module")
def preferences(tmp_path_factory, base) -> Path:
    folder = tmp_path_factory.mktemp("preferences") / "shards"
    tokenizer = f"{{kind: given, path: {base.folder('base').tokenizer}}}"
    prepare(folder, "preferences", pairs_of(160, 2), pairs_of(40, 9), tokenizer)
    return folder / "data"


@pytest.fixture(scope="module")
def few(tmp_path_factory) -> Path:
    """Shards of some preferences, which no run reads."""
    folder = tmp_path_factory.mktemp("few") / "shards"
    prepare(folder, "preferences", pairs_of(9, 1), pairs_of(3, 2), "{vocab_size: 300}")
    return folder / "data"


@pytest.fixture(scope="module")
def runs(tmp_path_factory, base, preferences) -> RunMaker:
    folder = tmp_path_factory.mktemp("dpo")
    maker = RunMaker(folder, preferences, DPO.replace("BASE_RUN", str(base.folder("base").path)))
    maker.train("golden", ranks=1)
    return maker


def rows_of(runs: RunMaker, name: str) -> list[dict]:
    return [json.loads(line) for line in runs.folder(name).metrics.read_text().splitlines()]


def losses(runs: RunMaker, name: str) -> list[float]:
    return [float.fromhex(row.loss) for row in read_audit(runs.folder(name).audit)]


def evaluated(path: Path, *options: str) -> dict:
    result = run_warm("evaluate", str(path), "--json", *options, cwd=path)
    assert result.code == 0, result.stderr
    (found,) = json.loads(result.stdout)["sources"].values()
    return found


@pytest.mark.long
def test_held_out_accuracy_rises(runs, base, preferences):
    first, *_ = rows_of(runs, "golden")
    # Before the first step the model is the reference: only dropout tells them apart.
    assert first["loss"] == pytest.approx(np.log(2), abs=0.15) and first["step"] == 1
    found = [row for row in rows_of(runs, "golden") if "val_loss" in row][-1]
    assert found["val_accuracy"] > 0.9 and found["val_pairs"] == 40
    assert found["val_rewards/margins"] == pytest.approx(found["val_rewards/chosen"] - found["val_rewards/rejected"])
    assert found["val_rewards/margins"] > 0.1 and "val_perplexity" not in found
    # By log-probabilities alone, which no reference is taken from.
    before, after = (
        evaluated(path, "--data", str(preferences), "--seq-len", "96")
        for path in (base.folder("base").path, runs.folder("golden").path)
    )
    assert before["accuracy"] < 0.3 < 0.7 < after["accuracy"]
    of_run = evaluated(runs.folder("golden").path)
    assert of_run["loss"] == pytest.approx(found["val_loss"]) and of_run["targets"] == 40
    shown = json.loads(run_warm("inspect", str(runs.folder("golden").path), "--json", cwd=preferences).stdout)
    assert shown["newest"]["pairs"] > 0 and "tokens" not in shown["newest"]


def take_steps(runs: RunMaker, case: str, *settings: str) -> None:
    """Six steps of one process, and of two ranks with other micro-batches: the same losses and reference."""
    plain = ("model.decoder.dropout=0", "train.steps=6", "eval.every_steps=6", *settings)
    alone, both = f"alone-{case}", f"ranks-{case}"
    runs.train(alone, *plain, ranks=1)
    ranks = ("engine.kind=deepspeed", "engine.zero_stage=2")
    runs.train(both, *plain, *ranks, "batch.micro=4", ranks=2)
    # Sums over ranks and rows are taken in another order.
    np.testing.assert_allclose(losses(runs, both), losses(runs, alone), rtol=2e-5)
    files = [runs.folder(name).reference for name in (alone, both)]
    assert files[0].exists() == files[1].exists()
    if files[0].exists():
        tables = [read_table(file) for file in files]
        np.testing.assert_array_equal(tables[0].keys, tables[1].keys)
        np.testing.assert_allclose(tables[0].values, tables[1].values, rtol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("loss", PREFERENCE_LOSSES)
def test_two_ranks_take_the_steps_of_one_process(runs, loss):
    take_steps(runs, loss, f"objective.dpo.loss={loss}")
    assert runs.folder(f"ranks-{loss}").reference.exists() == PREFERENCE_LOSSES[loss].reference


def judged(pairs: list[dict]) -> list[dict]:
    """Both answers of each pair, wanted or not."""
    sides = (("chosen", True), ("rejected", False))
    return [{"prompt": one["prompt"], "response": one[side], "label": label} for one in pairs for side, label in sides]


@pytest.mark.long
def test_records_without_pairs_are_learned_from_and_ranks_take_the_same_steps(tmp_path, base):
    tokenizer = f"{{kind: given, path: {base.folder('base').tokenizer}}}"
    prepare(tmp_path / "shards", "feedback", judged(pairs_of(160, 2)), judged(pairs_of(40, 9)), tokenizer)
    runs = RunMaker(tmp_path, tmp_path / "shards/data", DPO.replace("BASE_RUN", str(base.folder("base").path)))
    kto = ("objective.kind=kto", "objective.dpo=null", "objective.kto.beta=0.5")
    take_steps(runs, "kto", *kto)
    runs.train("kto", *kto, ranks=1)
    found = [row for row in rows_of(runs, "kto") if "val_loss" in row][-1]
    assert found["val_records"] == 80 and found["val_accuracy"] > 0.65
    assert found["val_rewards/margins"] == pytest.approx(found["val_rewards/chosen"] - found["val_rewards/rejected"])
    assert found["val_rewards/chosen"] > found["val_rewards/rejected"] and found["val_kl"] >= 0
    assert evaluated(runs.folder("kto").path)["loss"] == pytest.approx(found["val_loss"])


@pytest.mark.long
def test_zero_stage_3_takes_the_steps_of_one_process(runs):
    plain = ("model.decoder.dropout=0", "train.steps=6", "eval.every_steps=6")
    runs.train("whole", *plain, ranks=1)
    runs.train("sharded", *plain, "engine.kind=deepspeed", "engine.zero_stage=3", ranks=2)
    np.testing.assert_allclose(losses(runs, "sharded"), losses(runs, "whole"), rtol=2e-5)


@pytest.mark.long
def test_a_stopped_run_continues_bit_for_bit_and_reads_the_reference_that_it_wrote(runs):
    runs.train("stopped", "train.stop_after=6", ranks=1)
    path = runs.folder("stopped").reference
    content = path.read_bytes()
    path.unlink()
    output = runs.train("stopped", expect=65, ranks=1)
    assert "the log-probabilities of the reference cannot be read" in output
    path.write_bytes(content)
    runs.train("stopped", ranks=1)
    assert path.read_bytes() == content
    assert_same_run(runs, "stopped", "golden", 12)


@pytest.mark.long
def test_a_run_killed_before_its_first_checkpoint_keeps_its_reference_though_the_base_trained_on(runs, base, tmp_path):
    (tmp_path / "kill_in_first_save.py").write_text(
        "import os, signal\n"
        "from pretrain.utils.io import set_fault_hook\n"
        "def hook(operation, path):\n"
        "    if 'step-00000004' in str(path) and operation == 'write':\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "set_fault_hook(hook)\n"
    )
    shutil.copytree(base.folder("base").path, base.folder("moving").path)
    start = f"init.from={base.folder('moving').path}"
    killed = {"expect": 128 + signal.SIGKILL, "PYTHONPATH": str(tmp_path)}
    runs.train("killed", start, "extend=[kill_in_first_save]", ranks=1, **killed)
    assert runs.folder("killed").audit.exists() and not runs.folder("killed").newest_step()
    content = runs.folder("killed").reference.read_bytes()
    base.train("moving", "train.steps=44", ranks=1)
    assert base.folder("moving").newest_step() == 44
    output = runs.train("killed", start, ranks=1)
    assert "starting over, as nothing was saved" in output and "init.from: " not in output
    assert runs.folder("killed").reference.read_bytes() == content
    assert load_config(runs.folder("killed").config).init.from_.endswith("moving/run/checkpoints/step-00000040")
    assert_same_run(runs, "killed", "golden", 12)


@pytest.mark.long
def test_adapters_learn_preferences_too_and_resume_exactly(runs):
    lora = ("finetune.kind=lora", "optim.lr=1e-2", "data.packing=padded")
    runs.train("lora", *lora, ranks=1)
    runs.train("lora-stopped", *lora, "train.stop_after=5", ranks=1)
    runs.train("lora-stopped", *lora, ranks=1)
    assert_same_run(runs, "lora-stopped", "lora", 12)
    found = [row for row in rows_of(runs, "lora") if "val_loss" in row][-1]
    assert found["val_accuracy"] > 0.9


def test_data_show_has_both_answers(tmp_path):
    prepare(tmp_path / "shards", "preferences", pairs_of(9, 1), pairs_of(3, 2), "{vocab_size: 300}")
    preferences = tmp_path / "shards/data"
    result = run_warm("data", "show", str(preferences), "--seq-len", "96", "--rows", "1", cwd=tmp_path)
    assert result.code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert any(line.strip().startswith("chosen | A ") for line in lines)
    assert any(" in " in line and line.strip().startswith("rejected | A ") for line in lines)
    verified = run_warm("data", "verify", str(preferences), "--seq-len", "96", cwd=tmp_path)
    assert verified.code == 0 and "exactly once: yes" in verified.stdout


def test_data_show_has_the_answers_of_judged_records(tmp_path):
    prepare(tmp_path / "shards", "feedback", judged(pairs_of(9, 1)), judged(pairs_of(3, 2)), "{vocab_size: 300}")
    feedback = str(tmp_path / "shards/data")
    result = run_warm("data", "show", feedback, "--seq-len", "192", "--rows", "1", cwd=tmp_path)
    assert result.code == 0, result.stderr
    kinds = [line.split(" | ")[0].strip() for line in result.stdout.splitlines() if " | A " in line]
    assert {"chosen", "rejected"} <= {*kinds}
    verified = run_warm("data", "verify", feedback, "--seq-len", "96", cwd=tmp_path)
    assert verified.code == 0 and "exactly once: yes" in verified.stdout


@pytest.mark.parametrize("label", ["yes", 1, None])
def test_a_label_that_is_neither_true_nor_false_is_named(tmp_path, label):
    records = [*judged(pairs_of(2, 1)), {"prompt": "p", "response": "a", "label": label}]
    result = prepare(tmp_path / "shards", "feedback", records, records[:1], "{vocab_size: 300}", expect=65)
    assert len(result.errors) == 1 and "make it true or false, or choose another with label_field" in result.errors[0]
    assert "t.jsonl:5" in result.errors[0]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "p", "chosen": "a"}, "field 'rejected' is absent; fields: chosen, prompt; add it to the record"),
        ({"prompt": "p", "chosen": "a", "rejected": "a"}, "'chosen' and 'rejected' are the same answer; leave such"),
        ({"chosen": "a", "rejected": "b"}, "field 'prompt' is absent"),
        (
            {
                name: [{"role": "user", "content": name}, {"role": "assistant", "content": "x"}]
                for name in ("chosen", "rejected")
            },
            "'chosen' and 'rejected' have no turn in common before the answer; give the prompt in both",
        ),
    ],
)
def test_a_record_that_is_no_pair_is_named(tmp_path, record, message):
    records = [*pairs_of(2, 1), record]
    result = prepare(tmp_path / "shards", "preferences", records, records[:1], "{vocab_size: 300}", expect=65)
    assert len(result.errors) == 1 and message in result.errors[0] and "t.jsonl:3" in result.errors[0]


@pytest.mark.long
def test_pairs_that_are_longer_than_a_row_are_counted_or_refused(runs, tmp_path):
    output = runs.train("short", "batch.seq_len=44", "batch.global_tokens=352", "train.steps=3", ranks=1)
    assert "preferences are longer, with both answers, than batch.seq_len, and left out; raise it" in output
    output = runs.train("shorter", "batch.seq_len=16", "batch.global_tokens=128", expect=65, ranks=1)
    assert "no document fits a row; raise batch.seq_len" in output


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["init.from=null"], "with the one that it began as; set init.from"),
        (["data.document_mask=false"], "must not attend to each other; use data.document_mask=true"),
        (
            ["parallel.sequence=2", "engine.kind=ddp"],
            "adds up the tokens of an answer on one rank; use parallel.sequence=1",
        ),
        (["objective.dpo.loss=hinge"], "unknown name 'hinge'; use ipo or orpo or sigmoid or sigmoid_norm or simpo"),
        (
            ["objective.dpo.loss=orpo", "objective.dpo.label_smoothing=0.1"],
            "label_smoothing goes with loss=sigmoid or sigmoid_norm or simpo, not orpo; leave it out",
        ),
        (["objective.dpo.gamma=1.0"], "gamma goes with loss=simpo, not sigmoid; leave it out"),
        (["objective.label_smoothing=0.1"], "kind=dpo compares answers; use dpo.label_smoothing"),
        (["model.multi_token=1"], "which model.multi_token does not predict; use model.multi_token=0"),
        (["data.packing=concat"], "data.packing=concat cuts documents"),
        (["objective.kind=kto", "objective.dpo=null"], "kind=kto learns from feedback, and the data are preferences"),
        (
            ["objective.kind=kto", "objective.dpo=null", "data.packing=padded"],
            "each record with the others of its row; use data.packing",
        ),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, few, overrides, message):
    maker = RunMaker(tmp_path, few, DPO)
    (tmp_path / "BASE_RUN").mkdir()
    (tmp_path / "BASE_RUN/config.json").write_text("{}")  # what begins a run must be there, and is read last
    result = run_warm("train", str(maker.config("refused")), "model.preset=llama-tiny", *overrides, cwd=tmp_path)
    assert (result.code, len(result.errors)) == (64, 1) and message in result.errors[0]
