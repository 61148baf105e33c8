"""One short run with everything on that shows a run, and what it leaves: metrics, samples, pictures, profile, wandb."""

import gzip
import json
import math
import os
import re
import shutil

import numpy as np
import pytest
from PIL import Image

from pretrain.checkpoint.format import list_checkpoints
from pretrain.run.folder import RunDir
from pretrain.tracking.audit import read_audit
from pretrain.tracking.meter import PARTS
from pretrain.utils.jsonl import read_rows
from tests.helpers.cli import run_warm
from tests.unit.data.prepared import options, prepare
from tests.unit.tracking.wandb_file import read_history, read_records

CONFIG = """
seed: 7
run: {{dir: runs, name: run}}
data: {{mixture: [{{name: most, path: {data}, weight: 3}}, {{name: few, path: {data}, weight: 1}}], lanes: 3}}
model: {{preset: llama-tiny, max_seq_len: 32, decoder: {{width: 32, heads: 4, kv_heads: 2, ff_width: 48}}}}
batch: {{global_tokens: 512, seq_len: 32, micro: 16}}
optim: {{lr: 1e-3, schedule: {{warmup_steps: 5}}}}
train: {{steps: 12}}
eval: {{every_steps: 6, max_tokens: 256}}
engine: {{kind: single, precision: fp32, device: cpu}}
checkpoint: {{every_steps: 6}}
tracking:
  log_every_steps: 2
  norms_every_steps: 4
  wandb: offline
  artifacts: references
  name: The observed one
  group: observed
  job_type: test
  tags: [tiny, "with {{everything}}"]
  notes: One run with everything on.
  samples: {{prompts: ["alpha ", "be"], max_tokens: 8}}
  attention: {{text: "alpha be", heads: [0, 2]}}
profile: {{steps: [3, 3]}}
"""


LAYERS = ("decoder_0", "decoder_1", "embedding", "head", "decoder")
SECTIONS = {
    "train": {
        "loss", "loss_most", "loss_few", "accuracy", "lr", "grad_norm", "tokens", "epochs_most", "epochs_few",
        "skipped_steps",
        *(f"{norm}/{layer}" for norm in ("grad_norm", "update_norm") for layer in LAYERS),
    },
    "val": {"loss", "loss_most", "loss_few", "perplexity", "accuracy", "tokens", "bits_per_byte"},
    "perf": {
        "tokens_per_s", "step_time_s", "data_wait", "eta_s", *(f"{part}_s" for part in PARTS),
        "checkpoint_step", "checkpoint_stall_s", "checkpoint_write_s",
    },
    "system": {"memory_bytes"},
}  # fmt: skip
"""Metrics of the run by their section in wandb."""


def metric_of(name: str) -> str:
    """Returns the name in metrics.jsonl of a metric in wandb."""
    section, _, metric = name.partition("/")
    return f"val_{metric}" if section == "val" else metric or name


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("observed")
    (folder / "config.yaml").write_text(CONFIG.format(data=corpus))
    away = {name: "" for name in os.environ if name.startswith("WANDB_")}
    done = run_warm("train", "config.yaml", cwd=folder, SLURM_JOB_ID="4711", **away)
    assert done.code == 0, done.stderr
    return RunDir(folder / "runs" / "run"), done


def test_a_row_has_loss_by_source_memory_and_a_timeline_that_adds_up(run):
    folder, _ = run
    rows = [row for row in read_rows(folder.metrics) if "loss" in row]
    assert [row["step"] for row in rows] == [2, 4, 6, 8, 10, 12]
    losses = {row.step: float.fromhex(row.loss) for row in read_audit(folder.audit)}
    for row in rows:
        assert row["loss"] == losses[row["step"]]
        # All rows have as many targets, and of four samples in a row three are of the one source.
        mean = 0.75 * row["loss_most"] + 0.25 * row["loss_few"]
        assert mean == pytest.approx((losses[row["step"]] + losses[row["step"] - 1]) / 2, rel=1e-6)
        assert row["memory_bytes"] > 10 * 2**20
        assert {f"{part}_s" for part in ("data", "forward", "backward", "optimizer", "communication")} <= row.keys()
        assert all(row.get(f"{part}_s", 0) >= 0 for part in PARTS)


def test_norms_by_layer_come_at_their_interval_and_add_up_to_the_gradients(run):
    folder, _ = run
    rows = {row["step"]: row for row in read_rows(folder.metrics) if "loss" in row}
    assert [step for step, row in rows.items() if "grad_norm/head" in row] == [4, 8, 12]
    for step in (4, 8, 12):
        norms = [value for key, value in rows[step].items() if key.startswith("grad_norm/")]
        assert math.hypot(*norms) == pytest.approx(rows[step]["grad_norm"], rel=1e-5)
        assert all(value > 0 for key, value in rows[step].items() if key.startswith("update_norm/"))


def test_checkpoints_tell_what_they_cost(run):
    folder, _ = run
    rows = [row for row in read_rows(folder.metrics) if "checkpoint_step" in row]
    assert [row["checkpoint_step"] for row in rows] == [6, 12]
    assert all(row["checkpoint_write_s"] >= row["checkpoint_stall_s"] > 0 for row in rows)


def test_samples_follow_each_evaluation_and_are_logged(run):
    folder, done = run
    rows = read_rows(folder.path / "samples.jsonl")
    assert [row["step"] for row in rows] == [6, 12]
    assert [[sample["prompt"] for sample in row["samples"]] for row in rows] == [["alpha ", "be"]] * 2
    assert all(0 < len(sample["text"]) <= 8 for row in rows for sample in row["samples"])
    assert done.stderr.count("sample 'alpha '") == 2


def test_pictures_follow_each_evaluation(run):
    folder, _ = run
    paths = sorted((folder.path / "attention").iterdir())
    assert [path.name for path in paths] == ["step-00000006.png", "step-00000012.png"]
    first, last = (np.asarray(Image.open(path).convert("L")).astype(int) for path in paths)
    assert first.shape == last.shape and (first != last).any(), "the weights have changed"


def test_a_profile_has_the_operations_of_its_steps(run):
    folder, _ = run
    trace = json.loads(gzip.decompress((folder.path / "profile" / "steps-3-3-rank-0.json.gz").read_bytes()))
    assert any("Backward" in event.get("name", "") for event in trace["traceEvents"])
    table = (folder.path / "profile" / "steps-3-3-rank-0.txt").read_text()
    assert "aten::" in table and "Self CPU" in table


def test_wandb_has_the_rows_the_facts_the_texts_and_where_the_checkpoints_are(run):
    folder, done = run
    history = read_history(folder.path)
    shown = {"samples._type", "attention._type"}
    rows = [row for row in history if not shown & row.keys()]
    assert [{metric_of(name): value for name, value in row.items()} for row in rows] == read_rows(folder.metrics)
    for section, names in SECTIONS.items():
        sent = {name for row in rows for name in row if name.startswith(f"{section}/")}
        assert sent == {f"{section}/{name}" for name in names}
    assert {name.partition("/")[0] for row in rows for name in row} == {"step", *SECTIONS}
    tables = [(row["step"], row["samples._type"], row["samples.nrows"]) for row in history if "samples._type" in row]
    assert tables == [(6, "table-file", 2), (12, "table-file", 2)]
    images = {row["step"]: row["attention.path"] for row in history if row.get("attention._type") == "image-file"}
    assert list(images) == [6, 12]
    for step, path in images.items():
        (copy,) = (folder.path / "wandb").glob(f"offline-run-*/files/{path}")
        assert copy.read_bytes() == (folder.path / "attention" / f"step-{step:08d}.png").read_bytes()
    config = {item.key: json.loads(item.value_json) for record in read_records(folder.path, "run")
              for item in record.run.config.update}  # fmt: skip
    assert config["batch"]["global_tokens"] == 512
    described = read_records(folder.path, "run")[0].run
    assert (described.display_name, described.run_group, described.job_type) == ("The observed one", "observed", "test")
    assert (list(described.tags), described.notes) == (["tiny", "with {everything}"], "One run with everything on.")
    assert config["slurm"] == {"job_id": "4711"}
    assert config["machine"]["cores"] == os.cpu_count()
    assert config["data_card"]["sources"]["few"]["kind"] == "text"
    if shutil.which("git"):
        assert len(config["code"]["commit"]) == 40
    artifacts = [record.artifact for record in read_records(folder.path, "artifact")]
    artifacts += [record.request.log_artifact.artifact for record in read_records(folder.path, "request")
                  if record.request.HasField("log_artifact")]  # fmt: skip
    assert [json.loads(artifact.metadata)["step"] for artifact in artifacts if artifact.type == "checkpoint"] == [6, 12]
    sync = f"wandb sync wandb/offline-run-*-{folder.read_record()['id']}\n"
    assert sync in (folder.path / "wandb" / "SYNC.txt").read_text()
    assert "sync" not in done.stdout + done.stderr


def test_the_log_has_a_line_a_row_and_no_progress_bar(run):
    folder, done = run
    assert "\x1b" not in done.stderr and "\r" not in done.stderr
    line = next(line for line in done.stderr.splitlines() if "step 12/12  loss" in line)
    assert all(f"  {label} " in line for label in ("lr", "grad", "tok/s", "wait", "mem", "eta"))
    assert len(list_checkpoints(folder.checkpoints)) == 2


def test_the_start_is_told_phase_by_phase_and_other_libraries_say_nothing(run):
    _, done = run
    lines = done.stderr.splitlines()
    told = [line.split(" INFO    ") for line in lines]
    assert [line for line, parts in zip(lines, told, strict=True) if len(parts) != 2] == []
    phases = [what for _, what in told[:6]]
    assert phases[0] == "importing torch" and phases[1].startswith("reading /")
    engine = ["importing the engine", "starting the engine: single, 1 rank"]
    assert phases[2:5] == [*engine, "building a model of 23.7 k parameters"]
    assert phases[5] == "starting runs/run, 12 steps: single, fp32, 1 x cpu"


def test_a_run_that_is_done_ends_with_a_summary_and_the_next_commands(run):
    folder, done = run
    rows = read_rows(folder.metrics)
    (first, *_, last), (val, end) = ([row for row in rows if key in row] for key in ("loss", "val_loss"))
    head, *lines = done.stdout.splitlines()
    assert re.fullmatch(rf"done: 12 steps, {last['tokens']:,.0f} target tokens, \d:\d\d in 1 start", head)
    assert lines == [
        f"      loss {first['loss']:.4f} at step 2, {last['loss']:.4f} at step 12",
        f"      val_loss {val['val_loss']:.4f} at step 6, {end['val_loss']:.4f} at step 12",
        "next: pretrain generate runs/run",
        "      pretrain report runs/run",
    ]


def test_evaluations_that_cannot_be_made_are_told_with_the_remedy(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("alpha beta gamma " * 400)
    prepare(options(tmp_path, split="hash:0"))
    text = CONFIG.format(data=tmp_path / "out").replace("offline", "off")
    (tmp_path / "config.yaml").write_text(text)
    few = ["train.steps=2", "optim.schedule.warmup_steps=1", "profile.steps=[1, 1]", "optim.lr=8e-3"]
    done = run_warm("train", "config.yaml", *few, cwd=tmp_path)
    remedy = "prepare another folder with --split tail:0.05, or set eval.every_steps=0"
    assert done.code == 0 and f"nothing is evaluated: the data have no validation split; {remedy}" in done.stderr
    assert "optim.lr=0.008 is high for optim.kind=adamw, whose usual rate is 0.001" in done.stderr
